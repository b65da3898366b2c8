"""Expert routing: sigmoid scores, a correction bias that selects but does not weigh."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def route(
    x: Float[Array, "N D"], w_gate: Float[Array, "E D"], bias: Float[Array, "E"], top_k: int, scale: float
) -> tuple[Int[Array, "N top_k"], Float[Array, "N top_k"]]:
    """Chooses experts for each token, in float32.

        s = sigmoid(x w_gate^T);  ids = top_k(s + bias);  weights = scale * s[ids] / (sum(s[ids]) + 1e-20)

    Returns: Expert ids, best first, ties to the lower id; float32 weights, all zero where every s underflows.
    """
    logits = jnp.einsum(
        "nd,ed->ne", x.astype(jnp.float32), w_gate.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    scores = jax.nn.sigmoid(logits)
    _, ids = jax.lax.top_k(scores + bias.astype(jnp.float32), top_k)
    chosen = jnp.take_along_axis(scores, ids, axis=-1)
    return ids.astype(jnp.int32), scale * chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20)
