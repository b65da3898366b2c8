"""Routed experts of all layers in a fixed number of places in memory, read when a router asks for them.

The experts of every layer have one shape, so a place holds any expert of any layer. All places are one array that is
written in place: computing with an expert copies nothing, and the array's size is the bound.
"""

import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from maxmoe.checkpoint.hf_names import EXPERTS, layer_group
from maxmoe.checkpoint.weight_source import WeightSource
from maxmoe.config import MXFP4_GROUP, MoEConfig
from maxmoe.ops.experts import ExpertWeights

NUM_READERS = 8  # experts that are read at once, and as many at most lie beside the places on their way into them


@dataclasses.dataclass
class StreamStats:
    """What streaming has read and spared since the engine was made.

    Attributes:
      expert_hits: Experts that a layer needed for a step and found in a place. An expert that several tokens of the
        step are routed to counts once.
      expert_misses: Those that had to be read.
      expert_bytes, dense_bytes: Read of routed experts, and of everything else, as the source stores them.
    """

    expert_hits: int = 0
    expert_misses: int = 0
    expert_bytes: int = 0
    dense_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits per lookup, 0 to 1; 0 before the first."""
        return self.expert_hits / max(1, self.expert_hits + self.expert_misses)

    @property
    def bytes_read(self) -> int:
        """All bytes read from the source."""
        return self.expert_bytes + self.dense_bytes

    def summary(self) -> str:
        """One line for a log."""
        lookups = self.expert_hits + self.expert_misses
        return (
            f"experts: {self.expert_hits} of {lookups} lookups ({self.hit_rate:.1%}) found in the cache; read "
            f"{self.expert_bytes / 2**30:.3f} GiB of experts, {self.dense_bytes / 2**30:.3f} GiB of other weights"
        )


def expert_shapes(config: MoEConfig) -> ExpertWeights:
    """Shapes of one expert's packed weights and scales."""
    up, down = (config.expert_dim, config.latent_dim), (config.latent_dim, config.expert_dim)
    pairs = [((out, inner // 2), (out, inner // MXFP4_GROUP)) for out, inner in (up, up, down)]
    return ExpertWeights(*(shape for pair in pairs for shape in pair))


class ExpertCache:
    """The least recently used expert makes room for a new one.

    Attributes:
      expert_bytes: Of one expert.
      num_places: Experts that fit.
      weights: All places, as a stack of one layer: `weights[0, place]`. Valid until experts are fetched again.
    """

    def __init__(self, source: WeightSource, config: MoEConfig, num_layers: int, max_bytes: int, stats: StreamStats):
        """Allocates all places.

        Args:
          num_layers: Layers that have experts: no more places are made than the model has experts.
          max_bytes: That all places may take together.
          stats: Where hits, misses and bytes are counted.
        Raises: ValueError if the experts of one token do not fit.
        """
        self.source, self.config, self.stats = source, config, stats
        self.shapes = expert_shapes(config)
        self.expert_bytes = sum(int(np.prod(shape)) for shape in self.shapes)
        self.num_places = min(max_bytes // self.expert_bytes, num_layers * config.num_experts)
        if num_layers and self.num_places < config.top_k:
            raise ValueError(
                f"expert_cache_bytes={max_bytes} holds {self.num_places} experts of {self.expert_bytes} bytes; one "
                f"token of a layer needs {config.top_k}: give at least {config.top_k * self.expert_bytes} bytes"
            )
        self.weights = ExpertWeights(*(jnp.zeros((1, self.num_places, *shape), jnp.uint8) for shape in self.shapes))
        self._place_of: collections.OrderedDict[tuple[int, int], int] = collections.OrderedDict()  # oldest first
        self._free = list(reversed(range(self.num_places)))  # the next to be used last; place 0 is filled first
        self._readers = concurrent.futures.ThreadPoolExecutor(NUM_READERS, thread_name_prefix="experts")

    def close(self) -> None:
        """Waits for reads that are under way, and ends the threads."""
        self._readers.shutdown(cancel_futures=True)

    def rounds(self, layer: int, experts: Sequence[int]) -> Iterator[Int[np.ndarray, "E"]]:
        """Brings experts of a layer into places, as many at a time as fit: in one round if there are places for all.

        Yields: For each round, where each of the layer's experts lies in `weights`; -1 for those of no concern to
          this round. What the round is for must be dispatched before the next one is asked for.
        """
        # Those that are here come first, lest the others push them out.
        order = sorted(experts, key=lambda expert: (layer, expert) not in self._place_of)
        for first in range(0, len(order), self.num_places):
            chosen = order[first : first + self.num_places]
            self._fetch(layer, chosen)
            places = np.full(self.config.num_experts, -1, np.int32)
            places[chosen] = [self._place_of[layer, expert] for expert in chosen]
            yield places

    def _fetch(self, layer: int, experts: list[int]) -> None:
        """Makes sure that all of `experts`, at most `num_places`, have a place."""
        missing = []
        for expert in experts:
            if (layer, expert) in self._place_of:
                self._place_of.move_to_end((layer, expert))
            else:
                missing.append(expert)
        self.stats.expert_hits += len(experts) - len(missing)
        self.stats.expert_misses += len(missing)
        reads = collections.deque()
        waiting = iter(missing)
        try:
            for expert in missing:
                while len(reads) < NUM_READERS and (following := next(waiting, None)) is not None:
                    reads.append(self._readers.submit(self._read, layer, following))
                self._keep((layer, expert), reads.popleft().result())
                jax.block_until_ready(self.weights)  # else what waits to be written would pile up
        finally:
            for read in reads:  # left only by an error
                read.cancel()

    def _keep(self, key: tuple[int, int], weights: ExpertWeights) -> None:
        place = self._free.pop() if self._free else self._place_of.popitem(last=False)[1]
        self.weights = _put(self.weights, place, weights)
        self._place_of[key] = place
        self.stats.expert_bytes += self.expert_bytes

    def _read(self, layer: int, expert: int) -> ExpertWeights:
        """Reads one expert; runs in a thread."""
        arrays = []
        for name, shape in zip(ExpertWeights._fields, self.shapes, strict=True):
            array = self.source.read(layer_group(layer), f"{EXPERTS}{name}", (expert,))
            if array.shape != shape or array.dtype != np.uint8:
                raise ValueError(
                    f"expert {expert} of layer {layer}: {name} is {array.dtype} {array.shape}; this model needs "
                    f"uint8 {shape}. Check that checkpoint and config belong together"
                )
            arrays.append(jnp.array(array))  # a copy: what the source gave may be a view of its file
        return ExpertWeights(*arrays)


@functools.partial(jax.jit, donate_argnums=0)
def _put(all_places: ExpertWeights, place: int | Array, weights: ExpertWeights) -> ExpertWeights:
    """Writes one expert into its place, without a copy of the others."""
    return jax.tree.map(lambda held, new: held.at[0, place].set(new), all_places, weights)
