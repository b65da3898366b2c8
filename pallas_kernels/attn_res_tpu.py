"""Block attention residual and the RMSNorm behind it on TPU, in one pass over the bank.

    s_i = sum_d v_id w_d / sqrt(mean(v_i^2) + eps);   m = sum_i softmax(s)_i v_i
    y = weight * m / sqrt(mean(m^2) + eps')

with v_i the bank's entries that exist and, last, the running sum. What XLA makes of it reads the bank several times and
writes it out in float32. Here a block of rows of every entry is fetched once, and of entries that do not exist nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tiling import ATTN_RES_TPU

_LANES = 128
_ROWS = 16  # worked on at a time: the sublanes of a bfloat16 register
_SCORED_AT_ONCE = 4  # values; the sums of more would not stay in registers
_MOST_ENTRIES = 16  # their blocks, two of each, must fit in vector memory
_VMEM_BYTES = 32 * 2**20


def attn_res_tpu_refusal(num_entries: int, width: int, dtype: jnp.dtype) -> str | None:
    """Why `attn_res_norm_tpu` cannot run for a bank of this many places, width and dtype; None if it can."""
    if width % _LANES:
        return f"width {width}: the TPU kernel handles multiples of {_LANES}"
    if not 0 < num_entries <= _MOST_ENTRIES:
        return f"a bank of {num_entries} places: the TPU kernel handles 1 to {_MOST_ENTRIES}"
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        return f"values of {jnp.dtype(dtype).name}: the TPU kernel handles float32 and bfloat16"
    if _block_bytes(num_entries, width, dtype, _ROWS) > _VMEM_BYTES // 2:
        return f"{num_entries} entries of width {width}: their blocks do not fit in the TPU's vector memory"
    return None


def _block_bytes(num_entries, width, dtype, rows):
    return 2 * (num_entries + 2) * rows * width * jnp.dtype(dtype).itemsize


def attn_res_norm_tpu(
    current: jax.Array,
    bank: jax.Array,
    num_entries: jax.Array,
    score_weight: jax.Array,
    out_weight: jax.Array,
    *,
    eps: float,
    out_eps: float,
    interpret=None,
) -> jax.Array:
    """Mixes and normalises, in float32; the mixture and the normalised value are rounded to current's dtype.

    Args:
      current: The running sum [N, D].
      bank: [A, N, D], of the same dtype. Entries from `num_entries` on must be finite.
      num_entries: int32, how many exist.
      score_weight: The product of the score's norm and projection weights, float32 [D].
      out_weight: Weight of the norm behind the mixture [D].
      interpret: Passed on to `pallas_call`.
    Returns: [N, D] in current's dtype.
    Raises: NotImplementedError with the text of `attn_res_tpu_refusal`.
    """
    places, num_rows, width = bank.shape
    if refusal := attn_res_tpu_refusal(places, width, current.dtype):
        raise NotImplementedError(f"attn_res_norm_tpu: {refusal}")
    rows = 2 * _ROWS if num_rows >= ATTN_RES_TPU.many_rows else _ROWS
    if _block_bytes(places, width, current.dtype, rows) > _VMEM_BYTES // 2:
        rows = _ROWS
    rows = min(rows, -(-num_rows // _ROWS) * _ROWS)

    def entry_block(place):
        # One array, seen once per place: the window of a place that does not exist stays put, so nothing is fetched.
        return pl.BlockSpec((None, rows, width), lambda i, count: (place, jnp.where(place < count[0], i, 0), 0))

    row_block = pl.BlockSpec((rows, width), lambda i, count: (i, 0))
    weight_block = pl.BlockSpec((1, width), lambda i, count: (0, 0))
    size = current.dtype.itemsize
    return pl.pallas_call(
        functools.partial(_kernel, places=places, eps=eps, out_eps=out_eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(num_rows, rows),),
            in_specs=[weight_block, weight_block, *map(entry_block, range(places)), row_block],
            out_specs=row_block,
        ),
        out_shape=jax.ShapeDtypeStruct(current.shape, current.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=_VMEM_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=(6 * (places + 1) + 4) * num_rows * width,
            transcendentals=(places + 3) * num_rows,
            bytes_accessed=(places + 2) * num_rows * width * size,
        ),
        interpret=False if interpret is None else interpret,
        name="attn_res_norm_tpu",
    )(
        jnp.asarray(num_entries, jnp.int32).reshape(1),
        score_weight.astype(jnp.float32)[None],
        out_weight.astype(current.dtype)[None],
        *[bank] * places,
        current,
    )


def _kernel(count, score_weight, out_weight, *refs, places, eps, out_eps):
    *entries, current, out = refs
    lower = -1
    # What there is to compute for entries that do not exist is saved in two steps; one for each count would be long.
    for most in sorted({places // 2, places}):

        @pl.when((count[0] > lower) & (count[0] <= most))
        def _(values=(*entries[:most], current)):
            @pl.loop(0, out.shape[0] // _ROWS)
            def _(group):
                rows = pl.ds(pl.multiple_of(group * _ROWS, _ROWS), _ROWS)
                _mix_and_norm(count[0], score_weight, out_weight, values, rows, out, eps, out_eps)

        lower = most


def _mix_and_norm(count, score_weight, out_weight, values, rows, out, eps, out_eps):
    """Some rows of the output; the last of the values is the running sum."""
    width, zero = out.shape[1], jnp.zeros((_ROWS, _LANES), jnp.float32)
    lane = jax.lax.broadcasted_iota(jnp.int32, (_ROWS, _LANES), 1)
    scores = jnp.full((_ROWS, _LANES), -jnp.inf)  # of all values, one a lane, since registers are few
    for first in range(0, len(values), _SCORED_AT_ONCE):
        for i, score in enumerate(_scores(values[first : first + _SCORED_AT_ONCE], rows, score_weight, eps), first):
            scores = jnp.where(lane == i, score, scores)
    scores = jnp.where((lane < count) | (lane == len(values) - 1), scores, -jnp.inf)
    shares = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    weights = [jnp.broadcast_to(shares[:, i : i + 1], (_ROWS, _LANES)) for i in range(len(values))]

    def mix(columns, squares):
        mixed = sum(w * value[rows, columns].astype(jnp.float32) for w, value in zip(weights, values, strict=True))
        rounded = mixed.astype(out.dtype)
        out[rows, columns] = rounded
        return squares + jnp.square(rounded.astype(jnp.float32))

    inverse_rms = jax.lax.rsqrt(_sum_over_chunks(width, mix, zero) / width + out_eps)
    inverse_rms = jnp.broadcast_to(inverse_rms, (_ROWS, _LANES))

    def normalise(columns, sums):
        normed = (out[rows, columns].astype(jnp.float32) * inverse_rms).astype(out.dtype)
        out[rows, columns] = normed * out_weight[:, columns]
        return sums

    _sum_over_chunks(width, normalise, ())


def _scores(values, rows, score_weight, eps):
    """[rows, 1] of each value. Several together, since the sums of one alone would wait for each other."""

    def add(columns, sums):
        weight, added = score_weight[:, columns], []
        for value, (squares, products) in zip(values, sums, strict=True):
            v = value[rows, columns].astype(jnp.float32)
            added.append((squares + v * v, products + v * weight))
        return added

    width = values[0].shape[1]
    zero = jnp.zeros((_ROWS, _LANES), jnp.float32)
    sums = _sum_over_chunks(width, add, [(zero, zero)] * len(values))
    return [products * jax.lax.rsqrt(squares / width + eps) for squares, products in sums]


def _sum_over_chunks(width, add, sums):
    """Runs sums = add(columns, sums) over all columns, 128 at a time; returns the sums over lanes, [rows, 1] each."""
    per_turn = next(n for n in range(ATTN_RES_TPU.columns // _LANES, 0, -1) if width // _LANES % n == 0)

    def turn(i, sums):
        for j in range(per_turn):
            sums = add(pl.ds(pl.multiple_of((i * per_turn + j) * _LANES, _LANES), _LANES), sums)
        return sums

    sums = jax.lax.fori_loop(0, width // _LANES // per_turn, turn, sums)
    return jax.tree.map(lambda x: jnp.sum(x, axis=-1, keepdims=True), sums)
