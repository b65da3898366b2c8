"""Short depthwise causal convolution, with the last inputs as its state."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def short_conv(
    x: Float[Array, "B T C"],
    weight: Float[Array, "C W"],
    state: Float[Array, "B W-1 C"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T C"], Float[Array, "B W-1 C"]]:
    """y_t = sum_j weight[:, j] x_(t - W + 1 + j), with `state` standing before the first token.

    Args:
      weight: Taps, oldest first; the last one weighs the current token.
      state: The W-1 inputs before x, oldest first; zeros at the start of a sequence.
      lengths: Real tokens per row, 0..T; what follows them is padding and does not reach the state.
    Returns: y in float32, and the last W-1 real inputs in state's dtype.
    """
    taps = weight.shape[-1]
    num_tokens = x.shape[1]
    extended = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    weight = weight.astype(jnp.float32)
    y = sum(extended[:, j : j + num_tokens].astype(jnp.float32) * weight[:, j] for j in range(taps))
    last = lengths[:, None] + jnp.arange(taps - 1)
    return y, jnp.take_along_axis(extended, last[..., None], axis=1).astype(state.dtype)
