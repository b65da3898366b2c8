"""x W^T for an MXFP4 weight on TPU: the weight is dequantised in vector memory, next to the matrix unit.

Each weight tile is unpacked once per row block, while the matrix unit works on it; see `mxfp4_unpack` for how.
Scales are read as [groups, out]: the compiler stores a [out, groups] array that way round, the wide axis on lanes,
so that the swap is free while a copy into row-major order is not.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mxfp4_unpack as unpack
from pallas_kernels.tiling import MXFP4_MATMUL_GRADIENT_TPU, MXFP4_MATMUL_TPU, Mxfp4MatmulTpuTiling

_SUBLANES = 16  # rows of a bfloat16 register
_F32_PARTS = 3  # bfloat16 numbers that add up to a float32


def mxfp4_matmul_tpu_refusal(
    x_shape: tuple[int, ...], x_dtype: jnp.dtype, packed_shape: tuple[int, ...], scale_shape: tuple[int, ...]
) -> str | None:
    """Why `mxfp4_matmul_tpu` cannot run for these arguments, or None."""
    if x_dtype not in (jnp.bfloat16, jnp.float32):
        return f"mxfp4_matmul_tpu takes x in bfloat16 or float32, not {jnp.dtype(x_dtype).name}"
    if len(x_shape) != 2 or len(packed_shape) != 2 or x_shape[0] == 0:
        return f"mxfp4_matmul_tpu takes x [M, K] with M > 0 and packed [N, K/2], not {x_shape} and {packed_shape}"
    (_, k), (n, half) = x_shape, packed_shape
    if k != 2 * half or scale_shape != (n, k // unpack.GROUP):
        return f"x {x_shape}, packed {packed_shape} and scale {scale_shape} do not fit [M, K], [N, K/2] and [N, K/32]"
    if k % unpack.PAIR or n % unpack.LANES:
        return f"mxfp4_matmul_tpu takes K in multiples of {unpack.PAIR} and N of {unpack.LANES}, not K={k}, N={n}"
    if k > unpack.MAX_COLUMNS and k % 1024:
        return f"mxfp4_matmul_tpu takes K above {unpack.MAX_COLUMNS} in multiples of 1024, not {k}"
    return None


def mxfp4_matmul_tpu(
    x: jax.Array,
    packed: jax.Array,
    scale: jax.Array,
    *,
    method: str | None = None,
    tiling: Mxfp4MatmulTpuTiling | None = None,
    interpret: pltpu.InterpretParams | bool | None = None,
) -> jax.Array:
    """x dequantize(packed, scale)^T, accumulated in float32 and rounded once to x's dtype.

        out[m, n] = sum_k x[m, k] code[n, k] 2^(scale[n, k // 32] - 127)

    Differentiable in x: dx = dout W, by the same kernel with the other contraction.

    Args:
      x: [M, K] in bfloat16, or in float32, which runs as three bfloat16 products.
      packed: uint8 [N, K/2], low nibble first along K.
      scale: uint8 [N, K/32].
      method: How weights are unpacked, one of `mxfp4_unpack.METHODS`, with its limits of scale; None for the chip's.
      tiling: None for the one that suits the chip and the number of rows.
      interpret: Passed to `pallas_call`.
    Returns: [M, N].
    Raises: NotImplementedError with the text of `mxfp4_matmul_tpu_refusal`.
    """
    reason = mxfp4_matmul_tpu_refusal(x.shape, x.dtype, packed.shape, scale.shape)
    if reason:
        raise NotImplementedError(reason)
    how = (method or unpack.default_method(), tiling, interpret)
    return _matmul(how, x, packed, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(how, x, packed, scale):
    return _in_parts(functools.partial(_call, how, False), x, packed, scale)


def _matmul_fwd(how, x, packed, scale):
    return _matmul(how, x, packed, scale), (packed, scale)


def _matmul_bwd(how, saved, dout):
    no_gradient = (np.zeros(leaf.shape, jax.dtypes.float0) for leaf in saved)
    return _in_parts(functools.partial(_call, how, True), dout, *saved), *no_gradient


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _in_parts(product, x, packed, scale):
    """A product of float32 x as one of bfloat16 rows: the weights are exact in bfloat16, and parts of x add up."""
    if x.dtype == jnp.bfloat16:
        return product(x, packed, scale, x.dtype)
    parts, rest = [], x
    for _ in range(_F32_PARTS):
        # Not a cast to and fro, which a compiler may drop.
        parts.append(jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16))
        rest = rest - parts[-1].astype(jnp.float32)
    out = product(jnp.concatenate(parts), packed, scale, x.dtype).reshape(_F32_PARTS, x.shape[0], -1)
    return (out[2] + out[1]) + out[0]


def _call(how, transposed, x, packed, scale, out_dtype):
    """x W^T, or x W if transposed, for bfloat16 x."""
    method, tiling, interpret = how
    num_rows, (num_outputs, half) = x.shape[0], packed.shape
    if tiling is None:
        choices = (MXFP4_MATMUL_GRADIENT_TPU if transposed else MXFP4_MATMUL_TPU)[method]
        tiling = next((one for one in choices if num_rows <= one.rows), choices[-1])
    num_columns = 2 * half
    bm = min(tiling.rows, -(-num_rows // _SUBLANES) * _SUBLANES)
    bn = _largest_divisor(num_outputs, tiling.outputs, unpack.LANES)
    bk = _largest_divisor(num_columns, tiling.columns, unpack.PAIR)
    groups = num_columns // unpack.GROUP
    if num_columns > unpack.MAX_COLUMNS:
        bk, groups = 1024, 1024 // unpack.GROUP
    lanes = unpack.uses_lane_order(method)
    x = jnp.pad(x, ((0, -num_rows % bm), (0, 0)))
    if lanes and not transposed:
        x = unpack.lane_order(x)
    tiles = (x.shape[0] // bm, num_outputs // bn, num_columns // bk)
    if transposed:  # the grid is (rows, columns, outputs): the last axis is summed over
        grid, of = (tiles[0], tiles[2], tiles[1]), lambda i, a, b: (i, b, a)
    else:
        grid, of = tiles, lambda i, a, b: (i, a, b)
    x_width, out_width = (bn, bk) if transposed else (bk, bn)

    def weight_map(i, a, b):
        _, n, k = of(i, a, b)
        return n, k

    def scale_map(i, a, b):
        _, n, k = of(i, a, b)
        return (k if num_columns > unpack.MAX_COLUMNS else 0), n

    at_a_time = _largest_divisor(bn, tiling.at_a_time, unpack.LANES)
    width = _largest_divisor(bk, tiling.width, unpack.PAIR)
    kernel = functools.partial(
        _kernel,
        method=method,
        transposed=transposed,
        whole_scales=num_columns <= unpack.MAX_COLUMNS,
        at_a_time=at_a_time,
        width=width,
        unrolled=tiling.unrolled,
    )
    unpacked = pltpu.VMEM((width, at_a_time) if method == "float4" else (at_a_time, width), jnp.bfloat16)
    written = jax.ShapeDtypeStruct((x.shape[0], num_columns if transposed else num_outputs), out_dtype)
    out = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[
            pl.BlockSpec((bm, x_width), lambda i, a, b: (i, b)),
            pl.BlockSpec((bn, bk // 2), weight_map),
            pl.BlockSpec((groups, bn), scale_map),
        ],
        out_specs=pl.BlockSpec((bm, out_width), lambda i, a, b: (i, a)),
        out_shape=written,
        scratch_shapes=[
            pltpu.VMEM((bm, out_width), jnp.float32),
            unpack.scale_scratch(method, groups, bn),
            *(tiling.buffers * [unpacked]),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * x.shape[0] * packed.size * 2,
            bytes_accessed=packed.size + scale.size + 2 * x.size + written.size * written.dtype.itemsize,
            transcendentals=0,
        ),
        name="mxfp4_matmul_transposed" if transposed else "mxfp4_matmul",
        interpret=interpret or False,
    )(x, packed, scale.T)[:num_rows]
    return unpack.from_lane_order(out) if lanes and transposed else out


def _largest_divisor(size, most, unit):
    """The largest multiple of unit up to `most` that divides size."""
    return max(width for width in range(unit, max(most, unit) + 1, unit) if size % width == 0)


def _kernel(
    x, packed, scale, out, total, prepared, *buffers, method, transposed, whole_scales, at_a_time, width, unrolled
):
    step = pl.program_id(2)
    column_block = pl.program_id(1) if transposed else step

    @pl.when(step == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    def prepare():
        unpack.prepare_scales(method, scale[...], prepared)

    if whole_scales and not transposed:
        pl.when(step == 0)(prepare)  # the same for all blocks of columns
    else:
        prepare()
    num_groups = 2 * packed.shape[1] // unpack.GROUP
    first_group = pl.multiple_of(column_block * num_groups, num_groups) if whole_scales else 0

    def multiply(i):
        at = i * at_a_time if unrolled else pl.multiple_of(i * at_a_time, at_a_time)
        outputs = pl.ds(at, at_a_time)
        for column in range(0, 2 * packed.shape[1], width):
            columns, half = slice(column, column + width), slice(column // 2, (column + width) // 2)
            group = first_group + column // unpack.GROUP
            weight = unpack.dequantised(method, packed[outputs, half], prepared, group, at)
            if buffers:
                buffer = buffers[i % len(buffers)]
                buffer[...] = weight
                weight = buffer[...]
            if transposed:
                total[:, columns] += unpack.times_transpose(method, x[:, outputs], weight)
            else:
                total[:, outputs] += unpack.times_weight(method, x[:, columns], weight)

    turns = packed.shape[0] // at_a_time
    if unrolled:
        for i in range(turns):
            multiply(i)
    else:
        jax.lax.fori_loop(0, turns, lambda i, _: multiply(i), None)

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        out[...] = total[...].astype(out.dtype)
