"""maxmoe: the Kimi-K3 family in JAX. The public names, imported when first used."""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "Completion": "maxmoe.inference.engine",
    "Engine": "maxmoe.inference.engine",
    "SamplingParams": "maxmoe.inference.sampling",
    "Transformer": "maxmoe.model.transformer",
    "decode_step": "maxmoe.inference.steps",
    "describe": "maxmoe.checkpoint.describe",
    "forward": "maxmoe.inference.steps",
    "init_cache": "maxmoe.inference.steps",
    "init_params": "maxmoe.params",
    "load_config": "maxmoe.config",
    "load_params": "maxmoe.checkpoint.store",
    "load_tokenizer": "maxmoe.chat.tokenizer",
    "prefill": "maxmoe.inference.steps",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from maxmoe.chat.tokenizer import load_tokenizer
    from maxmoe.checkpoint.describe import describe
    from maxmoe.checkpoint.store import load_params
    from maxmoe.config import load_config
    from maxmoe.inference.engine import Completion, Engine
    from maxmoe.inference.sampling import SamplingParams
    from maxmoe.inference.steps import decode_step, forward, init_cache, prefill
    from maxmoe.model.transformer import Transformer
    from maxmoe.params import init_params


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'maxmoe' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
