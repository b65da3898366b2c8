"""Attention of each query over its own selected latents on NVIDIA GPUs, absorbed form, from paged caches.

A program takes 32 or 48 of the heads of one query and gathers the rows that the query's indices name, some at a time,
by asynchronous copies to addresses of its own making. Each row is read once for its score and its share of the context.
All products are turned over - scores [keys, heads], context [R, heads] - so that rows fill the 64 rows that `wgmma`
wants, and heads, as tiles of 32 or of 32 and 16, its columns: 96 heads are 3 or 2 programs, without padding.
Where there are few queries, their keys are split over programs, whose partial results are put together at the end.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import gpu_compat as gpu
from pallas_kernels.tiling import MLA_SPARSE_H200, MlaSparseGpuTiling

LOWEST = -1e30  # a running maximum before the first key; finite, so that differences stay numbers


def mla_sparse_gpu_refusal(
    q: jax.ShapeDtypeStruct,
    q_shared: jax.ShapeDtypeStruct,
    latent_pages: jax.ShapeDtypeStruct,
    shared_pages: jax.ShapeDtypeStruct,
    page_table: jax.ShapeDtypeStruct,
    indices: jax.ShapeDtypeStruct,
) -> str | None:
    """Why `mla_sparse_gpu` cannot run for arguments of these shapes and dtypes, or None."""
    (batch, num_queries, _, latent_dim), shared_dim = q.shape, q_shared.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float32) or any(x.dtype != q.dtype for x in (q_shared, latent_pages)):
        return (
            f"q, q_shared and pages are {q.dtype}, {q_shared.dtype} and {latent_pages.dtype}: all bfloat16 or float32"
        )
    if shared_pages.dtype != latent_pages.dtype:
        return f"pages are {latent_pages.dtype} and {shared_pages.dtype}: both must be the same"
    for what, size, most in (("latent", latent_dim, 512), ("shared", shared_dim, 128)):
        if size & (size - 1) or not gpu.MIN_DOT <= size <= most:
            return f"{what} width {size}: powers of two from {gpu.MIN_DOT} to {most} are allowed"
    if q_shared.shape != (*q.shape[:3], shared_dim):
        return f"q_shared is {q_shared.shape}: only {(*q.shape[:3], shared_dim)} fits q {q.shape}"
    slots = latent_pages.shape[0] * latent_pages.shape[1]
    for what, pages, width in (("latent", latent_pages, latent_dim), ("shared", shared_pages, shared_dim)):
        if pages.size != slots * width:
            return (
                f"{what} pages are {pages.shape}: {slots} rows of {width} values are {slots * width}, not {pages.size}"
            )
    if slots >= 2**31:
        return f"the cache has {slots} rows: fewer than 2**31 are allowed"
    if indices.shape[:2] != (batch, num_queries) or page_table.shape[0] != batch:
        return f"indices {indices.shape} and page_table {page_table.shape} do not belong to q {q.shape}"
    return None


def mla_sparse_gpu(
    q: jax.Array,
    q_shared: jax.Array,
    latent_pages: jax.Array,
    shared_pages: jax.Array,
    page_table: jax.Array,
    indices: jax.Array,
    scale: float,
    *,
    tiling: MlaSparseGpuTiling = MLA_SPARSE_H200,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends with each query to the cache rows that its indices name.

        s_hk = scale (q_h . latent_k + q_shared_h . shared_k);   p = softmax over k;   context_h = sum_k p_hk latent_k

    Scores and sums are float32, the factors of products q's dtype. Not differentiable.

    Args:
      q: [B, T, H, R], with the key matrices absorbed.
      q_shared: [B, T, H, r], the queries' part for the key that all heads share.
      latent_pages: [num_pages, page_size, ...], where a row's R values lie one after the other.
      shared_pages: The same rows' r values, [num_pages * page_size, r] in any shape.
      page_table: int32 [B, pages], the page of each page_size tokens of a sequence.
      indices: int32 [B, T, top_k], the tokens that a query sees, in any order, each once. An entry that is negative or
        beyond the page table names none; what stands in its row, NaN included, does not matter.
    Returns: The context [B, T, H, R] in q's dtype, and the natural logarithm of the sum of e^s, float32 [B, T, H], with
      which contexts over disjoint parts of the keys combine. A query that sees nothing gets zeros and -inf.
    Raises: NotImplementedError with the text of `mla_sparse_gpu_refusal`.
    """
    if reason := mla_sparse_gpu_refusal(q, q_shared, latent_pages, shared_pages, page_table, indices):
        raise NotImplementedError(f"mla_sparse_gpu: {reason}")
    batch, num_queries, num_heads, latent_dim = q.shape
    queries, top_k = batch * num_queries, indices.shape[-1]
    page_size = latent_pages.shape[1]
    named = (indices >= 0) & (indices < page_table.shape[1] * page_size)
    token = jnp.where(named, indices, 0)
    page = jnp.take_along_axis(page_table, (token // page_size).reshape(batch, -1), axis=1).reshape(token.shape)
    rows = jnp.where(named, page * page_size + token % page_size, -1).reshape(queries, top_k).astype(jnp.int32)

    pieces = _pieces(num_heads, tiling.heads)
    groups = -(-num_heads // sum(pieces))
    steps = -(-top_k // tiling.keys)
    steps_each = steps
    while steps_each > 1 and queries * groups * -(-steps // steps_each) < tiling.min_programs:
        steps_each = -(-steps_each // 2)
    splits = -(-steps // steps_each)
    rows = jnp.pad(rows, ((0, 0), (0, splits * steps_each * tiling.keys - top_k)), constant_values=-1)
    dtype = q.dtype if splits == 1 else jnp.float32
    context, log_sum = gpu.kernel_call(
        functools.partial(_body, pieces=pieces, keys=tiling.keys, steps_each=steps_each, scale=float(scale)),
        grid=(groups, splits, queries),
        out_shape=[
            jax.ShapeDtypeStruct((queries, splits, num_heads, latent_dim), dtype),
            jax.ShapeDtypeStruct((queries, splits, num_heads), jnp.float32),
        ],
        num_operands=5,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        interpret=interpret,
        name="mla_sparse",
    )(
        q.reshape(queries, num_heads, latent_dim),
        q_shared.reshape(queries, num_heads, -1),
        latent_pages.reshape(-1, latent_dim),
        shared_pages.reshape(-1, q_shared.shape[-1]),
        rows,
    )
    if splits > 1:
        context, log_sum = _combine(context, log_sum)
    shape = (batch, num_queries, num_heads)
    return context.reshape(*shape, latent_dim).astype(q.dtype), log_sum.reshape(shape)


def _pieces(num_heads, tiles):
    """The head tiles of a program: those wanted, or those of other widths that would stand empty."""
    if num_heads % sum(tiles) == 0:
        return tiles
    return (gpu.MIN_DOT,) if 0 < num_heads % (2 * gpu.MIN_DOT) <= gpu.MIN_DOT else (2 * gpu.MIN_DOT,)


def _combine(context, log_sum):
    """Joins partial results [N, splits, ...] over the second axis; parts without keys weigh nothing."""
    total = jax.nn.logsumexp(log_sum, axis=1)
    weight = jnp.where(log_sum == -jnp.inf, 0.0, jnp.exp(log_sum - total[:, None]))
    return jnp.sum(weight[..., None] * context, axis=1), total


def _body(q_ref, q_shared_ref, latent_ref, shared_ref, rows_ref, context_ref, log_sum_ref, *, pieces, keys, steps_each,
          scale):  # fmt: skip
    """Some heads of one query over some of its keys."""
    group, split, query = (pl.program_id(axis) for axis in range(3))
    num_heads, latent_dim, shared_dim = q_ref.shape[1], q_ref.shape[2], q_shared_ref.shape[2]
    # In parts of 128 values, a thread copies pieces of few rows and holds few addresses.
    width = min(latent_dim, 128)
    parts = range(0, latent_dim, width)
    columns = jnp.arange(width, dtype=jnp.int32)[None, :]
    shared_columns = jnp.arange(shared_dim, dtype=jnp.int32)[None, :]

    first_heads, first = [], group * sum(pieces)
    for piece in pieces:
        first_heads.append(first)
        first = first + piece

    def real_heads(first, piece):
        return first + jnp.arange(piece, dtype=jnp.int32) < num_heads

    def read_queries(ref, columns):
        return [
            gpu.load(ref.at[query, pl.ds(first, piece), columns], mask=real_heads(first, piece)[:, None], other=0.0)
            for first, piece in zip(first_heads, pieces, strict=True)
        ]

    q_parts = [read_queries(q_ref, pl.ds(part, width)) for part in parts]
    q_shared = read_queries(q_shared_ref, pl.ds(0, shared_dim))

    def one_step(step, carry):
        place = (split * steps_each + step) * keys
        row = rows_ref[query, pl.ds(place, keys)]
        named = row >= 0
        row = jnp.where(named, row, 0)[:, None]
        latent = [gpu.load(latent_ref.at[row, part + columns], mask=named[:, None], other=0.0) for part in parts]
        shared = gpu.load(shared_ref.at[row, shared_columns], mask=named[:, None], other=0.0)
        new = []
        for piece, (top, total, context) in enumerate(carry):
            scores = gpu.dot(shared, q_shared[piece], (1, 1))
            for keys_of_part, q_of_part in zip(latent, q_parts, strict=True):
                scores = scores + gpu.dot(keys_of_part, q_of_part[piece], (1, 1))
            scores = scores * scale
            scores = jnp.where(named[:, None], scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=0))
            probs, kept = jnp.exp(scores - new_top[None, :]), jnp.exp(top - new_top)
            total = total * kept + jnp.sum(probs, axis=0)
            rounded = probs.astype(shared.dtype)
            context = [
                old * kept[None, :] + gpu.dot(values, rounded, (0, 0))
                for old, values in zip(context, latent, strict=True)
            ]
            new.append((new_top, total, tuple(context)))
        return tuple(new)

    start = tuple(
        (
            jnp.full((piece,), LOWEST, jnp.float32),
            jnp.zeros((piece,), jnp.float32),
            tuple(jnp.zeros((width, piece), jnp.float32) for _ in parts),
        )
        for piece in pieces
    )
    results = jax.lax.fori_loop(0, steps_each, one_step, start)
    for first, piece, (top, total, context) in zip(first_heads, pieces, results, strict=True):
        heads, real = pl.ds(first, piece), real_heads(first, piece)
        divisor = jnp.where(total > 0, total, 1.0)[None, :]
        for part, sums in zip(parts, context, strict=True):
            out = (sums / divisor).T.astype(context_ref.dtype)
            gpu.store(context_ref.at[query, split, heads, pl.ds(part, width)], out, mask=real[:, None])
        log_sum = jnp.where(total > 0, jnp.log(total) + top, -jnp.inf)
        gpu.store(log_sum_ref.at[query, split, heads], log_sum, mask=real)
