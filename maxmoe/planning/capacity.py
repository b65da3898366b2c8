"""How many bytes each device keeps between steps: weights, caches, optimizer, as declarations and shardings say."""

import dataclasses
from typing import Any

import jax

from maxmoe.model.cache import Cache, KDACache, MLACache
from maxmoe.planning.placement import device_bytes
from maxmoe.training.step import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """Bytes on one device.

    Attributes:
      weights_bytes: As the step takes them; of training the masters.
      expert_bytes: The part of the weights that routed experts take.
      state_bytes: The part of the cache that does not grow with the context: recurrent and conv state.
      key_bytes: The part that is index keys.
      row_bytes: The part that is latent rows.
    """

    weights_bytes: int
    expert_bytes: int
    state_bytes: int
    key_bytes: int
    row_bytes: int
    optimizer_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        """All of the cache; the counter of each sequence's tokens too small to name."""
        return self.state_bytes + self.key_bytes + self.row_bytes

    @property
    def resident_bytes(self) -> int:
        """What must fit before anything is computed."""
        return self.weights_bytes + self.optimizer_bytes + self.cache_bytes

    def sequences_that_fit(self, left_bytes: float, local_sequences: float) -> int:
        """How many more sequences of the same context the left bytes of each device hold, over the whole mesh.

        Args:
          local_sequences: Sequences whose caches take `cache_bytes` of every device: a batch over the whole mesh.
        """
        if left_bytes <= 0 or not self.cache_bytes:
            return 0
        return int(left_bytes * local_sequences // self.cache_bytes)


def capacity(params: Any, cache: Cache | None) -> Capacity:
    """Adds up placed weights and a placed cache; None for a step without one."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sizes = [(is_expert(path), device_bytes(leaf)) for path, leaf in leaves]
    parts = dict.fromkeys(("state_bytes", "key_bytes", "row_bytes"), 0)
    entries = [] if cache is None else [entry for stack in cache.stacks for entry in stack]
    for entry in entries:
        if isinstance(entry, KDACache):
            parts["state_bytes"] += device_bytes(entry.conv) + device_bytes(entry.state)
        elif isinstance(entry, MLACache):
            parts["row_bytes"] += sum(map(device_bytes, jax.tree.leaves(entry.rows)))
            parts["key_bytes"] += device_bytes(entry.index_keys) if entry.index_keys is not None else 0
        else:
            raise NotImplementedError(f"a cache of kind {type(entry).__name__} has no arithmetic here; add it")
    if cache is not None:
        parts["state_bytes"] += device_bytes(cache.lengths)
    return Capacity(
        weights_bytes=sum(size for _, size in sizes), expert_bytes=sum(size for mine, size in sizes if mine), **parts
    )


def training_capacity(state: TrainState) -> Capacity:
    """Adds up a placed training state."""
    held = capacity(state.masters, None)
    return dataclasses.replace(held, optimizer_bytes=sum(map(device_bytes, jax.tree.leaves(state.optimizer))))


def is_expert(path: Any) -> bool:
    """Whether a weight's path names routed experts, which only the tokens sent to them read."""
    return any(str(getattr(key, "key", "")).startswith("experts_") for key in path)
