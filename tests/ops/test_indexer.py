"""The lightning indexer: its scores, and an exact and repeatable choice of the best keys."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.ops import indexer, query_blocks
from maxmoe.ops.indexer import index_scores, select_candidates, select_tokens, select_topk, write_keys
from tests.ops.closeness import assert_close, assert_same_bits
from tests.ops.quick_jit import quick_jit

select = jax.jit(select_topk, static_argnums=1)


def _reference_topk(scores, k, valid):
    """Sorts one row: score descending, index ascending; NaN and -inf last among the valid; then -1."""
    scores = np.where(np.isnan(scores), -np.inf, np.asarray(scores, np.float64))
    order = sorted(np.flatnonzero(valid).tolist(), key=lambda i: (-scores[i], i))
    return np.array((order + [-1] * k)[:k], np.int32)


def _random_index(seed, batch=2, queries=7, keys=11, heads=3, width=5):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, queries, heads, width)).astype(np.float32)
    key = rng.standard_normal((batch, width, keys)).astype(np.float32)
    return q, key, rng.standard_normal((batch, queries, heads)).astype(np.float32)


def _reference_scores(q, keys, head_weights):
    q, keys, head_weights = (np.asarray(x).astype(np.float64) for x in (q, keys, head_weights))
    dots = np.maximum(np.einsum("btij,bjs->btis", q, keys), 0)
    return np.einsum("btis,bti->bts", dots, head_weights)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_index_scores_follow_the_equation(dtype):
    inputs = [jnp.asarray(x, dtype) for x in _random_index(0)]
    given = index_scores(*inputs)
    assert given.dtype == jnp.float32
    # Fifteen products of order 1, in float32 also for bfloat16 inputs.
    assert_close(given, _reference_scores(*inputs), atol=5e-6)


_SCORES = st.sampled_from([0.0, -0.0, 1.0, 1.5, -1.0, -2.5, 3e38, -3e38, np.inf, -np.inf, np.nan])


@pytest.mark.parametrize("k", [1, 5, 13, 20])
@hypothesis.given(st.lists(st.tuples(_SCORES, st.booleans()), min_size=13, max_size=13))
@hypothesis.settings(max_examples=60)
def test_select_topk_sorts(k, entries):
    scores, valid = np.array([s for s, _ in entries], np.float32), np.array([v for _, v in entries])
    assert_same_bits(select(scores, k, valid), _reference_topk(scores, k, valid))


def test_select_topk_sorts_every_row():
    rng = np.random.default_rng(1)
    scores = rng.choice(np.float32([-1, 0, 0.5, 2]), (3, 4, 13))
    valid = rng.random((3, 4, 13)) < 0.7
    given = np.asarray(select(scores, 6, valid))
    for row in np.ndindex(3, 4):
        assert_same_bits(given[row], _reference_topk(scores[row], 6, valid[row]), f"row {row}")


def test_select_topk_ranks_nan_last():
    scores = np.array([np.nan, 1, 2, -np.inf], np.float32)
    valid = np.array([True, True, True, False])
    assert np.asarray(select(scores, 2, valid)).tolist() == [2, 1]
    assert np.asarray(select(scores, 4, valid)).tolist() == [2, 1, 0, -1]
    assert np.asarray(select(scores, 4, np.ones(4, bool))).tolist() == [2, 1, 0, 3]


def test_select_topk_takes_two_zeros_as_one_score():
    scores = np.array([-0.0, 0.0, -0.0, 0.0, -1.0], np.float32)
    assert np.asarray(select(scores, 5, np.ones(5, bool))).tolist() == [0, 1, 2, 3, 4]


def test_select_topk_fills_with_the_lowest_of_many_equal_scores():
    rng = np.random.default_rng(2)
    winners = np.sort(rng.choice(np.arange(2048, 8320), 100, replace=False))
    scores = np.zeros(8320, np.float32)
    scores[winners] = 1 + rng.permutation(100)
    given = np.asarray(select(scores, 2048, np.ones(8320, bool)))
    assert len(set(given.tolist())) == 2048 and given.min() >= 0
    assert_same_bits(given[:100], winners[np.argsort(-scores[winners])].astype(np.int32), "winners")
    assert_same_bits(given[100:], np.arange(1948, dtype=np.int32), "the rest")


def test_select_topk_gives_the_ties_of_the_case_report():
    scores = np.zeros(8320, np.float32)
    scores[:100] = 1
    assert_same_bits(select(scores, 2048, np.ones(8320, bool)), np.arange(2048, dtype=np.int32))


def test_select_topk_breaks_ties_the_same_way_every_time():
    scores, valid = np.full(4096, 0.25, np.float32), np.ones(4096, bool)
    for _ in range(20):
        assert_same_bits(select(scores, 2048, valid), np.arange(2048, dtype=np.int32), "jit")
        assert_same_bits(select_topk(scores, 2048, valid), np.arange(2048, dtype=np.int32), "eager")


@pytest.mark.parametrize("num_keys", [8192, 8219])  # whole runs, and a rest
@pytest.mark.parametrize("kind", ["few values", "all equal", "rising", "winners in one run", "NaN and infinities"])
def test_select_topk_in_two_rounds_sorts(kind, num_keys):
    k, rng = 10, np.random.default_rng(7)
    assert indexer._run_length(num_keys, k) == 32
    scores = {
        "few values": rng.choice(np.float32([-1, 0, 1]), num_keys),
        "all equal": np.zeros(num_keys, np.float32),
        "rising": np.arange(num_keys, dtype=np.float32),
        "winners in one run": np.where(np.arange(num_keys) // 32 == 77, np.float32(3), np.float32(-0.0)),
        "NaN and infinities": rng.choice(np.float32([np.nan, np.inf, -np.inf]), num_keys, p=[0.9, 5e-4, 0.0995]),
    }[kind]
    masks = {"all": np.ones(num_keys, bool), "some": rng.random(num_keys) < 0.5, "7": np.arange(num_keys) < 7}
    for name, valid in masks.items():
        assert_same_bits(select(scores, k, valid), _reference_topk(scores, k, valid), f"{name} valid")
    both = np.stack([scores, scores[::-1]])
    valid = np.stack([masks["some"], masks["7"]])
    expected = [_reference_topk(*row) for row in zip(both, [k, k], valid, strict=True)]
    assert_same_bits(select(both, k, valid), np.stack(expected), "two rows")


def test_select_topk_of_parts_merges_to_that_of_the_whole():
    scores = np.array([5, 1, 5, 0, 5, 9, 5, 2], np.float32)
    assert np.asarray(select(scores, 3, np.ones(8, bool))).tolist() == [5, 0, 2]
    for parts in ([range(4), range(4, 8)], [range(0, 8, 2), range(1, 8, 2)]):  # contiguous, interleaved
        chosen = []
        for part in map(np.array, parts):
            chosen.append(part[np.asarray(select(scores[part], 3, np.ones(4, bool)))])
        candidates = np.sort(np.concatenate(chosen))  # global ids, ascending, so that ties fall to the lowest
        merged = candidates[np.asarray(select(scores[candidates], 3, np.ones(6, bool)))]
        assert merged.tolist() == [5, 0, 2]


def test_select_topk_merges_like_one_device_on_random_ties():
    rng = np.random.default_rng(3)
    for _ in range(20):
        scores = rng.choice(np.float32([0, 1, 2, np.nan]), 26)
        valid = rng.random(26) < 0.8
        whole = np.asarray(select(scores, 5, valid))
        lists = [np.asarray(select(scores[s : s + 13], 5, valid[s : s + 13])) for s in (0, 13)]
        # Each list goes in by rank, with its place kept: equal scores of one part already stand in id order.
        ids = np.concatenate([np.where(ids >= 0, ids + s, -1) for ids, s in zip(lists, (0, 13), strict=True)])
        merged = ids[np.asarray(select(scores[ids], 5, ids >= 0))]
        count = min(5, valid.sum())
        assert merged[:count].tolist() == whole[:count].tolist()


def _stacked(keys):
    """Keys of the middle one of three layers; the others are NaN."""
    return jnp.full((3, *keys.shape), jnp.nan, keys.dtype).at[1].set(keys)


def _expected_candidates(q, keys, head_weights, positions, top_k):
    """Slots in order, with the scores as the plain form has them: NaN and -inf as the lowest number."""
    scores = np.asarray(index_scores(q, keys, head_weights))
    slots = np.empty((*positions.shape, top_k), np.int32)
    for b, t in np.ndindex(*positions.shape):
        slots[b, t] = _reference_topk(scores[b, t], top_k, np.arange(scores.shape[-1]) <= positions[b, t])
    chosen = np.take_along_axis(scores, np.maximum(slots, 0), axis=-1)
    return np.where(slots < 0, -np.inf, np.fmax(chosen, np.finfo(np.float32).min)).astype(np.float32), slots


@pytest.mark.parametrize("top_k", [4, 15])
@pytest.mark.parametrize("budget", [2**26, 3 * 66, 1])  # one block; blocks of three queries and a rest; single ones
def test_select_tokens_is_causal(monkeypatch, top_k, budget):
    monkeypatch.setattr(query_blocks, "BUDGET", budget)
    q, keys, head_weights = _random_index(4)
    positions = np.stack([np.arange(7), np.arange(4, 11)]).astype(np.int32)
    _, expected = _expected_candidates(q, keys, head_weights, positions, top_k)
    poisoned = keys.copy()
    poisoned[0, :, 7:] = np.nan  # no query of the first row may see these
    select = quick_jit(lambda q, keys, *args: select_tokens(q, keys, jnp.int32(1), *args, top_k))
    given = select(q, _stacked(poisoned), head_weights, positions)
    assert_same_bits(given, expected)
    for t in range(7):
        assert set(np.asarray(given)[0, t].tolist()) - {-1} <= set(range(t + 1))
        if t + 1 <= top_k:  # fewer keys than top_k: all of them
            assert set(np.asarray(given)[0, t].tolist()) == set(range(t + 1)) | ({-1} if top_k > t + 1 else set())


@pytest.mark.parametrize("top_k", [3, 15])
@pytest.mark.parametrize("budget", [2**26, 3 * 66])
def test_select_candidates_gives_scores_beside_slots(monkeypatch, top_k, budget):
    monkeypatch.setattr(query_blocks, "BUDGET", budget)
    q, keys, head_weights = _random_index(8)
    keys[1, :, 2], q[0, 3] = np.nan, np.inf  # a key, and a query, without a score
    positions = np.stack([np.arange(7), [-1, 3, -9, 10, 10, 0, 5]]).astype(np.int32)
    expected = _expected_candidates(q, keys, head_weights, positions, top_k)
    given = jax.jit(select_candidates, static_argnums=5)(q, _stacked(keys), 1, head_weights, positions, top_k)
    assert_same_bits(given[1], expected[1])
    # Sums of fifteen products of order 1, compiled for another number of queries; placeholders are exact.
    assert_close(given[0], expected[0], rtol=1e-5, atol=1e-5)
    assert (np.isneginf(given[0]) == (np.asarray(given[1]) < 0)).all()
    assert (np.asarray(given[1])[1, [0, 2]] == -1).all()


@pytest.mark.parametrize("num_keys", [11, 3000])
def test_select_candidates_of_parts_merge_to_those_of_the_whole(num_keys):
    # Shards of a cache split along the sequence: a query's position, less a shard's first slot, may be negative.
    q, keys, head_weights = _random_index(9, keys=num_keys)
    positions = np.stack([np.arange(7), np.linspace(0, num_keys - 1, 7)]).astype(np.int32)
    top_k, half = 6, num_keys // 2
    whole = select_candidates(q, _stacked(keys), 1, head_weights, positions, top_k)
    parts = []
    for start, end in ((0, half), (half, num_keys)):
        scores, slots = select_candidates(
            q, _stacked(keys[..., start:end]), 1, head_weights, jnp.asarray(positions - start), top_k
        )
        parts.append((scores, jnp.where(slots < 0, -1, slots + start)))
    scores, slots = (jnp.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
    places = select_topk(scores, top_k, slots >= 0)
    merged = jnp.where(places < 0, -1, jnp.take_along_axis(slots, places, axis=-1))
    assert_same_bits(merged, whole[1])


def test_select_tokens_row_does_not_depend_on_its_neighbours():
    tokens = jax.jit(select_tokens, static_argnums=5)
    inputs, others = _random_index(5), _random_index(6)
    positions = np.broadcast_to(np.arange(4, 11, dtype=np.int32), (2, 7))
    mixed = [np.stack([x[0], y[1]]) for x, y in zip(inputs, others, strict=True)]

    def choose(q, keys, head_weights):
        return tokens(q, _stacked(keys), 1, head_weights, positions, 4)

    assert_same_bits(choose(*mixed)[0], choose(*inputs)[0])


WRITERS = pytest.mark.parametrize("writer", [write_keys, indexer._write_windows, indexer._write_columns])


@WRITERS
@pytest.mark.parametrize("num_slots", [9, 1300])  # one window; windows of which the last overlaps
@pytest.mark.parametrize("num_tokens", [1, 5, 700])
def test_write_keys_changes_the_slots_named_and_no_others(writer, num_slots, num_tokens):
    rng = np.random.default_rng(10)
    keys = rng.standard_normal((2, 3, 4, num_slots)).astype(np.float32)
    new = rng.standard_normal((3, num_tokens, 4)).astype(np.float32)
    new[:, -1] = np.nan  # a key like any other
    slots = np.stack([rng.permutation(np.arange(-700, 2300))[:num_tokens] for _ in range(3)]).astype(np.int32)
    slots[1] = np.arange(num_tokens) + num_slots - num_tokens // 2 - 1  # a span that ends behind the cache
    slots[0, 0], slots[2, -1] = -1, -(2**31)
    expected = keys.copy()
    for b, t in np.ndindex(3, num_tokens):
        if 0 <= slots[b, t] < num_slots:
            expected[1, b, :, slots[b, t]] = new[b, t]
    given = quick_jit(lambda *args: writer(*args))(keys, jnp.int32(1), slots, new)
    assert_same_bits(given, expected)


def test_write_keys_gradients_reach_what_stays_and_what_is_written():
    rng = np.random.default_rng(11)
    keys, new = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 2, 4, 9), (2, 3, 4)))
    slots = jnp.asarray([[2, -1, 8], [9, 0, 5]])
    factors = rng.standard_normal(keys.shape).astype(np.float32)
    kept, written = jax.grad(lambda keys, new: jnp.sum(factors * write_keys(keys, 1, slots, new)), (0, 1))(keys, new)
    expected = np.zeros(new.shape, np.float32)
    for b, t in np.ndindex(2, 3):
        if 0 <= slots[b, t] < 9:
            expected[b, t] = factors[1, b, :, slots[b, t]]
            factors[1, b, :, slots[b, t]] = 0
    assert_same_bits(written, expected)
    assert_same_bits(kept, factors)


def test_write_keys_rounds_to_the_type_of_the_cache():
    keys, new = jnp.zeros((1, 1, 2, 3), jnp.bfloat16), jnp.full((1, 1, 2), 1.2345)
    given = write_keys(keys, 0, jnp.asarray([[1]]), new)
    assert given.dtype == jnp.bfloat16 and float(given[0, 0, 0, 1]) == float(jnp.bfloat16(1.2345))
