"""SiTU-GLU: the gated activation of every FFN of the family, smooth and bounded on both branches."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def situ_glu(
    gate: Float[Array, "*b F"], up: Float[Array, "*b F"], gate_beta: float, linear_beta: float
) -> Float[Array, "*b F"]:
    """b1 tanh(gate / b1) sigmoid(gate) * b2 tanh(up / b2), in float32, rounded once to gate's dtype."""
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    gated = gate_beta * jnp.tanh(g / gate_beta) * jax.nn.sigmoid(g)
    return (gated * (linear_beta * jnp.tanh(u / linear_beta))).astype(gate.dtype)
