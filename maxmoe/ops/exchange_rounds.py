"""Rows on their way to the devices of their experts and back, a window at a time, inside `shard_map`.

Every assignment of a token to an expert is a row. A device's rows are sorted by expert, which cuts them into one piece
for each of the P devices. In a round, C rows of every piece travel, are computed and come back, so that a device keeps
P C rows however uneven the routing is. The longest piece of any device decides how many rounds there are: one, as a
rule, for C is twice the mean. Nothing is dropped.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Sorted(NamedTuple):
    """One device's assignments in the order of their experts, those that name none last."""

    order: Int[Array, "N*k"]  # n * k + j of each row
    used: Bool[Array, "N*k"]
    row: Int[Array, "N k"]  # of each assignment; 0 for one that names no expert
    named: Bool[Array, "N k"]
    counts: Int[Array, "P E/P"]  # rows for each expert of each device
    starts: Int[Array, "P"]  # the first row of each device's piece


class Pieces(NamedTuple):
    """What a device knows of the pieces that it sends and of those that it gets, one entry per device."""

    starts: Int[Array, "P"]
    sizes: Int[Array, "P"]
    ends: Int[Array, "P E/P"]  # in the piece that each device sends here, the end of each expert's rows
    starts_at_home: Int[Array, "P"]
    device: Int[Array, ""]  # of this one
    num_rounds: Int[Array, ""]


class Window(NamedTuple):
    """The index arguments of `ragged_all_to_all` on the way there; on the way back the last two come first.

    Rows lie tight at home, and in slots of C rows where the experts are.
    """

    home_offsets: Int[Array, "P"]
    send_sizes: Int[Array, "P"]
    slot_offsets: Int[Array, "P"]  # at the receiver
    recv_sizes: Int[Array, "P"]


class Exchange(NamedTuple):
    """How rows travel and what happens to them.

    Attributes:
      compute: compute(rows [M, D], ids [M, 1], *operands) -> [M, 1, D].
      axes: Mesh axes that split the experts, major first.
      window_rows: C.
      ragged: Sends the rows in use by `ragged_all_to_all`, which CPUs lack. Else all C of each piece travel.
      dtype: Of what comes back.
    """

    compute: Callable[..., Array]
    axes: tuple[str, ...]
    window_rows: int
    ragged: bool
    dtype: jnp.dtype


def window_rows(num_tokens: int, top_k: int, num_experts: int, num_devices: int) -> int:
    """C for N tokens a device: twice the mean rows of a piece and a few, but no more than tokens can fill."""
    mean = -(-num_tokens * top_k // num_devices)
    return min(num_tokens * min(top_k, num_experts // num_devices), 2 * mean + 16)


def sort_by_expert(ids: Int[Array, "N k"], num_experts: int, num_devices: int) -> Sorted:
    """Sorts one device's assignments; ids outside 0..E-1 name no expert."""
    named = (ids >= 0) & (ids < num_experts)
    flat = jnp.where(named, ids, num_experts).reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    row = jnp.zeros_like(order).at[order].set(jnp.arange(flat.size, dtype=jnp.int32)).reshape(ids.shape)
    counts = jnp.bincount(flat, length=num_experts + 1)[:-1].astype(jnp.int32).reshape(num_devices, -1)
    sizes = counts.sum(axis=1)
    used = named.reshape(-1)[order]
    return Sorted(order, used, jnp.where(named, row, 0), named, counts, jnp.cumsum(sizes) - sizes)


def meet(plan: Sorted, axes: tuple[str, ...], rows_per_round: int) -> Pieces:
    """Tells every device along `axes` what it will get; they agree on the number of rounds."""
    table = jnp.concatenate([plan.counts, plan.starts[:, None]], axis=1)
    table = jax.lax.all_to_all(table, axes, 0, 0, tiled=True)
    sizes = plan.counts.sum(axis=1)
    longest = jax.lax.pmax(sizes.max(), axes)
    return Pieces(
        starts=plan.starts,
        sizes=sizes,
        ends=jnp.cumsum(table[:, :-1], axis=1),
        starts_at_home=table[:, -1],
        device=jax.lax.axis_index(axes),
        num_rounds=-(-longest // rows_per_round),
    )


def window_of(pieces: Pieces, step: int | Int[Array, ""], rows_per_round: int) -> tuple[Window, Window]:
    """What travels in a round, as the sender's offsets and as the receiver's, on the way there and on the way back."""
    first = step * rows_per_round
    send_sizes = jnp.clip(pieces.sizes - first, 0, rows_per_round)
    recv_sizes = jnp.clip(pieces.ends[:, -1] - first, 0, rows_per_round)
    # An empty slice may begin anywhere, but not beyond the rows.
    own_rows = jnp.where(send_sizes > 0, pieces.starts + first, 0)
    rows_at_home = jnp.where(recv_sizes > 0, pieces.starts_at_home + first, 0)
    slots = jnp.arange(send_sizes.size, dtype=jnp.int32) * rows_per_round
    own_slot = jnp.full_like(slots, rows_per_round) * jnp.asarray(pieces.device, jnp.int32)
    return Window(own_rows, send_sizes, own_slot, recv_sizes), Window(slots, recv_sizes, rows_at_home, send_sizes)


def ids_of_window(pieces: Pieces, step: int | Int[Array, ""], rows_per_round: int) -> Int[Array, "P C"]:
    """The local expert of every row that arrives in a round; E/P for a row not in use."""
    row = step * rows_per_round + jnp.arange(rows_per_round)
    return (row[None, :, None] >= pieces.ends[:, None, :]).sum(axis=-1, dtype=jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def outputs_of_rows(
    exchange: Exchange, rows: Float[Array, "N*k D"], pieces: Pieces, operands: tuple
) -> Float[Array, "N*k D"]:
    """Each row's output, from the device of its expert; zero for rows that name none.

    Differentiable in rows and operands. Nothing of a round is kept: its rows are sent again for the gradient.
    """

    def one_round(step, outputs):
        received = _there(exchange, rows, pieces, step)
        return _back(exchange, _computed(exchange, pieces, step, received, operands), outputs, pieces, step)

    return jax.lax.fori_loop(0, pieces.num_rounds, one_round, jnp.zeros(rows.shape, exchange.dtype))


def _outputs_forward(exchange, rows, pieces, operands):
    return outputs_of_rows(exchange, rows, pieces, operands), (rows, pieces, operands)


def _outputs_backward(exchange, kept, gradient):
    rows, pieces, operands = kept
    leaves, tree = jax.tree.flatten(operands)
    places = [place for place, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def one_round(step, carry):
        d_rows, sums = carry
        received = _there(exchange, rows, pieces, step)
        d_outputs = _there(exchange, gradient, pieces, step)

        def computed(received, *some):
            whole = list(leaves)
            for place, leaf in zip(places, some, strict=True):
                whole[place] = leaf
            return _computed(exchange, pieces, step, received, jax.tree.unflatten(tree, whole))

        _, pull = jax.vjp(computed, received, *(leaves[place] for place in places))
        d_received, *d_leaves = pull(d_outputs)
        sums = tuple(total + d.astype(total.dtype) for total, d in zip(sums, d_leaves, strict=True))
        return _back(exchange, d_received, d_rows, pieces, step), sums

    sums = tuple(jnp.zeros(leaves[p].shape, jnp.promote_types(leaves[p].dtype, jnp.float32)) for p in places)
    d_rows, sums = jax.lax.fori_loop(0, pieces.num_rounds, one_round, (jnp.zeros_like(rows), sums))
    d_leaves = [None] * len(leaves)
    for place, total in zip(places, sums, strict=True):
        d_leaves[place] = total.astype(leaves[place].dtype)
    return d_rows, None, jax.tree.unflatten(tree, d_leaves)


outputs_of_rows.defvjp(_outputs_forward, _outputs_backward)


def _computed(exchange, pieces, step, received, operands):
    ids = ids_of_window(pieces, step, exchange.window_rows).reshape(-1, 1)
    return exchange.compute(received, ids, *operands)[:, 0].astype(exchange.dtype)


def _there(exchange, rows, pieces, step):
    """The rows [P C, D] that devices sent here; zero where none came."""
    there, _ = window_of(pieces, step, exchange.window_rows)
    with jax.named_scope("dispatch"):
        if exchange.ragged:
            into = jnp.zeros((there.send_sizes.size * exchange.window_rows, rows.shape[1]), rows.dtype)
            return jax.lax.ragged_all_to_all(rows, into, *there, axis_name=exchange.axes)
        at, used = _rows_of_slots(there, exchange.window_rows)
        return jax.lax.all_to_all(jnp.where(used[:, None], rows[at], 0), exchange.axes, 0, 0, tiled=True)


def _back(exchange, computed, into, pieces, step):
    """`into` [N*k, D] with what came back for the rows of a round."""
    there, back = window_of(pieces, step, exchange.window_rows)
    with jax.named_scope("combine"):
        if exchange.ragged:
            return jax.lax.ragged_all_to_all(computed, into, *back, axis_name=exchange.axes)
        at, used = _rows_of_slots(there, exchange.window_rows)
        came = jax.lax.all_to_all(computed, exchange.axes, 0, 0, tiled=True)
        return into.at[jnp.where(used, at, into.shape[0])].set(came, mode="drop")


def _rows_of_slots(there, rows_per_round):
    """Which row lies in each slot of what is sent [P C], and whether it is in use."""
    rank = jnp.arange(rows_per_round)
    used = (rank < there.send_sizes[:, None]).reshape(-1)
    return jnp.where(used, (there.home_offsets[:, None] + rank).reshape(-1), 0), used


# Both gathers below take each row from one place, so that their gradients are gathers too, where autodiff would
# scatter. The first sums the gradients of a token's rows in float32.


@jax.custom_vjp
def rows_of_tokens(x: Float[Array, "N D"], plan: Sorted) -> Float[Array, "N*k D"]:
    """Each row is its assignment's token."""
    return x[plan.order // plan.row.shape[1]]


def _rows_of_tokens_backward(plan, gradient):
    of_assignments = jnp.where(plan.named[..., None], gradient[plan.row], 0)
    return of_assignments.sum(axis=1, dtype=jnp.float32).astype(gradient.dtype), None


rows_of_tokens.defvjp(lambda x, plan: (rows_of_tokens(x, plan), plan), _rows_of_tokens_backward)


@jax.custom_vjp
def outputs_of_assignments(rows: Float[Array, "N*k D"], plan: Sorted) -> Float[Array, "N k D"]:
    """The inverse order; what stands for an assignment that names no expert means nothing."""
    return rows[plan.row]


def _outputs_of_assignments_backward(plan, gradient):
    flat = gradient.reshape(-1, gradient.shape[-1])
    return jnp.where(plan.used[:, None], flat[plan.order], 0), None


outputs_of_assignments.defvjp(
    lambda rows, plan: (outputs_of_assignments(rows, plan), plan), _outputs_of_assignments_backward
)
