"""What decoding keeps per sequence: latent rows and index keys that grow, KDA and conv state that do not."""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from maxmoe import axes
from maxmoe.config import ModelConfig
from maxmoe.model.stacks import Mixer, plan_stacks
from maxmoe.ops.latent_cache import LatentRows, empty_rows
from maxmoe.sharding import activation_axes, activation_spec, current_mesh


@flax.struct.dataclass
class Spans:
    """The tokens of one call: row b holds `lengths[b]` real tokens from position `start[b]` on.

    Attributes:
      row: Of a batch of `num_rows`, where the call is about that row alone and has caches as `one_row` lays them out;
        None where it is about all rows.
    """

    start: Int[Array, "B"]
    lengths: Int[Array, "B"]
    row: Int[Array, ""] | None = None
    num_rows: int = flax.struct.field(pytree_node=False, default=1)

    def layer(self, superblock: Int[Array, ""]) -> Int[Array, ""]:
        """Where a superblock's state lies along the first axis of caches."""
        return superblock if self.row is None else superblock * self.num_rows + self.row

    def positions(self, num_tokens: int) -> Int[Array, "B T"]:
        """Position of each token; padding repeats that of the row's last real token, at least 0."""
        offset = jnp.minimum(jnp.arange(num_tokens), self.lengths[:, None] - 1)
        return jnp.maximum(self.start[:, None] + offset, 0)

    def real(self, num_tokens: int) -> Array:
        """Which tokens are real: bool [B, T]."""
        return jnp.arange(num_tokens) < self.lengths[:, None]

    def slots(self, num_tokens: int) -> Int[Array, "B T"]:
        """Where each token is kept; -1, which names no slot, for padding."""
        return jnp.where(self.real(num_tokens), self.start[:, None] + jnp.arange(num_tokens), -1)


@flax.struct.dataclass
class KDACache:
    """State of one KDA layer, stacked over the L superblocks that share its place."""

    conv: Float[Array, "L B 3 W-1 H K"]  # last inputs of the q, k and v convolutions
    state: Float[Array, "L B H K V"]  # float32
    window: tuple[Float[Array, "L B T _"], ...] | None = None  # see `KDALayer.read_window`; None between steps

    def read(self, layer: Int[Array, ""]) -> tuple[Array, Array]:
        """Returns conv state and recurrent state of one superblock."""
        return self.conv[layer], self.state[layer]

    def write(self, layer: Int[Array, ""], conv: Array, state: Array) -> "KDACache":
        """Replaces both states of one superblock."""
        conv = self.conv.at[layer].set(conv.astype(self.conv.dtype))
        return self.replace(conv=conv, state=self.state.at[layer].set(state))


@flax.struct.dataclass
class MLACache:
    """Rows of one full-attention layer, stacked over the L superblocks that share its place."""

    rows: LatentRows  # latent, and the key part that heads share
    index_keys: Float[Array, "L B J S"] | None  # only with an indexer

    @property
    def num_slots(self) -> int:
        """Tokens a sequence can hold."""
        return self.rows.num_slots


@flax.struct.dataclass
class PlainMLACache:
    """What an `MLACache` holds, one row per token, however a platform lays it out."""

    rows: Float[Array, "L B S R+r"]
    index_keys: Float[Array, "L B S J"] | None


@flax.struct.dataclass
class Cache:
    """State of a batch of sequences: `lengths[b]` tokens seen, and per stack and place a layer's cache."""

    lengths: Int[Array, "B"]
    stacks: tuple[tuple[KDACache | MLACache, ...], ...]

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self.lengths.shape[0]

    @functools.cached_property
    def max_len(self) -> int | None:
        """Tokens a row can hold; None if no layer keeps rows."""
        sizes = [entry.num_slots for stack in self.stacks for entry in stack if isinstance(entry, MLACache)]
        return sizes[0] if sizes else None


def make_cache(config: ModelConfig, batch: int, max_len: int, dtype: jnp.dtype) -> Cache:
    """An empty cache for `batch` sequences of up to `max_len` tokens each.

    Args:
      dtype: Of latent rows, index keys and conv inputs. The recurrent state is float32: it gains increments
        far below its own size, which bfloat16 loses.
    Raises: ValueError for sizes below 1.
    """
    if batch < 1 or max_len < 1:
        raise ValueError(f"init_cache(batch={batch}, max_len={max_len}): both must be at least 1")
    sizes = batch, max_len, dtype
    stacks = tuple(
        tuple(make_layer_cache(config, layer.mixer, stack.count, *sizes) for layer in stack.layers)
        for stack in plan_stacks(config)
    )
    return Cache(lengths=jnp.zeros(batch, jnp.int32), stacks=stacks)


def make_layer_cache(
    config: ModelConfig, mixer: Mixer, count: int, batch: int, max_len: int, dtype: jnp.dtype
) -> KDACache | MLACache:
    """The part of `make_cache` of one place in a stack of `count` superblocks."""
    kda, mla, indexer = config.kda, config.mla, config.indexer
    if mixer is Mixer.KDA:
        conv = (count, batch, 3, kda.conv_width - 1, kda.num_heads, kda.head_dim)
        state = (count, batch, kda.num_heads, kda.head_dim, kda.head_dim)
        return KDACache(conv=jnp.zeros(conv, dtype), state=jnp.zeros(state, jnp.float32))
    keys = None if indexer is None else jnp.zeros((count, batch, indexer.head_dim, max_len), dtype)
    rows = empty_rows(count, batch, max_len, mla.kv_lora_rank, mla.cache_dim - mla.kv_lora_rank, dtype)
    return MLACache(rows=rows, index_keys=keys)


def cache_shardings(mesh: Mesh | AbstractMesh, cache: Cache) -> Cache:
    """Where each array of a cache lies on a mesh: batch rows, heads of KDA states, and slots of rows are split.

    Args:
      cache: Arrays or shapes.
    """

    def entry(kept):
        if isinstance(kept, KDACache):
            conv = spec(kept.conv, None, axes.BATCH, None, None, axes.HEADS, None)
            return KDACache(conv=conv, state=spec(kept.state, None, axes.BATCH, axes.HEADS, None, None))
        slots = slot_axes(mesh, kept.rows)
        batch = activation_axes(mesh, axes.BATCH, kept.rows.latent.shape[1]) or None
        rows = NamedSharding(mesh, PartitionSpec(None, batch, slots or None))
        keys = None if kept.index_keys is None else NamedSharding(mesh, PartitionSpec(None, batch, None, slots or None))
        return MLACache(rows=LatentRows(rows, rows), index_keys=keys)

    def spec(leaf, *names):
        return NamedSharding(mesh, activation_spec(mesh, names, leaf.shape))

    stacks = tuple(tuple(entry(kept) for kept in stack) for stack in cache.stacks)
    # Lengths are whole everywhere: the host reads them, also where it has not all devices.
    return Cache(lengths=NamedSharding(mesh, PartitionSpec()), stacks=stacks)


def constrain_cache(cache: Cache) -> Cache:
    """The cache, laid out on the current mesh; on a single device the cache itself."""
    mesh = current_mesh()
    if mesh is None:
        return cache
    return jax.tree.map(jax.lax.with_sharding_constraint, cache, cache_shardings(mesh, cache))


def slot_axes(mesh: Mesh | AbstractMesh, rows: LatentRows) -> tuple[str, ...]:
    """The mesh axes over which slots are split: whole groups of rows that lie together."""
    return activation_axes(mesh, axes.SLOTS, rows.shared.shape[2])


def one_row(cache: Cache, row: Int[Array, ""]) -> Cache:
    """A batch of the one row, over the same memory: layers and rows share the first axis, see `Spans.layer`.

    Steps on it read and write that row in place, where a slice would be a copy of all that the row holds.
    """
    stacks = jax.tree.map(lambda leaf: leaf.reshape(-1, 1, *leaf.shape[2:]), cache.stacks)
    return Cache(lengths=jax.lax.dynamic_slice_in_dim(cache.lengths, row, 1), stacks=stacks)


def whole_batch(cache: Cache, kept: Cache, row: Int[Array, ""]) -> Cache:
    """The inverse of `one_row`: the batch that `cache` was, with the row as it is in `kept`."""
    stacks = jax.tree.map(lambda leaf, new: new.reshape(leaf.shape), cache.stacks, kept.stacks)
    lengths = jax.lax.dynamic_update_slice_in_dim(cache.lengths, kept.lengths, row, 0)
    return constrain_cache(Cache(lengths=lengths, stacks=stacks))


def open_windows(config: ModelConfig, cache: Cache, num_tokens: int, dtype: jnp.dtype) -> Cache:
    """The cache with room for the inputs of its KDA layers' recurrences: q, k, v, decay and step size of each token."""
    sizes = (config.kda.inner_dim,) * 4 + (config.kda.num_heads,)

    def entry(kept):
        if not isinstance(kept, KDACache):
            return kept
        lead = (*kept.state.shape[:2], num_tokens)
        return kept.replace(window=tuple(jnp.zeros((*lead, size), dtype) for size in sizes))

    return _map_entries(entry, cache)


def close_windows(cache: Cache) -> Cache:
    """The inverse of `open_windows`."""
    return _map_entries(lambda kept: kept.replace(window=None) if isinstance(kept, KDACache) else kept, cache)


def clear_row(cache: Cache, row: Int[Array, ""]) -> Cache:
    """The batch with one row as if nothing had been there: length, KDA and conv state are zero.

    What lies in rows beyond a sequence's length is never read, whatever it is, so it stays.
    """

    def entry(kept):
        if not isinstance(kept, KDACache):
            return kept
        return kept.replace(conv=kept.conv.at[:, row].set(0), state=kept.state.at[:, row].set(0))

    return constrain_cache(_map_entries(entry, cache.replace(lengths=cache.lengths.at[row].set(0))))


def to_plain(cache: Cache) -> Cache:
    """The cache with a `PlainMLACache` for each `MLACache`: for keeping it, and for changing its capacity."""

    def entry(kept):
        if not isinstance(kept, MLACache):
            return kept
        lead = (*kept.rows.latent.shape[:2], kept.num_slots)
        rows = jnp.concatenate([part.reshape(*lead, -1) for part in kept.rows], axis=-1)
        keys = None if kept.index_keys is None else jnp.swapaxes(kept.index_keys, 2, 3)
        return PlainMLACache(rows=rows, index_keys=keys)

    return _map_entries(entry, cache)


def from_plain(cache: Cache, latent_dim: int) -> Cache:
    """The inverse of `to_plain`, for rows of `latent_dim` latent values."""

    def entry(kept):
        if not isinstance(kept, PlainMLACache):
            return kept
        count, batch, num_slots, width = kept.rows.shape
        sizes = (count, batch, num_slots, latent_dim, width - latent_dim)
        shapes = jax.eval_shape(lambda: empty_rows(*sizes, kept.rows.dtype))
        parts = jnp.split(kept.rows, [latent_dim], axis=-1)
        rows = LatentRows(*(part.reshape(shape.shape) for part, shape in zip(parts, shapes, strict=True)))
        keys = None if kept.index_keys is None else jnp.swapaxes(kept.index_keys, 2, 3)
        return MLACache(rows=rows, index_keys=keys)

    return _map_entries(entry, cache)


def _map_entries(function, cache):
    return cache.replace(stacks=tuple(tuple(function(kept) for kept in stack) for stack in cache.stacks))


def cache_bytes(config: ModelConfig, batch: int, max_len: int, dtype: jnp.dtype) -> int:
    """Bytes that `make_cache` would allocate, without allocating."""
    shapes = jax.eval_shape(lambda: make_cache(config, batch, max_len, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
