"""maxmoe: the Kimi-K3 family in JAX. The public names, imported when first used."""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Completion": "maxmoe.inference.answer",
    "Engine": "maxmoe.inference.engine",
    "Grammars": "maxmoe.inference.grammar",
    "ModelDrafter": "maxmoe.inference.model_drafter",
    "NgramDrafter": "maxmoe.inference.drafting",
    "Request": "maxmoe.inference.request",
    "SamplingParams": "maxmoe.inference.sampling_params",
    "Session": "maxmoe.checkpoint.session",
    "ThinkingMarkers": "maxmoe.inference.budget",
    "Transformer": "maxmoe.model.transformer",
    "decode_step": "maxmoe.inference.steps",
    "describe": "maxmoe.describe",
    "forward": "maxmoe.inference.steps",
    "init_cache": "maxmoe.inference.steps",
    "init_params": "maxmoe.params",
    "load_config": "maxmoe.config",
    "load_params": "maxmoe.checkpoint.store",
    "load_session": "maxmoe.checkpoint.session",
    "load_tokenizer": "maxmoe.chat.tokenizer",
    "make_mesh": "maxmoe.sharding",
    "prefill": "maxmoe.inference.steps",
    "save_params": "maxmoe.checkpoint.save",
    "save_session": "maxmoe.checkpoint.session",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'maxmoe' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
