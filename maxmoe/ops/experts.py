"""Routed experts: MXFP4 weights, SiTU-GLU, tokens grouped by expert.

Tokens are sorted by expert and cut into blocks of rows that share one, so that each block is one small dense
FFN whose weights are dequantised just before use: no copy of the experts in a wider type ever exists whole.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from maxmoe.ops import mxfp4

MAX_BLOCK_ROWS = 128
AT_ONCE = 5 * 2**18  # weights that may be dequantised together; twice as many for a single row, which writes none out


class ExpertWeights(NamedTuple):
    """Weights of the E routed experts of L layers, as published: packed codes and scales, `[out, in]` each."""

    gate_packed: UInt8[Array, "L E F D/2"]
    gate_scale: UInt8[Array, "L E F D/32"]
    up_packed: UInt8[Array, "L E F D/2"]
    up_scale: UInt8[Array, "L E F D/32"]
    down_packed: UInt8[Array, "L E D F/2"]
    down_scale: UInt8[Array, "L E D F/32"]


def routed_experts(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    experts: ExpertWeights,
    layer: int | Int[Array, ""],
    activation: Callable[[Array, Array], Array],
) -> Float[Array, "N D"]:
    """sum_k weights_k * expert_k(x), with expert(x) = activation(x Wg^T, x Wu^T) Wd^T rounded to x's dtype.

    The sum runs in float32 in the order of k, whatever else is in the batch, and is rounded once.

    Args:
      layer: Which of the stacked layers; its experts are read in place, a few at a time, never sliced out whole.
      expert_ids: An id outside 0..E-1, such as that of a padding token, names no expert and adds nothing.
    """
    outputs = expert_outputs(x, expert_ids, experts, layer, activation)
    return weighted_sum(outputs, expert_ids, weights, experts.gate_packed.shape[1])


def weighted_sum(
    outputs: Float[Array, "N k D"], expert_ids: Int[Array, "N k"], weights: Float[Array, "N k"], num_experts: int
) -> Float[Array, "N D"]:
    """The sum of `routed_experts` over what `expert_outputs` gave."""
    named = _named(expert_ids, num_experts)
    weighted = jnp.where(named[..., None], weights[..., None] * outputs.astype(jnp.float32), 0)
    return sum(weighted[:, j] for j in range(expert_ids.shape[1])).astype(outputs.dtype)


def expert_outputs(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    experts: ExpertWeights,
    layer: int | Int[Array, ""],
    activation: Callable[[Array, Array], Array],
    places: Int[Array, "E"] | None = None,
) -> Float[Array, "N k D"]:
    """expert(x) of every assignment. What stands where an id names no expert means nothing.

    Args:
      places: For a stack that holds some of the E experts, in any order: where each lies, -1 for those that are not
        there, which then are not named. How tokens are grouped depends on E alone, so that neither what else is
        held nor where changes a bit of an output. None for a stack that holds them all, in order.
    """
    num_experts, expert_dim = experts.gate_packed.shape[1:3]
    if places is not None:
        num_experts = places.shape[0]
        held = _named(expert_ids, num_experts) & (places[expert_ids] >= 0)
        expert_ids = jnp.where(held, expert_ids, num_experts)
    block_rows = _block_rows(expert_ids.size, num_experts)
    plan = _plan_blocks(expert_ids, num_experts, block_rows)

    def ffn(chosen, rows):
        chosen = jnp.minimum(chosen, num_experts - 1)
        if places is not None:
            chosen = jnp.maximum(places[chosen], 0)
        w = jax.tree.map(lambda leaf: leaf[layer, chosen], experts)
        # One product of twice the width is faster than two. Its columns come out as the next product takes them.
        pairs = ((w.gate_packed, w.up_packed), (w.gate_scale, w.up_scale))
        packed, scale = (jnp.concatenate([mxfp4.packed_order(a, axis=-2) for a in pair], axis=-2) for pair in pairs)
        gate, up = jnp.split(mxfp4.matmul(rows, packed, scale), 2, axis=-1)
        return mxfp4.matmul(activation(gate, up), w.down_packed, w.down_scale)

    at_once = AT_ONCE if block_rows > 1 else 2 * AT_ONCE
    per_step = max(1, min(plan.block_experts.size, at_once // (3 * expert_dim * x.shape[1])))
    out = _run_blocks(ffn, mxfp4.packed_order(x), plan, num_experts, per_step)
    return out.reshape(-1, x.shape[1])[plan.slots]


def _run_blocks(ffn, x, plan, num_experts, per_step):
    """Runs `per_step` blocks together; steps after the last block in use cost nothing."""
    pad = -plan.block_experts.size % per_step
    chosen = jnp.pad(plan.block_experts, (0, pad), constant_values=num_experts).reshape(-1, per_step)
    tokens = jnp.pad(plan.block_tokens, ((0, pad), (0, 0))).reshape(*chosen.shape, -1)
    if chosen.shape[0] == 1:
        return ffn(chosen[0], x[tokens[0]])

    def one_step(_, step):
        chosen, tokens = step
        in_use = chosen[0] < num_experts
        return None, jax.lax.cond(in_use, ffn, lambda _, rows: jnp.zeros_like(rows), chosen, x[tokens])

    return jax.lax.scan(one_step, None, (chosen, tokens))[1]


class _Plan(NamedTuple):
    block_experts: Int[Array, "blocks"]  # E for a block that is not used
    block_tokens: Int[Array, "blocks rows"]  # the token in each row; row 0's token where there is none
    slots: Int[Array, "N k"]  # where in the joined blocks each assignment's output lies
    named: Array  # bool [N, k]


def _named(expert_ids, num_experts):
    return (expert_ids >= 0) & (expert_ids < num_experts)


def _block_rows(num_assignments: int, num_experts: int) -> int:
    """Rows per block: 1 where experts outnumber assignments, else room for a quarter more than the mean share."""
    if num_assignments <= num_experts:
        return 1
    return min(MAX_BLOCK_ROWS, -(-5 * num_assignments // (4 * num_experts)) + 15 & ~15)


def _plan_blocks(expert_ids, num_experts, rows):
    named = _named(expert_ids, num_experts)
    flat = jnp.where(named, expert_ids, num_experts).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    group_sizes = jnp.bincount(flat, length=num_experts + 1)
    group_starts = jnp.cumsum(group_sizes) - group_sizes
    group_blocks = -(-group_sizes[:num_experts] // rows)
    block_ends = jnp.cumsum(group_blocks)
    # Each expert in use wastes at most rows - 1 rows of its last block.
    num_blocks = (flat.size + min(num_experts, flat.size) * (rows - 1)) // rows
    blocks = jnp.arange(num_blocks)
    block_experts = jnp.searchsorted(block_ends, blocks, side="right")
    rank_of_block = blocks - jnp.append(block_ends - group_blocks, 0)[block_experts]
    row_in_group = rank_of_block[:, None] * rows + jnp.arange(rows)
    filled = row_in_group < group_sizes[block_experts][:, None]
    sorted_row = jnp.where(filled, group_starts[block_experts][:, None] + row_in_group, 0)
    block_tokens = order[sorted_row] // expert_ids.shape[1]

    rank = jnp.arange(flat.size) - group_starts[flat[order]]
    first_row = jnp.append((block_ends - group_blocks) * rows, 0)[flat[order]]
    slots = jnp.zeros_like(flat).at[order].set(jnp.where(flat[order] < num_experts, first_row + rank, 0))
    return _Plan(block_experts, block_tokens, slots.reshape(expert_ids.shape), named)
