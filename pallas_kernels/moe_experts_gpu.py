"""Routed experts on NVIDIA GPUs: MXFP4 weights, rows grouped by expert, SiTU-GLU between the two products.

One kernel makes the hidden rows and one the outputs; both stream packed weights, decode them in registers
(mxfp4_registers_gpu.py) and multiply weights [N, K] by rows [K, R], so that the weights fill the 64 rows that `wgmma`
wants and the few rows of a decoding step its columns. Rows lie in blocks that share one expert; only experts that have
rows are read, in place in the stack of layers.

A 16-bit word of weights holds four neighbouring columns. Instead of interleaving what is decoded from its four places,
four products meet every fourth column of the rows; the first kernel makes the hidden rows in that order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import gpu_compat as gpu
from pallas_kernels.mxfp4_registers_gpu import CODES, GROUP, SHRUNK_BY, as_words, by_code, decode
from pallas_kernels.tiling import MOE_EXPERTS_H200_DECODE, MOE_EXPERTS_H200_PREFILL, MoeExpertsGpuTiling


def moe_experts_gpu_refusal(x_shape: tuple[int, ...], x_dtype: Any, experts: Any) -> str | None:
    """Why `moe_experts_gpu` cannot run for these arguments, or None. `experts` may hold anything with a shape."""
    if jnp.dtype(x_dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        return f"moe_experts_gpu takes x in bfloat16 or float32, not {jnp.dtype(x_dtype).name}"
    if len(x_shape) != 2 or x_shape[0] == 0:
        return f"moe_experts_gpu takes x [M, D] with M > 0, not {x_shape}"
    layers, num_experts, hidden = experts[0].shape[:3]
    dim = x_shape[1]
    wide, tall = (layers, num_experts, hidden, dim), (layers, num_experts, dim, hidden)
    for place, leaf in enumerate(experts):
        *lead, width = tall if place > 3 else wide
        expected = (*lead, width // (GROUP if place % 2 else 2))
        if tuple(leaf.shape) != expected:
            return f"experts[{place}] is {tuple(leaf.shape)}: x {x_shape} and experts[0] ask for {expected}"
    for name, size in (("D", dim), ("F", hidden)):
        if size % (2 * GROUP):
            return f"moe_experts_gpu takes D and F in multiples of {2 * GROUP}, not {name}={size}"
    return None


def moe_experts_gpu(
    x: jax.Array,
    group_sizes: jax.Array,
    experts: Any,
    layer: int | jax.Array,
    gate_beta: float,
    linear_beta: float,
    *,
    tiling: MoeExpertsGpuTiling | None = None,
    interpret: Any = None,
) -> jax.Array:
    """expert(x) of every row, each by the expert of its group.

        expert(x) = (b1 tanh(g / b1) sigmoid(g) b2 tanh(u / b2)) Wd^T,  g = x Wg^T,  u = x Wu^T

    Products are accumulated in float32; g, u and the hidden rows are rounded to x's dtype. Not differentiable.

    Args:
      x: [M, D] in bfloat16 or float32: the rows of expert 0, then those of expert 1, ... Rows after the last group
        give 0.
      group_sizes: int32 [E], rows of each expert; their sum is at most M.
      experts: gate_packed uint8 [L, E, F, D / 2], gate_scale [L, E, F, D / 32], up_packed, up_scale likewise,
        down_packed [L, E, D, F / 2] and down_scale [L, E, D, F / 32].
      layer: Which of the stacked layers. The stack is read in place, and of it only experts that have rows.
      gate_beta, linear_beta: b1 and b2.
      tiling: None for the one that suits the number of rows.
    Returns: [M, D] in x's dtype.
    Raises: NotImplementedError with the text of `moe_experts_gpu_refusal`.
    """
    if reason := moe_experts_gpu_refusal(x.shape, x.dtype, experts):
        raise NotImplementedError(reason)
    num_rows, dim = x.shape
    _, num_experts, hidden = experts[0].shape[:3]
    if tiling is None:
        decoding = num_rows <= MOE_EXPERTS_H200_DECODE.rows * num_experts // 2
        tiling = MOE_EXPERTS_H200_DECODE if decoding else MOE_EXPERTS_H200_PREFILL
    blocks = _plan(group_sizes, num_rows, tiling.rows)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    experts = [leaf if place % 2 else as_words(leaf) for place, leaf in enumerate(experts)]

    def call(body, outputs, inner, shape, name, *operands):
        columns = _divisor(hidden // CODES if outputs == hidden else outputs, tiling.outputs)
        step = _divisor(inner // CODES, tiling.words)
        static = dict(rows=tiling.rows, columns=columns, step=step, in_registers=not interpret)
        return gpu.kernel_call(
            functools.partial(body, **static),
            grid=(outputs // columns, blocks[0].shape[0]),
            out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
            num_operands=4 + len(operands),
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            interpret=interpret,
            name=name,
        )(layer, *blocks, *operands)

    betas = dict(gate_beta=float(gate_beta), linear_beta=float(linear_beta))
    body = functools.partial(_hidden_body, **betas)
    rows = call(body, hidden, dim, (num_rows, hidden), "moe_hidden", by_code(x), *experts[:4])
    return call(_output_body, dim, hidden, (num_rows, dim), "moe_output", rows, *experts[4:])


def _divisor(size, most):
    """The largest power of two that divides size, at most `most`."""
    return min(most, size & -size)


def _plan(group_sizes, num_rows, block_rows):
    """(expert, first row, end) of each block, int32: expert E for rows after the last group, -1 for no block."""
    num_experts = group_sizes.shape[0]
    sizes = jnp.append(group_sizes.astype(jnp.int32), 0)
    sizes = sizes.at[-1].set(num_rows - jnp.sum(sizes))
    stops, counts = jnp.cumsum(sizes), -(-sizes // block_rows)
    ends = jnp.cumsum(counts)
    block = jnp.arange(num_rows // block_rows + min(num_experts + 1, num_rows))
    expert = jnp.minimum(jnp.searchsorted(ends, block, side="right"), num_experts)
    start = (stops - sizes)[expert] + block_rows * (block - (ends - counts)[expert])
    expert = jnp.where(block < ends[-1], expert, -1)
    return expert.astype(jnp.int32), start.astype(jnp.int32), stops[expert].astype(jnp.int32)


def _weights_by_rows(layer, expert, x_ref, packed_ref, scale_ref, names, row_block, real, *, step, in_registers):
    """Sums over the inner axis of weights [columns, inner] by rows [inner, rows] of a block, for each weight matrix."""
    inner, columns, rows = x_ref.shape[1] // CODES, names.shape[0], real.shape[0]

    def one_step(index, sums):
        first = index * step
        along = first + jnp.arange(step, dtype=jnp.int32)
        groups = first * CODES // GROUP + jnp.arange(step * CODES // GROUP, dtype=jnp.int32)

        def read(place):
            columns_of_place = pl.ds(place * inner + first, step)
            return gpu.load(x_ref.at[row_block, columns_of_place], mask=real[:, None], other=0.0)

        parts, new = [read(place) for place in range(CODES)], []
        for total, packed, scale in zip(sums, packed_ref, scale_ref, strict=True):
            weights = decode(
                packed[layer, expert, names[:, None], along[None, :]],
                scale[layer, expert, names[:, None], groups[None, :]],
                x_ref.dtype,
                in_registers,
            )
            for weight, part in zip(weights, parts, strict=True):
                total = total + gpu.dot(weight, part, (1, 1))
            new.append(total)
        return tuple(new)

    zeros = tuple(jnp.zeros((columns, rows), jnp.float32) for _ in packed_ref)
    return [total / SHRUNK_BY for total in jax.lax.fori_loop(0, inner // step, one_step, zeros)]


def _hidden_body(
    layer_ref, expert_ref, start_ref, end_ref, x_ref, gate_ref, gate_scale_ref, up_ref, up_scale_ref, hidden_ref,
    *, rows, columns, step, in_registers, gate_beta, linear_beta,
):  # fmt: skip
    """Some columns of the hidden rows of one block, every fourth."""
    tile, block = pl.program_id(0), pl.program_id(1)
    expert = expert_ref[block]
    tiles = hidden_ref.shape[1] // CODES // columns
    place, first = tile // tiles, tile % tiles * columns

    @pl.when((expert >= 0) & (expert < gate_ref.shape[1]))
    def _():
        names = CODES * (first + jnp.arange(columns, dtype=jnp.int32)) + place
        row_block = pl.ds(start_ref[block], rows)
        real = start_ref[block] + jnp.arange(rows, dtype=jnp.int32) < end_ref[block]
        gate, up = _weights_by_rows(
            layer_ref[0], expert, x_ref, (gate_ref, up_ref), (gate_scale_ref, up_scale_ref), names, row_block, real,
            step=step, in_registers=in_registers,
        )  # fmt: skip
        gate, up = (x.astype(x_ref.dtype).astype(jnp.float32) for x in (gate, up))
        gated = gate_beta * jnp.tanh(gate / gate_beta) / (1 + jnp.exp(-gate))
        out = (gated * (linear_beta * jnp.tanh(up / linear_beta))).astype(hidden_ref.dtype)
        gpu.store(hidden_ref.at[row_block, pl.ds(tile * columns, columns)], out.T, mask=real[:, None])


def _output_body(
    layer_ref, expert_ref, start_ref, end_ref, hidden_ref, down_ref, down_scale_ref, out_ref,
    *, rows, columns, step, in_registers,
):  # fmt: skip
    """Some columns of the outputs of one block."""
    first, block = pl.program_id(0) * columns, pl.program_id(1)
    expert, num_experts = expert_ref[block], down_ref.shape[1]
    row_block = pl.ds(start_ref[block], rows)
    real = start_ref[block] + jnp.arange(rows, dtype=jnp.int32) < end_ref[block]

    def write(out):
        gpu.store(out_ref.at[row_block, pl.ds(first, columns)], out.astype(out_ref.dtype), mask=real[:, None])

    @pl.when((expert >= 0) & (expert < num_experts))
    def _():
        names = first + jnp.arange(columns, dtype=jnp.int32)
        (out,) = _weights_by_rows(
            layer_ref[0], expert, hidden_ref, (down_ref,), (down_scale_ref,), names, row_block, real,
            step=step, in_registers=in_registers,
        )  # fmt: skip
        write(out.T)

    @pl.when(expert == num_experts)
    def _():
        write(jnp.zeros((rows, columns), jnp.float32))
