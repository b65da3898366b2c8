"""Attention of each query over its own selected latents on TPU, absorbed form, from paged caches.

Rows come by asynchronous copies, one per row and part, with some hundred in flight (mla_rows_tpu.py says how and in
which layout), and meet a softmax that runs over blocks of them: nothing of size [T, top_k, R] ever exists.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla_fetch_tpu import plan_fetch
from pallas_kernels.mla_pages_tpu import LANES, SHARED_DIM, pages_refusal
from pallas_kernels.mla_rows_tpu import NUM_SCRATCH, Rows, call_kernel, dot
from pallas_kernels.mla_sparse_backward_tpu import mla_sparse_backward_tpu
from pallas_kernels.tiling import MLA_SPARSE_TPU

LOWEST = -1e30  # a running maximum before the first key; finite, so that differences stay numbers


def mla_sparse_tpu_refusal(
    q: jax.ShapeDtypeStruct,
    q_shared: jax.ShapeDtypeStruct,
    latent_pages: jax.ShapeDtypeStruct,
    shared_pages: jax.ShapeDtypeStruct,
    page_table: jax.ShapeDtypeStruct,
    indices: jax.ShapeDtypeStruct,
) -> str | None:
    """Why `mla_sparse_tpu` cannot run for arguments of these shapes and dtypes, or None."""
    if q.dtype != latent_pages.dtype or q_shared.dtype != q.dtype:
        return f"queries are {q.dtype} and {q_shared.dtype}, pages {latent_pages.dtype}: all must be the same"
    if reason := pages_refusal(latent_pages, shared_pages, page_table):
        return reason
    batch, num_queries, num_heads, latent_dim = q.shape
    if latent_dim != latent_pages.shape[2] * LANES:
        return f"q has {latent_dim} latent values, the pages {latent_pages.shape[2] * LANES}: they must be the same"
    if q_shared.shape != (batch, num_queries, num_heads, SHARED_DIM):
        return f"q_shared is {q_shared.shape}: only {(batch, num_queries, num_heads, SHARED_DIM)} fits q {q.shape}"
    if num_heads > 128:
        return f"{num_heads} heads: at most 128 are allowed"
    if indices.shape[:2] != (batch, num_queries) or page_table.shape[0] != batch:
        return f"indices {indices.shape} and page_table {page_table.shape} do not belong to q {q.shape}"
    if indices.dtype != jnp.int32 or page_table.dtype != jnp.int32:
        return f"indices are {indices.dtype} and page_table is {page_table.dtype}: both must be int32"
    return None


def mla_sparse_tpu(
    q: jax.Array,
    q_shared: jax.Array,
    latent_pages: jax.Array,
    shared_pages: jax.Array,
    page_table: jax.Array,
    indices: jax.Array,
    scale: float,
    interpret: bool | pltpu.InterpretParams | None = None,
    *,
    expected_keys: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends with each query to the cache rows that its indices name.

        s_hk = scale (q_h . latent_k + q_shared_h . shared_k);   p = softmax over k;   context_h = sum_k p_hk latent_k

    Scores and sums are float32, the factors of products q's dtype. Differentiable in queries and pages.

    Args:
      q: [B, T, H, R], bfloat16 or float32, with the key matrices absorbed.
      q_shared: [B, T, H, 64], the queries' part for the key that all heads share.
      latent_pages, shared_pages: The cache, laid out as `mla_pages_tpu` says.
      page_table: int32 [B, pages], the page of each page_size tokens of a sequence.
      indices: int32 [B, T, top_k], the tokens that a query sees, in any order. An entry that is negative or beyond the
        page table names none; what stands in its row, NaN included, does not matter.
      expected_keys: How many indices of a query name a key, as a rule, where most name none, as on a device that has
        a part of all keys: for what the compiler is told of costs. None for all.
    Returns: The context [B, T, H, R] in q's dtype, and the natural logarithm of the sum of e^s, float32 [B, T, H], with
      which contexts over disjoint parts of the keys combine. A query that sees nothing gets zeros and -inf.
    Raises: NotImplementedError with the text of `mla_sparse_tpu_refusal`.
    """
    if reason := mla_sparse_tpu_refusal(q, q_shared, latent_pages, shared_pages, page_table, indices):
        raise NotImplementedError(f"mla_sparse_tpu: {reason}")
    expected_keys = indices.shape[2] if expected_keys is None else expected_keys
    args = (q, q_shared, latent_pages, shared_pages, page_table, indices)
    return _attend(*args, scale, expected_keys, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _attend(*args):
    return _forward(*args)


def _attend_keep(*args):
    context, log_sum_exp = _forward(*args)
    return (context, log_sum_exp), (*args[:6], context, log_sum_exp)


def _attend_back(scale, expected_keys, interpret, kept, gradients):
    del expected_keys  # the gradient writes rows for every index
    *args, context, log_sum_exp = kept
    context_gradient, log_sum_exp_gradient = gradients
    products = context_gradient.astype(jnp.float32) * context.astype(jnp.float32)
    delta = jnp.sum(products, axis=-1) - log_sum_exp_gradient
    found = mla_sparse_backward_tpu(*args, context_gradient, log_sum_exp, delta, scale, interpret)
    return *found, None, None


_attend.defvjp(_attend_keep, _attend_back)


@functools.partial(jax.jit, static_argnames=("scale", "expected_keys", "interpret"))
def _forward(q, q_shared, latent_pages, shared_pages, page_table, indices, scale, expected_keys, interpret):
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
    return call_kernel(
        functools.partial(_kernel, fetch=fetch, num_keys=num_keys, scale=scale),
        fetch,
        (latent_pages, shared_pages),
        [page_table, indices, q, q_shared],
        out_specs=[fetch.window(num_heads, latent_dim), fetch.window(num_heads)],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)],
        scratch_shapes=[
            pltpu.VMEM((num_heads, LANES), jnp.float32),
            pltpu.VMEM((num_heads, LANES), jnp.float32),
            pltpu.VMEM((num_heads, latent_dim), jnp.float32),
        ],
        multiplications=2 * latent_dim + SHARED_DIM,
        expected_keys=expected_keys,
        interpret=interpret,
    )


def _kernel(
    latent_pages, shared_pages, page_table, indices, q, q_shared, context, log_sum_exp, *scratch, fetch, num_keys, scale
):
    rows = Rows(fetch, latent_pages, shared_pages, *scratch[:NUM_SCRATCH])
    top, total, acc = scratch[NUM_SCRATCH:]
    rows.prepare(page_table, indices, q_shared, num_keys)

    # The maximum and the sum of a head fill its lanes, so that nothing has to be spread over lanes to be used.
    def clear():
        top[...] = jnp.full_like(top, LOWEST)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    clear()

    def compute(query, block, slot, step):
        scores, kind = yield from rows.scores(q, query, block, slot)
        scores = jnp.where(kind >= 0, scores * (scale * math.log2(math.e)), LOWEST)
        yield
        new_top = jnp.maximum(top[...], jnp.max(scores, axis=1, keepdims=True))
        yield
        weights = jnp.where(kind >= 0, jnp.exp2(scores - new_top), 0)
        fade = jnp.exp2(top[...] - new_top)
        yield
        total[...] = total[...] * fade + jnp.sum(weights, axis=1, keepdims=True)
        top[...] = new_top
        yield
        weights = weights.astype(q.dtype)
        for i in range(fetch.chunks):
            lanes = pl.ds(i * LANES, LANES)
            acc[:, lanes] = acc[:, lanes] * fade + dot(weights, rows.latent_line(slot, i), "hk,kr->hr")
            yield

    def finish(query):
        sequence, at = fetch.locate(query)
        is_empty = total[...] == 0
        for i in range(fetch.chunks):
            lanes = pl.ds(i * LANES, LANES)
            share = jnp.where(is_empty, 0, acc[:, lanes] / total[...])
            context[sequence, at, :, lanes] = share.astype(context.dtype)
        column = jnp.where(is_empty, -jnp.inf, top[...] * math.log(2) + jnp.log(total[...]))
        diagonal = lax.broadcasted_iota(jnp.int32, top.shape, 0) == lax.broadcasted_iota(jnp.int32, top.shape, 1)
        line = jnp.sum(jnp.where(diagonal, column, 0), axis=0, keepdims=True)
        log_sum_exp[sequence, pl.ds(at, 1)] = line[:, : fetch.num_heads]
        clear()

    rows.for_each_block(compute, finish)
