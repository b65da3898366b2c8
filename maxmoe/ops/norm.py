"""Norms, computed in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*b D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*b D"]:
    """weight * cast(x / sqrt(mean(x^2) + eps)): rounded to x's dtype before the weight, as the reference does."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return weight.astype(x.dtype) * normed.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*b D"], weight: Float[Array, "D"], bias: Float[Array, "D"], eps: float
) -> Float[Array, "*b D"]:
    """Mean-centred norm with scale and offset, rounded once to x's dtype."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def l2_norm(x: Float[Array, "*b D"], eps: float = 1e-6) -> Float[Array, "*b D"]:
    """x / sqrt(sum(x^2) + eps) in float32; eps stands inside the root, as in the KDA reference kernels."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.sum(jnp.square(x32), axis=-1, keepdims=True) + eps)


def gated_rms_norm(
    x: Float[Array, "*b D"], gate: Float[Array, "*b D"], weight: Float[Array, "D"], eps: float
) -> Float[Array, "*b D"]:
    """RMSNorm(x; weight) * sigmoid(gate), all in float32, rounded once to gate's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(gate.dtype)
