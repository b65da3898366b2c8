"""The indexer's scores of one query on one tile of keys, on TPU.

For queries whose choice needs every score. A kernel, though the plain product would be as fast, because it reads its
tile where the keys lie: XLA copies all keys into another layout first, where it likes that better for the product.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tiling import IndexerTopkTpuTiling


def indexer_scores_tpu(q, keys, layer, head_weights, row, tile, *, tiling: IndexerTopkTpuTiling, interpret=None):
    """sum_i head_weights_i relu(q_i . key) in float32 for the keys of one tile.

    Args:
      q: [I, J]. Its dtype is that of the keys, bfloat16 or float32.
      keys: [L, B, J, S].
      layer: int32 [1].
      head_weights: [I] float32.
      row, tile: Which row of the batch, and which of its tiles of `tiling.key_tile` keys.
    Returns: float32 [key_tile]; behind the end of the keys it holds anything.
    """
    heads, width = q.shape
    return pl.pallas_call(
        _scores_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[
                pl.BlockSpec((heads, width), lambda n, *_: (0, 0)),
                pl.BlockSpec(
                    (None, None, width, tiling.key_tile), lambda n, layer, place: (layer[0], place[0], 0, place[1])
                ),
                pl.BlockSpec((heads, 1), lambda n, *_: (0, 0)),
            ],
            out_specs=pl.BlockSpec((1, tiling.key_tile), lambda n, *_: (0, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((1, tiling.key_tile), jnp.float32),
        cost_estimate=pl.CostEstimate(
            flops=2 * heads * (width + 1) * tiling.key_tile,
            bytes_accessed=(width * keys.dtype.itemsize + 4) * tiling.key_tile,
            transcendentals=0,
        ),
        interpret=False if interpret is None else interpret,
        name="indexer_scores",
    )(layer, jnp.stack([row, tile]).astype(jnp.int32), q, keys, head_weights[:, None])[0]


def _scores_kernel(layer, place, q, keys, head_weights, scores):
    del layer, place
    exact = jax.lax.Precision.DEFAULT if keys.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST

    @pl.loop(0, keys.shape[1] // 128)
    def _(c):
        lanes = pl.ds(pl.multiple_of(c * 128, 128), 128)
        dots = jax.lax.dot(q[...], keys[:, lanes], precision=exact, preferred_element_type=jnp.float32)
        scores[:, lanes] = jnp.sum(head_weights[...] * jnp.maximum(dots, 0), axis=0, keepdims=True)
