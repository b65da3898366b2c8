"""Block attention residuals: each layer reads a softmax mixture of earlier block sums and the running sum."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def mix(
    current: Float[Array, "*b D"],
    bank: Float[Array, "A *b D"],
    num_entries: int | Int[Array, ""],
    norm_weight: Float[Array, "D"],
    proj_weight: Float[Array, "D"],
    eps: float,
) -> Float[Array, "*b D"]:
    """sum_i softmax(s)_i v_i over the first `num_entries` of the bank and, last, the running sum `current`.

        s_i = sum_d v_id / sqrt(mean(v_i^2) + eps) * (norm_weight_d * proj_weight_d)

    in float32, with no rounding of the normalised value. An empty bank gives `current` exactly. Entries
    beyond `num_entries` must be finite.
    """
    score_weight = norm_weight.astype(jnp.float32) * proj_weight.astype(jnp.float32)

    def score(v):
        inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(v), axis=-1) + eps)
        return jnp.einsum("...d,d->...", v, score_weight, precision=jax.lax.Precision.HIGHEST) * inverse_rms

    entries, current32 = bank.astype(jnp.float32), current.astype(jnp.float32)
    exists = (jnp.arange(bank.shape[0]) < num_entries).reshape(-1, *[1] * (current.ndim - 1))
    bank_scores = jnp.where(exists, score(entries), -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([bank_scores, score(current32)[None]]), axis=0)
    mixed = sum((weights[i, ..., None] * entries[i] for i in range(bank.shape[0])), weights[-1, ..., None] * current32)
    return mixed.astype(current.dtype)
