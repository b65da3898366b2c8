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
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mxfp4_unpack as unpack
from pallas_kernels.moe_visits_tpu import plan_visits, rows_of_visits
from pallas_kernels.tiling import MOE_EXPERTS_TPU_DECODE, MOE_EXPERTS_TPU_PREFILL, MoeExpertsTpuTiling

_SUBLANES = 16  # rows of a bfloat16 register


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
    method: str | None = None,
    tiling: MoeExpertsTpuTiling | None = None,
    interpret: pltpu.InterpretParams | bool | None = None,
) -> jax.Array:
    """expert(x) of every row, each by the expert of its group; float32 inside, hidden rows rounded to bfloat16.

        expert(x) = (b1 tanh(g / b1) sigmoid(g) b2 tanh(u / b2)) Wd^T,  g = x Wg^T,  u = x Wu^T

    Differentiable in x, straight through the rounding; the hidden rows are computed again.

    Args:
      x: [M, D] in bfloat16: the rows of expert 0, then those of expert 1, ... Rows after the last group give 0.
      group_sizes: int32 [E], rows of each expert; their sum is at most M.
      layer: Which of the stacked layers. The stack is read in place, and of it only experts that have rows.
      gate_beta, linear_beta: b1 and b2.
      method: How weights are unpacked, one of `mxfp4_unpack.METHODS`, with its limits of scale; None for the chip's.
      tiling: None for the one that suits the number of rows.
      interpret: Passed to `pallas_call`.
    Returns: [M, D].
    Raises: NotImplementedError with the text of `moe_experts_tpu_refusal`.
    """
    reason = moe_experts_tpu_refusal(x.shape, x.dtype, experts)
    if reason:
        raise NotImplementedError(reason)
    how = settings(x.shape[0], gate_beta, linear_beta, method, tiling, interpret)
    return _ffn(how, x, group_sizes, Mxfp4Experts(*experts), jnp.asarray(layer, jnp.int32))


def settings(num_rows, gate_beta, linear_beta, method, tiling, interpret):
    """What is fixed when the kernel is traced, with what was left open filled in."""
    if tiling is None:
        tiling = MOE_EXPERTS_TPU_DECODE if num_rows <= MOE_EXPERTS_TPU_DECODE.rows else MOE_EXPERTS_TPU_PREFILL
    return method or unpack.default_method(), tiling, interpret, float(gate_beta), float(linear_beta)


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
    method, tiling, interpret, gate_beta, linear_beta = how
    (num_rows, dim), hidden = rows[0].shape, experts.gate_packed.shape[2]
    bm = min(tiling.rows, -(-num_rows // _SUBLANES) * _SUBLANES)
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
            _kernel,
            method=method,
            backward=backward,
            with_hidden=with_hidden,
            width=_largest_divisor(dim, tiling.width),
            betas=(gate_beta, linear_beta),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, visits.count, hidden // bf // cores),
            in_specs=in_specs,
            out_specs=out_specs[: len(out_shape)],
            scratch_shapes=_scratch(method, bm, bf, dim, hidden, backward),
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=tiling.vmem_bytes
        ),
        name="moe_experts_backward" if backward else "moe_experts",
        interpret=interpret or False,
    )(
        *scalars,
        *rows,
        # The compiler keeps [.., out, groups] with the wide axis last: the swap is free, a copy would not be.
        *(jnp.swapaxes(leaf, -1, -2) if name.endswith("scale") else leaf for name, leaf in experts._asdict().items()),
    )
    out = (out[0] if cores == 1 else jnp.sum(out, axis=0).astype(jnp.bfloat16))[:num_rows]
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


def _scratch(method, bm, bf, dim, hidden, backward):
    wide_scales = unpack.scale_scratch(method, dim // unpack.GROUP, bf)
    return [
        pltpu.VMEM((bm, dim), jnp.bfloat16),  # x in the weights' order of columns
        pltpu.VMEM((bm, bf), jnp.float32),  # gate
        pltpu.VMEM((bm, bf), jnp.float32),  # up
        pltpu.VMEM((bm, bf) if backward else (8, unpack.LANES), jnp.float32),  # gradient of the hidden rows
        pltpu.VMEM((bm, bf), jnp.bfloat16),  # gradient of gate, or hidden rows
        pltpu.VMEM((bm, bf) if backward else (16, unpack.LANES), jnp.bfloat16),  # gradient of up
        pltpu.VMEM((bm, dim), jnp.float32),  # sums over the hidden axis
        wide_scales,
        wide_scales,
        unpack.scale_scratch(method, hidden // unpack.GROUP, dim),
    ]


def _num_cores():
    """Cores that share one device's memory: 2 on v5p."""
    try:
        return pltpu.get_tpu_info().num_cores
    except ValueError:  # no TPU, and none that is compiled for
        return 1


def _largest_divisor(size, most):
    """The largest multiple of a lane pair up to `most` that divides size."""
    return max(width for width in range(unpack.PAIR, max(most, unpack.PAIR) + 1, unpack.PAIR) if size % width == 0)


def _kernel(layer, tile, expert, start, end, x, *refs, method, backward, with_hidden, width, betas):
    """One block of the hidden axis of one visit: adds what it contributes to the outputs, or to dx, of a tile."""
    dout, refs = (refs[0], refs[1:]) if backward else (None, refs)
    (gate_w, gate_s, up_w, up_s, down_w, down_s, out), refs = refs[:7], refs[7:]
    hidden_out, refs = (refs[:3], refs[3:]) if with_hidden else ((), refs)
    x_ordered, gate, up, dhidden, dgate, dup, total, gate_p, up_p, down_p = refs
    activated = dgate  # the forward pass has no gradients to keep
    v, f = pl.program_id(1), pl.program_id(2)
    hidden_block = pl.program_id(0) * pl.num_programs(2) + f
    bf, dim = gate_w.shape[0], x.shape[1]
    groups, lanes = bf // unpack.GROUP, unpack.uses_lane_order(method)

    def chunks(body):
        lax.fori_loop(0, dim // width, lambda i, _: body(pl.multiple_of(i * width, width)), None)

    def row_blocks(body):
        """A register's rows at a time: what happens to each element needs many registers."""
        lax.fori_loop(
            0,
            x.shape[0] // _SUBLANES,
            lambda i, _: body(pl.ds(pl.multiple_of(i * _SUBLANES, _SUBLANES), _SUBLANES)),
            None,
        )

    def prepare(*pairs):
        def some(i, _):
            at = pl.multiple_of(i * unpack.LANES, unpack.LANES)
            for scale, prepared in pairs:
                unpack.prepare_scales(method, scale[:, pl.ds(at, unpack.LANES)], prepared, at)

        lax.fori_loop(0, pairs[0][0].shape[1] // unpack.LANES, some, None)

    def wide(packed, prepared, at, first=0, count=bf):
        """Columns from `at` of gate or up, for some of the block's hidden units."""
        codes = packed[first : first + count, pl.ds(pl.multiple_of(at // 2, width // 2), width // 2)]
        group = pl.multiple_of(at // unpack.GROUP, width // unpack.GROUP)
        return unpack.dequantised(method, codes, prepared, group, first)

    def tall(at, count=width):
        """Outputs from `at` of down."""
        first = pl.multiple_of(hidden_block * groups, groups)
        return unpack.dequantised(method, down_w[pl.ds(at, count), :], down_p, first, at)

    @pl.when(f == 0)
    def _():
        def begin(at):
            columns = pl.ds(at, width)
            total[:, columns] = jnp.zeros((x.shape[0], width), jnp.float32)
            x_ordered[:, columns] = unpack.lane_order_in_kernel(x[:, columns]) if lanes else x[:, columns]

        chunks(begin)
        prepare((down_s, down_p))

    @pl.when(start[v] < end[v])
    def _():
        prepare((gate_s, gate_p), (up_s, up_p))
        gate[...] = jnp.zeros_like(gate)
        up[...] = jnp.zeros_like(up)

        def into_hidden(at):
            columns = x_ordered[:, pl.ds(at, width)]
            count = unpack.outputs_at_once(method, bf)
            for sums, packed, prepared in ((gate, gate_w, gate_p), (up, up_w, up_p)):
                for first in range(0, bf, count):
                    weight = wide(packed, prepared, at, first, count)
                    sums[:, first : first + count] += unpack.times_weight(method, columns, weight)

        chunks(into_hidden)
        if backward:
            dhidden[...] = jnp.zeros_like(dhidden)

            def into_dhidden(at):
                dhidden[...] += unpack.times_transpose(method, dout[:, pl.ds(at, width)], tall(at))

            chunks(into_dhidden)

            def differentiate(rows):
                products, by_unit = (gate[rows, :], up[rows, :]), dhidden[rows, :]
                by_unit = unpack.from_lane_order_in_kernel(by_unit) if lanes else by_unit
                dgate[rows, :], dup[rows, :] = (
                    d.astype(jnp.bfloat16) for d in _situ_glu_gradient(*products, by_unit, *betas)
                )
                if with_hidden:
                    hidden_out[0][rows, :], hidden_out[1][rows, :] = dgate[rows, :], dup[rows, :]
                    hidden_out[2][rows, :] = _situ_glu(*products, *betas).astype(jnp.bfloat16)

            row_blocks(differentiate)

            def into_dx(at):
                for d, packed, prepared in ((dgate, gate_w, gate_p), (dup, up_w, up_p)):
                    total[:, pl.ds(at, width)] += unpack.times_transpose(method, d[...], wide(packed, prepared, at))

            chunks(into_dx)
        else:

            def activate(rows):
                value = _situ_glu(gate[rows, :], up[rows, :], *betas).astype(jnp.bfloat16)
                activated[rows, :] = unpack.lane_order_in_kernel(value) if lanes else value

            row_blocks(activate)

            def into_outputs(at):
                count = unpack.outputs_at_once(method, width)
                for first in range(0, width, count):
                    outputs = pl.multiple_of(at + first, count)
                    product = unpack.times_weight(method, activated[...], tall(outputs, count))
                    total[:, pl.ds(outputs, count)] += product

            chunks(into_outputs)

    @pl.when(f == pl.num_programs(2) - 1)
    def _():
        row = tile[v] * x.shape[0] + lax.broadcasted_iota(jnp.int32, (x.shape[0], width), 0)
        own = (row >= start[v]) & (row < end[v])
        # The first visit of a tile finds nothing in it; later ones find the rows of other experts.
        is_first = (v == 0) | (tile[jnp.maximum(v - 1, 0)] != tile[v])

        def finish(at):
            columns = pl.ds(at, width)
            others = jnp.where(is_first, jnp.zeros(row.shape, out.dtype), out[:, columns])
            result = total[:, columns]
            result = unpack.from_lane_order_in_kernel(result) if backward and lanes else result
            out[:, columns] = jnp.where(own, result.astype(out.dtype), others)

        chunks(finish)


def _situ_glu(gate, up, gate_beta, linear_beta):
    gated = gate_beta * jnp.tanh(gate / gate_beta) * jax.nn.sigmoid(gate)
    return gated * (linear_beta * jnp.tanh(up / linear_beta))


def _situ_glu_gradient(gate, up, dout, gate_beta, linear_beta):
    """Of the gate's and the up product's inputs."""
    gate_tanh, sigmoid, up_tanh = jnp.tanh(gate / gate_beta), jax.nn.sigmoid(gate), jnp.tanh(up / linear_beta)
    gated = gate_beta * gate_tanh * sigmoid
    dgated = (1 - gate_tanh * gate_tanh) * sigmoid + gated * (1 - sigmoid)
    return dout * dgated * (linear_beta * up_tanh), dout * gated * (1 - up_tanh * up_tanh)
