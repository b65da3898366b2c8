"""Attention over a cache whose slots are split over mesh axes.

Shard s of P along `axis_names` (major to minor, such as ("seq", "tensor")) holds slots s S .. (s + 1) S - 1 of every
sequence, S the slots per shard. Each shard scores its own keys; the best `top_k` of all are found from the scores of
each shard's candidates; each shard attends to those of the best that it holds; and the partial results are joined by
their log-sum-exp. The chosen slots are those of one device, ties included. The cache stays where it is, except that a
long prefill may gather one layer's rows over the axis that also splits the heads (`choose_movement`).

Everything here runs inside `shard_map` and finds the other shards by the names of the axes. It works with `check_vma`
on or off (kernels ask for off). Differentiate the mapped function from outside: there the cotangent of a result that
several devices hold is shared among them.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxmoe.ops import query_blocks
from maxmoe.ops.expert_exchange import MESSAGE_BYTES
from maxmoe.ops.indexer import select_candidates
from maxmoe.ops.latent_cache import LatentRows
from maxmoe.ops.sparse_mla import dense_context, sparse_context

AxisNames = tuple[str, ...]

# ---- Which slots ----------------------------------------------------------------------------------------------------


def first_slot(axis_names: AxisNames, slots_per_shard: int) -> Int[Array, ""]:
    """The slot of the whole cache at which this shard begins; 0 without axes."""
    return jax.lax.axis_index(axis_names) * slots_per_shard if axis_names else jnp.int32(0)


def local_positions(positions: Int[Array, "B T"], axis_names: AxisNames, slots_per_shard: int) -> Int[Array, "B T"]:
    """The last slot of this shard that each query sees, counted from the shard's first; -1 where it sees none."""
    return jnp.clip(positions - first_slot(axis_names, slots_per_shard), -1, slots_per_shard - 1)


def select_over_shards(
    q: Float[Array, "B T I J"],
    keys: Float[Array, "L B J S"],
    layer: int | Int[Array, ""],
    head_weights: Float[Array, "B T I"],
    positions: Int[Array, "B T"],
    top_k: int,
    axis_names: AxisNames,
    implementation: str | None = None,
) -> Int[Array, "B T top_k"]:
    """This shard's part of the slots that `select_tokens` chooses from the whole cache.

    Shards exchange the scores of their best min(top_k, S) slots, never keys or slots: a list sorted by (score, slot)
    and, over shards, joined in their order takes part in the choice with a prefix, whose length is all that a shard
    has to learn. `choose_exchange` says how the scores travel. There is no gradient.

    Args:
      q, head_weights, positions: Of all queries, the same on all shards.
      keys: This shard's slots.
      axis_names: The mesh axes that split the slots, major first.
      implementation: As for `select_candidates`.
    Returns: Slots counted from the shard's first, best first, of equal scores the lower slot first; then -1.
    """
    num_slots = keys.shape[3]
    q, keys, head_weights = jax.lax.stop_gradient((q, keys, head_weights))
    here = local_positions(positions, axis_names, num_slots)
    scores, slots = select_candidates(q, keys, layer, head_weights, here, min(top_k, num_slots), implementation)
    if _num_shards(axis_names) > 1:
        with jax.named_scope("merge_candidates"):
            count = _num_selected_here(scores, top_k, axis_names)
        slots = jnp.where(jnp.arange(slots.shape[-1]) < count[..., None], slots, -1)
    return jnp.pad(slots, [(0, 0), (0, 0), (0, top_k - slots.shape[-1])], constant_values=-1)


def choose_exchange(num_queries: int, num_candidates: int, num_shards: int) -> Literal["gathered", "exchanged"]:
    """How the scores of Q queries and k candidates travel among P shards: what costs less, in bytes per device.

        gathered    (P-1) Q 4 k                            every shard merges all queries
        exchanged   (P-1)/P Q (4 k + 4) + 2 (P-1) messages  a shard merges Q/P queries and sends back the counts

    With 16 shards and k = 2048 the first is cheaper for up to 78 queries: decode. It is one collective, not two.
    """
    gathered_bytes = (num_shards - 1) * num_queries * 4 * num_candidates
    exchanged_bytes = (num_shards - 1) / num_shards * num_queries * (4 * num_candidates + 4)
    exchanged_bytes += 2 * (num_shards - 1) * MESSAGE_BYTES
    return "gathered" if gathered_bytes <= exchanged_bytes else "exchanged"


def _num_selected_here(scores, top_k, axis_names):
    """How many of this shard's candidates are among the best of all: [B, T, k] -> [B, T]."""
    num_shards, num_queries = _num_shards(axis_names), math.prod(scores.shape[:-1])
    rows = scores.reshape(num_queries, -1)
    if choose_exchange(*rows.shape, num_shards) == "gathered":
        counts = num_selected(jax.lax.all_gather(rows, axis_names), top_k)
        return counts[jax.lax.axis_index(axis_names)].reshape(scores.shape[:-1])
    rows = jnp.pad(rows, [(0, -num_queries % num_shards), (0, 0)], constant_values=-jnp.inf)
    # Leading axis: on the way there the shard that merges these queries, then the shard that the scores came from.
    lists = jax.lax.all_to_all(rows.reshape(num_shards, -1, rows.shape[1]), axis_names, 0, 0)
    counts = jax.lax.all_to_all(num_selected(lists, top_k), axis_names, 0, 0)
    return counts.reshape(-1)[:num_queries].reshape(scores.shape[:-1])


def num_selected(lists: Float[Array, "P Q k"], top_k: int) -> Int[Array, "P Q"]:
    """How many scores of each list are among the best top_k of all P lists; of equal ones those of earlier lists.

    Bit by bit finds the score of rank top_k, by counting: no sort, and nothing as large as the lists is made.

    Args:
      lists: -inf where there is no candidate. No NaN.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(lists == 0, 0, lists), jnp.uint32)  # -0 and 0 are one score
    sign = jnp.uint32(1 << 31)
    keys = jnp.where(bits >= sign, ~bits, bits | sign)  # ordered as the scores are
    keys = jnp.where(lists > -jnp.inf, keys, 0)  # below every score

    def set_bit(i, threshold):
        trial = threshold | (sign >> i.astype(jnp.uint32))
        return jnp.where(jnp.sum(keys >= trial[:, None], axis=(0, 2)) >= top_k, trial, threshold)

    start = keys[0, :, 0] & 0  # zeros, typed as varying over devices as the scores are
    threshold = jax.lax.fori_loop(0, 32, set_bit, start)  # stays 0 where fewer than top_k are candidates
    above = jnp.sum(keys > threshold[:, None], axis=2)
    equal = jnp.where(threshold > 0, jnp.sum(keys == threshold[:, None], axis=2), 0)
    room = top_k - jnp.sum(above, axis=0) - (jnp.cumsum(equal, axis=0) - equal)
    return above + jnp.clip(room, 0, equal)


# ---- Attention ------------------------------------------------------------------------------------------------------


def combine_over_shards(
    context: Float[Array, "B T H R"],
    log_sum_exp: Float[Array, "B T H"],
    axis_names: AxisNames,
    scatter_heads_over: str | None = None,
    scatter_queries_over: str | None = None,
) -> Float[Array, "B T/n H/t R"]:
    """Joins attention to the slots of each shard, as `sparse_mla.combine` does, summed over devices in float32.

    Args:
      context, log_sum_exp: This shard's, of all queries and heads; -inf where it holds nothing that a query sees.
      axis_names: The mesh axes that split the slots.
      scatter_heads_over: One of them, of size t, over which the result's heads are split; None for all heads.
      scatter_queries_over: The same for the queries.
    Returns: In context's dtype; zeros where no shard holds anything that a query sees.
    Raises: ValueError for an axis that is not among axis_names, or is given twice.
    """
    scattered = {2: scatter_heads_over, 1: scatter_queries_over}
    scattered = {dim: axis for dim, axis in scattered.items() if axis is not None}
    if len(set(scattered.values())) < len(scattered) or not set(scattered.values()) <= set(axis_names):
        raise ValueError(
            f"combine_over_shards: scatter_heads_over={scatter_heads_over!r}, scatter_queries_over="
            f"{scatter_queries_over!r}: give different ones of the axes {axis_names} that are summed over"
        )
    if not axis_names:
        return context
    top = jax.lax.pmax(jax.lax.stop_gradient(log_sum_exp), axis_names)
    weight = jnp.exp(log_sum_exp - jnp.where(jnp.isneginf(top), 0, top))
    part = jnp.where(jnp.isneginf(log_sum_exp)[..., None], 0, weight[..., None] * context.astype(jnp.float32))
    rest = tuple(axis for axis in axis_names if axis not in scattered.values())

    def over_shards(x):
        for dim, axis in scattered.items():
            x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(x, rest) if rest else x

    with jax.named_scope("combine_over_shards"):
        total, summed = over_shards(weight), over_shards(part)
    # Where anything is seen, the total is at least 1.
    return (summed / jnp.where(total == 0, 1, total)[..., None]).astype(context.dtype)


def sparse_attention_over_shards(
    q: Float[Array, "B T H R"],
    q_shared: Float[Array, "B T H r"],
    index_q: Float[Array, "B T I J"],
    index_keys: Float[Array, "L B J S"],
    head_weights: Float[Array, "B T I"],
    rows: LatentRows,
    layer: int | Int[Array, ""],
    positions: Int[Array, "B T"],
    top_k: int,
    scale: float,
    *,
    slot_axes: AxisNames,
    head_axis: str | None = None,
    query_axis: str | None = None,
    implementation: str | None = None,
    index_implementation: str | None = None,
) -> Float[Array, "B T H R"]:
    """`sparse_context` of the slots that the indexer chooses from a cache split over devices.

    Every shard meets all queries: they are gathered over a query_axis that also splits the slots, and results are
    scattered back. Over a head_axis that also splits the slots, `choose_movement` says what travels. Blocks of queries
    bound the memory, see `_in_blocks`; in the backward pass a block is computed again, but its slots are kept.

    Args:
      q, q_shared: This device's queries and heads, as in `sparse_context`.
      index_q, head_weights, positions: Of this device's queries, all index heads.
      index_keys, rows: This device's slots.
      slot_axes: The mesh axes that split the slots, major first.
      head_axis: The mesh axis that splits the heads, which may be one of slot_axes; None if each device has all.
      query_axis: The same for the queries, T; None if each device has all.
      implementation, index_implementation: As for `sparse_context` and `select_candidates`.
    Returns: Context of this device's queries and heads, in q's dtype; zeros for a query that sees nothing.
    Raises: ValueError if axes have two roles, or index_keys and rows differ in slots.
    """
    if index_keys.shape[3] != rows.num_slots:
        raise ValueError(
            f"sparse_attention_over_shards: index_keys hold {index_keys.shape[3]} slots and rows {rows.num_slots}; "
            "both must be this device's part of one cache"
        )
    roles = _roles(q, rows, top_k, slot_axes, head_axis, query_axis)
    met_rows, met_layer = _gather_rows(rows, layer, roles.rows)
    expected_keys = -(-top_k // _num_shards(roles.summed))

    def attend(q, q_shared, positions, index_q, head_weights):
        slots = select_over_shards(
            index_q, index_keys, layer, head_weights, positions, top_k, slot_axes, index_implementation
        )
        if roles.rows is not None:
            slots = _join_lists(slots, rows.num_slots, roles.rows)
        slots = checkpoint_name(slots, "selected_slots")
        return sparse_context(q, q_shared, met_rows, met_layer, slots, scale, implementation, expected_keys)

    return _in_blocks(attend, (q, q_shared, positions, index_q, head_weights), 6 * top_k, roles)


def dense_attention_over_shards(
    q: Float[Array, "B T H R"],
    q_shared: Float[Array, "B T H r"],
    rows: LatentRows,
    layer: int | Int[Array, ""],
    positions: Int[Array, "B T"],
    scale: float,
    *,
    slot_axes: AxisNames,
    head_axis: str | None = None,
    query_axis: str | None = None,
) -> Float[Array, "B T H R"]:
    """`dense_context` of a cache split over devices; arguments as in `sparse_attention_over_shards`."""
    roles = _roles(q, rows, 0, slot_axes, head_axis, query_axis)
    rows, layer = _gather_rows(rows, layer, roles.rows)

    def attend(q, q_shared, positions):
        here = local_positions(positions, roles.summed, rows.num_slots)
        return dense_context(q, q_shared, rows, layer, here, scale)

    return _in_blocks(attend, (q, q_shared, positions), 0, roles)


# ---- What travels ---------------------------------------------------------------------------------------------------

ROWS_BYTES = 2**30  # of one layer, that a device may gather


def choose_movement(
    num_queries: int, num_heads: int, rows: LatentRows, top_k: int, num_devices: int
) -> Literal["queries", "rows"]:
    """What travels over an axis of t devices that splits both heads and slots, in bytes per device and layer.

        queries  (t-1)/t Q H ((R + r) itemsize + 4 R)      with all heads to every shard, and float32 results back
        rows     (t-1) B S (R + r) itemsize + (t-1)/t 8 Q k  of the layer to every device, and the lists of slots

    Decode sends queries. Of a chunk of 8,192 tokens of K3.1 in bfloat16 on ("seq" 8, "tensor" 16), queries and results
    are 2.4 GB, and rows and lists 0.3 GB at a context of 1M. Rows travel only where those of t shards take at most
    ROWS_BYTES. The gradient of rows that travel is summed over devices in their dtype.

    Args:
      num_queries: Q, of all B sequences and of all devices along the query axis.
      num_heads: H, of all devices.
      rows: One device's part, S slots.
      top_k: k; 0 for dense attention.
    """
    row_values = rows.latent_dim + rows.shared_dim
    itemsize = rows.latent.dtype.itemsize
    queries_bytes = num_queries * num_heads * (row_values * itemsize + 4 * rows.latent_dim)
    gathered_bytes = num_devices * rows.latent.shape[1] * rows.num_slots * row_values * itemsize
    is_less = gathered_bytes + 8 * num_queries * top_k < queries_bytes  # all times (t-1)/t
    return "rows" if is_less and gathered_bytes <= ROWS_BYTES else "queries"


class _Roles(NamedTuple):
    """What this device gathers over which axis, and the axes over which results are summed."""

    queries: str | None
    heads: str | None
    rows: str | None
    summed: AxisNames


def _roles(q, rows, top_k, slot_axes, head_axis, query_axis):
    if head_axis is not None and head_axis == query_axis:
        raise ValueError(f"head_axis and query_axis are both {head_axis!r}: heads and queries need axes of their own")
    queries = query_axis if query_axis in slot_axes else None
    if head_axis not in slot_axes:
        return _Roles(queries, None, None, slot_axes)
    num_devices = jax.lax.axis_size(head_axis)
    num_queries = q.shape[0] * q.shape[1] * (jax.lax.axis_size(queries) if queries else 1)
    movement = choose_movement(num_queries, q.shape[2] * num_devices, rows, top_k, num_devices)
    # Rows of shards that do not follow one another are no cache that positions could cut; a list may name them.
    if movement == "rows" and (top_k > 0 or head_axis == slot_axes[-1]):
        return _Roles(queries, None, head_axis, tuple(axis for axis in slot_axes if axis != head_axis))
    return _Roles(queries, head_axis, None, slot_axes)


def _gather_rows(rows, layer, axis):
    """One layer's rows of all devices along an axis, as a cache of one layer; or all that is here, without an axis."""
    if axis is None:
        return rows, layer
    with jax.named_scope("gather_rows"):
        return LatentRows(*[_all_gather(part[layer][None], axis, 2) for part in rows]), 0


def _join_lists(slots, num_slots, axis):
    """The slots that the devices along an axis chose, as one list: those in the rows that `_gather_rows` joins."""
    top_k = slots.shape[-1]
    count = jnp.sum(slots >= 0, axis=-1, dtype=jnp.int32)
    index = jax.lax.axis_index(axis)
    is_before = (jnp.arange(jax.lax.axis_size(axis)) < index)[:, None, None]
    start = jnp.sum(jnp.where(is_before, jax.lax.all_gather(count, axis), 0), axis=0)
    # One more than the slot, so that 0 says none and the lists can be added. Moved to its place bit by bit of the
    # distance, because a gather of single values is slow on TPU.
    part = jnp.where(slots >= 0, slots + index * num_slots + 1, 0)
    for bit in range((top_k - 1).bit_length()):
        step = 1 << bit
        moved = jnp.pad(part[..., :-step], [(0, 0), (0, 0), (step, 0)])
        part = jnp.where((start[..., None] >> bit) & 1 == 1, moved, part)
    return jax.lax.psum(part, axis) - 1


def _in_blocks(attend: Callable, queries, extra_elements, roles):
    """Gathers queries, attends on this shard, joins and scatters back, one block of the device's queries at a time.

    A block holds `query_blocks.BUDGET` elements of queries, contexts, scores and lists: with all H = 96 heads, R = 512,
    r = 64 and k = 2048 that is 570 queries of all devices together, some 0.6 GB. `attend` has its own blocks within.
    """

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("selected_slots"))
    def block(*queries):
        with jax.named_scope("gather_queries"):
            queries = [_all_gather(x, roles.queries, 1) for x in queries]
            q, q_shared = (_all_gather(x, roles.heads, 2) for x in queries[:2])
        context, log_sum_exp = attend(q, q_shared, *queries[2:])
        return combine_over_shards(context, log_sum_exp, roles.summed, roles.heads, roles.queries)

    (batch, _, num_heads, latent_dim), shared_dim = queries[0].shape, queries[1].shape[-1]
    num_heads *= jax.lax.axis_size(roles.heads) if roles.heads else 1
    elements = batch * (num_heads * (2 * latent_dim + shared_dim) + extra_elements)
    elements *= jax.lax.axis_size(roles.queries) if roles.queries else 1
    block_size = queries_per_block(queries[0].shape[1], elements)
    return query_blocks.map_query_blocks(block, query_blocks.BUDGET // block_size, *queries)


def queries_per_block(num_queries: int, elements_per_query: int) -> int:
    """As many queries as hold `query_blocks.BUDGET` elements, or fewer so that padding adds at most a sixteenth.

    A multiple of 128, or at least of 8, where there are so many: XLA for TPU scatters a sum into parts that are no
    whole tiles by an all-reduce of it all.
    """
    most = max(1, query_blocks.BUDGET // elements_per_query)
    if most >= num_queries:
        return num_queries
    unit = next(unit for unit in (128, 8, 1) if unit <= most)

    def padding_above_a_sixteenth(block):
        return max(0, -num_queries % block - num_queries // 16)

    return min(range(most - most % unit, 0, -unit), key=padding_above_a_sixteenth)


def _all_gather(x, axis, dim):
    return x if axis is None else jax.lax.all_gather(x, axis, axis=dim, tiled=True)


def _num_shards(axis_names):
    return math.prod(jax.lax.axis_size(axis) for axis in axis_names)
