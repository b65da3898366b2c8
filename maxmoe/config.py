"""Model configuration: frozen facts about one model.

`load_config` accepts a `config.json`, a checkpoint folder that holds one, or a Python file such as
`configs/k3.py` that defines `config`.
"""

import ast
import dataclasses
import functools
import json
import math
import runpy
import types
import typing
from typing import Any

from etils import epath

MXFP4_GROUP = 32  # consecutive input columns that share one scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class KDAConfig:
    """Kimi Delta Attention. `gate_lower_bound` None selects the unbounded softplus decay of Kimi-Linear."""

    num_heads: int
    head_dim: int
    conv_width: int
    gate_lower_bound: float | None

    @property
    def inner_dim(self) -> int:
        """Channels of q, k, v and of the output gate: heads x head width."""
        return self.num_heads * self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Gated multi-head latent attention without position encoding (NoPE).

    `qk_shared_head_dim` is the part of a key that all heads share; elsewhere it carries RoPE, here nothing.
    """

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_shared_head_dim: int
    v_head_dim: int
    lora_norm_eps: float = 1e-6  # the reference builds these two norms with its class default

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key."""
        return self.qk_nope_head_dim + self.qk_shared_head_dim

    @property
    def cache_dim(self) -> int:
        """Values cached per token: the latent, then the shared key part."""
        return self.kv_lora_rank + self.qk_shared_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """Lightning indexer: which `top_k` tokens each query of a full-attention layer may see."""

    num_heads: int
    head_dim: int
    top_k: int
    norm_eps: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """LatentMoE: routed experts work on a `latent_dim` projection; shared experts on the full width."""

    num_experts: int
    top_k: int
    num_shared_experts: int
    expert_dim: int
    latent_dim: int
    routed_scale: float

    @property
    def shared_dim(self) -> int:
        """Hidden width of the shared experts, which are fused into one FFN."""
        return self.num_shared_experts * self.expert_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class SituConfig:
    """SiTU-GLU: bounds of the gate and of the linear branch."""

    gate_beta: float
    linear_beta: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """MoonViT3d tower and projector: the sizes that fix its tensors."""

    num_layers: int
    model_dim: int
    qkv_dim: int
    mlp_dim: int
    num_heads: int
    patch_size: int
    pos_emb_height: int
    pos_emb_width: int
    merge_height: int
    merge_width: int
    norm_eps: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model of the family. Layers are 0-based; a layer that is not full attention is KDA.

    `max_len` is the trained context in tokens; `eos_id` ends a turn.
    Raises ValueError, with every fault in one message, for sizes that cannot form a model.
    """

    vocab_size: int
    model_dim: int
    num_layers: int
    full_attention_layers: tuple[int, ...]
    num_dense_layers: int
    dense_dim: int
    attn_res_block_size: int
    norm_eps: float
    max_len: int
    bos_id: int
    eos_id: int
    pad_id: int
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig
    situ: SituConfig
    indexer: IndexerConfig | None = None
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        _raise_all(_inconsistencies(self), "this model configuration cannot be built")

    @property
    def num_attn_res_blocks(self) -> int:
        """Entries that the block-residual bank holds after the last layer."""
        return -(-self.num_layers // self.attn_res_block_size)

    @functools.cached_property
    def full_attention_set(self) -> frozenset[int]:
        """The full-attention layers, for membership tests."""
        return frozenset(self.full_attention_layers)

    def override(self, *assignments: str) -> "ModelConfig":
        """Returns a copy with fields replaced, e.g. `cfg.override("moe.num_experts=8", "norm_eps=1e-6")`."""
        changes: dict[str, Any] = {}  # of the whole, so that only the outcome has to fit together
        for assignment in assignments:
            path, sep, text = assignment.partition("=")
            if not sep:
                raise ValueError(f"override {assignment!r}: write FIELD=VALUE, e.g. moe.num_experts=8")
            name, *rest = path.strip().split(".")
            part = changes.get(name, getattr(self, name, None))
            if not rest:
                changes[name] = _parse_field(self, name, text.strip(), assignment)
            elif not dataclasses.is_dataclass(part) or len(rest) > 1:
                owner, leaf = (self, name) if not dataclasses.is_dataclass(part) else (part, rest[0])
                _field_hint(owner, leaf, assignment)
                raise ValueError(f"override {assignment!r}: {leaf!r} is {getattr(owner, leaf)!r} and has no fields")
            else:
                new = _parse_field(part, rest[0], text.strip(), assignment)
                changes[name] = dataclasses.replace(part, **{rest[0]: new})
        return dataclasses.replace(self, **changes)


def load_config(source: epath.PathLike) -> ModelConfig:
    """Reads a model configuration.

    Args:
      source: A published `config.json`, a folder that holds one, on a disk or in a bucket, or a Python file that
        defines `config`.
    Raises: FileNotFoundError, or ValueError that lists every key that is unknown, missing or not supported.
    """
    path = epath.Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no model configuration at {path}: give a config.json, a checkpoint folder that holds one, "
            "or a Python file such as configs/k3.py"
        )
    if path.suffix == ".py":
        config = runpy.run_path(str(path)).get("config")
        if not isinstance(config, ModelConfig):
            raise ValueError(f"{path} must define `config`, a ModelConfig; found {type(config).__name__}")
        return config
    try:
        published = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(published, dict):
        raise ValueError(f"{path} must hold a JSON object; found {type(published).__name__}")
    from maxmoe import published_config  # it builds on the classes above

    return published_config.from_published(published)


def _field_hint(part: Any, name: str, assignment: str) -> Any:
    hints = typing.get_type_hints(type(part))
    if name not in hints:
        raise ValueError(
            f"override {assignment!r}: {type(part).__name__} has no field {name!r}; it has {', '.join(hints)}"
        )
    return hints[name]


def _parse_field(part: Any, name: str, text: str, assignment: str) -> Any:
    """Reads a Python literal as a value of one field."""
    hint = _field_hint(part, name, assignment)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"override {assignment!r}: {text!r} is not a Python literal") from error
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in kinds and type(value) is int:
        value = float(value)
    kinds = tuple(typing.get_origin(kind) or kind for kind in kinds)
    if type(value) not in kinds or (type(value) is tuple and any(type(item) is not int for item in value)):
        allowed = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise ValueError(f"override {assignment!r}: {name!r} takes {allowed}, got {type(value).__name__} {value!r}")
    return value


def _inconsistencies(cfg: ModelConfig) -> list[str]:
    problems = []
    for part in (cfg, cfg.kda, cfg.mla, cfg.moe, cfg.situ, cfg.indexer, cfg.vision):
        for field in dataclasses.fields(part) if part is not None else ():
            value = getattr(part, field.name)
            lowest = 0 if field.name in ("bos_id", "eos_id", "pad_id", "num_dense_layers") else 1
            if type(value) is int and value < lowest:
                problems.append(f"{field.name}={value}: must be at least {lowest}")
            if type(value) is float and field.name != "gate_lower_bound" and not 0 < value < math.inf:
                problems.append(f"{field.name}={value}: must be positive and finite")
    layers = cfg.full_attention_layers
    if list(layers) != sorted(set(layers)) or any(not 0 <= layer < cfg.num_layers for layer in layers):
        problems.append(f"full_attention_layers={layers}: must ascend within 0..{cfg.num_layers - 1}")
    if cfg.num_dense_layers > cfg.num_layers:
        problems.append(f"num_dense_layers={cfg.num_dense_layers}: the model has {cfg.num_layers} layers")
    if cfg.moe.top_k > cfg.moe.num_experts:
        problems.append(f"moe.top_k={cfg.moe.top_k}: there are {cfg.moe.num_experts} experts")
    for name in ("expert_dim", "latent_dim"):
        if getattr(cfg.moe, name) % MXFP4_GROUP:
            problems.append(
                f"moe.{name}={getattr(cfg.moe, name)}: must be a multiple of {MXFP4_GROUP}, the MXFP4 group"
            )
    for name in ("bos_id", "eos_id", "pad_id"):
        if getattr(cfg, name) >= cfg.vocab_size:
            problems.append(f"{name}={getattr(cfg, name)}: must be below vocab_size={cfg.vocab_size}")
    bound = cfg.kda.gate_lower_bound
    if bound is not None and not -math.inf < bound < 0:
        problems.append(f"kda.gate_lower_bound={bound}: must be negative and finite (log decay per token), or None")
    if cfg.kda.conv_width < 2:
        problems.append(f"kda.conv_width={cfg.kda.conv_width}: must be at least 2")
    return problems


def _raise_all(problems: list[str], heading: str) -> None:
    if problems:
        raise ValueError(f"{heading}:\n  " + "\n  ".join(problems))
