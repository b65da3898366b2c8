"""The cache of experts: what it holds, what it forgets, and that it never holds more than it may."""

import numpy as np
import pytest

from maxmoe.checkpoint.hf_names import layer_group
from maxmoe.config import MoEConfig
from maxmoe.inference.expert_cache import ExpertCache, StreamStats, expert_shapes
from maxmoe.ops.experts import ExpertWeights

CONFIG = MoEConfig(num_experts=9, top_k=2, num_shared_experts=1, expert_dim=32, latent_dim=64, routed_scale=1.0)
SHAPES = expert_shapes(CONFIG)
EXPERT_BYTES = 3 * (32 * 64 // 2 + 32 * 64 // 32)
NUM_LAYERS = 3


class NumberedExperts:
    """Every byte of an expert is 10 x layer + expert."""

    def __init__(self):
        self.reads, self.failing = [], None

    def read(self, group, name, index=()):
        layer, (expert,) = int(group.removeprefix("layer_")), index
        if (layer, expert) == self.failing:
            raise OSError("the disk gave up")
        if name == "experts/gate_packed":
            self.reads.append((layer, expert))
        shape = SHAPES[ExpertWeights._fields.index(name.removeprefix("experts/"))]
        return np.full(shape, 10 * layer + expert, np.uint8)


def _make(num_places, source=None):
    source, stats = source or NumberedExperts(), StreamStats()
    return ExpertCache(source, CONFIG, NUM_LAYERS, num_places * EXPERT_BYTES + EXPERT_BYTES - 1, stats), source


def _check(cache, layer, places, experts):
    """The experts named lie where `places` says, in all six arrays, and no others are named."""
    assert sorted(np.flatnonzero(places >= 0)) == sorted(experts)
    for leaf in cache.weights:
        for expert in experts:
            assert np.all(np.asarray(leaf[0, places[expert]]) == 10 * layer + expert)


def test_expert_cache_holds_what_the_bound_allows_and_no_more():
    cache, _ = _make(4)
    assert cache.expert_bytes == EXPERT_BYTES and cache.num_places == 4
    assert sum(leaf.nbytes for leaf in cache.weights) == 4 * EXPERT_BYTES
    assert _make(1000)[0].num_places == NUM_LAYERS * CONFIG.num_experts  # all there are


def test_expert_cache_forgets_the_least_recently_used():
    cache, source = _make(3)
    for layer, experts in ((0, [1, 2]), (1, [1]), (0, [1]), (2, [5])):  # the last takes the place of (0, 2)
        (places,) = cache.rounds(layer, experts)
        _check(cache, layer, places, experts)
    assert source.reads == [(0, 1), (0, 2), (1, 1), (2, 5)]
    assert (cache.stats.expert_hits, cache.stats.expert_misses, cache.stats.hit_rate) == (1, 4, 0.2)
    list(cache.rounds(0, [1])), list(cache.rounds(1, [1])), list(cache.rounds(2, [5]))
    assert len(source.reads) == 4
    list(cache.rounds(0, [2]))
    assert source.reads[4:] == [(0, 2)]
    assert cache.stats.expert_bytes == 5 * EXPERT_BYTES == cache.stats.bytes_read


def test_expert_cache_gives_rounds_when_a_layer_needs_more_than_fit():
    cache, source = _make(4)
    list(cache.rounds(1, [7, 8]))
    asked, named = [0, 1, 2, 3, 4, 6, 7, 8], []
    for places in cache.rounds(1, asked):
        experts = np.flatnonzero(places >= 0).tolist()
        assert len(experts) <= 4
        _check(cache, 1, places, experts)
        named.append(experts)
    assert len(named) == 2 and sorted(named[0] + named[1]) == asked
    assert {7, 8} <= set(named[0])  # used before they are pushed out
    assert len(source.reads) == 8 == len(set(source.reads))


def test_expert_cache_gives_no_round_for_no_experts():
    assert list(_make(4)[0].rounds(0, [])) == []


def test_expert_cache_agrees_with_a_list_on_random_lookups():
    rng, held = np.random.default_rng(0), []
    cache, source = _make(5)
    for _ in range(60):
        layer, experts = int(rng.integers(3)), rng.permutation(9)[: rng.integers(1, 6)].tolist()
        keys = [(layer, expert) for expert in experts]
        source.reads.clear()
        (places,) = cache.rounds(layer, experts)
        _check(cache, layer, places, experts)
        missing = [key for key in keys if key not in held]
        assert sorted(source.reads) == sorted(missing)
        hits = [key for key in keys if key in held]
        held = ([key for key in held if key not in hits] + hits + missing)[-5:]


def test_expert_cache_survives_an_error_of_the_source():
    cache, source = _make(3)
    list(cache.rounds(0, [0, 1, 2]))
    source.failing = (1, 4)
    with pytest.raises(OSError, match="the disk gave up"):
        list(cache.rounds(1, [3, 4, 5]))
    source.failing = None
    for layer, experts in ((1, [3, 4, 5]), (0, [0, 1, 2])):
        (places,) = cache.rounds(layer, experts)
        _check(cache, layer, places, experts)


def test_expert_cache_writes_in_place():
    cache, _ = _make(4)
    list(cache.rounds(0, [0]))
    where = [leaf.unsafe_buffer_pointer() for leaf in cache.weights]
    list(cache.rounds(1, [1, 2, 3]))
    assert [leaf.unsafe_buffer_pointer() for leaf in cache.weights] == where


def test_expert_cache_refuses_a_bound_below_one_token():
    message = f"expert_cache_bytes={2 * EXPERT_BYTES - 1} holds 1 experts .* needs 2: .*at least {2 * EXPERT_BYTES}"
    with pytest.raises(ValueError, match=message):
        ExpertCache(NumberedExperts(), CONFIG, NUM_LAYERS, 2 * EXPERT_BYTES - 1, StreamStats())


def test_expert_cache_refuses_an_expert_of_another_shape():
    class Narrow(NumberedExperts):
        def read(self, group, name, index=()):
            return super().read(group, name, index)[:, :-1]

    with pytest.raises(ValueError, match="expert 1 of layer 2: gate_packed is uint8 .*needs uint8"):
        list(_make(3, Narrow())[0].rounds(2, [1]))


def test_expert_cache_close_ends_its_threads():
    cache, _ = _make(3)
    list(cache.rounds(0, [0]))
    cache.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        list(cache.rounds(0, [1]))


def test_stream_stats_say_it_in_a_line():
    assert StreamStats().hit_rate == 0.0
    stats = StreamStats(expert_hits=3, expert_misses=1, expert_bytes=2**30, dense_bytes=2**29)
    line = "experts: 3 of 4 lookups (75.0%) found in the cache; read 1.000 GiB of experts, 0.500 GiB of other weights"
    assert stats.summary() == line
    assert layer_group(7) == "layer_007"
