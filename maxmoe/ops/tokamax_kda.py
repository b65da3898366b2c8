"""Kimi Delta Attention by the kernel of tokamax, a library that is not asked for: `pip install tokamax`."""

import importlib
import importlib.util

import jax.numpy as jnp
from jaxtyping import Array, Float


def refusal() -> str | None:
    """Why the library cannot be called, or None. What its kernel cannot do, it says itself when it is traced."""
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed: pip install 'maxmoe[tokamax]', with Python 3.12 or newer"
    return None


def kda_chunked(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    kernel: str = "mosaic",
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """As `kda.kda_chunked`, gradient included.

    Args:
      kernel: tokamax's own name of the implementation.
    Raises: NotImplementedError, from tokamax, for shapes that its kernel lacks; ImportError where it is not installed.
    """
    ops = importlib.import_module("tokamax.ops")  # heavy, and an extra
    by_head = (jnp.moveaxis(x, 2, 0) for x in (q, k, v, g, beta))
    out, state = ops.kimi_delta_attention(
        *by_head,
        scale=1.0,  # q is scaled already
        initial_state=state.astype(jnp.float32)[:, None],  # one segment a row
        output_final_state=True,
        implementation=kernel,
    )
    return jnp.moveaxis(out, 0, 2).astype(v.dtype), state[:, 0].astype(jnp.float32)
