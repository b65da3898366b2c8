"""Expert parallelism: tokens meet the experts of other devices, inside `shard_map`.

The E routed experts lie in P contiguous blocks of E / P on the devices along `expert_axes`, and each expert's hidden
width may be split further along `hidden_axes`. What travels is the narrow latent that routed experts read and write,
never the residual stream. Two forms compute the same sum:

  gathered   every device sees all tokens, applies its own experts, and partial sums are added across devices.
  exchanged  each assignment of a token to an expert is one row, sent to the expert's device and back.

`choose_form` says which is cheaper. Nothing is dropped: buffers hold the worst case. No barrier stands around a
collective, so work that does not need its result, such as shared experts, can run while it is in flight.

Use `shard_map(..., check_vma=False)`: results that are equal on several devices are not typed as such.
Source: GShard, arXiv:2006.16668, for the exchange; LatentMoE, `model.md`, for what travels.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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

    Memory: a device receives into P n min(k, E/P) rows of D, n tokens a device, and computes as many outputs; n counts
    a share where tokens are replicated over expert axes, and the tokens of all where they are split over hidden axes.
    A token's ids are distinct, as top-k gives them; where some name experts twice, and rows do not suffice, the
    results of tokens that found none are NaN.

    Args: as in `gathered`, and
      ragged: Sends exactly the rows in use, by `ragged_all_to_all`, which TPU and GPU have. Else every pair of devices
        exchanges the worst case, n min(k, E/P) rows, which runs anywhere.
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
    plan = plan_exchange(ids, num_experts, num_devices)
    # A row of this small table tells a device how many rows it gets for each of its experts, and where at home
    # their outputs belong.
    table = jnp.concatenate([plan.counts, plan.starts[:, None]], axis=1)
    table = jax.lax.all_to_all(table, axes, 0, 0, tiled=True)
    counts, starts_at_home = table[:, :-1], table[:, -1]
    there, back = ragged_offsets(plan, counts, starts_at_home, jax.lax.axis_index(axes))

    packing = pack_tight(plan) if ragged else pack_slots(plan)
    with jax.named_scope("dispatch"):
        rows = _rows_of_tokens(x, packing)
        if ragged:
            rows = _send_slices(axes, num_devices * plan.capacity, rows, there, back)
        else:
            rows = jax.lax.all_to_all(rows, axes, 0, 0, tiled=True)
    outputs = compute(rows, received_ids(counts, plan.capacity).reshape(-1, 1), *operands)[:, 0]
    outputs = outputs if hidden_axes else outputs.astype(x.dtype)
    with jax.named_scope("combine"):
        if ragged:
            outputs = _send_slices(axes, ids.size, outputs, back, there)
        else:
            outputs = jax.lax.all_to_all(outputs, axes, 0, 0, tiled=True)
        outputs = _outputs_of_assignments(outputs, packing)
    overflowed = _names(ids, num_experts) & ~plan.sent
    return jnp.where(overflowed[..., None], jnp.nan, outputs)


class ExchangePlan(NamedTuple):
    """Who gets which assignment: they are sorted by expert, hence by device, and cut into one piece per device."""

    order: Int[Array, "N*k"]  # assignments n * k + j in the order of their experts, those not sent last
    position: Int[Array, "N k"]  # where in `order` each assignment stands
    owner: Int[Array, "N k"]  # the device it goes to
    rank: Int[Array, "N k"]  # where in that device's piece it stands
    sent: Bool[Array, "N k"]
    counts: Int[Array, "P E/P"]  # rows for each expert of each device
    starts: Int[Array, "P"]  # where in `order` each device's piece begins
    capacity: int  # rows that a piece may have: N min(k, E/P)


class Packing(NamedTuple):
    """In which row of the sending buffer each assignment travels, and comes back."""

    assignment: Int[Array, "rows"]  # n * k + j of each row; any, for a row not in use
    used: Bool[Array, "rows"]
    row: Int[Array, "N k"]  # row of each assignment; 0 for one that is not sent
    sent: Bool[Array, "N k"]


class RaggedSlices(NamedTuple):
    """The index arguments of `ragged_all_to_all`, one entry per device."""

    input_offsets: Int[Array, "P"]
    send_sizes: Int[Array, "P"]
    output_offsets: Int[Array, "P"]  # at the receiver
    recv_sizes: Int[Array, "P"]


def plan_exchange(ids: Int[Array, "N k"], num_experts: int, num_devices: int) -> ExchangePlan:
    """Plans the sending of one device's assignments; ids outside 0..E-1 are not sent."""
    num_tokens, top_k = ids.shape
    experts_here = num_experts // num_devices
    capacity = num_tokens * min(top_k, experts_here)
    named = _names(ids, num_experts)
    flat = jnp.where(named, ids, num_experts).reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    position = jnp.zeros_like(order).at[order].set(jnp.arange(flat.size, dtype=jnp.int32)).reshape(ids.shape)
    counts = jnp.bincount(flat, length=num_experts + 1)[:-1].astype(jnp.int32).reshape(num_devices, experts_here)
    sizes = counts.sum(axis=1)
    starts = jnp.cumsum(sizes) - sizes
    owner = jnp.minimum(flat // experts_here, num_devices - 1).reshape(ids.shape)
    rank = position - starts[owner]
    return ExchangePlan(order, position, owner, rank, named & (rank < capacity), counts, starts, capacity)


def pack_tight(plan: ExchangePlan) -> Packing:
    """Pieces one after the other, as long as they are: N k rows."""
    used = plan.sent.reshape(-1)[plan.order]
    return Packing(plan.order, used, jnp.where(plan.sent, plan.position, 0), plan.sent)


def pack_slots(plan: ExchangePlan) -> Packing:
    """Each piece at its device's slot of `capacity` rows: P N min(k, E/P) rows."""
    rank = jnp.arange(plan.capacity, dtype=jnp.int32)
    used = rank < plan.counts.sum(axis=1, keepdims=True)
    at = jnp.where(used, plan.starts[:, None] + rank, 0).reshape(-1)
    row = jnp.where(plan.sent, plan.owner * plan.capacity + plan.rank, 0)
    return Packing(plan.order[at], used.reshape(-1), row, plan.sent)


def received_ids(counts: Int[Array, "P E/P"], capacity: int) -> Int[Array, "P capacity"]:
    """The local expert of every row received: slots hold rows sorted by expert, then rows not in use, E/P.

    Args:
      counts: Rows that each device sent for each expert of this one.
    """
    ends = jnp.cumsum(counts, axis=1)
    return (jnp.arange(capacity)[None, :, None] >= ends[:, None, :]).sum(axis=-1, dtype=jnp.int32)


def ragged_offsets(
    plan: ExchangePlan,
    counts: Int[Array, "P E/P"],
    starts_at_home: Int[Array, "P"],
    device: int | Int[Array, ""],
) -> tuple[RaggedSlices, RaggedSlices]:
    """What `ragged_all_to_all` is told on one device, on the way to the experts and on the way home.

    Pieces are packed tight at home, and lie in slots of `capacity` rows where the experts are.

    Args:
      counts: Rows that each device sends for each expert of this one.
      starts_at_home: Where in its packed rows each device's piece for this one begins.
      device: Index of this device along the expert axes: the slot of its rows on every other.
    """
    sizes = jnp.minimum(plan.counts.sum(axis=1), plan.capacity)
    received = jnp.minimum(counts.sum(axis=1), plan.capacity)
    own_slot = jnp.full_like(sizes, plan.capacity) * jnp.asarray(device, jnp.int32)
    slots = jnp.arange(sizes.size, dtype=jnp.int32) * plan.capacity
    there = RaggedSlices(plan.starts, sizes, own_slot, received)
    return there, RaggedSlices(slots, received, starts_at_home, sizes)


# The gradient of each way is the other way, whose slices are known: JAX's own rule would exchange them again.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send_slices(axes, num_rows, rows, there, back):
    """The rows [num_rows, D] that devices along `axes` sent here, zero where none came; `back` reverses `there`."""
    into = jnp.zeros((num_rows, rows.shape[1]), rows.dtype)
    return jax.lax.ragged_all_to_all(rows, into, *there, axis_name=axes)


def _send_slices_forward(axes, num_rows, rows, there, back):
    # The number of rows is kept as the shape of an array without columns.
    return _send_slices(axes, num_rows, rows, there, back), (rows[:, :0], there, back)


def _send_slices_backward(axes, num_rows, kept, gradient):
    of_rows, there, back = kept
    return _send_slices(axes, of_rows.shape[0], gradient, back, there), None, None


_send_slices.defvjp(_send_slices_forward, _send_slices_backward)


# Both gathers below take each row from one place, so that their gradients are gathers too, where autodiff would
# scatter. The first sums the gradients of a token's rows in float32.


@jax.custom_vjp
def _rows_of_tokens(x, packing):
    return x[packing.assignment // packing.row.shape[1]]


def _rows_of_tokens_backward(packing, gradient):
    of_assignments = jnp.where(packing.sent[..., None], gradient[packing.row], 0)
    return of_assignments.sum(axis=1, dtype=jnp.float32).astype(gradient.dtype), None


_rows_of_tokens.defvjp(lambda x, packing: (_rows_of_tokens(x, packing), packing), _rows_of_tokens_backward)


@jax.custom_vjp
def _outputs_of_assignments(rows, packing):
    return rows[packing.row]


def _outputs_of_assignments_backward(packing, gradient):
    flat = gradient.reshape(-1, gradient.shape[-1])
    return jnp.where(packing.used[:, None], flat[packing.assignment], 0), None


_outputs_of_assignments.defvjp(
    lambda rows, packing: (_outputs_of_assignments(rows, packing), packing), _outputs_of_assignments_backward
)


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
