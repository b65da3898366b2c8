"""Generates with a model whose weights do not fit in memory: they are read from the checkpoint for every step.

A layer's dense weights are read while the layer before it computes, and let go after use. Of its routed experts only
those are read that the step's tokens are routed to and that the expert cache does not hold. In memory are the top
weights, the dense weights of two layers, the expert cache and the cache of the sequences.

Answers are those of the resident engine, bit for bit where its layers are unrolled: the parts that are compiled here
are those that barriers set apart in the model. Scanned layers are fused otherwise, and differ by rounding; so do all
on a CPU with jax before 0.12, which fuses products with sums in one program and not in another.
"""

import concurrent.futures
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from maxmoe.checkpoint.hf_names import TOP_GROUP, layer_group
from maxmoe.checkpoint.weight_source import WeightSource
from maxmoe.config import ModelConfig, SituConfig
from maxmoe.inference.budget import ThinkingMarkers
from maxmoe.inference.engine import PREFILL_CHUNK, Engine
from maxmoe.inference.expert_cache import ExpertCache, StreamStats
from maxmoe.inference.stop_strings import MakeDetokenizer
from maxmoe.model.block import Layer, layer_of
from maxmoe.model.cache import Cache, KDACache, MLACache, Spans
from maxmoe.model.moe_layer import Routing, run_experts
from maxmoe.model.stacks import FFN, plan_stacks
from maxmoe.model.transformer import Transformer
from maxmoe.ops.experts import ExpertWeights
from maxmoe.params import abstract_params

EXPERT_CACHE_BYTES = 8 * 2**30
NUM_READERS = 4  # dense weights that are read at once


class LayerAt(NamedTuple):
    """A layer and its place; modules of layers of one kind are equal, so that they share compiled programs."""

    depth: int  # 0-based number among all layers
    stack: int
    superblock: int
    place: int
    module: Layer
    shapes: dict[str, tuple[int, ...]]  # of its dense weights, by their names in a `WeightSource`


@functools.cache
def list_layers(config: ModelConfig, implementation: str | None = None) -> tuple[LayerAt, ...]:
    """All layers of a model, in order. Makes no array."""
    weights = nn.unbox(abstract_params(Transformer(config, scan_layers=True)))
    layers = []
    for number, plan in enumerate(plan_stacks(config)):
        modules = [layer_of(config, plan, place, implementation) for place in range(plan.size)]
        stacked = [weights[f"stacks_{number}"]["scanned"][f"layers_{place}"] for place in range(plan.size)]
        shapes = [
            {name: leaf.shape[1:] for name, leaf in flax.traverse_util.flatten_dict(tree, sep="/").items()}
            for tree in stacked
        ]
        for superblock in range(plan.count):
            for place in range(plan.size):
                layers.append(LayerAt(len(layers), number, superblock, place, modules[place], shapes[place]))
    return tuple(layers)


class DenseWeights:
    """Reads what is not a routed expert: a layer at a time, and the next one ahead of its use."""

    def __init__(self, source: WeightSource, layers: tuple[LayerAt, ...], dtype: Any, stats: StreamStats):
        """Reads nothing yet.

        Args:
          dtype: What BF16 weights become; None keeps them. F32 weights stay.
          stats: Where bytes are counted.
        """
        self.source, self.layers, self.stats = source, layers, stats
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self._ahead: tuple[int, dict[str, concurrent.futures.Future]] | None = None
        self._readers = concurrent.futures.ThreadPoolExecutor(NUM_READERS, thread_name_prefix="dense")

    def close(self) -> None:
        """Waits for reads that are under way, and ends the threads."""
        self._readers.shutdown(cancel_futures=True)

    def top(self, config: ModelConfig) -> dict[str, Array]:
        """Reads embedding, head and what belongs to it."""
        weights = nn.unbox(abstract_params(Transformer(config)))
        shapes = {name: leaf.shape for name, leaf in weights.items() if not name.startswith("stacks_")}
        return self._collect(self._start(TOP_GROUP, shapes))

    def take(self, depth: int) -> dict[str, Any]:
        """The dense weights of a layer, as its module's parameters. Starts to read the next, after the last the first.

        Raises: what the source raised when it read them.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == depth:
            reads = ahead[1]
        else:
            _cancel(ahead[1] if ahead is not None else {})
            reads = self._start(layer_group(depth), self.layers[depth].shapes)
        weights = self._collect(reads)
        following = (depth + 1) % len(self.layers)
        self._ahead = following, self._start(layer_group(following), self.layers[following].shapes)
        return weights

    def _start(self, group, shapes):
        return {name: self._readers.submit(self._read, group, name, shape) for name, shape in shapes.items()}

    def _collect(self, reads):
        flat = {}
        try:
            for name, read in reads.items():
                flat[name], num_bytes = read.result()
                self.stats.dense_bytes += num_bytes
        finally:
            _cancel(reads)  # those that are left after an error
        return flax.traverse_util.unflatten_dict(flat, sep="/")

    def _read(self, group: str, name: str, shape: tuple[int, ...]) -> tuple[Array, int]:
        """Reads one weight; runs in a thread."""
        array = self.source.read(group, name)
        if array.shape != shape or array.dtype not in (jnp.bfloat16, jnp.float32):
            raise ValueError(
                f"{group}: {name} is {array.dtype} {array.shape}; this model needs bfloat16 or float32 {shape}. "
                "Check that checkpoint and config belong together"
            )
        cast = self.dtype is not None and array.dtype == jnp.bfloat16
        # A copy, made here: what the source gave may be a view of its file.
        return jnp.array(array, self.dtype if cast else array.dtype), array.nbytes


class StreamingEngine(Engine):
    """An `Engine` that holds a few layers at a time; `generate` and `stream` are the same.

    The host looks at each token before the next step, for a step costs far more than the device's waiting: an answer
    that has ended reads nothing more, and in a batch neither do rows that have ended.

    A prompt is prefilled in chunks, and each chunk passes over the whole checkpoint: the longer the chunk, the fewer
    bytes a prompt reads. A chunk may need more experts of a layer than the cache holds; they then come in rounds, and
    the outputs of all rounds are put together before they are summed in their usual order.

    Attributes:
      stats: What was read and what the expert cache spared so far.
    """

    runs_ahead = False

    def __init__(
        self,
        model: Transformer,
        source: WeightSource,
        *,
        max_batch: int = 1,
        max_len: int = 32_768,
        cache_dtype: Any = None,
        prefill_chunk: int = PREFILL_CHUNK,
        expert_cache_bytes: int = EXPERT_CACHE_BYTES,
        dtype: Any = None,
        detokenizer: MakeDetokenizer | None = None,
        thinking: ThinkingMarkers | None = None,
    ):
        """Reads the top weights and allocates the expert cache.

        Args:
          source: Where weights are read. It stays open, and belongs to the caller, until `close`.
          max_batch, max_len, cache_dtype, prefill_chunk, detokenizer, thinking: See `Engine`.
          expert_cache_bytes: That the experts kept may take; no more is taken than all of the model's experts need.
            While experts are read, up to `expert_cache.NUM_READERS` more lie beside the cache.
          dtype: What BF16 weights become, as for `load_params`; None keeps them.
        Raises: ValueError if the experts of one token do not fit into the cache; what the source raises.
        """
        self.stats = StreamStats()
        config = model.config
        self._layers = list_layers(config, model.implementation)
        num_moe = sum(layer.module.kind.ffn is FFN.MOE for layer in self._layers)
        self._experts = ExpertCache(source, config.moe, num_moe, expert_cache_bytes, self.stats)
        self._dense = DenseWeights(source, self._layers, dtype, self.stats)
        super().__init__(
            model,
            self._dense.top(config),
            max_batch=max_batch,
            max_len=max_len,
            cache_dtype=cache_dtype,
            prefill_chunk=prefill_chunk,
            detokenizer=detokenizer,
            thinking=thinking,
        )
        self.prefills_together = True  # one pass over the checkpoint serves all rows

    def close(self) -> None:
        """Waits for reads that are under way. The source may be closed afterwards; the engine is of no more use."""
        self._dense.close()
        self._experts.close()

    def prefill_chunk(self, ids, cache, lengths):
        """See `Engine`: one pass over the checkpoint."""
        spans = Spans(start=cache.lengths, lengths=jnp.asarray(lengths))
        current, bank, cache = self._run_layers("prefill", jnp.asarray(ids), cache, spans)
        return _end_prefill(self.model, self.params, current, bank, spans), cache

    def decode_token(self, token, cache, active):
        """See `Engine`: one pass over the checkpoint, without experts for rows that are not active."""
        spans = Spans(start=cache.lengths, lengths=jnp.asarray(active, jnp.int32))
        max_len = cache.max_len
        current, bank, cache = self._run_layers("decode", token[:, None], cache, spans, active)
        return _end_decode(self.model, max_len, self.params, current, bank, spans), cache

    def _run_layers(
        self,
        method: str,
        ids: Int[Array, "B T"],
        cache: Cache,
        spans: Spans,
        active: Bool[np.ndarray, "B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "A B T D"], Cache]:
        """All layers in turn. Returns running sum, bank and cache; `cache` is used up."""
        current, bank = _begin(self.model, self.params, ids)
        stacks = [list(stack) for stack in cache.stacks]
        for at in self._layers:
            weights = self._dense.take(at.depth)
            entry = stacks[at.stack][at.place]
            numbers = at.depth, at.superblock, spans
            if at.module.kind.ffn is FFN.DENSE:
                current, bank, entry = _whole_layer(at.module, method, weights, current, bank, entry, *numbers)
            else:
                mixed, current, bank, entry, routing = _until_experts(
                    at.module, method, weights, current, bank, entry, *numbers
                )
                routing, outputs = self._run_experts(at.depth, routing, active)
                current = _after_experts(at.module, weights, current, mixed, routing, outputs)
            stacks[at.stack][at.place] = entry
        return current, bank, Cache(lengths=spans.start + spans.lengths, stacks=tuple(map(tuple, stacks)))

    def _run_experts(
        self, depth: int, routing: Routing, active: Bool[np.ndarray, "N"] | None
    ) -> tuple[Routing, Float[Array, "N top_k latent"]]:
        """Fetches the experts that the active tokens are routed to, and runs them. The others' ids then name none."""
        num_experts = self.model.config.moe.num_experts
        ids = np.array(routing.ids)  # here the host waits for the device
        if active is not None:
            ids[~active] = num_experts
        routing = routing._replace(ids=jnp.asarray(ids))
        outputs = jnp.zeros((*ids.shape, routing.latent.shape[1]), routing.latent.dtype)
        for places in self._experts.rounds(depth, np.unique(ids[ids < num_experts]).tolist()):
            outputs = _run_round(self.model.config.situ, routing, self._experts.weights, places, outputs)
        return routing, outputs


def _cancel(reads: dict[str, concurrent.futures.Future]) -> None:
    for read in reads.values():
        read.cancel()


# ---- The compiled parts of a step: one program each per kind of layer and shape, not per layer ------------------


@functools.partial(jax.jit, static_argnums=0)
def _begin(model: Transformer, top: dict, ids):
    return model.apply({"params": top}, ids, method="begin")


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4, 5))
def _whole_layer(
    layer: Layer, method: str, weights: dict, current, bank, cache: KDACache | MLACache, depth, superblock, spans
):
    """A layer without routed experts. Returns running sum, bank and the layer's cache."""
    return layer.apply({"params": weights}, current, bank, cache, None, depth, superblock, spans, method=method)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4, 5))
def _until_experts(
    layer: Layer, method: str, weights: dict, current, bank, cache: KDACache | MLACache, depth, superblock, spans
):
    """The first half of a layer with routed experts. Returns the FFN's input, sum, bank, cache, and the routing."""

    def run(module, *args):
        mixed, current, bank, cache = getattr(module, f"{method}_mixer")(*args, depth, superblock, spans)
        mixed, current = jax.lax.optimization_barrier((mixed, current))
        return mixed, current, bank, cache, module.ffn.route(mixed, spans.real(mixed.shape[1]))

    return layer.apply({"params": weights}, current, bank, cache, method=run)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _run_round(
    situ: SituConfig, routing: Routing, experts: ExpertWeights, places: Int[Array, "E"], outputs
) -> Float[Array, "N top_k latent"]:
    """Replaces the outputs of those experts that have a place in this round."""
    new = run_experts(situ, routing, experts, 0, places)
    here = (routing.ids < places.shape[0]) & (places[routing.ids] >= 0)
    return jnp.where(here[..., None], new, outputs)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _after_experts(layer: Layer, weights: dict, current, mixed, routing: Routing, outputs):
    """The rest of a layer with routed experts. Returns the running sum."""

    def run(module, current, mixed, routing, outputs):
        return current + module.ffn.join(mixed, routing, outputs)

    return layer.apply({"params": weights}, current, mixed, routing, outputs, method=run)


@functools.partial(jax.jit, static_argnums=0)
def _end_prefill(model: Transformer, top: dict, current, bank, spans):
    return model.apply({"params": top}, current, bank, spans, method="end_prefill")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _end_decode(model: Transformer, max_len: int | None, top: dict, current, bank, spans):
    return model.apply({"params": top}, current, bank, spans, max_len, method="end_decode")
