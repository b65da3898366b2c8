"""Lightning indexer: scores every earlier token for each query and keeps the best `top_k`.

Source: DeepSeek-V3.2 (sparse attention), without RoPE as in K3.1.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxmoe.ops.mla import causal_mask
from maxmoe.ops.query_blocks import map_query_blocks


def index_scores(
    q: Float[Array, "B T I J"], keys: Float[Array, "B S J"], head_weights: Float[Array, "B T I"]
) -> Float[Array, "B T S"]:
    """sum_i head_weights_i relu(q_i . key), in float32: I index heads of width J share one key per token."""
    dots = jnp.einsum(
        "btij,bsj->btis", q.astype(jnp.float32), keys.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    weights = head_weights.astype(jnp.float32)
    return jnp.einsum("btis,bti->bts", jax.nn.relu(dots), weights, precision=jax.lax.Precision.HIGHEST)


def select_topk(scores: Float[Array, "*b S"], k: int, valid: Bool[Array, "*b S"]) -> Int[Array, "*b k"]:
    """Indices of the k largest valid scores, best first: exact and deterministic.

    Order: score descending, then index ascending. NaN and -inf rank last among the valid, by index.
    Returns: int32 indices; -1 fills the end where fewer than k entries are valid.
    """
    scores = jnp.where(scores == 0, 0, scores.astype(jnp.float32))  # -0 and 0 are one score
    lowest = jnp.finfo(jnp.float32).min
    ranked = jnp.where(jnp.isnan(scores), lowest, jnp.maximum(scores, lowest))
    ranked = jnp.where(valid, ranked, -jnp.inf)
    values, indices = jax.lax.top_k(ranked, min(k, scores.shape[-1]))
    indices = jnp.where(values == -jnp.inf, -1, indices).astype(jnp.int32)
    missing = k - indices.shape[-1]
    return jnp.pad(indices, [(0, 0)] * (indices.ndim - 1) + [(0, max(0, missing))], constant_values=-1)


def select_tokens(
    q: Float[Array, "B T I J"],
    keys: Float[Array, "B S J"],
    head_weights: Float[Array, "B T I"],
    positions: Int[Array, "B T"],
    top_k: int,
) -> Int[Array, "B T top_k"]:
    """Chooses the slots each query may see, among those at and before its position.

    The score matrix exists for one block of queries at a time, never whole at long context.
    """

    def select(q, head_weights, positions):
        return select_topk(index_scores(q, keys, head_weights), top_k, causal_mask(positions, keys.shape[1]))

    elements = q.shape[0] * q.shape[2] * keys.shape[1]
    return map_query_blocks(select, elements, q, head_weights, positions)
