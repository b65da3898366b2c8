"""One token of Kimi Delta Attention per sequence, from the projections to the gated norm, on states held in slots.

The plain form gathers the named slots, takes the layer's ops one after another, and writes the slots back. Kernels do
all of it in one pass over the states, which is what the step costs: 64 KiB read and written per head and sequence.
Source: Kimi Linear, arXiv:2510.26692.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmoe.ops import dispatch
from maxmoe.ops.kda import bounded_gate, kda_step, softplus_gate
from maxmoe.ops.norm import gated_rms_norm, l2_norm
from maxmoe.ops.short_conv import short_conv


def kda_decode(
    q: Float[Array, "B C"],
    k: Float[Array, "B C"],
    v: Float[Array, "B C"],
    z: Float[Array, "B C"],
    gate: Float[Array, "B C"],
    beta: Float[Array, "B H"],
    conv_weight: Float[Array, "3 C W"],
    dt_bias: Float[Array, "C"],
    a_log: Float[Array, "H"],
    out_norm: Float[Array, "K"],
    state: Float[Array, "N H K K"],
    conv: Float[Array, "N 3 W-1 H K"],
    slots: Int[Array, "B"],
    *,
    lower_bound: float | None,
    norm_eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B C"], Float[Array, "N H K K"], Float[Array, "N 3 W-1 H K"]]:
    """Advances each sequence by one token; C = H * K channels, heads outermost, N slots.

        x <- SiLU(sum_j w_j x_(t-3+j))                       for x = q, k, v, over the last three inputs and this one
        q <- q / |q| K^-1/2,  k <- k / |k|,  beta <- sigmoid(beta)
        g <- bound sigmoid(e^a (z + bias))                   or -e^a softplus(z + bias)
        S <- diag(e^g) S;   S <- S + beta k (v - S^T k)^T;   o <- RMSNorm(S^T q) sigmoid(gate)

    Only slots named are read or written; where the caller's jit donates state and conv, they are updated in place.

    Args:
      q, k, v: Projections of the token, before the convolution, all of one dtype.
      z: Decay logits, before `dt_bias`.
      gate: Logits of the output gate.
      beta: Logits of the step size.
      conv_weight: Taps of the q, k and v convolutions, oldest first.
      state: S of every slot, float32.
      conv: The last W - 1 inputs of the q, k and v convolutions of every slot, oldest first.
      slots: Which slot each row advances; -1 for padding, whose output is 0. No slot may appear twice.
      lower_bound: Of the log decay, < 0; None selects the unbounded softplus decay.
      implementation: See `dispatch.choose`.
    Returns: Outputs in gate's dtype, ready for the output projection; state; conv.
    Raises: ValueError for shapes that do not belong together; NotImplementedError for a named kernel that cannot run.
    """
    heads, head_dim = _head_shape(q, k, v, z, gate, beta, state, conv)
    shape = (heads, head_dim, conv_weight.shape[-1], q.dtype, state.dtype)
    refusals = {
        "pallas_tpu": lambda: _tpu().kda_decode_refusal(*shape),
        "pallas_gpu": lambda: _gpu().kda_decode_gpu_refusal(*shape),
    }
    chosen = dispatch.choose("kda_decode", implementation, refusals)
    slots = slots.astype(jnp.int32)  # a narrower type cannot name the places behind the last slot
    arguments = (q, k, v, z, gate, beta, conv_weight, dt_bias, a_log, out_norm, state, conv, slots)
    if chosen == "pallas_tpu":
        return _tpu().kda_decode_tpu(*arguments, lower_bound=lower_bound, norm_eps=norm_eps)
    if chosen == "pallas_gpu":
        return _gpu().kda_decode_gpu(*arguments, lower_bound=lower_bound, norm_eps=norm_eps)
    real = slots >= 0
    here = jnp.where(real, slots, 0)
    windows = conv[here].reshape(*slots.shape, 3, -1, heads * head_dim)
    one = jnp.ones_like(slots)

    def by_head(x):  # [B, C] -> [B, 1, H, K]
        return x.reshape(-1, 1, heads, head_dim)

    with jax.named_scope("short_conv"):
        pairs = [short_conv(x[:, None], conv_weight[i], windows[:, i], one) for i, x in enumerate((q, k, v))]
    q, k, v = (by_head(jax.nn.silu(y).astype(x.dtype)) for (y, _), x in zip(pairs, (q, k, v), strict=True))
    q, k = l2_norm(q) * head_dim**-0.5, l2_norm(k)
    with jax.named_scope("decay_gate"):
        z = by_head(z.astype(jnp.float32) + dt_bias)
        g = softplus_gate(z, a_log) if lower_bound is None else bounded_gate(z, a_log, lower_bound)
    step = jax.nn.sigmoid(beta.astype(jnp.float32))
    out, new_state = kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], step, state[here])
    out = gated_rms_norm(out, gate.reshape(out.shape), out_norm, norm_eps).reshape(gate.shape)
    # Padding writes behind the last slot, where it is dropped; a negative index would count from the end.
    there = jnp.where(real, slots, state.shape[0] + jnp.arange(slots.shape[0]))
    new_conv = jnp.stack([x for _, x in pairs], axis=1).reshape(-1, *conv.shape[1:]).astype(conv.dtype)
    state = state.at[there].set(new_state.astype(state.dtype), mode="drop", unique_indices=True)
    conv = conv.at[there].set(new_conv, mode="drop", unique_indices=True)
    return jnp.where(real[:, None], out, 0), state, conv


def _head_shape(q, k, v, z, gate, beta, state, conv):
    """Heads and channels per head, where the arguments agree on them."""
    heads, channels = beta.shape[-1], q.shape[-1]
    if channels % heads:
        raise ValueError(f"q has {channels} channels for {heads} heads of beta: channels must be a multiple of heads")
    rows = {"q": q, "k": k, "v": v, "z": z, "gate": gate}
    for name, x in rows.items():
        if x.shape != (beta.shape[0], channels):
            raise ValueError(f"{name} has shape {x.shape}: q, k, v, z and gate are [B, C], here {q.shape}")
    head_dim = channels // heads
    if state.shape[1:] != (heads, head_dim, head_dim) or conv.shape[0] != state.shape[0]:
        raise ValueError(
            f"state {state.shape} and conv {conv.shape}: q {q.shape} and beta {beta.shape} need "
            f"[N, {heads}, {head_dim}, {head_dim}] and [N, 3, W - 1, {heads}, {head_dim}]"
        )
    return heads, head_dim


def _tpu():
    """The kernel for TPU; importing Pallas takes a second that few need."""
    from pallas_kernels import kda_decode_tpu

    return kda_decode_tpu


def _gpu():
    from pallas_kernels import kda_decode_gpu

    return kda_decode_gpu
