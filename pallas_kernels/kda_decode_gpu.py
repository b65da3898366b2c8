"""One token of Kimi Delta Attention per sequence on NVIDIA GPUs, from the projections to the gated norm, in place.

    x <- SiLU(sum_j w_j x_(t-3+j))                       for x = q, k, v, over the last three inputs and this one
    q <- q / |q| K^-1/2,  k <- k / |k|,  beta <- sigmoid(beta)
    g <- bound sigmoid(e^a (z + bias))                   or -e^a softplus(z + bias)
    S <- diag(e^g) S;   S <- S + beta k (v - S^T k)^T;   o <- RMSNorm(S^T q) sigmoid(gate)

A program holds the state of one head of one sequence in registers: it reads and writes it once, 64 KiB each way, which
is what the step costs. All arithmetic is float32; what the layer rounds between its parts is rounded here too.
Source: Kimi Linear, arXiv:2510.26692.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import gpu_compat as gpu
from pallas_kernels.tiling import KDA_DECODE_H200, KdaDecodeGpuTiling

_L2_EPS = 1e-6


def kda_decode_gpu_refusal(num_heads: int, head_dim: int, conv_width: int, dtype: Any, state_dtype: Any) -> str | None:
    """Why `kda_decode_gpu` cannot run for heads and convolutions of these sizes and dtypes, or None."""
    if head_dim & (head_dim - 1) or not gpu.MIN_DOT <= head_dim <= 128:
        return f"heads of {head_dim} channels: kda_decode_gpu takes powers of two from {gpu.MIN_DOT} to 128"
    if num_heads < 1 or conv_width < 2:
        return f"{num_heads} heads, {conv_width} taps: kda_decode_gpu takes at least 1 head and 2 taps"
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        return f"projections of {jnp.dtype(dtype).name}: kda_decode_gpu takes float32 and bfloat16"
    if jnp.dtype(state_dtype) != jnp.dtype(jnp.float32):
        return f"states of {jnp.dtype(state_dtype).name}: kda_decode_gpu takes float32, as others lose increments"
    return None


def kda_decode_gpu(
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
    tiling: KdaDecodeGpuTiling = KDA_DECODE_H200,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Advances each sequence by one token; C = H * K channels, heads outermost.

    State and conv are updated in place where the caller's jit donates them: only slots named are read or written.

    Args:
      q, k, v: Projections of the token [B, C], before the convolution, of one dtype.
      z: Decay logits [B, C], before `dt_bias`.
      gate: Logits of the output gate [B, C].
      beta: Logits of the step size [B, H].
      conv_weight: Taps of the q, k and v convolutions, oldest first, float32 [3, C, W].
      dt_bias, a_log: float32 [C] and [H].
      out_norm: Weight of the output norm, float32 [K].
      state: float32 [S, H, K, K].
      conv: The last W - 1 inputs of the q, k and v convolutions, oldest first, [S, 3, W - 1, H, K].
      slots: int32 [B]: which state each row advances; -1 for padding, whose output is 0. No slot may appear twice.
      lower_bound: Of the log decay, < 0; None selects the unbounded softplus decay.
    Returns: Outputs [B, C] in gate's dtype, ready for the output projection; state; conv.
    Raises: NotImplementedError with the text of `kda_decode_gpu_refusal`.
    """
    batch, heads = beta.shape
    head_dim = q.shape[1] // heads
    if reason := kda_decode_gpu_refusal(heads, head_dim, conv_weight.shape[-1], q.dtype, state.dtype):
        raise NotImplementedError(reason)
    body = functools.partial(_body, lower_bound=lower_bound, norm_eps=norm_eps, interpret=interpret)
    operands = (slots, q, k, v, z, gate, beta, conv_weight, dt_bias, a_log, out_norm, state, conv)
    return gpu.kernel_call(
        body,
        grid=(heads, batch),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (gate, state, conv)],
        num_operands=len(operands),
        num_warps=tiling.warps,
        num_stages=1,
        interpret=interpret,
        name="kda_decode",
        aliases={len(operands) - 2: 1, len(operands) - 1: 2},
    )(*operands)


def _body(
    slots_ref, q_ref, k_ref, v_ref, z_ref, gate_ref, beta_ref, taps_ref, bias_ref, a_log_ref, norm_ref, _, __,
    out_ref, state_ref, conv_ref, *, lower_bound, norm_eps, interpret,
):  # fmt: skip
    """One head of one sequence."""
    head, row = pl.program_id(0), pl.program_id(1)
    head_dim, taps = norm_ref.shape[0], taps_ref.shape[2]
    channels = pl.ds(head * head_dim, head_dim)
    channel = head * head_dim + jnp.arange(head_dim, dtype=jnp.int32)
    slot = slots_ref[row]

    def window(which, ref):
        return [conv_ref[slot, which, j, head] for j in range(taps - 1)] + [ref[row, channels]]

    def convolved(which, inputs):
        y = jnp.zeros((head_dim,), jnp.float32)
        for j, x in enumerate(inputs):
            y = y + x.astype(jnp.float32) * taps_ref[which, channel, j]
            if j > 0:
                conv_ref[slot, which, j - 1, head] = x.astype(conv_ref.dtype)
        return (y * _sigmoid(y)).astype(inputs[-1].dtype).astype(jnp.float32)

    def unit(x):
        return x * jax.lax.rsqrt(jnp.sum(x * x) + _L2_EPS)

    @pl.when(slot >= 0)
    def _():
        windows = [window(which, ref) for which, ref in enumerate((q_ref, k_ref, v_ref))]
        gpu.barrier(interpret)  # several threads read each channel: none may shift it before all have
        q, k, v = (convolved(which, inputs) for which, inputs in enumerate(windows))
        q, k = unit(q) * head_dim**-0.5, unit(k)
        z = z_ref[row, channels].astype(jnp.float32) + bias_ref[channels]
        growth = jnp.exp(a_log_ref[head])
        g = lower_bound * _sigmoid(growth * z) if lower_bound is not None else -growth * _softplus(z)
        beta = _sigmoid(beta_ref[row, head].astype(jnp.float32))
        state = state_ref[slot, head] * jnp.exp(g)[:, None]
        error = v - jnp.sum(state * k[:, None], axis=0)
        state = state + (beta * k)[:, None] * error[None, :]
        state_ref[slot, head] = state
        out = jnp.sum(state * q[:, None], axis=0).astype(v_ref.dtype).astype(jnp.float32)
        normed = out * jax.lax.rsqrt(jnp.sum(out * out) / head_dim + norm_eps) * norm_ref[...]
        out_ref[row, channels] = (normed * _sigmoid(gate_ref[row, channels].astype(jnp.float32))).astype(out_ref.dtype)

    @pl.when(slot < 0)
    def _():
        out_ref[row, channels] = jnp.zeros((head_dim,), out_ref.dtype)


def _sigmoid(x):
    return 1.0 / (1.0 + jnp.exp(-x))


def _softplus(x):
    return jnp.maximum(x, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(x)))
