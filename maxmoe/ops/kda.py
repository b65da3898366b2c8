"""Kimi Delta Attention: a gated delta rule with one decay per key channel.

`kda_recurrent` is the definition; everything else that computes KDA is tested against it.
`kda_chunked` does the same work with matrix products, a chunk of tokens at a time.
Source: Kimi Linear, arXiv:2510.26692.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxmoe.ops import dispatch, tokamax_kda

# Decay and state keep full float32 products on every platform.
_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

_BASE = 4  # rows whose decays are formed pair by pair; wider blocks are split at a border between the tokens


def bounded_gate(z: Float[Array, "B T H K"], a_log: Float[Array, "H"], lower_bound: float) -> Float[Array, "B T H K"]:
    """Log decay lower_bound * sigmoid(exp(a_log) z) per head, in (lower_bound, 0). Not a clamp of `softplus_gate`."""
    return lower_bound * jax.nn.sigmoid(jnp.exp(a_log)[:, None] * z.astype(jnp.float32))


def softplus_gate(z: Float[Array, "B T H K"], a_log: Float[Array, "H"]) -> Float[Array, "B T H K"]:
    """Log decay -exp(a_log) softplus(z) per head, without a bound: the form of Kimi-Linear."""
    return -jnp.exp(a_log)[:, None] * jax.nn.softplus(z.astype(jnp.float32))


def kda_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """One token of `kda_recurrent`: returns the output in v's dtype and the new state in float32."""
    q, k, g, beta, v32 = (x.astype(jnp.float32) for x in (q, k, g, beta, v))
    state = state.astype(jnp.float32) * jnp.exp(g)[..., None]
    error = v32 - _dot("bhkv,bhk->bhv", state, k)
    state = state + (beta[..., None] * k)[..., None] * error[..., None, :]
    return _dot("bhkv,bhk->bhv", state, q).astype(v.dtype), state


def kda_recurrent(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Runs KDA one token at a time, in float32.

        S <- diag(exp g_t) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T;   o_t = S^T q_t

    Args:
      q: Queries, already scaled by K**-0.5.
      g: Log decay per key channel, in nats, <= 0.
      state: S before the first token; zeros at the start of a sequence.
    Returns: Outputs in v's dtype, and the final state in float32.
    """

    def one_token(state, token):
        out, state = kda_step(*token, state)
        return state, out

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, g, beta))
    state, out = jax.lax.scan(one_token, state.astype(jnp.float32), tokens)
    return jnp.moveaxis(out, 0, 1), state


def kda_chunked(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Runs KDA a chunk at a time: same arguments, results and equation as `kda_recurrent`.

    With G the running sum of g inside a chunk, the chunk's updates solve a triangular system:

        (I + L) V' = diag(beta) (V - (K*e^G) S),   L_ij = beta_i sum_d k_id k_jd e^(G_id - G_jd)  for j < i
        O = (Q*e^G) S + A V',                      A_ij = sum_d q_id k_jd e^(G_id - G_jd)         for j <= i
        S <- diag(e^G_last) S + (K*e^(G_last - G))^T V'

    No exponent is ever positive (see `_decayed_products`), so any gate is safe, bounded or not, and a token
    never depends on a later one, not even by rounding. (A NaN, though, spreads through its row's chunk.)

    Args:
      implementation: See `dispatch.choose`. Kernels have a chunk size of their own, and no gradient on GPU.
    Raises: ValueError if chunk_size is not a power of two; NotImplementedError for a named kernel that cannot run.
    """
    if chunk_size < _BASE or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size={chunk_size}: must be a power of two and at least {_BASE}, e.g. 64")
    refusals = {
        "pallas_tpu": lambda: _tpu().kda_chunk_trainable_refusal(q.shape, v.shape, v.dtype, state.shape[0]),
        "pallas_gpu": lambda: _gpu().kda_chunk_gpu_refusal(q.shape, v.shape, q.dtype, state.shape[0], False),
        "tokamax": tokamax_kda.refusal,
    }
    chosen = dispatch.choose("kda_chunked", implementation, refusals)
    if chosen == "pallas_tpu":
        return _tpu().kda_chunk_trainable_tpu(q, k, v, g, beta, state)
    if chosen == "pallas_gpu":
        return _without_gradient(q, k, v, g, beta, state)
    if chosen == "tokamax":
        return tokamax_kda.kda_chunked(q, k, v, g, beta, state)
    num_tokens, out_dtype = q.shape[1], v.dtype
    pad = -num_tokens % chunk_size

    def chunked(x):  # [B, T, H, ...] -> [chunks, B, H, chunk, ...]; padding tokens leave the state alone
        x = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    def one_chunk(state, chunk):
        q, k, v, g, beta = chunk
        a_qk, a_kk, before, after = _decayed_products(q, k, g)
        inverse = _invert_unit_lower(beta[..., None] * jnp.tril(a_kk, -1))
        error = v - _dot("...ik,...kv->...iv", k * jnp.exp(before), state)
        delta = _dot("...ij,...jv->...iv", inverse, beta[..., None] * error)
        out = _dot("...ik,...kv->...iv", q * jnp.exp(before), state) + _dot("...ij,...jv->...iv", a_qk, delta)
        update = _dot("...ik,...iv->...kv", k * jnp.exp(after), delta)
        return jnp.exp(before[..., -1, :, None]) * state + update, out

    state, out = jax.lax.scan(one_chunk, state.astype(jnp.float32), tuple(map(chunked, (q, k, v, g, beta))))
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(out.shape[1], -1, out.shape[2], out.shape[-1])
    return out[:, :num_tokens].astype(out_dtype), state


@jax.custom_vjp
def _without_gradient(*tokens_and_state):
    return _gpu().kda_chunk_gpu(*tokens_and_state)


def _refuse_gradient(*tokens_and_state):
    raise NotImplementedError(
        f"kda_chunked: implementation='pallas_gpu' has no gradient, and one was asked for with q of shape "
        f"{tokens_and_state[0].shape}. Give 'xla' to train on GPU"
    )


_without_gradient.defvjp(_refuse_gradient, _refuse_gradient)


def _tpu():
    """The kernels for TPU; importing Pallas takes a second that few need."""
    from pallas_kernels import kda_chunk_backward_tpu

    return kda_chunk_backward_tpu


def _gpu():
    from pallas_kernels import kda_chunk_gpu

    return kda_chunk_gpu


def _decayed_products(q, k, g):
    """A_ij = sum_d x_id k_jd e^(G_id - G_jd) for j <= i, else 0, for x = q and x = k.

    Blocks of the diagonal double in width. The part of a block below its two halves factors at the border
    between them: e^(G_i - border) e^(border - G_j). Only blocks of _BASE rows compare tokens pair by pair.

    Args: q, k, g [..., C, K]. Returns: two arrays [..., C, C], the decay from each chunk's start up to and
      including each token, and the decay after each token up to the chunk's end, [..., C, K], as logarithms.
    """
    lead, size = g.shape[:-2], g.shape[-2]

    def blocked(x, width):
        return x.reshape(*lead, -1, width, x.shape[-1])

    width = _BASE
    qk = jnp.stack([blocked(q, width), blocked(k, width)], axis=-2)  # [..., blocks, i, 2, K]
    before = jnp.cumsum(blocked(g, width), axis=-2)  # sum of g from the block's start, token included
    after = before[..., -1:, :] - before  # and from the next token to the block's end
    causal = jnp.tril(jnp.ones((width, width), bool))[..., None]
    pair = jnp.where(causal, before[..., :, None, :] - before[..., None, :, :], -jnp.inf)
    k_pair = blocked(k, width)[..., None, :, :] * jnp.exp(pair)  # [..., blocks, i, j, K]
    inside = _dot("...ixk,...ijk->...ixj", qk, k_pair)  # [..., blocks, i, 2, j]
    a = jnp.moveaxis(inside, -2, 0)  # [2, ..., blocks, i, j]
    while width < size:
        halves = before.reshape(*lead, -1, 2, width, before.shape[-1])
        ends = after.reshape(halves.shape)
        x = jnp.stack([q, k]).reshape(2, *halves.shape)
        low = x[..., 1, :, :] * jnp.exp(halves[..., 1, :, :])
        up = x[1, ..., 0, :, :] * jnp.exp(ends[..., 0, :, :])
        corner = _dot("x...ik,...jk->x...ij", low, up)  # [2, ..., blocks, width, width]
        left, right = a[..., 0::2, :, :], a[..., 1::2, :, :]
        top = jnp.concatenate([left, jnp.zeros_like(left)], axis=-1)
        a = jnp.concatenate([top, jnp.concatenate([corner, right], axis=-1)], axis=-2)
        first, second = halves[..., 0, :, :], halves[..., 1, :, :]
        before = jnp.concatenate([first, second + first[..., -1:, :]], axis=-2)
        first, second = ends[..., 0, :, :], ends[..., 1, :, :]
        after = jnp.concatenate([first + halves[..., 1, -1:, :], second], axis=-2)
        width *= 2
    return a[0, ..., 0, :, :], a[1, ..., 0, :, :], before[..., 0, :, :], after[..., 0, :, :]


def _invert_unit_lower(lower: Float[Array, "*b C C"]) -> Float[Array, "*b C C"]:
    """(I + lower)^-1 for strictly lower triangular `lower`, by doubling the size of inverted diagonal blocks.

    [[A, 0], [M, D]]^-1 = [[A^-1, 0], [-D^-1 M A^-1, D^-1]]. Unlike a Neumann series it stays accurate when
    the keys of a chunk repeat, where powers of `lower` grow like binomial coefficients.
    """
    size = lower.shape[-1]
    blocks = jnp.ones((*lower.shape[:-2], size, 1, 1), lower.dtype)  # inverses of the 1 x 1 diagonal blocks
    width = 1
    while width < size:
        pairs = lower.reshape(*lower.shape[:-2], size // (2 * width), 2, width, size // (2 * width), 2, width)
        mixed = jnp.moveaxis(jnp.diagonal(pairs[..., 1, :, :, 0, :], axis1=-4, axis2=-2), -1, -3)
        upper, below = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        corner = -_dot("...ij,...jk,...kl->...il", below, mixed, upper)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        blocks = jnp.concatenate([top, jnp.concatenate([corner, below], axis=-1)], axis=-2)
        width *= 2
    return blocks[..., 0, :, :]
