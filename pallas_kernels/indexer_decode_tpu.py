"""Candidates for the indexer's choice where few queries share the keys, as in decoding, on TPU.

One program takes one query. Its heads are the sublanes of a product, its keys the lanes; the heads' sum leaves one
row of scores, which is folded so that the lists of `indexer_groups_tpu` fill whole registers.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.in_hbm_tpu import in_hbm
from pallas_kernels.indexer_groups_tpu import insert, ranked, scoring_cost
from pallas_kernels.tiling import IndexerTopkTpuTiling


def indexer_decode_tpu(q, keys, layer, head_weights, positions, *, tiling: IndexerTopkTpuTiling, interpret=None):
    """As `indexer_candidates_tpu`, with the same arguments and results; the keys are read once per query."""
    batch, num_queries, heads, width = q.shape
    tile, sublanes = tiling.key_tile, tiling.groups // 128

    def key_window(b, t, n, layer, positions):
        return layer[0], b, 0, jnp.clip(n, 0, jnp.maximum(positions[b, t], 0) // tile)

    out_spec = pl.BlockSpec((None, None, tiling.kept, sublanes, 128), lambda b, t, n, *_: (b, t, 0, 0, 0))
    out_shape = (batch, num_queries, tiling.kept, sublanes, 128)
    scores, slots = pl.pallas_call(
        functools.partial(_decode_kernel, tiling=tiling),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, num_queries, pl.cdiv(keys.shape[3], tile)),
            in_specs=[
                pl.BlockSpec((None, None, heads, width), lambda b, t, n, *_: (b, t, 0, 0)),
                pl.BlockSpec((None, None, width, tile), key_window),
                pl.BlockSpec((None, None, heads, 1), lambda b, t, n, *_: (b, t, 0, 0)),
            ],
            out_specs=[out_spec, out_spec],
            scratch_shapes=[pltpu.VMEM((sublanes, 128), jnp.float32)],
        ),
        out_shape=[jax.ShapeDtypeStruct(out_shape, jnp.float32), jax.ShapeDtypeStruct(out_shape, jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=scoring_cost(q, keys, programs=batch * num_queries, results=2 * math.prod(out_shape)),
        interpret=False if interpret is None else interpret,
        name="indexer_decode",
    )(layer, positions, q, in_hbm(keys), head_weights[..., None])
    return scores.reshape(batch, num_queries, -1), slots.reshape(batch, num_queries, -1)


def _decode_kernel(layer, positions, q, keys, head_weights, scores, slots, folded, *, tiling):
    del layer
    groups, sublanes = tiling.groups, tiling.groups // 128
    n = pl.program_id(2)
    position = positions[pl.program_id(0), pl.program_id(1)]

    @pl.when(n == 0)
    def _():
        scores[...] = jnp.full(scores.shape, -jnp.inf, jnp.float32)
        slots[...] = jnp.full(slots.shape, -1, jnp.int32)

    @pl.when(n * tiling.key_tile <= position)
    def _():
        exact = jax.lax.Precision.DEFAULT if keys.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
        weight = head_weights[...]
        place = jax.lax.broadcasted_iota(jnp.int32, (sublanes, 128), 0) * 128
        place += jax.lax.broadcasted_iota(jnp.int32, (sublanes, 128), 1)

        @pl.loop(0, tiling.key_tile // groups)
        def _(run):
            for c in range(sublanes):
                tile = keys[:, pl.ds(pl.multiple_of(run * groups + c * 128, 128), 128)]
                dots = jax.lax.dot(q[...], tile, precision=exact, preferred_element_type=jnp.float32)
                folded[c : c + 1, :] = jnp.sum(weight * jnp.maximum(dots, 0), axis=0, keepdims=True)
            slot = n * tiling.key_tile + run * groups + place
            score = ranked(folded[...], slot <= position)
            kept_scores, kept_slots = [scores[d] for d in range(tiling.kept)], [slots[d] for d in range(tiling.kept)]
            kept_scores, kept_slots = insert(score, slot, kept_scores, kept_slots)
            for d in range(tiling.kept):
                scores[d] = kept_scores[d]
                slots[d] = kept_slots[d]
