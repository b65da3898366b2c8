"""Multi-head latent attention without position encoding (NoPE).

One latent per token serves all heads: keys and values are linear in it. A key is a head's own part, made
from the latent, beside a part that all heads share. `expanded_attention` makes keys and values and then
attends; `absorbed_attention` moves the same matrices to the queries and outputs and attends to the latents.
A cache row is the latent (R values), then the shared key part (r values). Source: DeepSeek-V2, arXiv:2405.04434.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxmoe.ops.query_blocks import map_query_blocks

EXPANDED_BUDGET = 2**28  # elements of keys and values that the expanded form may hold


def attention(
    q: Float[Array, "B T H K"],
    rows: Float[Array, "B S R+r"],
    w_kv: Float[Array, "H*(n+V) R"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T H V"]:
    """`expanded_attention` or `absorbed_attention`: the form with fewer multiplications that fits its budget."""
    (batch, num_queries, num_heads, key_dim), num_keys = q.shape, rows.shape[1]
    rank = w_kv.shape[-1]
    own_and_value = w_kv.shape[0] // num_heads
    value_dim = own_and_value - (key_dim - (rows.shape[-1] - rank))
    expanded = num_keys * own_and_value * rank + num_queries * num_keys * (key_dim + value_dim)
    absorbed = num_queries * own_and_value * rank + num_queries * num_keys * (rows.shape[-1] + rank)
    fits = batch * num_keys * num_heads * (key_dim + value_dim) <= EXPANDED_BUDGET
    form = expanded_attention if fits and expanded < absorbed else absorbed_attention
    return form(q, rows, w_kv, positions)


def expanded_attention(
    q: Float[Array, "B T H K"],
    rows: Float[Array, "B S R+r"],
    w_kv: Float[Array, "H*(n+V) R"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T H V"]:
    """Attends to keys and values made from the cache rows; cheapest where many queries share the keys.

    Args:
      q: Queries, not scaled: per head the part that meets the head's own key, then the part for the shared key.
      rows: One per key; the key in slot s stands at position s.
      w_kv: Key and value matrices, head by head: n key rows, then V value rows.
      positions: Position of each query, >= 0. It sees the keys at and before it; slots after the last
        query's position may hold anything, NaN included.
    """
    w_key, w_value = split_kv_weight(w_kv, q, rows)
    rows, scale = clear_after(rows, positions), q.shape[-1] ** -0.5
    latent, shared = jnp.split(rows, [w_kv.shape[-1]], axis=-1)
    keys = einsum("bsr,hnr->bshn", latent, w_key)
    values = einsum("bsr,hvr->bshv", latent, w_value)
    shared = jnp.broadcast_to(shared[:, :, None], (*keys.shape[:3], shared.shape[-1]))
    keys = jnp.concatenate([keys, shared], axis=-1)

    def attend(q, positions):
        scores = scale * einsum("bqhk,bshk->bhqs", q, keys, dtype=jnp.float32)
        probs = masked_softmax(scores, causal_mask(positions, keys.shape[1])[:, None])
        return einsum("bhqs,bshv->bqhv", probs.astype(q.dtype), values)

    return map_query_blocks(attend, q.shape[0] * q.shape[2] * keys.shape[1], q, positions)


def absorbed_attention(
    q: Float[Array, "B T H K"],
    rows: Float[Array, "B S R+r"],
    w_kv: Float[Array, "H*(n+V) R"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T H V"]:
    """`expanded_attention` without ever making keys or values; cheapest for few queries over many keys."""
    w_key, w_value = split_kv_weight(w_kv, q, rows)
    rows, scale = clear_after(rows, positions), q.shape[-1] ** -0.5
    latent = rows[..., : w_kv.shape[-1]]

    def attend(q, positions):
        scores = scale * einsum("bqhc,bsc->bhqs", q, rows, dtype=jnp.float32)
        probs = masked_softmax(scores, causal_mask(positions, rows.shape[1])[:, None])
        return einsum("bhqs,bsr->bqhr", probs.astype(q.dtype), latent)

    elements = q.shape[0] * q.shape[2] * rows.shape[1]
    context = map_query_blocks(attend, elements, absorb_queries(q, w_key), positions)
    return einsum("bthr,hvr->bthv", context, w_value)


def split_kv_weight(
    w_kv: Float[Array, "H*(n+V) R"], q: Float[Array, "B T H K"], rows: Float[Array, "B S R+r"]
) -> tuple[Float[Array, "H n R"], Float[Array, "H V R"]]:
    """Takes the joined weight apart into key and value matrices per head, in q's dtype."""
    rank = w_kv.shape[-1]
    key_dim = q.shape[-1] - (rows.shape[-1] - rank)
    w_kv = w_kv.reshape(q.shape[2], -1, rank).astype(q.dtype)
    return w_kv[:, :key_dim], w_kv[:, key_dim:]


def absorb_queries(q: Float[Array, "B T H K"], w_key: Float[Array, "H n R"]) -> Float[Array, "B T H R+r"]:
    """Queries that meet cache rows directly: the head's own part times its key matrix, then the shared part."""
    own, shared = jnp.split(q, [w_key.shape[1]], axis=-1)
    return jnp.concatenate([einsum("bthn,hnr->bthr", own, w_key), shared], axis=-1)


def causal_mask(positions: Int[Array, "B T"], num_slots: int) -> Bool[Array, "B T S"]:
    """Which slots each query sees: those at and before its position."""
    return jnp.arange(num_slots) <= positions[..., None]


def clear_after(rows: Float[Array, "B S C"], positions: Int[Array, "B T"]) -> Float[Array, "B S C"]:
    """Zeroes the slots after the last query: stale content, even NaN, must not reach a product with weight 0."""
    written = jnp.arange(rows.shape[1]) <= jnp.max(positions, axis=1, keepdims=True)
    return jnp.where(written[..., None], rows, 0)


def masked_softmax(scores: Float[Array, "*b S"], mask: Bool[Array, "*b S"]) -> Float[Array, "*b S"]:
    """Softmax over the allowed entries, in float32; the others get exactly 0. One at least must be allowed."""
    return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)


def einsum(formula: str, *operands: Array, dtype: jnp.dtype | None = None) -> Array:
    """Einsum accumulated in float32, then rounded to `dtype`, by default that of the first operand."""
    dtype = dtype or operands[0].dtype

    def product(*operands):
        precision = jax.lax.Precision.HIGHEST if operands[0].dtype == jnp.float32 else None
        out = jnp.einsum(formula, *operands, precision=precision, preferred_element_type=jnp.float32)
        return out.astype(dtype)

    if operands[0].dtype == jnp.float32:
        return product(*operands)
    # XLA's CPU backend has no batched product of bfloat16 into float32; widened operands give the same sums.

    def widened(*operands):
        return product(*(operand.astype(jnp.float32) for operand in operands))

    return jax.lax.platform_dependent(*operands, cpu=widened, default=product)
