"""`kda_chunk_tpu` with a gradient, in memory that does not grow with the number of chunks but for sparse checkpoints.

The forward pass is the kernel, which also returns the state at every so many work items. The backward pass walks
those stretches from the last to the first: it computes the states inside a stretch again, one per item, and then
takes each item's tokens through the derivative of `_chunk`, one chunk of all heads at a time. That part is plain JAX.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda_chunk_tpu import CHUNK, kda_chunk_refusal, kda_chunk_tpu
from pallas_kernels.kda_work_list_tpu import unpack_item, work_list

kda_chunk_trainable_refusal = kda_chunk_refusal  # the same kernel runs

_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def kda_chunk_trainable_tpu(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    cu_seqlens: jax.Array | None = None,
    items_per_checkpoint: int = 16,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """`kda_chunk_tpu` that can be differentiated; arguments, results, limits and errors are those of it.

    Args:
      items_per_checkpoint: A state per sequence chunk is kept for the backward pass at every so many chunks; between
        two of them as many states are held for a while. 16 costs 4 KiB of checkpoints per token and head.
    Raises: ValueError if items_per_checkpoint is below 1.
    """
    if items_per_checkpoint < 1:
        raise ValueError(f"items_per_checkpoint={items_per_checkpoint}: must be at least 1")
    batch, num_tokens = q.shape[:2]
    starts = np.arange(batch + 1, dtype=np.int32) * num_tokens if cu_seqlens is None else cu_seqlens
    packed = [x.reshape(1, batch * num_tokens, *x.shape[2:]) for x in (q, k, v, g, beta)]
    out, state = _differentiable(*packed, state, starts, items_per_checkpoint, interpret)
    return out.reshape(v.shape), state


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _differentiable(q, k, v, g, beta, state, starts, stride, interpret):
    del stride
    return kda_chunk_tpu(q, k, v, g, beta, state, cu_seqlens=starts, interpret=interpret)


def _forward(q, k, v, g, beta, state, starts, stride, interpret):
    items = _items(starts, q.shape[1], stride)
    out, final, kept = kda_chunk_tpu(
        q, k, v, g, beta, state, cu_seqlens=starts, state_positions=items["position"][::stride], interpret=interpret
    )
    return (out, final), (q, k, v, g, beta, state, starts, kept[0])


def _items(starts, num_tokens, stride):
    """The work list by name, filled up to a multiple of `stride` with items of no rows."""
    chunk, seq, _, meta = map(jnp.asarray, work_list(starts, None, num_tokens, CHUNK))
    start, end, *_ = unpack_item(meta)
    end = jnp.where(start + chunk * CHUNK >= starts[-1], start, end)  # rows behind the last sequence
    items = {"chunk": chunk, "seq": seq, "start": start, "end": end, "position": chunk * CHUNK + start}
    return {name: jnp.pad(x, (0, -x.shape[0] % stride), mode="edge") for name, x in items.items()} | {
        "end": jnp.pad(end, (0, -end.shape[0] % stride)),
    }


def _backward(stride, interpret, saved, cotangents):
    del interpret
    q, k, v, g, beta, state, starts, kept = saved
    d_out, d_final = cotangents
    num_tokens = q.shape[1]
    pad = -num_tokens % CHUNK
    inputs = tuple(jnp.pad(x[0], [(0, pad)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v, g, beta, d_out))
    items = _items(starts, num_tokens, stride)
    stretches = {name: x.reshape(-1, stride) for name, x in items.items()}
    is_first = stretches["position"][:, 0] == jnp.asarray(starts)[stretches["seq"][:, 0]]

    def one_stretch(carry, stretch):
        kept, is_first, items = stretch
        seq = items["seq"][0]
        at_start = jnp.where(is_first, state[seq], kept)
        before = _states_before(inputs, state.astype(jnp.float32).at[seq].set(at_start), items)
        return _through_stretch(inputs, carry, items, before), None

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in inputs[:5])
    carry = (zeros, d_final.astype(jnp.float32))
    (grads, d_state), _ = jax.lax.scan(one_stretch, carry, (kept, is_first, stretches), reverse=True)
    grads = [x[None, :num_tokens].astype(y.dtype) for x, y in zip(grads, (q, k, v, g, beta), strict=True)]
    no_gradient = np.zeros(starts.shape, jax.dtypes.float0)
    return *grads, d_state.astype(state.dtype), no_gradient


_differentiable.defvjp(_forward, _backward)


def _rows(x, item):
    """The item's rows of [T, H, ...] as [H, 64, ...] in float32; other rows of the chunk are 0."""
    x = jax.lax.dynamic_slice_in_dim(x, item["chunk"] * CHUNK, CHUNK).astype(jnp.float32)
    row = jnp.arange(CHUNK).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.moveaxis(jnp.where((row >= item["start"]) & (row < item["end"]), x, 0), 1, 0)


def _states_before(inputs, states, items):
    """The state before each item of a stretch, [items, H, K, V], given that of every sequence at its start."""

    def one_item(states, item):
        before = states[item["seq"]]
        _, after = _chunk(*[_rows(x, item) for x in inputs[:5]], before)
        return states.at[item["seq"]].set(after), before

    return jax.lax.scan(one_item, states, items)[1]


def _through_stretch(inputs, carry, items, before):
    """Adds the stretch's gradients to those of the tokens, and moves those of the states to its start."""

    def one_item(carry, step):
        grads, d_states = carry
        item, before = step
        *tokens, d_out = (_rows(x, item) for x in inputs)
        _, pull = jax.vjp(_chunk, *tokens, before)
        *d_tokens, d_before = pull((d_out, d_states[item["seq"]]))

        def add(total, x):
            at = item["chunk"] * CHUNK
            here = jax.lax.dynamic_slice_in_dim(total, at, CHUNK)
            row = jnp.arange(CHUNK).reshape(-1, *[1] * (total.ndim - 1))
            x = jnp.where((row >= item["start"]) & (row < item["end"]), jnp.moveaxis(x, 0, 1), 0)
            return jax.lax.dynamic_update_slice_in_dim(total, here + x, at, 0)

        return (jax.tree.map(add, grads, tuple(d_tokens)), d_states.at[item["seq"]].set(d_before)), None

    return jax.lax.scan(one_item, carry, (items, before), reverse=True)[0]


def _chunk(q, k, v, g, beta, state):
    """64 tokens of all heads, as `kda_chunk_math_tpu` defines it: q, k, v, g [H, 64, 128], beta [H, 64], state.

    Blocks of the diagonal double in width from single tokens on: of A, of diag(beta) L' = L, and of (I + L)^-1.
    Returns: outputs [H, 64, V] and the new state [H, K, V].
    """
    heads = q.shape[0]

    def halves(x, width):  # [H, blocks, width, ...] -> the blocks' upper and lower halves
        x = x.reshape(heads, -1, 2, width, x.shape[-1])
        return x[:, :, 0], x[:, :, 1]

    a = jnp.sum(q * k, axis=-1)[..., None, None]  # [H, blocks, width, width]
    inverse = jnp.ones_like(a)
    before, after = g, jnp.zeros_like(g)
    width = 1
    while width < CHUNK:
        (_, q_low), (k_up, k_low), (_, step) = (halves(x, width) for x in (q, k, beta[..., None]))
        (first, second), (first_after, second_after) = halves(before, width), halves(after, width)
        k_up, decay = k_up * jnp.exp(first_after), jnp.exp(second)
        a = _joined(a, _dot("hbik,hbjk->hbij", q_low * decay, k_up))
        corner = step * _dot("hbik,hbjk->hbij", k_low * decay, k_up)
        corner = _dot("hbij,hbjk,hbkl->hbil", inverse[:, 1::2], corner, inverse[:, 0::2])
        inverse = _joined(inverse, -corner)
        before = jnp.concatenate([first, second + first[:, :, -1:]], axis=2).reshape(g.shape)
        after = jnp.concatenate([first_after + second[:, :, -1:], second_after], axis=2).reshape(g.shape)
        width *= 2
    a, inverse = a[:, 0], inverse[:, 0]
    error = v - _dot("hik,hkv->hiv", k * jnp.exp(before), state)
    delta = _dot("hij,hjv->hiv", inverse, beta[..., None] * error)
    out = _dot("hik,hkv->hiv", q * jnp.exp(before), state) + _dot("hij,hjv->hiv", a, delta)
    update = _dot("hik,hiv->hkv", k * jnp.exp(after), delta)
    return out, jnp.exp(before[:, -1])[..., None] * state + update


def _joined(blocks, corner):
    """Pairs of neighbours on the diagonal as one block of twice the width, with `corner` below."""
    top = jnp.concatenate([blocks[:, 0::2], jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, blocks[:, 1::2]], axis=-1)], axis=-2)
