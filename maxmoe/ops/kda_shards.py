"""KDA and its short convolutions over one long row whose tokens are split over a mesh axis.

Shard i holds tokens i T .. (i + 1) T - 1 of each row, T the tokens per shard. Everything here runs inside
`shard_map` and finds the other shards by the axis's name. The functions work with `check_vma` on or off (kernels ask
for off); differentiate the mapped function from outside, since the cotangent of a replicated result is shared there.
Source: Kimi Linear, arXiv:2510.26692, and the composition of affine maps that linear recurrences allow.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmoe.ops import dispatch
from maxmoe.ops.kda import kda_chunked
from maxmoe.ops.short_conv import short_conv

# As in `kda`: decay and state keep full float32 products on every platform.
_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def kda_over_shards(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    axis_name: str,
    *,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """`kda_chunked` of whole rows whose tokens are split over a mesh axis.

    A token maps the state to (I - beta k k^T) diag(e^g) S + beta k v^T, so the shard's tokens up to t map it to
    M_t S + U_t, and with S_i the state before the shard's first token

        o_t = U_t^T q_t + S_i^T (M_t^T q_t),    S_(i+1) = M S_i + U,    M, U those of the shard's last token

    U and M come from one run of the tokens, before anything is known of other shards: started from [0 | I], with
    values [v | 0]. The shards' maps are composed by `_states_after`; nothing is ever inverted.

    Cost: a run takes 3 K + 2 C multiply-adds per token, head and column, C the chunk; adding S_i takes K more. With
    K = V = 128, C = 64 that is 2.25 times the run of one device. To run the tokens again from S_i needs as many, but
    forms the chunks' triangular systems twice and keeps the second run waiting for the other shards.

    Args:
      q, k, v, g, beta: This shard's tokens. What follows a row's last real token has k = g = beta = 0.
      state: S before the row's first token, the same on all shards.
      axis_name: The mesh axis, of any size; with size 1 this is `kda_chunked`.
      chunk_size, implementation: As for `kda_chunked`.
    Returns: This shard's outputs in v's dtype, and S after the row's last token in float32, the same on all shards.
    Raises: What `kda_chunked` raises.
    """
    tokens = (q, k, v, g, beta)
    run = functools.partial(kda_chunked, chunk_size=chunk_size, implementation=implementation)
    state = _varying_like(state.astype(jnp.float32), tokens)
    if jax.lax.axis_size(axis_name) == 1:
        out, state = run(*tokens, state)
        return out, _of_last_shard(state, axis_name)
    with jax.named_scope("kda_shard_map"):
        # The first shard knows its state and starts from it: it needs no map, and gets nothing to add.
        start = jnp.where(jax.lax.axis_index(axis_name) == 0, state, 0)
        (out, offset), (carried_q, transition) = _own_runs(run, tokens, start, implementation)
    with jax.named_scope("kda_compose"):
        after = _states_after(transition, offset, axis_name)
        before = _from_shard(after, axis_name, 1)
    with jax.named_scope("kda_add_state"):
        out = out + _dot("bthk,bhkv->bthv", carried_q, before)
    return out.astype(v.dtype), _of_last_shard(after, axis_name)


def _own_runs(run, tokens, start, implementation):
    """Outputs and last state of the shard's tokens from `start`; the same without values from the identity."""
    q, k, v, g, beta = tokens
    # Float32 outputs: the two parts of a sum are rounded once, as the sum.
    v = v.astype(jnp.float32)
    no_values = jnp.zeros(k.shape, jnp.float32)
    identity = jnp.broadcast_to(jnp.eye(k.shape[-1], dtype=jnp.float32), (*start.shape[:2], *[k.shape[-1]] * 2))
    identity = _varying_like(identity, tokens)
    if (implementation or dispatch.DEFAULTS["kda_chunked"].get(dispatch.platform(), "xla")) != "xla":
        # Kernels are made for values as wide as a head's, not for those and the keys side by side.
        return run(q, k, v, g, beta, start), run(q, k, no_values, g, beta, identity)
    columns = jnp.concatenate([v, no_values], axis=-1)
    out, end = run(q, k, columns, g, beta, jnp.concatenate([start, identity], axis=-1))
    (out, carried_q), (end, transition) = (jnp.split(x, [v.shape[-1]], axis=-1) for x in (out, end))
    return (out, end), (carried_q, transition)


def _states_after(transition, offset, axis_name):
    """The state after each shard's tokens, from the maps S -> transition S + offset; the first shard's is its offset.

    A parallel prefix: with P shards, ceil(log2 P) rounds, in each of which a shard composes its map with that of the
    shard `step` before it. In bytes per head a shard sends at most 4 K V a round, and 4 K K in all but the last (a
    map that starts at the first shard is constant, so its transition is not sent). An all-gather of the maps and a
    scan by each shard would receive and hold 4 (P - 1) K (K + V). At K = V = 128 that is 0.9 MB against 0.3 MB for
    P = 8, and 8.3 MB against 0.7 MB for P = 64; and what a shard holds must not grow with their number.
    """
    num_shards, step = jax.lax.axis_size(axis_name), 1
    while step < num_shards:
        offset = offset + _dot("bhij,bhjv->bhiv", transition, _from_shard(offset, axis_name, step))
        if 2 * step < num_shards:
            earlier = _from_shard(transition, axis_name, step, first_sender=step)
            transition = _dot("bhij,bhjk->bhik", transition, earlier)
        step *= 2
    return offset


def _from_shard(x, axis_name, distance, first_sender=0):
    """x of the shard `distance` before this one; zeros where that is none, or comes before `first_sender`."""
    senders = range(first_sender, jax.lax.axis_size(axis_name) - distance)
    return jax.lax.ppermute(x, axis_name, [(i, i + distance) for i in senders])


def _of_last_shard(x, axis_name):
    is_last = jax.lax.axis_index(axis_name) == jax.lax.axis_size(axis_name) - 1
    return jax.lax.psum(jnp.where(is_last, x, 0), axis_name)


def _varying_like(x, others):
    """x, typed as different on the devices of every mesh axis on which one of `others` is: a scan's carry must be."""
    varying, *wanted = (jax.typeof(a).manual_axis_type.varying for a in (x, *others))
    axes = frozenset().union(*wanted) - varying
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def conv_halo(
    x_last: Float[Array, "B W-1 C"], first: Float[Array, "B W-1 C"], axis_name: str
) -> Float[Array, "B W-1 C"]:
    """The inputs before this shard's first token: `x_last` of the shard before, and `first` on the first shard.

    Args:
      x_last: The last W-1 inputs of this shard.
      first: The W-1 inputs before the whole row, the same on all shards.
    Returns: In x_last's dtype.
    Raises: ValueError if the shapes differ.
    """
    if x_last.shape != first.shape:
        raise ValueError(
            f"conv_halo: x_last of shape {x_last.shape} and first of shape {first.shape}: both must be the W-1 inputs "
            "before a token, [B, W-1, C]; short_conv_over_shards handles shards of fewer tokens"
        )
    passed_on = _from_shard(x_last, axis_name, 1)
    return jnp.where(jax.lax.axis_index(axis_name) == 0, first.astype(x_last.dtype), passed_on)


def short_conv_over_shards(
    x: Float[Array, "B T C"],
    weight: Float[Array, "C W"],
    state: Float[Array, "B W-1 C"],
    lengths: Int[Array, "B"],
    axis_name: str,
) -> tuple[Float[Array, "B T C"], Float[Array, "B W-1 C"]]:
    """`short_conv` of whole rows whose tokens are split over a mesh axis; the same inputs reach each token.

    Args:
      x: This shard's inputs; T may be less than W-1.
      weight: Taps, oldest first.
      state: The W-1 inputs before the row, the same on all shards.
      lengths: Real tokens of the whole row, from 0 up to T times the number of shards; padding stands at the end.
    Returns: This shard's y in float32; the last W-1 real inputs of the row in state's dtype, the same on all shards.
    """
    num_tokens, num_shards, reach = x.shape[1], jax.lax.axis_size(axis_name), weight.shape[-1] - 1
    state_dtype, state = state.dtype, state.astype(x.dtype)
    before = state
    # A shard of fewer than W-1 tokens passes on some of what was passed to it, so those take more rounds.
    for _ in range(min(-(-reach // num_tokens), num_shards - 1)):
        before = conv_halo(jnp.concatenate([before, x], axis=1)[:, -reach:], state, axis_name)
    start = jax.lax.axis_index(axis_name) * num_tokens
    y, _ = short_conv(x, weight, before, jnp.clip(lengths - start, 0, num_tokens))

    position = lengths[:, None] - reach + jnp.arange(reach)  # in the row; negative ones are in the state
    here = position - start
    own = jnp.take_along_axis(x, jnp.clip(here, 0, num_tokens - 1)[..., None], axis=1)
    is_here = (here >= 0) & (here < num_tokens)
    last = jax.lax.psum(jnp.where(is_here[..., None], own, 0), axis_name)  # one shard has each: the sum is exact
    old = jnp.take_along_axis(state, jnp.clip(position + reach, 0, reach - 1)[..., None], axis=1)
    return y, jnp.where((position < 0)[..., None], old, last).astype(state_dtype)
