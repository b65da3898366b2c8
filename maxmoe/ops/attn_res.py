"""Block attention residuals: each layer reads a softmax mixture of earlier block sums and the running sum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxmoe.ops import dispatch
from maxmoe.ops.norm import rms_norm


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


def mix_and_norm(
    current: Float[Array, "*b D"],
    bank: Float[Array, "A *b D"],
    num_entries: int | Int[Array, ""],
    norm_weight: Float[Array, "D"],
    proj_weight: Float[Array, "D"],
    eps: float,
    out_norm: Float[Array, "D"],
    implementation: str | None = None,
) -> Float[Array, "*b D"]:
    """rms_norm(mix(...), out_norm, eps): what a mixer or an FFN is applied to.

    The kernel reads every entry that exists once. XLA reads the bank several times, and in a long prefill writes it
    out in float32.

    Args:
      implementation: See `dispatch.choose`.
    Raises: NotImplementedError for a named kernel that cannot run.
    """
    refusals = {"pallas_tpu": lambda: _refusal(current, bank)}
    if dispatch.choose("mix_and_norm", implementation, refusals) == "pallas_tpu":
        return _fused(eps, current, bank, jnp.asarray(num_entries, jnp.int32), norm_weight, proj_weight, out_norm)
    return _plain(eps, current, bank, num_entries, norm_weight, proj_weight, out_norm)


def _plain(eps, current, bank, num_entries, norm_weight, proj_weight, out_norm):
    return rms_norm(mix(current, bank, num_entries, norm_weight, proj_weight, eps), out_norm, eps)


def _refusal(current, bank):
    if bank.dtype != current.dtype:
        return f"the bank is {bank.dtype.name} and the running sum {current.dtype.name}: the TPU kernel wants one dtype"
    return _tpu().attn_res_tpu_refusal(bank.shape[0], current.shape[-1], current.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(eps, current, bank, num_entries, norm_weight, proj_weight, out_norm):
    width = current.shape[-1]
    score_weight = norm_weight.astype(jnp.float32) * proj_weight.astype(jnp.float32)
    rows, entries = current.reshape(-1, width), bank.reshape(bank.shape[0], -1, width)
    out = _tpu().attn_res_norm_tpu(rows, entries, num_entries, score_weight, out_norm, eps=eps, out_eps=eps)
    return out.reshape(current.shape)


def _fused_forward(eps, *arguments):
    return _fused(eps, *arguments), arguments


def _fused_backward(eps, arguments, cotangent):
    """The plain form's derivative, which computes the forward anew."""
    current, bank, num_entries, *weights = arguments

    def plain(current, bank, *weights):
        return _plain(eps, current, bank, num_entries, *weights)

    d_current, d_bank, *d_weights = jax.vjp(plain, current, bank, *weights)[1](cotangent)
    return d_current, d_bank, np.zeros((), jax.dtypes.float0), *d_weights


_fused.defvjp(_fused_forward, _fused_backward)


def _tpu():
    """The kernel for TPU; importing Pallas takes a second that few need."""
    from pallas_kernels import attn_res_tpu

    return attn_res_tpu
