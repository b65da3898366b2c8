"""One token of a KDA layer between its projections, with plain operations: what decode kernels are held to."""

import jax
import jax.numpy as jnp
import numpy as np

from maxmoe.ops.kda import bounded_gate, kda_step, softplus_gate
from maxmoe.ops.norm import gated_rms_norm, l2_norm
from maxmoe.ops.short_conv import short_conv

EPS = 1e-5
BOUND = -5.0


def decode_inputs(seed, batch, heads, num_slots, dtype):
    """Projections of one token per row, the layer's small weights, and states and conv states of all slots."""
    rng = np.random.default_rng(seed)
    channels = heads * 128
    rows = [rng.standard_normal((batch, channels)) for _ in range(5)]
    rows = [jnp.asarray(x, dtype) for x in (*rows, rng.standard_normal((batch, heads)))]
    weights = (
        rng.standard_normal((3, channels, 4)) * 0.5,
        rng.standard_normal(channels),
        rng.uniform(-1, 1, heads),
        rng.uniform(0.5, 1.5, 128),
    )
    state = rng.standard_normal((num_slots, heads, 128, 128)).astype(np.float32)
    conv = jnp.asarray(rng.standard_normal((num_slots, 3, 3, heads, 128)), dtype)
    return rows, [jnp.asarray(x, jnp.float32) for x in weights], jnp.asarray(state), conv


def plain_decode(rows, weights, state, conv, lower_bound=BOUND):
    """The layer's decode between its projections: states row by row."""
    q, k, v, z, gate, beta = rows
    conv_weight, dt_bias, a_log, out_norm = weights
    batch, heads = beta.shape

    def by_head(x):
        return x.reshape(batch, 1, heads, 128)

    ones = jnp.ones(batch, jnp.int32)
    conv = conv.reshape(batch, 3, 3, -1)
    pairs = [short_conv(x[:, None], conv_weight[i], conv[:, i], ones) for i, x in enumerate((q, k, v))]
    q, k, v = (by_head(jax.nn.silu(y).astype(q.dtype)) for y, _ in pairs)
    q, k = l2_norm(q) * 128**-0.5, l2_norm(k)
    z = by_head(z.astype(jnp.float32) + dt_bias)
    g = softplus_gate(z, a_log) if lower_bound is None else bounded_gate(z, a_log, lower_bound)
    beta = jax.nn.sigmoid(beta.astype(jnp.float32))
    out, state = kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta, state)
    out = gated_rms_norm(out, gate.reshape(batch, heads, 128), out_norm, EPS)
    return out.reshape(batch, -1), state, jnp.stack([x for _, x in pairs], axis=1).reshape(batch, 3, 3, heads, 128)
