"""What a step cannot do without: bytes that must be read and written, and multiplications, on one device.

Weights are read once, of routed experts those that some token is sent to; of n tokens that choose k of E experts
evenly, an expert is chosen by at least one with probability 1 - (1 - k/E)^n. Of caches: the recurrent state is read and
written, index keys are read whole, and of latent rows the selected ones.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh

from maxmoe.config import ModelConfig
from maxmoe.model.stacks import FFN, Mixer, plan_stacks
from maxmoe.params import count_weights
from maxmoe.planning.capacity import Capacity, is_expert
from maxmoe.planning.placement import device_bytes, token_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Of one step, on one device.

    Attributes:
      tokens: Of the whole mesh.
      touched_experts: Share of the routed experts that some token is sent to, expected.
      flops: Two per multiplication with its addition.
    """

    tokens: int
    touched_experts: float
    weight_bytes: float
    cache_bytes: float
    flops: float

    @property
    def unavoidable_bytes(self) -> float:
        """Weights touched, caches read and written."""
        return self.weight_bytes + self.cache_bytes


def touched_share(num_experts: int, top_k: int, tokens: float) -> float:
    """1 - (1 - k/E)^n, the expected share of experts that n tokens choose."""
    return 1 - (1 - top_k / num_experts) ** tokens


def needed_work(
    config: ModelConfig,
    params: Any,
    capacity: Capacity,
    mesh: AbstractMesh,
    phase: str,
    batch: int,
    context: int,
    chunk: int = 1,
) -> Work:
    """The work of one step.

    Args:
      params: Placed weights.
      chunk: Tokens per sequence in this step: 1 when decoding, the whole context when training.
    """
    tokens = batch * chunk
    split_by = set(token_axes(mesh, batch, chunk))
    per_replica = tokens / _devices(mesh, split_by - _axes_of_experts(params))
    local = tokens / _devices(mesh, split_by)
    rows = local if phase == "train" else batch / _devices(mesh, token_axes(mesh, batch, 1))
    touched = touched_share(config.moe.num_experts, config.moe.top_k, per_replica)
    table = params["embedding"]
    looked_up = local * config.model_dim * table.dtype.itemsize
    weight_bytes = capacity.weights_bytes - capacity.expert_bytes * (1 - touched) - device_bytes(table) + looked_up
    passes = 1
    if phase == "train":  # forward, and backward for inputs and for weights, whose gradient is written once
        weight_bytes, passes = 3 * weight_bytes, 3
    flops = passes * (
        _weight_flops(config, params, per_replica, local, rows)
        + _mixer_flops(config, context, phase) * tokens / mesh.size
    )
    return Work(
        tokens=tokens,
        touched_experts=touched,
        weight_bytes=weight_bytes,
        cache_bytes=_cache_traffic(config, capacity, context, chunk) if phase != "train" else 0,
        flops=flops,
    )


def _devices(mesh, names):
    return math.prod(mesh.shape[name] for name in names)


def _axes_of_experts(params):
    """Mesh axes that split the routed experts."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if is_expert(path):
            parts = [part if isinstance(part, tuple) else (part,) for part in leaf.sharding.spec if part]
            return {axis for part in parts for axis in part}
    return set()


def _cache_traffic(config, capacity, context, chunk):
    if not context:
        return 0
    written = (capacity.row_bytes + capacity.key_bytes) * min(1, chunk / context)
    selects = config.indexer is not None and context > config.indexer.top_k
    rows = capacity.row_bytes * (config.indexer.top_k / context if selects else 1)
    keys = capacity.key_bytes if selects else 0
    return 2 * capacity.state_bytes + keys + rows + written


def _weight_flops(config, params, per_replica, local, head_rows):
    """Products with weights: an expert's with the tokens sent to it, the head's with the tokens that need logits."""
    share = config.moe.top_k / config.moe.num_experts
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        shard = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        name = str(path[-1].key)
        if name == "embedding":
            continue
        rows = per_replica * share if is_expert(path) else head_rows if name == "lm_head" else local
        total += 2 * count_weights({name: shard}) * rows
    return total


def _mixer_flops(config, context, phase):
    """Per token, of all layers: the delta rule, index scores, attention in the absorbed form."""
    kinds = [kind for plan in plan_stacks(config) for kind in plan.layers * plan.count]
    num_kda = sum(kind.mixer is Mixer.KDA for kind in kinds)
    num_mla = len(kinds) - num_kda
    seen = context / 2 if phase == "train" else context
    attended = seen if config.indexer is None else min(seen, config.indexer.top_k)
    kda = 7 * config.kda.num_heads * config.kda.head_dim**2
    mla = 2 * config.mla.num_heads * attended * (config.mla.cache_dim + config.mla.kv_lora_rank)
    scores = 0
    if config.indexer is not None and seen > config.indexer.top_k:
        scores = 2 * config.indexer.num_heads * config.indexer.head_dim * seen
    return num_kda * kda + num_mla * (mla + scores)


def num_moe_layers(config: ModelConfig) -> int:
    """Layers with routed experts."""
    return sum(kind.ffn is FFN.MOE for plan in plan_stacks(config) for kind in plan.layers * plan.count)
