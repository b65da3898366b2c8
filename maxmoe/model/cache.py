"""What decoding keeps per sequence: latent rows and index keys that grow, KDA and conv state that do not."""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmoe.config import ModelConfig
from maxmoe.model.stacks import Mixer, plan_stacks


@flax.struct.dataclass
class Spans:
    """The tokens of one call: row b holds `lengths[b]` real tokens from position `start[b]` on."""

    start: Int[Array, "B"]
    lengths: Int[Array, "B"]

    def positions(self, num_tokens: int) -> Int[Array, "B T"]:
        """Position of each token; padding repeats that of the row's last real token, at least 0."""
        offset = jnp.minimum(jnp.arange(num_tokens), self.lengths[:, None] - 1)
        return jnp.maximum(self.start[:, None] + offset, 0)

    def real(self, num_tokens: int) -> Array:
        """Which tokens are real: bool [B, T]."""
        return jnp.arange(num_tokens) < self.lengths[:, None]


@flax.struct.dataclass
class KDACache:
    """State of one KDA layer, stacked over the L superblocks that share its place."""

    conv: Float[Array, "L B 3 W-1 C"]  # last inputs of the q, k and v convolutions
    state: Float[Array, "L B H K V"]  # float32

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

    rows: Float[Array, "L B S R+r"]  # latent, then the shared key part
    index_keys: Float[Array, "L B S J"] | None  # only with an indexer

    def append(
        self, layer: Int[Array, ""], spans: Spans, rows: Float[Array, "B T R+r"], index_keys: Array | None
    ) -> "MLACache":
        """Writes the call's tokens at their positions; padding, and what lies beyond the cache, is dropped."""
        num_tokens, num_slots = rows.shape[1], self.rows.shape[2]
        slots = jnp.where(spans.real(num_tokens), spans.start[:, None] + jnp.arange(num_tokens), num_slots)
        batch = jnp.arange(rows.shape[0])[:, None]

        def put(cached, new):
            return cached.at[layer, batch, slots].set(new.astype(cached.dtype), mode="drop")

        keys = None if self.index_keys is None else put(self.index_keys, index_keys)
        return self.replace(rows=put(self.rows, rows), index_keys=keys)


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
        sizes = [entry.rows.shape[2] for stack in self.stacks for entry in stack if isinstance(entry, MLACache)]
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
    kda, mla, indexer = config.kda, config.mla, config.indexer

    def entry(mixer: Mixer, count: int):
        if mixer is Mixer.KDA:
            conv = (count, batch, 3, kda.conv_width - 1, kda.inner_dim)
            state = (count, batch, kda.num_heads, kda.head_dim, kda.head_dim)
            return KDACache(conv=jnp.zeros(conv, dtype), state=jnp.zeros(state, jnp.float32))
        keys = None if indexer is None else jnp.zeros((count, batch, max_len, indexer.head_dim), dtype)
        return MLACache(rows=jnp.zeros((count, batch, max_len, mla.cache_dim), dtype), index_keys=keys)

    stacks = tuple(tuple(entry(layer.mixer, stack.count) for layer in stack.layers) for stack in plan_stacks(config))
    return Cache(lengths=jnp.zeros(batch, jnp.int32), stacks=stacks)


def cache_bytes(config: ModelConfig, batch: int, max_len: int, dtype: jnp.dtype) -> int:
    """Bytes that `make_cache` would allocate, without allocating."""
    shapes = jax.eval_shape(lambda: make_cache(config, batch, max_len, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
