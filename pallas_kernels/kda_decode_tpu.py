"""One token of Kimi Delta Attention per sequence on TPU, from the projections to the gated norm, states in place.

    x <- SiLU(sum_j w_j x_(t-3+j))                       for x = q, k, v, over the last three inputs and this one
    q <- q / |q| K^-1/2,  k <- k / |k|,  beta <- sigmoid(beta)
    g <- bound sigmoid(e^a (z + bias))                   or -e^a softplus(z + bias)
    S <- diag(e^g) S;   S <- S + beta k (v - S^T k)^T;   o <- RMSNorm(S^T q) sigmoid(gate)

A program handles eight heads of one sequence. Its time is that of reading and writing their states, 64 KiB each way
per head, so that everything else works on vectors in float32, without the matrix unit.
Source: Kimi Linear, arXiv:2510.26692.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.in_hbm_tpu import in_hbm
from pallas_kernels.tiling import KDA_DECODE_TPU

_DIM = 128
_TAPS = 4
_L2_EPS = 1e-6
_LEAVE, _COMPUTE, _COPY = 0, 1, 2


def kda_decode_refusal(
    num_heads: int, head_dim: int, conv_width: int, dtype: jnp.dtype, state_dtype: jnp.dtype
) -> str | None:
    """Why `kda_decode_tpu` cannot run for heads and convolutions of these sizes and dtypes; None if it can."""
    if num_heads % KDA_DECODE_TPU.heads_per_program and num_heads > KDA_DECODE_TPU.most_odd_heads:
        return (
            f"{num_heads} heads: the TPU kernel handles multiples of {KDA_DECODE_TPU.heads_per_program}, and up to "
            f"{KDA_DECODE_TPU.most_odd_heads} of any number"
        )
    if head_dim != _DIM:
        return f"heads of {head_dim} channels: the TPU kernel handles {_DIM}"
    if conv_width != _TAPS:
        return f"convolutions of {conv_width} taps: the TPU kernel handles {_TAPS}"
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        return f"projections of {jnp.dtype(dtype).name}: the TPU kernel handles float32 and bfloat16"
    if jnp.dtype(state_dtype) != jnp.dtype(jnp.float32):
        return f"states of {jnp.dtype(state_dtype).name}: the TPU kernel handles float32, as others lose increments"
    return None


def kda_decode_tpu(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    z: jax.Array,
    gate: jax.Array,
    beta: jax.Array,
    conv_weight: jax.Array,
    dt_bias: jax.Array,
    a_log: jax.Array,
    out_norm: jax.Array,
    state: jax.Array,
    conv: jax.Array,
    slots: jax.Array,
    *,
    lower_bound: float | None,
    norm_eps: float,
    interpret=None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Advances each sequence by one token; C = H * 128 channels, heads outermost.

    State and conv are updated in place where the caller's jit donates them: only slots named are read or written.

    Args:
      q, k, v: Projections of the token [B, C], before the convolution, all of one dtype.
      z: Decay logits [B, C], before `dt_bias`.
      gate: Logits of the output gate [B, C].
      beta: Logits of the step size [B, H].
      conv_weight: Taps of the q, k and v convolutions, oldest first, float32 [3, C, 4].
      dt_bias, a_log: float32 [C] and [H].
      out_norm: Weight of the output norm, float32 [128].
      state: float32 [S, H, 128, 128].
      conv: The last three inputs of the q, k and v convolutions, oldest first, [S, 3, 3, H, 128]. The heads are an
        axis of their own because a reshape from [S, 3, 3, C] would copy the whole cache into another layout.
      slots: int32 [B]: which state each row advances; -1 for padding, whose output is 0. No slot may appear twice.
      lower_bound: Of the log decay, < 0; None selects the unbounded softplus decay.
      interpret: Passed on to `pallas_call`.
    Returns: Outputs [B, C] in gate's dtype, ready for the output projection; state; conv.
    Raises: NotImplementedError with the text of `kda_decode_refusal`.
    """
    batch, heads = beta.shape
    refusal = kda_decode_refusal(heads, q.shape[1] // heads, conv_weight.shape[-1], q.dtype, state.dtype)
    if refusal:
        raise NotImplementedError(f"kda_decode_tpu: {refusal}")
    group = KDA_DECODE_TPU.heads_per_program if heads % KDA_DECODE_TPU.heads_per_program == 0 else heads

    def per_channel(x):  # one number per head, in all its channels
        return jnp.broadcast_to(x[..., None], (*x.shape, _DIM))

    def by_head(x):
        return x.reshape(*x.shape[:-1], heads, _DIM)

    dtype = jnp.result_type(q, k, v, z, gate, beta)
    tokens = [by_head(x) for x in (q, k, v, z, gate)] + [per_channel(beta)]
    tokens = jnp.stack([x.astype(dtype) for x in tokens], axis=1)  # [B, 6, H, 128]
    taps = by_head(jnp.moveaxis(conv_weight, 2, 1)).reshape(3 * _TAPS, heads, _DIM)
    constants = [by_head(dt_bias), per_channel(jnp.exp(a_log)), jnp.broadcast_to(out_norm, (heads, _DIM))]
    constants = jnp.concatenate([taps, jnp.stack(constants)]).astype(jnp.float32)  # [15, H, 128]
    token_spec = pl.BlockSpec((None, 6, group, _DIM), lambda h, b, slot, action: (b, 0, h, 0))
    constant_spec = pl.BlockSpec((3 * _TAPS + 3, group, _DIM), lambda h, b, slot, action: (0, h, 0))
    state_spec = pl.BlockSpec((None, group, _DIM, _DIM), lambda h, b, slot, action: (slot[b], h, 0, 0))
    conv_spec = pl.BlockSpec((None, 3, _TAPS - 1, group, _DIM), lambda h, b, slot, action: (slot[b], 0, 0, h, 0))
    out_spec = pl.BlockSpec((None, group, _DIM), lambda h, b, slot, action: (b, h, 0))
    out, state, conv = pl.pallas_call(
        functools.partial(_kernel, lower_bound=lower_bound, norm_eps=norm_eps, dtype=q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(heads // group, batch),
            in_specs=[token_spec, constant_spec, state_spec, conv_spec],
            out_specs=[out_spec, state_spec, conv_spec],
            scratch_shapes=[pltpu.VMEM((len(_Rows._fields), group, _DIM), jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, _DIM), gate.dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
            jax.ShapeDtypeStruct(conv.shape, conv.dtype),
        ],
        input_output_aliases={4: 1, 5: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(tokens, constants, state, conv, gate),
        interpret=False if interpret is None else interpret,
        name="kda_decode_tpu",
    )(*_windows(slots), tokens, constants, in_hbm(state), in_hbm(conv))
    return out.reshape(batch, heads * _DIM), state, conv


def _cost(tokens, constants, state, conv, gate):
    """What the compiler is told: each row's slot is read and written; the other slots stay where they are."""
    batch, _, heads, _ = tokens.shape
    slot = sum(x.size // x.shape[0] * x.dtype.itemsize for x in (state, conv))
    rows = sum(x.size * x.dtype.itemsize for x in (tokens, constants, gate))
    return pl.CostEstimate(
        flops=batch * heads * 7 * _DIM * _DIM,  # decay; two sums over the state; the update
        transcendentals=batch * heads * 7 * _DIM,
        bytes_accessed=2 * batch * slot + rows,
    )


def _windows(slots):
    """The slot whose state is in VMEM while each row is worked on, and what the row does with it.

    Padding keeps the window of the row before it, so that nothing moves. Where no row came before, it borrows the
    window of the first real row and hands on what it read, since a window that was named is written back.
    """
    slots = slots.astype(jnp.int32)
    real = slots >= 0
    row = jnp.arange(slots.shape[0], dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(real, row, -1))
    source = jnp.where(last >= 0, last, jnp.argmax(real))
    action = jnp.where(real, _COMPUTE, jnp.where(last >= 0, _LEAVE, _COPY))
    return jnp.maximum(slots[source], 0), action.astype(jnp.int32)


class _Rows(NamedTuple):
    """Vectors of each head [heads, 128] that the recurrence works with."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array  # e^g
    beta: jax.Array
    overlap: jax.Array  # q . k
    out: jax.Array


def _kernel(
    slot, action, tokens, constants, state_in, conv_in, out, state, conv, scratch, *, lower_bound, norm_eps, dtype
):
    del slot
    what = action[pl.program_id(1)]
    rows = _Rows(*(scratch.at[i] for i in range(len(_Rows._fields))))

    @pl.when(what == _COMPUTE)
    def _():
        bias, rate, norm = (constants[3 * _TAPS + i] for i in range(3))
        z, gate, beta = (tokens[3 + i].astype(jnp.float32) for i in range(3))
        q, k, v = (_short_conv(i, tokens, constants, conv_in, conv, dtype) for i in range(3))
        q, k = _unit(q) * _DIM**-0.5, _unit(k)
        rows.q[...], rows.k[...], rows.v[...] = q, k, v
        rows.decay[...] = jnp.exp(_log_decay(z + bias, rate, lower_bound))
        rows.beta[...] = jax.nn.sigmoid(beta)
        rows.overlap[...] = jnp.broadcast_to(jnp.sum(q * k, axis=-1, keepdims=True), q.shape)
        heads = q.shape[0]
        # Never all of them: in straight code the scheduler mixes the loop with what is around it, and spills.
        together = max(n for n in range(1, KDA_DECODE_TPU.heads_together + 1) if heads % n == 0 and n < max(heads, 2))

        @pl.loop(0, heads // together)
        def _(i):
            for j in range(together):
                _advance(i * together + j, rows, state_in, state)

        o = rows.out[...].astype(dtype).astype(jnp.float32)  # the reference rounds here too, before the norm
        o = o * jax.lax.rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + norm_eps)
        out[...] = (o * norm * jax.nn.sigmoid(gate)).astype(out.dtype)

    @pl.when(what != _COMPUTE)
    def _():
        out[...] = jnp.zeros_like(out)

    @pl.when(what == _COPY)
    def _():
        state[...] = state_in[...]
        conv[...] = conv_in[...]


def _short_conv(i, tokens, constants, conv_in, conv, dtype):
    """q, k or v after convolution and SiLU, [heads, 128], rounded to dtype; moves its window on."""
    now = tokens[i]
    y = now.astype(jnp.float32) * constants[i * _TAPS + _TAPS - 1]
    for j in range(_TAPS - 1):
        y += conv_in[i, j].astype(jnp.float32) * constants[i * _TAPS + j]
        conv[i, j] = now.astype(conv.dtype) if j == _TAPS - 2 else conv_in[i, j + 1]
    return (y * jax.nn.sigmoid(y)).astype(dtype).astype(jnp.float32)


def _unit(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _L2_EPS)


def _log_decay(z, rate, lower_bound):
    if lower_bound is not None:
        return lower_bound * jax.nn.sigmoid(rate * z)
    return -rate * (jnp.maximum(z, 0) + jnp.log1p(jnp.exp(-jnp.abs(z))))


def _advance(h, rows, state_in, state):
    """The recurrence of one head; the decayed state waits in the window of the new one, to spare registers."""

    def row(x):
        return x[pl.ds(h, 1), :]

    def column(x):  # [128, 128], each row the number of its key channel
        return jnp.broadcast_to(row(x), (_DIM, _DIM)).T

    state[h] = state_in[h] * column(rows.decay)
    k = column(rows.k)
    recalled = jnp.sum(state[h] * k, axis=0, keepdims=True)
    before_update = jnp.sum(state[h] * column(rows.q), axis=0, keepdims=True)
    step = row(rows.beta) * (row(rows.v) - recalled)
    state[h] = state[h] + k * step
    rows.out[pl.ds(h, 1), :] = before_update + row(rows.overlap) * step
