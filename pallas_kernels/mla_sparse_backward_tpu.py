"""Gradients of sparse latent attention on TPU: the kernel that fetches the rows again, and the sum over queries.

    p_hk = exp(s_hk - lse_h);   ds_hk = scale p_hk (dcontext_h . latent_k - delta_h)
    dq_h = sum_k ds_hk latent_k;   dlatent_k = sum_h ds_hk q_h + p_hk dcontext_h;   and likewise for the shared parts

with delta_h = dcontext_h . context_h - dlse_h. The kernel writes the gradient of every fetched row in float32. Plain
JAX adds them up per cache row, a stretch of queries at a time, as they are top_k times as large as the queries.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla_fetch_tpu import BLOCK_KEYS, QUERIES, plan_fetch
from pallas_kernels.mla_pages_tpu import LANES, SHARED_DIM, pack_pages
from pallas_kernels.mla_rows_tpu import NUM_SCRATCH, Rows, call_kernel, dot
from pallas_kernels.tiling import MLA_SPARSE_TPU

ROW_GRADIENT_BYTES = 2**29  # that the gradients of fetched rows may take at a time


def mla_sparse_backward_tpu(
    q: jax.Array,
    q_shared: jax.Array,
    latent_pages: jax.Array,
    shared_pages: jax.Array,
    page_table: jax.Array,
    indices: jax.Array,
    context_gradient: jax.Array,
    log_sum_exp: jax.Array,
    delta: jax.Array,
    scale: float,
    interpret: bool | pltpu.InterpretParams | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of `mla_sparse_tpu`, whose limits hold here too.

    Args:
      context_gradient: [B, T, H, R] in q's dtype.
      log_sum_exp: [B, T, H] float32, the second result of `mla_sparse_tpu`.
      delta: [B, T, H] float32, dcontext . context - dlse.
    Returns: Gradients of q, q_shared, latent_pages and shared_pages, each in the dtype of what it belongs to. Those of
      the pages are summed in float32.
    """
    num_pages, page_size = latent_pages.shape[:2]
    batch, num_queries, top_k = indices.shape
    width = q.shape[-1] + LANES
    row_bytes = 4 * width * -(-top_k // BLOCK_KEYS) * BLOCK_KEYS * batch
    stretch = max(1, ROW_GRADIENT_BYTES // row_bytes // QUERIES) * QUERIES  # queries of each sequence at a time
    per_query = (q, q_shared, indices, context_gradient, log_sum_exp, delta)
    if stretch >= num_queries:
        stretch, stretches = num_queries, [x[None] for x in per_query]
    else:
        stretches = [_split(x, stretch) for x in per_query]

    def add_stretch(total, stretch):
        q, q_shared, indices, context_gradient, log_sum_exp, delta = stretch
        dq, dq_shared, row_gradients = _backward(
            q,
            q_shared,
            latent_pages,
            shared_pages,
            page_table,
            indices,
            context_gradient,
            log_sum_exp,
            delta,
            scale,
            interpret,
        )
        named = (indices >= 0) & (indices < page_table.shape[1] * page_size)
        place = jnp.where(named, indices, 0)
        pages = page_table[jnp.arange(batch)[:, None, None], place // page_size]
        numbers = jnp.where(named, pages * page_size + place % page_size, num_pages * page_size)
        # What stands at an index that names no key was perhaps never written: it is dropped, not multiplied by 0.
        return total.at[numbers].add(row_gradients[:, :, :top_k], mode="drop"), (dq, dq_shared)

    total = jnp.zeros((num_pages * page_size, width), jnp.float32)
    total, gradients = lax.scan(add_stretch, total, stretches)
    dq, dq_shared = (jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :num_queries] for x in gradients)
    rows = total[:, : width - SHARED_DIM].reshape(num_pages, page_size, -1).astype(latent_pages.dtype)
    return dq, dq_shared, *pack_pages(rows)


def _split(x, stretch):
    """Stretches of the second axis, along a new first one. Queries added at the end name no key."""
    is_index = jnp.issubdtype(x.dtype, jnp.integer)
    pad = [(0, 0), (0, -x.shape[1] % stretch)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad, constant_values=-1 if is_index else 0)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, stretch, *x.shape[2:]), 1, 0)


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def _backward(
    q,
    q_shared,
    latent_pages,
    shared_pages,
    page_table,
    indices,
    context_gradient,
    log_sum_exp,
    delta,
    scale,
    interpret,
):
    num_heads, latent_dim = q.shape[2:]
    num_keys = page_table.shape[1] * latent_pages.shape[1]
    fetch, page_table, indices = plan_fetch(
        q,
        latent_pages,
        page_table,
        indices,
        num_slots=MLA_SPARSE_TPU.num_slots,
        sequences=MLA_SPARSE_TPU.sequences,
        interpret=interpret,
    )
    width = latent_dim + LANES
    return call_kernel(
        functools.partial(_kernel, fetch=fetch, num_keys=num_keys, scale=scale),
        fetch,
        (latent_pages, shared_pages),
        [page_table, indices, q, q_shared, context_gradient, log_sum_exp, delta],
        out_specs=[
            fetch.window(num_heads, latent_dim),
            fetch.window(num_heads, SHARED_DIM),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q_shared.shape, q_shared.dtype),
            jax.ShapeDtypeStruct((*indices.shape, width), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((num_heads, latent_dim), jnp.float32),
            pltpu.VMEM((num_heads, LANES), jnp.float32),
            pltpu.VMEM((2, BLOCK_KEYS, width), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        multiplications=5 * latent_dim + 3 * SHARED_DIM,
        expected_keys=fetch.top_k,
        interpret=interpret,
    )


def _kernel(
    latent_pages,
    shared_pages,
    page_table,
    indices,
    q,
    q_shared,
    context_gradient,
    log_sum_exp,
    delta,
    dq,
    dq_shared,
    row_gradients,
    *scratch,
    fetch,
    num_keys,
    scale,
):
    rows = Rows(fetch, latent_pages, shared_pages, *scratch[:NUM_SCRATCH])
    acc, acc_shared, ready, written = scratch[NUM_SCRATCH:]
    rows.prepare(page_table, indices, q_shared, num_keys)
    first_sequence = pl.program_id(0) * fetch.sequences
    first_query = pl.program_id(1) * fetch.queries

    def clear():
        acc[...] = jnp.zeros_like(acc)
        acc_shared[...] = jnp.zeros_like(acc_shared)

    clear()

    def store(query, block, slot):
        """The copy of a block's gradients to their place in HBM."""
        sequence, at = fetch.locate(query)
        place = row_gradients.at[first_sequence + sequence, first_query + at, pl.ds(block * BLOCK_KEYS, BLOCK_KEYS)]
        return pltpu.make_async_copy(ready.at[slot], place, written.at[slot])

    def compute(query, block, slot, step):
        place = fetch.locate(query)
        products, kind = yield from rows.scores(q, query, block, slot)
        out_slot = lax.rem(step, 2)
        pl.when(step >= 2)(store(query, block, out_slot).wait)
        shares = jnp.zeros_like(products)  # dcontext . latent
        for i in range(fetch.chunks):
            line = context_gradient[(*place, slice(None), pl.ds(i * LANES, LANES))]
            shares += dot(line, rows.latent_line(slot, i), "hr,kr->hk")
            yield
        weights = jnp.exp2(products * (scale * math.log2(math.e)) - _column(log_sum_exp, place) * math.log2(math.e))
        weights = jnp.where(kind >= 0, weights, 0)
        slopes = jnp.where(kind >= 0, weights * (shares - _column(delta, place)) * scale, 0).astype(q.dtype)
        weights = weights.astype(q.dtype)
        yield
        for i in range(fetch.chunks):
            lanes = pl.ds(i * LANES, LANES)
            acc[:, lanes] += dot(slopes, rows.latent_line(slot, i), "hk,kr->hr")
            through_scores = dot(slopes, q[(*place, slice(None), lanes)], "hk,hr->kr")
            through_values = dot(weights, context_gradient[(*place, slice(None), lanes)], "hk,hr->kr")
            ready[out_slot, :, lanes] = through_scores + through_values
            yield
        acc_shared[...] += dot(slopes, rows.own[...], "hk,kr->hr")
        lanes = pl.ds(fetch.latent_dim, LANES)
        ready[out_slot, :, lanes] = dot(slopes, rows.q_twice[query], "hk,hr->kr")
        store(query, block, out_slot).start()

    def finish(query):
        sequence, at = fetch.locate(query)
        # A query without keys has met a row that may hold anything.
        has_keys = _column(log_sum_exp, (sequence, at)) > -jnp.inf
        for i in range(fetch.chunks):
            lanes = pl.ds(i * LANES, LANES)
            dq[sequence, at, :, lanes] = jnp.where(has_keys, acc[:, lanes], 0).astype(dq.dtype)
        both = jnp.where(has_keys, acc_shared[...], 0)
        dq_shared[sequence, at] = (both[:, :SHARED_DIM] + both[:, SHARED_DIM:]).astype(dq_shared.dtype)
        clear()

    total = rows.for_each_block(compute, finish)
    for back in (2, 1):
        pl.when(total >= back)(store(0, 0, lax.rem(total - back, 2)).wait)


def _column(per_head, place):
    """Values [H] of a query in a window [.., .., H], each filling the lanes of its head: [H, 128]."""
    sequence, at = place
    line = per_head[sequence, pl.ds(at, 1)]
    num_heads = line.shape[-1]
    square = (num_heads, num_heads)
    diagonal = lax.broadcasted_iota(jnp.int32, square, 0) == lax.broadcasted_iota(jnp.int32, square, 1)
    column = jnp.sum(jnp.where(diagonal, line, 0), axis=1, keepdims=True)
    return jnp.broadcast_to(column, (num_heads, LANES))
