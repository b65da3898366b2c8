"""Latent attention of each query over its own selected tokens, gathered from the cache by index.

Queries are absorbed (`ops.mla`): they meet cache rows directly. What a set of rows gives is a context and a
log-sum-exp, so that sets of rows, such as the shards of a cache split along the sequence, combine.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxmoe.ops import dispatch
from maxmoe.ops.latent_cache import LatentRows, as_pages, gather_rows, read_parts
from maxmoe.ops.mla import absorb_queries, causal_mask, clear_after, einsum
from maxmoe.ops.query_blocks import map_query_blocks
from pallas_kernels.mla_pages_tpu import GROUP_ROWS, LANES, SHARED_DIM


def sparse_attention(
    q: Float[Array, "B T H K"],
    rows: LatentRows,
    layer: int | Int[Array, ""],
    w_kv: Float[Array, "H*(n+V) R"],
    indices: Int[Array, "B T top_k"],
    implementation: str | None = None,
) -> Float[Array, "B T H V"]:
    """`mla.absorbed_attention` with the keys of each query named by slot.

    Args:
      q, w_kv: As in `mla.expanded_attention`.
      rows, layer, indices, implementation: As in `sparse_context`. A query that sees nothing gets zeros.
    """
    own_dim = q.shape[-1] - rows.shared_dim
    w_kv = w_kv.reshape(q.shape[2], -1, rows.latent_dim).astype(q.dtype)
    q_latent, q_shared = jnp.split(absorb_queries(q, w_kv[:, :own_dim]), [rows.latent_dim], axis=-1)
    context, _ = sparse_context(q_latent, q_shared, rows, layer, indices, q.shape[-1] ** -0.5, implementation)
    return einsum("bthr,hvr->bthv", context, w_kv[:, own_dim:])


def sparse_context(
    q: Float[Array, "B T H R"],
    q_shared: Float[Array, "B T H r"],
    rows: LatentRows,
    layer: int | Int[Array, ""],
    indices: Int[Array, "B T top_k"],
    scale: float,
    implementation: str | None = None,
    expected_keys: int | None = None,
) -> tuple[Float[Array, "B T H R"], Float[Array, "B T H"]]:
    """Attends with each query to the cache rows that its indices name.

        s_hk = scale (q_h . latent_k + q_shared_h . shared_k);   p = softmax over k;   context_h = sum_k p_hk latent_k

    Args:
      q: With the key matrices absorbed, not scaled.
      q_shared: The queries' part for the key that all heads share.
      indices: Slots that each query sees; an entry outside 0..S-1, such as -1, names none. Rows that no index names
        may hold anything, NaN included.
      implementation: See `dispatch.choose`.
      expected_keys: How many of a query's indices name a slot, as a rule, where the others are on other devices: for
        what the compiler is told of a kernel's costs. None for all.
    Returns: The context in q's dtype, and the natural logarithm of the sum of e^s in float32. A query that sees
      nothing gets zeros and -inf.
    """
    args = (q, q_shared, rows, indices)
    refusals = {name: functools.partial(_refusal, name, *args) for name in ("pallas_tpu", "pallas_gpu")}
    chosen = dispatch.choose("sparse_context", implementation, refusals)
    if chosen != "xla":
        kernel, _ = _kernel(chosen)
        told = {"expected_keys": expected_keys} if chosen == "pallas_tpu" else {}
        return kernel(q, q_shared, *as_pages(rows, layer), indices, scale, **told)

    def attend(q, q_shared, indices):
        named = (indices >= 0) & (indices < rows.num_slots)
        parts = gather_rows(rows, layer, jnp.where(named, indices, 0))
        latent, shared = (jnp.where(named[..., None], part, 0).astype(q.dtype) for part in parts)
        scores = einsum("bqhr,bqkr->bqhk", q, latent, dtype=jnp.float32)
        scores += einsum("bqhr,bqkr->bqhk", q_shared, shared, dtype=jnp.float32)
        probs, log_sum_exp = _softmax(scale * scores, named[:, :, None])
        return einsum("bqhk,bqkr->bqhr", probs.astype(q.dtype), latent), log_sum_exp

    elements = indices.shape[0] * indices.shape[-1] * max(rows.latent_dim + rows.shared_dim, q.shape[2])
    return map_query_blocks(attend, elements, q, q_shared, indices)


def dense_context(
    q: Float[Array, "B T H R"],
    q_shared: Float[Array, "B T H r"],
    rows: LatentRows,
    layer: int | Int[Array, ""],
    positions: Int[Array, "B T"],
    scale: float,
) -> tuple[Float[Array, "B T H R"], Float[Array, "B T H"]]:
    """`sparse_context` with every slot at and before a query's position; a negative position sees none.

    Slots after the last query's position may hold anything, NaN included.
    """
    latent, shared = (clear_after(part.astype(q.dtype), positions) for part in read_parts(rows, layer))

    def attend(q, q_shared, positions):
        scores = einsum("bqhr,bsr->bqhs", q, latent, dtype=jnp.float32)
        scores += einsum("bqhr,bsr->bqhs", q_shared, shared, dtype=jnp.float32)
        probs, log_sum_exp = _softmax(scale * scores, causal_mask(positions, rows.num_slots)[:, :, None])
        return einsum("bqhs,bsr->bqhr", probs.astype(q.dtype), latent), log_sum_exp

    return map_query_blocks(attend, q.shape[0] * q.shape[2] * rows.num_slots, q, q_shared, positions)


def combine(
    contexts: Float[Array, "n *b R"], log_sum_exps: Float[Array, "n *b"]
) -> tuple[Float[Array, "*b R"], Float[Array, "*b"]]:
    """Joins attention over disjoint sets of keys, such as the shards of a cache split along the sequence.

        w_i = exp(lse_i - lse);   lse = log sum_i exp lse_i;   context = sum_i w_i context_i

    Args:
      contexts: One per set of keys.
      log_sum_exps: float32; -inf where a set has no key for a query.
    Returns: Context in the dtype of contexts, and log-sum-exp in float32; zeros and -inf where no set has a key.
    """
    top = jnp.max(log_sum_exps, axis=0)
    shift = jnp.where(jnp.isneginf(top), 0, top)
    weights = jnp.exp(log_sum_exps - shift)
    total = jnp.sum(weights, axis=0)
    share = weights / jnp.where(total == 0, 1, total)
    context = jnp.sum(share[..., None] * contexts.astype(jnp.float32), axis=0)
    return context.astype(contexts.dtype), jnp.log(total) + shift


def _softmax(
    scores: Float[Array, "*b S"], mask: Bool[Array, "*b S"]
) -> tuple[Float[Array, "*b S"], Float[Array, "*b"]]:
    """Softmax over the allowed entries, and the log-sum-exp; zeros and -inf where nothing is allowed."""
    any_allowed = jnp.any(mask, axis=-1, keepdims=True)
    # A row without entries is computed as one of equal scores, so that its gradients are zeros, not NaN.
    scores = jnp.where(mask, scores, jnp.where(any_allowed, -jnp.inf, 0))
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    log_sum_exp = jnp.where(any_allowed, top + jnp.log(total), -jnp.inf)[..., 0]
    return jnp.where(any_allowed, weights / total, 0), log_sum_exp


def _kernel(name):
    """A kernel, and what says why it cannot run; importing Pallas takes a second that few need."""
    if name == "pallas_tpu":
        from pallas_kernels import mla_sparse_tpu as module

        return module.mla_sparse_tpu, module.mla_sparse_tpu_refusal
    from pallas_kernels import mla_sparse_gpu as module

    return module.mla_sparse_gpu, module.mla_sparse_gpu_refusal


def _refusal(name, q, q_shared, rows, indices):
    """Why a kernel cannot run on the rows of this cache, or None."""
    if name == "pallas_tpu" and not (rows.is_grouped and rows.latent.shape[-1] == LANES):
        return (
            f"{rows.num_slots} slots with rows of {rows.latent_dim} and {rows.shared_dim} values: a multiple of "
            f"{GROUP_ROWS} slots and rows of {LANES} times 2, 4 or 8, and {SHARED_DIM}, are allowed"
        )
    _, refusal = _kernel(name)
    return refusal(q, q_shared, *jax.eval_shape(as_pages, rows, 0), indices)
