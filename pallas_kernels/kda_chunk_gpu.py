"""Chunked prefill of Kimi Delta Attention on NVIDIA GPUs: packed sequences, the state on chip from end to end.

Two kernels share the work. The first takes every chunk of 64 tokens of every head by itself, in parallel, and leaves
what the second needs: with G the running sum of g in the chunk, X = (I + L)^-1 diag(beta) and the matrices of
`maxmoe.ops.kda.kda_chunked`,

    U = X V,   W = X (K*e^G),   Q*e^G,   K*e^(G_last - G),   A,   G_last

The second walks the chunks of one head of one sequence with the state S in registers, in float32:

    D = U - W S;   O = (Q*e^G) S + A D;   S <- diag(e^G_last) S + (K*e^(G_last - G))^T D

No exponent is ever positive, so any gate is safe, bounded or not. The lower triangle of the chunk is cut into the
squares below the diagonal of widths 32, 16, ..., 1: in a square of width w every query lies after, and every key at or
before, one token, the border, and the decay between them is the product of two factors that each decay towards it.
At each width a token is either such a query or such a key, so that one exponential per channel serves both.
Source: Kimi Linear, arXiv:2510.26692.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import gpu_compat as gpu
from pallas_kernels.tiling import KDA_CHUNK_H200, KdaChunkGpuTiling

CHUNK = 64  # tokens: the rows of a tile of the matrix unit
_CELL = 8  # rows whose last running sum is kept, for borders at multiples of it


class _Chunks(NamedTuple):
    """Where each chunk lies in the packed tokens, and which chunks a sequence owns."""

    start: jax.Array  # int32 [chunks], the first token
    size: jax.Array  # int32 [chunks], tokens, 0 for a chunk that is not used
    stop: jax.Array  # int32 [chunks], 1 + the rank of the asked-for position that the chunk ends at, or 0
    first: jax.Array  # int32 [sequences + 2], the first chunk of each, of the tail after them, and of what is over


def kda_chunk_gpu_refusal(
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], dtype: Any, num_sequences: int, packed: bool
) -> str | None:
    """Why `kda_chunk_gpu` cannot run for these shapes, or None.

    Args:
      dtype: That of q, k and v.
      packed: Whether `cu_seqlens` is given.
    """
    (batch, _, _, key_dim), value_dim = q_shape, v_shape[-1]
    for what, size in (("K", key_dim), ("V", value_dim)):
        if size & (size - 1) or not gpu.MIN_DOT <= size <= 256:
            return f"{what}={size}: kda_chunk_gpu takes head widths that are powers of two from 16 to 256"
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        return f"q of {jnp.dtype(dtype)}: kda_chunk_gpu takes bfloat16 or float32"
    if packed and batch != 1:
        return f"batch={batch} with cu_seqlens: kda_chunk_gpu takes packed sequences as one batch row"
    if not packed and batch != num_sequences:
        return f"batch={batch} and {num_sequences} states: kda_chunk_gpu takes one state per row"
    return None


def kda_chunk_gpu(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    cu_seqlens: jax.Array | None = None,
    state_positions: jax.Array | None = None,
    tiling: KdaChunkGpuTiling = KDA_CHUNK_H200,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """`maxmoe.ops.kda.kda_chunked` for packed sequences.

        S <- diag(exp g_t) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T;   o_t = S^T q_t

    Args:
      q: [B, T, H, K], already scaled by K**-0.5.
      k, v: [B, T, H, K] and [B, T, H, V], of q's dtype. In bfloat16 every product has bfloat16 factors, except those
        that invert the triangular system; sums and the state are float32. In float32 all arithmetic is float32.
      g: [B, T, H, K], log decay per key channel, in nats, <= 0.
      beta: [B, T, H].
      state: [N, H, K, V], before each sequence; zeros at a start.
      cu_seqlens: int32 [N + 1], nondecreasing from 0 to at most T, with B == 1: sequence n is the tokens from
        cu_seqlens[n] up to cu_seqlens[n + 1]. A sequence of no tokens keeps its state. Outputs beyond the last are 0.
        None for B sequences of T tokens.
      state_positions: int32 [P], in any order, each in 1..T: states wanted besides the final ones. Entry p asks for
        the state after the row's first p tokens, of the sequence that token p - 1 belongs to. Multiples of 64 from
        the sequence's start cost nothing but the write; any other position cuts a chunk in two.
    Returns: Outputs [B, T, H, V] in v's dtype, final states float32 [N, H, K, V] and, if `state_positions` is given,
      the states asked for, float32 [B, P, H, K, V].
    Raises: NotImplementedError with the text of `kda_chunk_gpu_refusal`.
    """
    num_sequences, packed = state.shape[0], cu_seqlens is not None
    if reason := kda_chunk_gpu_refusal(q.shape, v.shape, q.dtype, num_sequences, packed):
        raise NotImplementedError(reason)
    batch, num_tokens, num_heads, key_dim = q.shape
    value_dim, total = v.shape[-1], batch * num_tokens
    if cu_seqlens is None:
        cu_seqlens = jnp.arange(batch + 1, dtype=jnp.int32) * num_tokens
    if state_positions is None:
        asked = stops = jnp.zeros((0,), jnp.int32)
    else:
        row_starts = jnp.arange(batch, dtype=jnp.int32)[:, None] * num_tokens
        asked = (row_starts + state_positions.astype(jnp.int32)).reshape(-1)
        stops = jnp.sort(asked)
    chunks = _plan(cu_seqlens.astype(jnp.int32), stops, total)
    q, k, v, g, beta = (x.reshape(total, *x.shape[2:]) for x in (q, k.astype(q.dtype), v.astype(q.dtype), g, beta))
    num_chunks, dtype = chunks.start.shape[0], q.dtype

    def tile(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct((num_chunks, num_heads, *shape), dtype)

    prepared = gpu.kernel_call(
        functools.partial(_prepare, interpret=interpret),
        grid=(num_chunks, num_heads),
        out_shape=[
            tile(CHUNK, value_dim),
            *[tile(CHUNK, key_dim)] * 3,
            tile(CHUNK, CHUNK),
            tile(key_dim, dtype=jnp.float32),
            tile(CHUNK // _CELL, key_dim, dtype=jnp.float32),
        ],
        num_operands=8,
        num_warps=tiling.prepare_warps,
        num_stages=1,
        interpret=interpret,
        name="kda_prepare",
    )(chunks.first, chunks.start, chunks.size, q, k, v, g.astype(jnp.float32), beta.astype(jnp.float32))
    block = tiling.value_block(num_sequences * num_heads, value_dim)
    states = (num_heads, key_dim, value_dim)
    out, final, at_stops = gpu.kernel_call(
        functools.partial(_walk, block=block, with_stops=stops.shape[0] > 0),
        grid=(value_dim // block, num_heads, num_sequences + packed),
        out_shape=[
            jax.ShapeDtypeStruct((total, num_heads, value_dim), dtype),
            jax.ShapeDtypeStruct((num_sequences, *states), jnp.float32),
            jax.ShapeDtypeStruct((max(1, stops.shape[0]), *states), jnp.float32),
        ],
        num_operands=11,
        num_warps=tiling.walk_warps(block),
        num_stages=tiling.walk_stages,
        interpret=interpret,
        name="kda_walk",
    )(*chunks, state.astype(jnp.float32), *prepared[:-1])
    out = out.reshape(batch, num_tokens, num_heads, value_dim).astype(v.dtype)
    if state_positions is None:
        return out, final
    return out, final, at_stops[jnp.searchsorted(stops, asked)].reshape(batch, -1, *states)


def _plan(cu_seqlens, stops, num_tokens):
    """Cuts sequences into chunks, anew at each stop. A chunk count that no lengths exceed fixes the shapes."""
    edges = jnp.sort(jnp.concatenate([cu_seqlens, stops]))  # the last piece is the tail after the last sequence
    ends_of_pieces = jnp.append(edges[1:], num_tokens)
    counts = -(-(ends_of_pieces - edges) // CHUNK)
    ends = jnp.cumsum(counts)
    chunk = jnp.arange(num_tokens // CHUNK + edges.shape[0])
    piece = jnp.minimum(jnp.searchsorted(ends, chunk, side="right"), edges.shape[0] - 1)
    start = edges[piece] + CHUNK * (chunk - (ends - counts)[piece])
    size = jnp.where(chunk < ends[-1], jnp.clip(ends_of_pieces[piece] - start, 0, CHUNK), 0)
    stop = jnp.zeros_like(size)
    if stops.shape[0]:  # equal positions share the first rank
        rank = jnp.minimum(jnp.searchsorted(stops, start + size), stops.shape[0] - 1)
        stop = jnp.where((stops[rank] == start + size) & (size > 0), rank + 1, 0)
    first = jnp.append(jnp.append(0, ends)[jnp.searchsorted(edges, cu_seqlens)], ends[-1])
    return _Chunks(*(x.astype(jnp.int32) for x in (start, size, stop, first)))


def _prepare(
    first_ref, start_ref, size_ref, q_ref, k_ref, v_ref, g_ref, beta_ref,
    u_ref, w_ref, q_out, k_out, a_ref, last_ref, cell_ref, *, interpret,
):  # fmt: skip
    """One chunk of one head, without the state."""
    chunk, head = pl.program_id(0), pl.program_id(1)
    size = size_ref[chunk]

    @pl.when(chunk < first_ref[first_ref.shape[0] - 2])
    def _():
        start = start_ref[chunk]
        rows = jnp.arange(CHUNK, dtype=jnp.int32)
        real = rows < size
        tokens = pl.ds(start, CHUNK)

        def read(ref):
            return gpu.load(ref.at[tokens, head], mask=real[:, None], other=0.0)

        beta = gpu.load(beta_ref.at[tokens, head], mask=real, other=0.0)
        decay = jnp.cumsum(read(g_ref), axis=0)
        cells = decay.reshape(CHUNK // _CELL, _CELL, -1)
        ends = jax.lax.broadcasted_iota(jnp.int32, cells.shape, 1) == _CELL - 1
        cell_ref[chunk, head] = jnp.sum(jnp.where(ends, cells, 0.0), axis=1)
        gpu.barrier(interpret)

        def one_width(exponent, width, products):
            # Read again at each width: kept, these tiles would not leave registers enough for the products.
            q, k, factor = read(q_ref), read(k_ref), jnp.exp(exponent)
            q_near, k_near = ((x.astype(jnp.float32) * factor).astype(k.dtype) for x in (q, k))
            square = _square(rows, width)
            new = gpu.dot(q_near, k_near, (1, 1)), gpu.dot(k_near, k_near, (1, 1))
            return tuple(jnp.where(square, n, old) for n, old in zip(new, products, strict=True))

        def near(level, products):
            return one_width(_near_border(g_ref, start, size, head, rows, 1 << level), 1 << level, products)

        def far(level, products):
            width = 1 << level
            border = (rows // (2 * width) * 2 * width + width - 1) // _CELL
            # <= 0: from the border to a token after it, or from a token to the border after it.
            return one_width(-jnp.abs(decay - cell_ref[chunk, head, border]), width, products)

        q32, k32 = read(q_ref).astype(jnp.float32), read(k_ref).astype(jnp.float32)
        diagonal = jnp.where(rows[:, None] == rows[None, :], jnp.sum(q32 * k32, axis=1)[:, None], 0.0)
        products = diagonal, jnp.zeros((CHUNK, CHUNK), jnp.float32)
        products = jax.lax.fori_loop(0, _CELL.bit_length() - 1, near, products)
        a_qk, a_kk = jax.lax.fori_loop(_CELL.bit_length() - 1, CHUNK.bit_length() - 1, far, products)
        a_ref[chunk, head] = a_qk.astype(a_ref.dtype)

        product = gpu.dot if q_ref.dtype == jnp.float32 else gpu.dot_three
        solved = _invert(beta[:, None] * a_kk, rows, product) * beta[None, :]
        # G of the last row, also where rows of padding, which do not decay, stand below the last token.
        last = jnp.sum(jnp.where(rows[:, None] == CHUNK - 1, decay, 0.0), axis=0)
        last_ref[chunk, head] = last
        k32, grown = read(k_ref).astype(jnp.float32), jnp.exp(decay)
        k_out[chunk, head] = (k32 * jnp.exp(jnp.minimum(last[None, :] - decay, 0.0))).astype(k_out.dtype)
        q_out[chunk, head] = (read(q_ref).astype(jnp.float32) * grown).astype(q_out.dtype)
        terms = (solved,) if q_ref.dtype == jnp.float32 else gpu.split_bf16(solved)
        for out, right in ((w_ref, (k32 * grown).astype(w_ref.dtype)), (u_ref, read(v_ref))):
            out[chunk, head] = sum(gpu.dot(term, right) for term in terms).astype(out.dtype)


def _near_border(g_ref, start, size, head, rows, width):
    """Sums of at most `width` values of g next to each row, read again: no cancellation where borders lie close."""
    place = rows % (2 * width)
    after = place >= width

    def one_step(step, total):
        row = jnp.where(after, rows - step, rows + 1 + step)
        wanted = jnp.where(after, step <= place - width, step <= width - 2 - place) & (row < size)
        return total + jnp.where(wanted[:, None], g_ref[jnp.where(wanted, start + row, start), head], 0.0)

    return jax.lax.fori_loop(0, width, one_step, jnp.zeros((CHUNK, g_ref.shape[-1]), jnp.float32))


def _square(rows, width):
    """Where a row stands after, and a column before, the border in the middle of one block of 2 width tokens."""
    block, after = rows // (2 * width), rows % (2 * width) >= width
    return (block[:, None] == block[None, :]) & after[:, None] & ~after[None, :]


def _invert(lower, rows, product):
    """(I + lower)^-1, lower read below its diagonal only, by doubling the size of inverted diagonal blocks.

    [[P, 0], [M, R]]^-1 = [[P^-1, 0], [-R^-1 M P^-1, R^-1]]: stays accurate when the keys of a chunk repeat, where the
    powers of a Neumann series grow like binomial coefficients.
    """

    def one_width(level, inverse):
        mixed = jnp.where(_square(rows, 1 << level), lower, 0.0)
        return inverse - product(inverse, product(mixed, inverse))

    inverse = jnp.where(rows[:, None] == rows[None, :], 1.0, jnp.where(_square(rows, 1), -lower, 0.0))
    return jax.lax.fori_loop(1, CHUNK.bit_length() - 1, one_width, inverse)


def _walk(
    start_ref, size_ref, stop_ref, first_ref, state_ref, u_ref, w_ref, q_ref, k_ref, a_ref, last_ref,
    out_ref, final_ref, at_stops_ref, *, block, with_stops,
):  # fmt: skip
    """All chunks of one head of one sequence, for `block` of its value channels."""
    head, sequence = pl.program_id(1), pl.program_id(2)
    values = pl.ds(pl.program_id(0) * block, block)
    rows = jnp.arange(CHUNK, dtype=jnp.int32)
    dtype = q_ref.dtype

    def one_chunk(chunk, state):
        rounded = state.astype(dtype)
        delta = u_ref[chunk, head, :, values].astype(jnp.float32) - gpu.dot(w_ref[chunk, head], rounded)
        delta = delta.astype(dtype)
        out = gpu.dot(q_ref[chunk, head], rounded) + gpu.dot(a_ref[chunk, head], delta)
        state = state * jnp.exp(last_ref[chunk, head])[:, None] + gpu.dot(k_ref[chunk, head], delta, (0, 0))
        real = rows < size_ref[chunk]
        gpu.store(out_ref.at[pl.ds(start_ref[chunk], CHUNK), head, values], out.astype(dtype), mask=real[:, None])
        if with_stops:
            stop = stop_ref[chunk]

            @pl.when(stop > 0)
            def _():
                at_stops_ref[stop - 1, head, :, values] = state

        return state

    def one_empty_chunk(chunk, _):
        real = rows < size_ref[chunk]
        zeros = jnp.zeros((CHUNK, block), dtype)
        gpu.store(out_ref.at[pl.ds(start_ref[chunk], CHUNK), head, values], zeros, mask=real[:, None])
        return _

    @pl.when(sequence < state_ref.shape[0])
    def _():
        state = state_ref[sequence, head, :, values]
        state = jax.lax.fori_loop(first_ref[sequence], first_ref[sequence + 1], one_chunk, state)
        final_ref[sequence, head, :, values] = state

    @pl.when(sequence == state_ref.shape[0])
    def _():
        jax.lax.fori_loop(first_ref[sequence], first_ref[sequence + 1], one_empty_chunk, 0)
