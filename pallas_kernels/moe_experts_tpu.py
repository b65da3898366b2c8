"""The FFN of routed experts on TPU, grouped: MXFP4 weights, SiTU-GLU between the two products, one kernel.

Rows are sorted by expert and cut into tiles. A *visit* is one expert on one tile: a tile that several experts share is
visited once by each and keeps its own rows each time, an expert without rows is never visited, and its weights are
never fetched. A visit walks over the hidden axis: for a block of it, gate and up weights are unpacked and multiplied
with the whole tile, activated, and multiplied into the tile's outputs, which stay in vector memory. The hidden rows
are never in HBM. Visits are counted on the device and bound the grid, so that a batch costs what its experts cost.

With few rows the time is that of streaming and unpacking weights, with many that of the matrix unit: `tiling` holds
a set of block sizes for each. Source of the weights' format and of their unpacking: `mxfp4_unpack`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mxfp4_unpack as unpack
from pallas_kernels.in_hbm_tpu import in_hbm
from pallas_kernels.moe_ffn_tpu import SUBLANES, ffn_kernel, largest_divisor, scratch
from pallas_kernels.moe_visits_tpu import plan_visits, rows_of_visits
from pallas_kernels.tiling import MOE_EXPERTS_GRADIENT_TPU, MOE_EXPERTS_TPU, MoeExpertsTpuTiling

_SUM_ROWS = 64  # of a block, where what two cores computed is added up


class Mxfp4Experts(NamedTuple):
    """Stacked weights of L layers and E experts, uint8: two codes to a byte, low nibble first, and scales."""

    gate_packed: jax.Array  # [L, E, F, D/2]
    gate_scale: jax.Array  # [L, E, F, D/32]
    up_packed: jax.Array
    up_scale: jax.Array
    down_packed: jax.Array  # [L, E, D, F/2]
    down_scale: jax.Array  # [L, E, D, F/32]


def moe_experts_tpu_refusal(x_shape: tuple[int, ...], x_dtype: jnp.dtype, experts: Mxfp4Experts) -> str | None:
    """Why `moe_experts_tpu` cannot run for these arguments, or None. `experts` may hold anything with a shape."""
    if x_dtype != jnp.bfloat16:
        return f"moe_experts_tpu takes x in bfloat16, not {jnp.dtype(x_dtype).name}"
    if len(x_shape) != 2 or x_shape[0] == 0:
        return f"moe_experts_tpu takes x [M, D] with M > 0, not {x_shape}"
    dim = x_shape[1]
    layers, num_experts, hidden = experts.gate_packed.shape[:3]
    wide, tall = (layers, num_experts, hidden, dim), (layers, num_experts, dim, hidden)
    for name, leaf in experts._asdict().items():
        *lead, width = tall if name.startswith("down") else wide
        expected = (*lead, width // (2 if name.endswith("packed") else unpack.GROUP))
        if tuple(leaf.shape) != expected:
            return f"{name} is {tuple(leaf.shape)}, and x {x_shape} with gate_packed asks for {expected}"
    for name, size in (("D", dim), ("F", hidden)):
        if size % unpack.PAIR or size > unpack.MAX_COLUMNS:
            return f"moe_experts_tpu takes D and F in multiples of 256 up to {unpack.MAX_COLUMNS}, not {name}={size}"
    return None


def moe_experts_tpu(
    x: jax.Array,
    group_sizes: jax.Array,
    experts: Mxfp4Experts,
    layer: int | jax.Array,
    gate_beta: float,
    linear_beta: float,
    *,
    expected_rows: int | None = None,
    method: str | None = None,
    tiling: MoeExpertsTpuTiling | None = None,
    interpret: pltpu.InterpretParams | bool | None = None,
) -> jax.Array:
    """expert(x) of every row, each by the expert of its group; float32 inside, hidden rows rounded to bfloat16.

        expert(x) = (b1 tanh(g / b1) sigmoid(g) b2 tanh(u / b2)) Wd^T,  g = x Wg^T,  u = x Wu^T

    Differentiable in x, straight through the rounding; the hidden rows are computed again.

    Args:
      x: [M, D] in bfloat16: the rows of expert 0, then those of expert 1, ... What comes out for rows after the last
        group means nothing, nor does their gradient: leave them out of sums. They cost nothing but their memory.
      group_sizes: int32 [E], rows of each expert; their sum is at most M.
      layer: Which of the stacked layers. The stack is read in place, and of it only experts that have rows.
      gate_beta, linear_beta: b1 and b2.
      expected_rows: How many rows the groups have as a rule, where M is their worst case: block sizes, and what
        the compiler is told of costs, suit that many. None for M.
      method: How weights are unpacked, one of `mxfp4_unpack.METHODS`, with its limits of scale; None for the chip's.
      tiling: None for the one that suits the expected rows.
      interpret: Passed to `pallas_call`.
    Returns: [M, D].
    Raises: NotImplementedError with the text of `moe_experts_tpu_refusal`.
    """
    reason = moe_experts_tpu_refusal(x.shape, x.dtype, experts)
    if reason:
        raise NotImplementedError(reason)
    rows = x.shape[0] if expected_rows is None else max(1, min(expected_rows, x.shape[0]))
    how = settings(rows, gate_beta, linear_beta, method, tiling, interpret)
    return _ffn(how, x, group_sizes, Mxfp4Experts(*experts), jnp.asarray(layer, jnp.int32))


def settings(expected_rows, gate_beta, linear_beta, method, tiling, interpret):
    """What is fixed when the kernel is traced, with what was left open filled in."""
    method = method or unpack.default_method()
    tilings = tiling, tiling
    if tiling is None:
        choices = MOE_EXPERTS_TPU[method], MOE_EXPERTS_GRADIENT_TPU[method]
        tilings = (next((one for one in some if expected_rows <= one.rows), some[-1]) for some in choices)
    return method, tuple(tilings), interpret, float(gate_beta), float(linear_beta), expected_rows


def forward(how, x, group_sizes, experts, layer):
    """`moe_experts_tpu` without a gradient, for `settings`."""
    return _call(how, (x,), group_sizes, experts, layer)


def backward(how, x, dout, group_sizes, experts, layer):
    """dx, and [M, F] in bfloat16: the gradients of gate's and of up's product, and the hidden rows."""
    return _call(how, (x, dout), group_sizes, experts, layer, with_hidden=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ffn(how, x, group_sizes, experts, layer):
    return _call(how, (x,), group_sizes, experts, layer)


def _ffn_fwd(how, x, group_sizes, experts, layer):
    return _ffn(how, x, group_sizes, experts, layer), (x, group_sizes, experts, layer)


def _ffn_bwd(how, saved, dout):
    x, *rest = saved
    no_gradient = jax.tree.map(lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0), tuple(rest))
    return _call(how, (x, dout), *rest), *no_gradient


_ffn.defvjp(_ffn_fwd, _ffn_bwd)


def _call(how, rows, group_sizes, experts, layer, with_hidden=False):
    """The FFN of rows (x,), or dx for rows (x, dout).

    Args:
      with_hidden: With dout, return beside dx what gradients of weights are made of, [M, F] in bfloat16 each: the
        gradients of gate's and of up's product, and the hidden rows.
    """
    method, tilings, interpret, gate_beta, linear_beta, expected_rows = how
    tiling = tilings[len(rows) - 1]
    (num_rows, dim), hidden = rows[0].shape, experts.gate_packed.shape[2]
    bm = min(tiling.rows, -(-num_rows // SUBLANES) * SUBLANES)
    cores, backward = _num_cores(), len(rows) == 2
    bf = tiling.hidden if hidden % (tiling.hidden * cores) == 0 else unpack.PAIR
    if hidden % (bf * cores):
        cores = 1
    rows = tuple(jnp.pad(value, ((0, -num_rows % bm), (0, 0))) for value in rows)
    visits = plan_visits(group_sizes, rows[0].shape[0] // bm, bm)
    in_specs, out_specs = _specs(len(rows), bm, bf, dim, hidden, hidden // bf // cores)
    # Two cores each sum over half of the hidden axis; what they give is added up and rounded once.
    out_shape = [jax.ShapeDtypeStruct((cores, *rows[0].shape), jnp.float32 if cores > 1 else jnp.bfloat16)]
    if with_hidden:  # by visit, since several write to a tile
        out_shape += 3 * [jax.ShapeDtypeStruct((visits.tile.size, bm, hidden), jnp.bfloat16)]
    scalars = (layer.reshape(1), visits.tile, visits.expert, visits.start, visits.end)
    out, *by_visit = pl.pallas_call(
        functools.partial(
            ffn_kernel,
            method=method,
            backward=backward,
            with_hidden=with_hidden,
            tiling=tiling,
            betas=(gate_beta, linear_beta),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, visits.count, hidden // bf // cores),
            in_specs=in_specs,
            out_specs=out_specs[: len(out_shape)],
            scratch_shapes=scratch(method, tiling, bm, bf, dim, hidden, backward),
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=tiling.vmem_bytes
        ),
        cost_estimate=_cost(expected_rows, bm, experts, backward, out_shape),
        name="moe_experts_backward" if backward else "moe_experts",
        interpret=interpret or False,
    )(
        *scalars,
        *rows,
        # The compiler keeps [.., out, groups] with the wide axis last: the swap is free, a copy would not be.
        *(
            in_hbm(jnp.swapaxes(leaf, -1, -2) if name.endswith("scale") else leaf)
            for name, leaf in experts._asdict().items()
        ),
    )
    out = (out[0] if cores == 1 else _sum_of_cores(out, jnp.sum(group_sizes), expected_rows, interpret))[:num_rows]
    return (out, *(rows_of_visits(value, visits, num_rows) for value in by_visit)) if with_hidden else out


def _specs(num_row_arrays, bm, bf, dim, hidden, blocks):
    """Blocks of the inputs and, at most, of the outputs; `blocks` of the hidden axis on each core."""

    def block_of(core, v, f, start, end):
        """The block of the hidden axis; a visit without rows keeps the last one, which needs no fetch."""
        return core * blocks + jnp.where(start[v] < end[v], f, blocks - 1)

    def wide_map(core, v, f, layer, tile, expert, start, end):  # [L, E, F, D / 2]
        return layer[0], expert[v], block_of(core, v, f, start, end), 0

    def last_map(core, v, f, layer, tile, expert, start, end):  # [L, E, D / 32, F] and [L, E, D, F / 2]
        return layer[0], expert[v], 0, block_of(core, v, f, start, end)

    row_in = pl.BlockSpec((bm, dim), lambda core, v, f, layer, tile, *_: (tile[v], 0))
    packed_in = pl.BlockSpec((None, None, bf, dim // 2), wide_map)
    scale_in = pl.BlockSpec((None, None, dim // unpack.GROUP, bf), last_map)
    down_packed_in = pl.BlockSpec((None, None, dim, bf // 2), last_map)
    down_scale_in = pl.BlockSpec(
        (None, None, hidden // unpack.GROUP, dim),
        lambda core, v, f, layer, tile, expert, *_: (layer[0], expert[v], 0, 0),
    )
    weights_in = [packed_in, scale_in, packed_in, scale_in, down_packed_in, down_scale_in]
    rows_out = pl.BlockSpec((None, bm, dim), lambda core, v, f, layer, tile, *_: (core, tile[v], 0))
    hidden_out = pl.BlockSpec((None, bm, bf), lambda core, v, f, *_: (v, 0, core * blocks + f))
    return num_row_arrays * [row_in] + weights_in, [rows_out] + 3 * [hidden_out]


def _cost(rows, bm, experts, backward, out_shape):
    """What the compiler is told, where rows choose experts evenly: the weights of those chosen, and what rows take."""
    _, num_experts, hidden, half = experts.gate_packed.shape
    matrix, read = 2 * half * hidden, num_experts * (1 - (1 - 1 / num_experts) ** rows)
    rows = -(-rows // bm) * bm
    weights = sum(leaf.size for leaf in experts) // (experts.gate_packed.shape[0] * num_experts)
    rows_in = (2 if backward else 1) * rows * 2 * half * 2
    written = sum(leaf.size // leaf.shape[-2] * rows * leaf.dtype.itemsize for leaf in out_shape[:1])
    written += sum(leaf.size * leaf.dtype.itemsize for leaf in out_shape[1:])
    return pl.CostEstimate(
        # Gate, up and down; the gradient has gate and up again, and one product back through each.
        flops=2 * rows * matrix * (5 if backward else 3),
        bytes_accessed=round(read * weights) + rows_in + written,
        transcendentals=3 * rows * hidden,
    )


def _sum_of_cores(parts, num_used, expected_rows, interpret):
    """The sum of float32 parts [cores, M, D] in bfloat16, of the first num_used rows, whose number is dynamic."""
    cores, num_rows, dim = parts.shape
    bm = largest_divisor(num_rows, _SUM_ROWS, SUBLANES)
    blocks = num_rows // bm
    shares = min(cores, blocks)
    share = pl.cdiv(pl.cdiv(jnp.maximum(num_used, 1), bm), shares)

    def block_of(core, i, share):
        return jnp.minimum(core * share[0] + i, blocks - 1)

    def kernel(share, parts, out):
        del share
        out[...] = jnp.sum(parts[...], axis=0).astype(out.dtype)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(shares, share),
            in_specs=[pl.BlockSpec((cores, bm, dim), lambda *at: (0, block_of(*at), 0))],
            out_specs=pl.BlockSpec((bm, dim), lambda *at: (block_of(*at), 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, dim), jnp.bfloat16),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=cores * expected_rows * dim, bytes_accessed=(4 * cores + 2) * expected_rows * dim, transcendentals=0
        ),
        name="moe_sum_of_cores",
        interpret=interpret or False,
    )(share.astype(jnp.int32).reshape(1), parts)


def _num_cores():
    """Cores that share one device's memory: 2 on v5p."""
    try:
        return pltpu.get_tpu_info().num_cores
    except ValueError:  # no TPU, and none that is compiled for
        return 1
