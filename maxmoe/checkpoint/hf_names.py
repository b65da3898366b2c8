"""The one table of published tensor names, and how each weight of the model lies in the published tensors.

Linear weights are `[out, in]` in both. A weight that is stacked over superblocks, or over experts, is made of
one published tensor per layer, or per layer and expert.
Source: the tensor table of the published Kimi-K3 checkpoint; for the indexer of K3.1 see `_INDEXER`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from maxmoe.config import ModelConfig, VisionConfig
from maxmoe.model.stacks import FFN, Mixer, StackPlan, plan_stacks
from maxmoe.model.transformer import Transformer
from maxmoe.params import abstract_params

PREFIX = "language_model."  # stands before every text tensor of the published file; other files may lack it
A_LOG_LENGTH = 128  # per head, padded with zeros; only the model's heads are read

TOP_GROUP = "top"  # the group of the weights that belong to no layer
EXPERTS = "experts/"  # stands before a layer's weights with one entry per expert
FLOAT_EXPERTS = tuple(EXPERTS + name for name in ("gate", "up", "down"))  # names where training has made floats of them

_TOP = {
    "embedding": "model.embed_tokens.weight",
    "lm_head": "lm_head.weight",
    "final_norm": "model.norm.weight",
    "final_res_norm": "model.output_attn_res_norm.weight",
    "final_res_proj": "model.output_attn_res_proj.weight",
}
_LAYER = {
    "mixer_norm": "input_layernorm.weight",
    "mixer_res_norm": "self_attention_res_norm.weight",
    "mixer_res_proj": "self_attention_res_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "ffn_res_norm": "mlp_res_norm.weight",
    "ffn_res_proj": "mlp_res_proj.weight",
}
_KDA = {
    "mixer/q_proj": "self_attn.q_proj.weight",
    "mixer/k_proj": "self_attn.k_proj.weight",
    "mixer/v_proj": "self_attn.v_proj.weight",
    "mixer/q_conv": "self_attn.q_conv1d.weight",
    "mixer/k_conv": "self_attn.k_conv1d.weight",
    "mixer/v_conv": "self_attn.v_conv1d.weight",
    "mixer/decay_down": "self_attn.f_a_proj.weight",
    "mixer/decay_up": "self_attn.f_b_proj.weight",
    "mixer/dt_bias": "self_attn.dt_bias",
    "mixer/a_log": "self_attn.A_log",
    "mixer/beta_proj": "self_attn.b_proj.weight",
    "mixer/gate_proj": "self_attn.g_proj.weight",
    "mixer/out_norm": "self_attn.o_norm.weight",
    "mixer/out_proj": "self_attn.o_proj.weight",
}
_MLA = {
    "mixer/q_down": "self_attn.q_a_proj.weight",
    "mixer/q_norm": "self_attn.q_a_layernorm.weight",
    "mixer/q_up": "self_attn.q_b_proj.weight",
    "mixer/kv_down": "self_attn.kv_a_proj_with_mqa.weight",
    "mixer/kv_norm": "self_attn.kv_a_layernorm.weight",
    "mixer/kv_up": "self_attn.kv_b_proj.weight",
    "mixer/gate_proj": "self_attn.g_proj.weight",
    "mixer/out_proj": "self_attn.o_proj.weight",
}
# Inferred from the names that public inference engines load; dtypes unseen, so BF16 and F32 are both taken.
_INDEXER = {
    "mixer/indexer/q_proj": "self_attn.indexer.wq_b.weight",
    "mixer/indexer/k_proj": "self_attn.indexer.wk.weight",
    "mixer/indexer/k_norm_weight": "self_attn.indexer.k_norm.weight",
    "mixer/indexer/k_norm_bias": "self_attn.indexer.k_norm.bias",
    "mixer/indexer/weights_proj": "self_attn.indexer.weights_proj.weight",
}
_DENSE = {
    "ffn/gate": "mlp.gate_proj.weight",
    "ffn/up": "mlp.up_proj.weight",
    "ffn/down": "mlp.down_proj.weight",
}
_MOE = {
    "ffn/router": "block_sparse_moe.gate.weight",
    "ffn/router_bias": "block_sparse_moe.gate.e_score_correction_bias",
    "ffn/down_proj": "block_sparse_moe.routed_expert_down_proj.weight",
    "ffn/norm": "block_sparse_moe.routed_expert_norm.weight",
    "ffn/up_proj": "block_sparse_moe.routed_expert_up_proj.weight",
    "ffn/shared/gate": "block_sparse_moe.shared_experts.gate_proj.weight",
    "ffn/shared/up": "block_sparse_moe.shared_experts.up_proj.weight",
    "ffn/shared/down": "block_sparse_moe.shared_experts.down_proj.weight",
}
_EXPERT = {
    "gate_packed": "w1.weight_packed",
    "gate_scale": "w1.weight_scale",
    "up_packed": "w3.weight_packed",
    "up_scale": "w3.weight_scale",
    "down_packed": "w2.weight_packed",
    "down_scale": "w2.weight_scale",
}
_MIXERS = {Mixer.KDA: _KDA, Mixer.MLA: _MLA | _INDEXER}
_FFNS = {FFN.DENSE: _DENSE, FFN.MOE: _MOE}

_DTYPE_NAMES = {"bfloat16": "BF16", "float32": "F32", "uint8": "U8"}


@dataclasses.dataclass(frozen=True)
class Piece:
    """One published tensor, and where it lies in the parameter tree and in a stored group of weights.

    `name` lacks the prefix; `shape` and `dtypes` are those the file may have, the usual dtype first.
    In the tree it is the entry `stack_index + inner` of the weight at `path`, whose leading axes may stack layers;
    in storage the entry `inner` (an expert's number, or nothing) of the weight called `weight` of `group`.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    path: tuple[str, ...]
    stack_index: tuple[int, ...]
    inner: tuple[int, ...]
    group: str
    weight: str
    entry_shape: tuple[int, ...]  # of what it fills; has as many elements as `shape`, padding aside

    @property
    def index(self) -> tuple[int, ...]:
        """Which entry of the leading axes of the weight in the tree."""
        return self.stack_index + self.inner

    @property
    def optional(self) -> bool:
        """Whether the file may lack it; it is then zero. True of the indexer's key-norm offset alone."""
        return self.path[-1] == "k_norm_bias"

    @property
    def padded(self) -> bool:
        """Whether the file may hold zeros beyond the weight's own length."""
        return self.path[-1] == "a_log"

    @property
    def is_scale(self) -> bool:
        """Whether it holds MXFP4 scale bytes."""
        return self.name.endswith("weight_scale")


def published_pieces(model: Transformer) -> Iterator[Piece]:
    """Every published tensor of the text model, from the declared weights alone."""
    plans = plan_stacks(model.config)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(nn.unbox(abstract_params(model))):
        path = tuple(key.key for key in keys)
        yield from _leaf_pieces(path, leaf, plans)


def _leaf_pieces(path: tuple[str, ...], leaf: Any, plans: tuple[StackPlan, ...]) -> Iterator[Piece]:
    dtypes = (_DTYPE_NAMES[leaf.dtype.name],)
    if path[0] in _TOP:
        shape = _published_shape(path, leaf.shape)
        yield Piece(_TOP[path[0]], shape, dtypes, path, (), (), TOP_GROUP, path[0], leaf.shape)
        return
    plan = plans[_number(path[0])]
    place = _number(path[1] if path[1].startswith("experts_") else path[2])
    if path[1].startswith("experts_"):
        for i, expert in itertools.product(*map(range, leaf.shape[:2])):
            layer = plan.first + i * plan.size + place
            name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{_EXPERT[path[2]]}"
            weight = EXPERTS + path[2]
            shape = leaf.shape[2:]
            yield Piece(name, shape, dtypes, path, (i,), (expert,), layer_group(layer), weight, shape)
        return
    kind, relative = plan.layers[place], "/".join(path[3:])
    suffix = (_LAYER | _MIXERS[kind.mixer] | _FFNS[kind.ffn])[relative]
    if "/indexer/" in relative:
        dtypes = ("BF16", "F32")
    scanned = path[1] == "scanned"
    for i in range(plan.count) if scanned else (_number(path[1]),):
        shape = leaf.shape[1:] if scanned else leaf.shape
        layer = plan.first + i * plan.size + place
        stack_index = (i,) if scanned else ()
        yield Piece(
            name=f"model.layers.{layer}.{suffix}",
            shape=_published_shape(path, shape),
            dtypes=dtypes,
            path=path,
            stack_index=stack_index,
            inner=(),
            group=layer_group(layer),
            weight=relative,
            entry_shape=shape,
        )


def layer_group(layer: int) -> str:
    """The group in which a layer's weights are stored; layers count from 0."""
    return f"layer_{layer:03d}"


def _number(part: str) -> int:
    return int(part.rpartition("_")[2])


def _published_shape(path: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    if path[-1].endswith("_conv"):
        return (shape[0], 1, shape[1])
    if path[-1].endswith("res_proj"):
        return (1, *shape)
    if path[-1] == "a_log":
        return (max(A_LOG_LENGTH, *shape),)
    return shape


def publish(params: Any, config: ModelConfig) -> dict[str, np.ndarray]:
    """The published tensors of a parameter tree, by name, in the dtypes that the tree has.

    Args:
      params: The text model's weights, scanned or not.
    """
    scan = any("scanned" in stack for name, stack in params.items() if name.startswith("stacks_"))
    tensors = {}
    for piece in published_pieces(Transformer(config, scan_layers=scan)):
        leaf = params
        for key in piece.path:
            leaf = leaf[key]
        array = np.asarray(leaf[piece.index])
        if piece.padded:
            array = np.pad(array, (0, piece.shape[0] - array.shape[0]))
        tensors[PREFIX + piece.name] = array.reshape(piece.shape)
    return tensors


# ---- Vision: named and counted; the tower itself is not built yet -----------------------------------------------

VISION_GROUP = "vision"  # the group in which a converted checkpoint keeps them, under their published names
VISION_PREFIXES = ("vision_tower.", "mm_projector.")


def vision_tensors(vision: VisionConfig, text_dim: int) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of the published vision tensors, all BF16. `text_dim` is the text model's width."""
    d, patch = vision.model_dim, vision.patch_size
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (d, 3, patch, patch),
        "vision_tower.patch_embed.pos_emb.weight": (vision.pos_emb_height, vision.pos_emb_width, d),
    }
    for block in range(vision.num_layers):
        start = f"vision_tower.encoder.blocks.{block}."
        shapes |= {
            start + "norm0.weight": (d,),
            start + "norm1.weight": (d,),
            start + "wqkv.weight": (3 * vision.qkv_dim, d),
            start + "wo.weight": (d, vision.qkv_dim),
            start + "mlp.fc0.weight": (vision.mlp_dim, d),
            start + "mlp.fc1.weight": (d, vision.mlp_dim),
        }
    merged = vision.merge_height * vision.merge_width * d
    shapes |= {
        "vision_tower.encoder.final_layernorm.weight": (d,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (text_dim, merged),
        "mm_projector.post_norm.weight": (text_dim,),
    }
    return shapes


def count_vision_weights(config: ModelConfig) -> int:
    """Weights of the vision tower and projector; 0 for a text-only model."""
    if config.vision is None:
        return 0
    return sum(math.prod(shape) for shape in vision_tensors(config.vision, config.model_dim).values())
