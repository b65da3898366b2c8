"""One step of `moe_experts_tpu`: a block of the hidden axis of one expert on one tile of rows, in vector memory.

A step is a row of loops, each over tiles of one weight that are unpacked and multiplied. How much of a weight is
unpacked at a time is bounded so that what is live fits the registers. Where unpacking goes through float32, which
takes twice the registers, tiles go through vector memory: one is unpacked while the one before it is multiplied.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mxfp4_unpack as unpack
from pallas_kernels.tiling import MoeExpertsTpuTiling

SUBLANES = 16  # rows of a bfloat16 register
_MAX_ROWS = 64  # of a tile, brought into lane order at a time: more need more registers than there are


def largest_divisor(size: int, most: int, unit: int = unpack.PAIR) -> int:
    """The largest multiple of unit up to `most` that divides size."""
    return max(width for width in range(unit, max(most, unit) + 1, unit) if size % width == 0)


def scratch(method: str, tiling: MoeExpertsTpuTiling, bm: int, bf: int, dim: int, hidden: int, backward: bool) -> list:
    """Scratch memory of `ffn_kernel`, for tiles of bm rows and blocks of bf hidden units."""
    wide_scales = unpack.scale_scratch(method, dim // unpack.GROUP, bf)
    buffers = []
    if unpack.through_memory(method):
        width, units, outputs = _at_a_time(tiling, bf, dim)
        buffers = 2 * [pltpu.VMEM((max(units, outputs), max(width, bf)), jnp.bfloat16)]
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
        *buffers,
    ]


def _at_a_time(tiling, bf, dim):
    """Columns of x, hidden units, and outputs of down that are unpacked at a time."""
    units = largest_divisor(bf, tiling.units, unpack.LANES)
    return largest_divisor(dim, tiling.width), units, largest_divisor(dim, tiling.outputs, unpack.LANES)


def ffn_kernel(layer, tile, expert, start, end, x, *refs, method, backward, with_hidden, tiling, betas):
    """One block of the hidden axis of one visit: adds what it contributes to the outputs, or to dx, of a tile."""
    dout, refs = (refs[0], refs[1:]) if backward else (None, refs)
    (gate_w, gate_s, up_w, up_s, down_w, down_s, out), refs = refs[:7], refs[7:]
    hidden_out, refs = (refs[:3], refs[3:]) if with_hidden else ((), refs)
    x_ordered, gate, up, dhidden, dgate, dup, total, gate_p, up_p, down_p, *buffers = refs
    activated = dgate  # the forward pass has no gradients to keep
    v, f = pl.program_id(1), pl.program_id(2)
    hidden_block = pl.program_id(0) * pl.num_programs(2) + f
    bf, (num_rows, dim) = gate_w.shape[0], x.shape
    lanes = unpack.uses_lane_order(method)
    width, units, outputs = _at_a_time(tiling, bf, dim)
    times_weight = functools.partial(unpack.times_weight, method)
    times_transpose = functools.partial(unpack.times_transpose, method)

    def blocks(body):
        """Every block of a tile of rows."""
        rows, columns = largest_divisor(num_rows, _MAX_ROWS, SUBLANES), dim // width

        def one(i, _):
            row = pl.multiple_of(i // columns * rows, rows)
            body(pl.ds(row, rows), pl.ds(pl.multiple_of(i % columns * width, width), width))

        lax.fori_loop(0, num_rows // rows * columns, one, None)

    def row_blocks(body):
        """A register's rows at a time: what happens to each element needs many registers."""

        def one(i, _):
            body(pl.ds(pl.multiple_of(i * SUBLANES, SUBLANES), SUBLANES))

        lax.fori_loop(0, num_rows // SUBLANES, one, None)

    def prepare(*pairs):
        def some(i, _):
            at = pl.multiple_of(i * unpack.LANES, unpack.LANES)
            for scale, prepared in pairs:
                unpack.prepare_scales(method, scale[:, pl.ds(at, unpack.LANES)], prepared, at)

        lax.fori_loop(0, pairs[0][0].shape[1] // unpack.LANES, some, None)

    def place(i):
        """Columns of x, and hidden units of the block, whose weights tile i of gate and of up holds."""
        at, first = i // (bf // units) * width, i % (bf // units) * units
        return pl.multiple_of(at, width), pl.multiple_of(first, units)

    def wide(packed, prepared):
        def tile_of(i):
            at, first = place(i)
            codes = packed[pl.ds(first, units), pl.ds(pl.multiple_of(at // 2, width // 2), width // 2)]
            group = pl.multiple_of(at // unpack.GROUP, width // unpack.GROUP)
            return unpack.dequantised(method, codes, prepared, group, first)

        return tile_of

    def tall(i):
        """Tile i of down: some outputs of the block's hidden units."""
        groups = bf // unpack.GROUP
        at = pl.multiple_of(i * outputs, outputs)
        first = pl.multiple_of(hidden_block * groups, groups)
        return unpack.dequantised(method, down_w[pl.ds(at, outputs), :], down_p, first, at)

    walk_wide = functools.partial(_walk, dim // width * (bf // units), buffers, (units, width))
    walk_tall = functools.partial(_walk, dim // outputs, buffers, (outputs, bf))

    @pl.when(f == 0)
    def _():
        def begin(rows, columns):
            total[rows, columns] = jnp.zeros((rows.size, width), jnp.float32)
            x_ordered[rows, columns] = unpack.lane_order_in_kernel(x[rows, columns]) if lanes else x[rows, columns]

        blocks(begin)
        prepare((down_s, down_p))

    @pl.when(start[v] < end[v])
    def _():
        prepare((gate_s, gate_p), (up_s, up_p))
        gate[...] = jnp.zeros_like(gate)
        up[...] = jnp.zeros_like(up)

        def into(sums):
            def multiply(i, weight):
                at, first = place(i)
                sums[:, pl.ds(first, units)] += times_weight(x_ordered[:, pl.ds(at, width)], weight)

            return multiply

        walk_wide((wide(gate_w, gate_p), into(gate)), (wide(up_w, up_p), into(up)))
        if backward:
            dhidden[...] = jnp.zeros_like(dhidden)

            def into_dhidden(i, weight):
                dhidden[...] += times_transpose(dout[:, pl.ds(pl.multiple_of(i * outputs, outputs), outputs)], weight)

            walk_tall((tall, into_dhidden))

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

            def into_dx(d):
                def multiply(i, weight):
                    at, first = place(i)
                    total[:, pl.ds(at, width)] += times_transpose(d[:, pl.ds(first, units)], weight)

                return multiply

            walk_wide((wide(gate_w, gate_p), into_dx(dgate)), (wide(up_w, up_p), into_dx(dup)))
        else:

            def activate(rows):
                value = _situ_glu(gate[rows, :], up[rows, :], *betas).astype(jnp.bfloat16)
                activated[rows, :] = unpack.lane_order_in_kernel(value) if lanes else value

            row_blocks(activate)

            def into_outputs(i, weight):
                columns = pl.ds(pl.multiple_of(i * outputs, outputs), outputs)
                total[:, columns] += times_weight(activated[...], weight)

            walk_tall((tall, into_outputs))

    @pl.when(f == pl.num_programs(2) - 1)
    def _():
        # The first visit of a tile finds nothing in it; later ones find the rows of other experts.
        is_first = (v == 0) | (tile[jnp.maximum(v - 1, 0)] != tile[v])

        def finish(rows, columns):
            row = tile[v] * num_rows + rows.start + lax.broadcasted_iota(jnp.int32, (rows.size, width), 0)
            own = (row >= start[v]) & (row < end[v])
            others = jnp.where(is_first, jnp.zeros(row.shape, out.dtype), out[rows, columns])
            result = total[rows, columns]
            result = unpack.from_lane_order_in_kernel(result) if backward and lanes else result
            out[rows, columns] = jnp.where(own, result.astype(out.dtype), others)

        blocks(finish)


def _walk(steps, buffers, shape, *parts):
    """Unpacks and multiplies every tile of one weight, or of two in turn.

    Args:
      buffers: None, or two references to memory for a tile of `shape` and more: then a tile is multiplied from there
        while the next is unpacked, and no more than a few registers of a tile are live.
      parts: unpacked(i) -> tile i of a weight, and multiply(i, tile), for each weight.
    """
    if not buffers:

        def direct(i, _):
            for unpacked, multiply in parts:
                multiply(i, unpacked(i))

        lax.fori_loop(0, steps, direct, None)
        return
    if len(parts) == 1:  # its even and its odd tiles in turn
        ((unpacked, multiply),) = parts
        if steps % 2:
            multiply(steps - 1, unpacked(steps - 1))
        steps //= 2
        parts = [_every_second(unpacked, multiply, odd) for odd in (0, 1)]
    if not steps:
        return
    (first_unpacked, first_multiply), (second_unpacked, second_multiply) = parts
    first, second = (buffer.at[: shape[0], : shape[1]] for buffer in buffers)

    def one_of_each(i, _):
        second[...] = second_unpacked(i)
        first_multiply(i, first[...])
        first[...] = first_unpacked(jnp.minimum(i + 1, steps - 1))
        second_multiply(i, second[...])

    first[...] = first_unpacked(0)
    lax.fori_loop(0, steps, one_of_each, None)


def _every_second(unpacked, multiply, odd):
    return lambda i: unpacked(2 * i + odd), lambda i, tile: multiply(2 * i + odd, tile)


def _situ_glu(gate, up, gate_beta, linear_beta):
    gated = gate_beta * jnp.tanh(gate / gate_beta) * jax.nn.sigmoid(gate)
    return gated * (linear_beta * jnp.tanh(up / linear_beta))


def _situ_glu_gradient(gate, up, dout, gate_beta, linear_beta):
    """Of the gate's and the up product's inputs."""
    gate_tanh, sigmoid, up_tanh = jnp.tanh(gate / gate_beta), jax.nn.sigmoid(gate), jnp.tanh(up / linear_beta)
    gated = gate_beta * gate_tanh * sigmoid
    dgated = (1 - gate_tanh * gate_tanh) * sigmoid + gated * (1 - sigmoid)
    return dout * dgated * (linear_beta * up_tanh), dout * gated * (1 - up_tanh * up_tanh)
