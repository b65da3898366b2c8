"""Latent attention of each query over its own selected tokens, gathered from the cache by index."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmoe.ops.mla import absorb_queries, einsum, masked_softmax, split_kv_weight
from maxmoe.ops.query_blocks import map_query_blocks


def sparse_attention(
    q: Float[Array, "B T H K"],
    rows: Float[Array, "B S R+r"],
    w_kv: Float[Array, "H*(n+V) R"],
    indices: Int[Array, "B T top_k"],
) -> Float[Array, "B T H V"]:
    """`absorbed_attention` with the keys of each query named by slot.

    Args:
      indices: Slots that each query sees; an entry outside 0..S-1, such as -1, names no key. A query
        whose entries all name none gets zeros.
    """
    w_key, w_value = split_kv_weight(w_kv, q, rows)
    scale = q.shape[-1] ** -0.5

    def attend(q, indices):
        named = (indices >= 0) & (indices < rows.shape[1])
        batch = jnp.arange(rows.shape[0])[:, None, None]
        chosen = jnp.where(named[..., None], rows[batch, jnp.where(named, indices, 0)], 0)
        scores = scale * einsum("bqhc,bqkc->bqhk", q, chosen, dtype=jnp.float32)
        any_named = jnp.any(named, axis=-1)[..., None, None]
        probs = masked_softmax(jnp.where(any_named, scores, 0), named[:, :, None] | ~any_named)
        return einsum("bqhk,bqkr->bqhr", probs.astype(q.dtype), chosen[..., : w_kv.shape[-1]])

    elements = indices.shape[0] * indices.shape[-1] * max(rows.shape[-1], q.shape[2])
    context = map_query_blocks(attend, elements, absorb_queries(q, w_key), indices)
    return einsum("bthr,hvr->bthv", context, w_value)
