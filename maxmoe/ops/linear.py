"""Products with weights in the published layout: `[out, in]`, no bias, accumulated in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def linear(x: Float[Array, "*b I"], weight: Float[Array, "O I"]) -> Float[Array, "*b O"]:
    """x W^T in x's dtype. Float32 operands are multiplied in full float32 on every platform."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    out = jax.lax.dot_general(
        x, weight.astype(x.dtype), contract, precision=precision, preferred_element_type=jnp.float32
    )
    return out.astype(x.dtype)
