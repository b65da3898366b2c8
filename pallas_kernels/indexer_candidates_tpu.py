"""Candidates for the indexer's choice: many queries score the same keys, tile by tile, on TPU.

One program holds a few queries, the sublanes of a register, and walks over tiles of keys, the lanes. A tile's
scores live in registers until the lists of `indexer_groups_tpu` have taken them in; no score goes to HBM but the
lists' own. Tiles behind the last position of a program are neither fetched nor computed.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer_groups_tpu import insert, ranked, scoring_cost
from pallas_kernels.tiling import IndexerTopkTpuTiling


def indexer_candidates_tpu(q, keys, layer, head_weights, positions, *, tiling: IndexerTopkTpuTiling, interpret=None):
    """The best `tiling.kept` keys of each of `tiling.groups` groups of keys, for each query.

        score_ts = sum_i head_weights_ti relu(q_ti . key_s), in float32;   group of s = s mod groups

    Args:
      q: [B, T, I, J], bfloat16 or float32. J is a multiple of 128.
      keys: [L, B, J, S] of q's dtype.
      layer: int32 [1]. A scalar goes ahead of the kernel, so that no layer is cut out of the keys.
      head_weights: [B, T, I] float32.
      positions: [B, T] int32 below S. A query sees the slots at and before its own; none if it is negative.
    Returns: Scores, float32, and slots, int32, both [B, T, kept * groups] with the groups minor; -inf and -1 where
      a group has fewer visible keys.
    """
    batch, num_queries, heads, width = q.shape
    rows, tile = tiling.queries, tiling.key_tile
    pad = -num_queries % rows
    q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
    head_weights = jnp.pad(head_weights, ((0, 0), (0, pad), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, pad)), constant_values=-1)
    blocks = (num_queries + pad) // rows
    # Within a program the head is the major axis of the product's rows: a head's scores fill whole registers.
    q = q.reshape(batch, blocks, rows, heads, width).swapaxes(2, 3).reshape(batch, blocks, heads * rows, width)
    # Number of the last tile that a program sees, -1 for none.
    last_tile = jnp.max(positions.reshape(batch, blocks, rows), axis=-1) // tile
    num_candidates = tiling.kept * tiling.groups

    def key_window(b, t, n, layer, last_tile):
        return layer[0], b, 0, jnp.clip(n, 0, jnp.maximum(last_tile[b, t], 0))

    out_spec = pl.BlockSpec((None, rows, num_candidates), lambda b, t, n, *_: (b, t, 0))
    out_shape = (batch, blocks * rows, num_candidates)
    scores, slots = pl.pallas_call(
        functools.partial(_candidates_kernel, heads=heads, tiling=tiling),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, blocks, pl.cdiv(keys.shape[3], tile)),
            in_specs=[
                pl.BlockSpec((None, None, heads * rows, width), lambda b, t, n, *_: (b, t, 0, 0)),
                pl.BlockSpec((None, None, width, tile), key_window),
                pl.BlockSpec((None, rows, heads), lambda b, t, n, *_: (b, t, 0)),
                pl.BlockSpec((None, rows, 1), lambda b, t, n, *_: (b, t, 0)),
            ],
            out_specs=[out_spec, out_spec],
            scratch_shapes=[pltpu.VMEM((heads * rows, 128), jnp.float32), pltpu.VMEM((rows, tile), jnp.float32)],
        ),
        out_shape=[jax.ShapeDtypeStruct(out_shape, jnp.float32), jax.ShapeDtypeStruct(out_shape, jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=scoring_cost(q, keys, programs=batch * blocks, results=2 * math.prod(out_shape)),
        interpret=False if interpret is None else interpret,
        name="indexer_candidates",
    )(layer, last_tile, q, keys, head_weights, positions[..., None])
    return scores[:, :num_queries], slots[:, :num_queries]


def _candidates_kernel(
    layer, last_tile, q, keys, head_weights, positions, scores, slots, weights, fresh, *, heads, tiling
):
    del layer
    rows, groups, lanes = tiling.queries, tiling.groups, tiling.lanes
    n = pl.program_id(2)

    @pl.when(n == 0)
    def _():
        scores[...] = jnp.full(scores.shape, -jnp.inf, jnp.float32)
        slots[...] = jnp.full(slots.shape, -1, jnp.int32)
        for i in range(heads):
            weights[i * rows : (i + 1) * rows, :] = jnp.broadcast_to(head_weights[:, i : i + 1], (rows, 128))

    @pl.when(n <= last_tile[pl.program_id(0), pl.program_id(1)])
    def _():
        position = positions[...]
        lane = jax.lax.broadcasted_iota(jnp.int32, (rows, 128), 1)

        @pl.loop(0, tiling.key_tile // lanes)
        def _(c):
            first = pl.multiple_of(c * lanes, 128)
            fresh[:, pl.ds(first, lanes)] = _weighted_sum(q, keys[:, pl.ds(first, lanes)], weights, heads, rows)

        @pl.loop(0, groups // 128)
        def _(c):
            places = [pl.ds(pl.multiple_of(d * groups + c * 128, 128), 128) for d in range(tiling.kept)]
            kept_scores, kept_slots = [scores[:, p] for p in places], [slots[:, p] for p in places]
            for run in range(0, tiling.key_tile, groups):
                first = run + c * 128
                slot = n * tiling.key_tile + first + lane
                score = ranked(fresh[:, pl.ds(pl.multiple_of(first, 128), 128)], slot <= position)
                kept_scores, kept_slots = insert(score, slot, kept_scores, kept_slots)
            for p, score, slot in zip(places, kept_scores, kept_slots, strict=True):
                scores[:, p] = score
                slots[:, p] = slot


def _weighted_sum(q, tile, weights, heads, rows):
    """Scores [rows, lanes] of one tile of keys [J, lanes]."""
    exact = jax.lax.Precision.DEFAULT if tile.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    dots = jax.lax.dot(q[...], tile, precision=exact, preferred_element_type=jnp.float32)
    total = jnp.zeros((rows, tile.shape[1]), jnp.float32)
    for i in range(heads):
        weight = weights[i * rows : (i + 1) * rows, :]
        weight = jnp.concatenate([weight] * (tile.shape[1] // 128), axis=1)
        total += weight * jnp.maximum(dots[i * rows : (i + 1) * rows], 0)
    return total
