"""Expert parallelism: tokens meet the experts of other devices, inside `shard_map`.

The E routed experts lie in P contiguous blocks of E / P on the devices along `expert_axes`, and each expert's hidden
width may be split further along `hidden_axes`. What travels is the narrow latent that routed experts read and write,
never the residual stream. Two forms compute the same sum:

  gathered   every device sees all tokens, applies its own experts, and partial sums are added across devices.
  exchanged  each assignment of a token to an expert is one row, sent to the expert's device and back; see
             `exchange_rounds`.

`choose_form` says which is cheaper. Nothing is dropped. No barrier stands around a collective of the gathered form, so
work that does not need its result, such as shared experts, can run while it is in flight.

Use `shard_map(..., check_vma=False)`: results that are equal on several devices are not typed as such.
Source: GShard, arXiv:2006.16668, for the exchange; LatentMoE, `model.md`, for what travels.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmoe.ops import exchange_rounds as rounds
from maxmoe.ops.experts import weighted_sum

# compute(x [M, D], ids [M, k'], *operands) -> [M, k', D]: outputs of this device's experts 0..E/P-1. An id outside that
# range names none, and what stands there means nothing. With `hidden_axes` it gives float32 partial outputs.
Compute = Callable[..., Array]

# What the links of a v5p carry, 4,800 Gb/s (cloud.google.com/tpu/docs/v5p), in 0.5 us: an assumption for what it takes
# to start one more message, a tenth of the 4.5 to 5.5 us that a whole ppermute takes (marin-community/marin #6736).
MESSAGE_BYTES = 300_000


def choose_form(
    num_tokens: int,
    top_k: int,
    latent_dim: int,
    itemsize: int,
    num_devices: int,
    message_bytes: int = MESSAGE_BYTES,
) -> Literal["gathered", "exchanged"]:
    """The form that costs less, in bytes per device, for N tokens of all P devices together.

        gathered   (P-1)/P N D (itemsize + 4)
        exchanged  (P-1)/P N D 2 k/P itemsize + 2 (P-1) messages

    The first gathers N rows of D and scatters as many float32 sums. The second sends N k / P rows and takes as many
    back, each time with P - 1 partners. Each is three collectives one after the other: two gathers and a sum, or an
    exchange of counts, the way there and the way back. With k = 16 in bfloat16 the first moves fewer bytes for any
    number of tokens on up to 10 devices.

    Args:
      num_tokens: N, over all devices that share the experts.
      latent_dim: D, of `itemsize` bytes each.
      num_devices: P, over which the experts are split.
      message_bytes: What a device's links carry in the time that it takes to start one message.
    """
    of_rows = (num_devices - 1) / num_devices * num_tokens * latent_dim
    gathered_bytes = of_rows * (itemsize + 4)
    exchanged_bytes = of_rows * 2 * top_k / num_devices * itemsize + 2 * (num_devices - 1) * message_bytes
    return "gathered" if gathered_bytes <= exchanged_bytes else "exchanged"


def gathered(
    x: Float[Array, "N D"],
    ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    compute: Compute,
    num_experts: int,
    *,
    expert_axes: Sequence[str],
    hidden_axes: Sequence[str] = (),
    token_axes: Sequence[str] = (),
    operands: tuple = (),
) -> Float[Array, "N D"]:
    """sum_k weights_k * expert_k(x), every device applying its own experts to the tokens of all.

    The sum runs in float32, first over a device's experts in the order of k, then over devices, and is rounded once.
    Unlike one device, it does not round an expert's output to x's dtype where `compute` gives float32. `compute` is
    asked for min(k, E/P) experts of every token. A token's ids are distinct, as top-k gives them; where one names
    experts twice, and of one device more than that, its result is NaN.

    Args:
      x: This device's tokens.
      ids: An id outside 0..E-1 names no expert and adds nothing.
      compute: See `Compute`; `operands` are its further arguments, such as the experts of this device.
      expert_axes: Mesh axes that split the experts, major first.
      hidden_axes: Mesh axes that split the hidden width of every expert.
      token_axes: Mesh axes that split the tokens; over all other axes they are replicated.
    Raises: ValueError if the experts do not divide, an axis is in both roles, or shapes do not fit.
    """
    experts_here = _experts_here(x, ids, weights, num_experts, expert_axes, hidden_axes)
    split = tuple(axis for axis in (*expert_axes, *hidden_axes) if axis in token_axes)
    rest = tuple(axis for axis in (*expert_axes, *hidden_axes) if axis not in token_axes)
    named = _names(ids, num_experts)
    with jax.named_scope("gather_tokens"):
        x_all = _all_gather(x, split)
        # One gather for both: float32 holds every id.
        asked = jnp.concatenate([jnp.where(named, ids, num_experts).astype(jnp.float32), weights], axis=1)
        ids_all, weights_all = jnp.split(_all_gather(asked, split), 2, axis=1)
    first = jax.lax.axis_index(tuple(expert_axes)) * experts_here if expert_axes else 0
    local = ids_all.astype(jnp.int32) - first
    here = _names(local, experts_here)
    local = jnp.where(here, local, experts_here)
    if experts_here < local.shape[1]:
        # Most columns would name none.
        columns = jnp.argsort(~here, axis=1, stable=True)[:, :experts_here]
        local, weights_all = (jnp.take_along_axis(array, columns, axis=1) for array in (local, weights_all))
    outputs = compute(x_all, local, *operands).astype(jnp.float32)
    overflowed = here.sum(axis=1) > local.shape[1]
    partial_sum = weighted_sum(outputs, local, weights_all, experts_here)
    partial_sum = jnp.where(overflowed[:, None], jnp.nan, partial_sum)
    with jax.named_scope("sum_over_devices"):
        summed = _psum_scatter(partial_sum, split)
        summed = jax.lax.psum(summed, rest) if rest else summed
    return summed.astype(x.dtype)


def exchanged(
    x: Float[Array, "N D"],
    ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    compute: Compute,
    num_experts: int,
    *,
    expert_axes: Sequence[str],
    hidden_axes: Sequence[str] = (),
    token_axes: Sequence[str] = (),
    ragged: bool,
    operands: tuple = (),
) -> Float[Array, "N D"]:
    """sum_k weights_k * expert_k(x), each assignment computed where its expert lies and joined at home.

    Outputs come back in x's dtype and are summed in float32 in the order of k, so that the result is that of one
    device, up to how `compute` groups its rows. With `hidden_axes` the float32 partial outputs come back and are
    summed before they are rounded. Where tokens are replicated over some of these axes, each device takes a share of
    them, and the results are gathered at the end.

    Memory: a device keeps n k rows of D of its own and receives into about 2 n k more, n tokens a device, at a time;
    n counts a share where tokens are replicated over expert axes, and the tokens of all where they are split over
    hidden axes. The more uneven the routing, the more rounds there are.

    Args: as in `gathered`, and
      ragged: Sends exactly the rows in use, by `ragged_all_to_all`, which TPU and GPU have. Else every pair of devices
        exchanges all rows of a round, in use or not, which runs anywhere.
    Raises: ValueError if the experts do not divide, an axis is in both roles, or shapes do not fit.
    """
    _experts_here(x, ids, weights, num_experts, expert_axes, hidden_axes)
    shared_experts = tuple(axis for axis in expert_axes if axis not in token_axes)
    shared_hidden = tuple(axis for axis in hidden_axes if axis not in token_axes)
    split_hidden = tuple(axis for axis in hidden_axes if axis in token_axes)
    shared = shared_experts + shared_hidden

    num_tokens = x.shape[0]
    pad = ((0, -num_tokens % _size(shared)), (0, 0))
    x, weights = jnp.pad(x, pad), jnp.pad(weights, pad)
    ids = jnp.where(_names(ids, num_experts), ids, num_experts).astype(jnp.int32)
    ids = jnp.pad(ids, pad, constant_values=num_experts)

    rows, rows_ids = (_all_gather(_share(array, shared_experts), split_hidden) for array in (x, ids))
    outputs = _outputs_of_owners(
        rows, rows_ids, compute, operands, num_experts, tuple(expert_axes), ragged, hidden_axes
    )
    if hidden_axes:
        with jax.named_scope("sum_over_hidden"):
            outputs = _psum_scatter(_psum_scatter(outputs.astype(jnp.float32), split_hidden), shared_hidden)
    own_ids, own_weights = _share(ids, shared), _share(weights, shared)
    joined = weighted_sum(outputs.astype(x.dtype), own_ids, own_weights, num_experts)
    return _all_gather(joined, shared)[:num_tokens]


def _outputs_of_owners(x, ids, compute, operands, num_experts, axes, ragged, hidden_axes):
    """compute's outputs [N, k, D] for all assignments of this device's tokens, from the devices of their experts."""
    num_devices = _size(axes)
    if num_devices == 1:
        return compute(x, ids, *operands)
    exchange = rounds.Exchange(
        compute=compute,
        axes=axes,
        window_rows=rounds.window_rows(*ids.shape, num_experts, num_devices),
        ragged=ragged,
        dtype=jnp.dtype(jnp.float32 if hidden_axes else x.dtype),
    )
    plan = rounds.sort_by_expert(ids, num_experts, num_devices)
    pieces = rounds.meet(plan, axes, exchange.window_rows)
    rows = rounds.rows_of_tokens(x, plan)
    return rounds.outputs_of_assignments(rounds.outputs_of_rows(exchange, rows, pieces, operands), plan)


def _experts_here(x, ids, weights, num_experts, expert_axes, hidden_axes):
    """How many experts each device has, once the arguments are found to fit."""
    both = set(expert_axes) & set(hidden_axes)
    if both:
        raise ValueError(f"mesh axes {sorted(both)} are in expert_axes and in hidden_axes; each may be in one")
    if ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"x {x.shape}, ids {ids.shape} and weights {weights.shape} do not fit: give [N, D], [N, k] and [N, k]"
        )
    num_devices = _size(expert_axes)
    if num_experts % num_devices:
        fitting = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ValueError(
            f"{num_experts} experts do not divide over {num_devices} devices of mesh axes {' x '.join(expert_axes)}; "
            f"numbers of devices that do: {', '.join(map(str, fitting))}"
        )
    return num_experts // num_devices


def _names(ids, num_experts):
    return (ids >= 0) & (ids < num_experts)


def _size(axes):
    size = 1
    for axis in axes:
        size *= jax.lax.axis_size(axis)
    return size


def _share(array, axes):
    """This device's contiguous part of rows that all devices along `axes` hold."""
    if not axes:
        return array
    rows = array.shape[0] // _size(axes)
    return jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(axes) * rows, rows)


def _all_gather(array, axes):
    return jax.lax.all_gather(array, axes, tiled=True) if axes else array


def _psum_scatter(array, axes):
    return jax.lax.psum_scatter(array, axes, scatter_dimension=0, tiled=True) if axes else array
