"""The indexer's choice on TPU, interpreted, beside its definition: one body, exact to the order of ties."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from maxmoe.ops.indexer import select_candidates
from pallas_kernels.indexer_groups_tpu import insert
from pallas_kernels.indexer_topk_tpu import indexer_topk_tpu, indexer_topk_tpu_refusal
from pallas_kernels.tiling import INDEXER_TOPK_TPU
from tests.ops.closeness import assert_close, assert_same_bits

SMALL = dataclasses.replace(INDEXER_TOPK_TPU, groups=256, kept=3, key_tile=512, lanes=256, chunk=8)
REAL_K = dataclasses.replace(INDEXER_TOPK_TPU, groups=1024, kept=4, key_tile=2048, lanes=512)  # chooses up to 2048
WIDTH = 128
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
PATHS = pytest.mark.parametrize("num_queries", [1, 9], ids=["decode", "prefill"])


@functools.partial(jax.jit, static_argnums=(0, 5), static_argnames=("tiling", "interpret"))
def _candidates(implementation, q, keys, head_weights, positions, top_k, tiling=SMALL, interpret=True):
    """keys: [B, J, S], which become the second of two layers."""
    keys, layer = jnp.stack([jnp.full_like(keys, jnp.nan), keys]), jnp.int32(1)
    if implementation == "xla":
        return select_candidates(q, keys, layer, head_weights, positions, top_k, "xla")
    return indexer_topk_tpu(q, keys, layer, head_weights, positions, top_k, tiling=tiling, interpret=interpret)


def _choose(*args, **settings):
    """Slots alone."""
    return _candidates(*args, **settings)[1]


def _with_scores(scores, num_queries, dtype=jnp.float32):
    """Queries, keys and head weights that give these scores [S], each exact, to every query.

    One head meets the positive scores, another, with a weight of -4, a quarter of the negative ones.
    """
    scores = np.asarray(scores, np.float32)
    keys = np.zeros((1, WIDTH, len(scores)), np.float32)
    keys[0, 0], keys[0, 1] = np.fmax(scores, 0), np.fmax(-scores / 4, 0)
    keys[0, 1, np.isneginf(scores)] = 3e38  # four times that is infinite in float32
    keys[0, 0, np.isnan(scores)] = np.nan
    q = np.broadcast_to(np.eye(8, WIDTH, dtype=np.float32), (1, num_queries, 8, WIDTH))
    head_weights = np.broadcast_to(np.float32([1, -4, 0, 0, 0, 0, 0, 0]), (1, num_queries, 8))
    return jnp.asarray(q, dtype), jnp.asarray(keys, dtype), head_weights


def _choice(implementation, scores, top_k, position=None, num_queries=1, tiling=SMALL):
    """What every one of a number of equal queries chooses."""
    position = len(scores) - 1 if position is None else position
    positions = np.full((1, num_queries), position, np.int32)
    given = np.asarray(_choose(implementation, *_with_scores(scores, num_queries), positions, top_k, tiling=tiling))
    assert given.shape == (1, num_queries, top_k)
    assert (given == given[:, :1]).all()
    return given[0, 0]


def _integers(seed, batch, num_queries, num_keys, heads=8, dtype=jnp.bfloat16):
    """Small integers: every score is exact in any order of summation, and there are many ties."""
    rng = np.random.default_rng(seed)
    q = rng.integers(-2, 3, (batch, num_queries, heads, WIDTH))
    keys = rng.integers(-1, 2, (batch, WIDTH, num_keys)) * (rng.random((1, WIDTH, num_keys)) < 0.05)
    head_weights = rng.integers(-2, 3, (batch, num_queries, heads))
    positions = rng.integers(0, num_keys + 5, (batch, num_queries))  # the last may stand behind all keys
    positions[0, 0], positions[-1, -1] = 5, num_keys - 1
    inputs = jnp.asarray(q, dtype), jnp.asarray(keys, dtype), jnp.asarray(head_weights, jnp.float32)
    return *inputs, jnp.asarray(positions, jnp.int32)


@IMPLEMENTATIONS
@PATHS
def test_indexer_topk_ranks_nan_last(implementation, num_queries):
    choose = functools.partial(_choice, implementation, [np.nan, 1, 2, -np.inf], num_queries=num_queries)
    assert choose(2, position=2).tolist() == [2, 1]
    assert choose(4, position=2).tolist() == [2, 1, 0, -1]
    assert choose(4, position=3).tolist() == [2, 1, 0, 3]


@IMPLEMENTATIONS
@PATHS
def test_indexer_topk_gives_the_ties_of_the_case_report(implementation, num_queries):
    scores = np.zeros(8320, np.float32)
    scores[:100] = 1
    given = _choice(implementation, scores, 2048, num_queries=num_queries, tiling=REAL_K)
    assert_same_bits(given, np.arange(2048, dtype=np.int32))
    rng = np.random.default_rng(0)
    winners = np.sort(rng.choice(np.arange(2048, 8320), 100, replace=False))
    scores = np.zeros(8320, np.float32)
    scores[winners] = 1 + rng.permutation(100)
    given = _choice(implementation, scores, 2048, num_queries=num_queries, tiling=REAL_K)
    assert len(set(given.tolist())) == 2048 and given.min() >= 0
    assert_same_bits(given[:100], winners[np.argsort(-scores[winners])].astype(np.int32), "winners")
    assert_same_bits(given[100:], np.arange(1948, dtype=np.int32), "the rest")


@IMPLEMENTATIONS
@PATHS
def test_indexer_topk_takes_the_lowest_of_equal_scores(implementation, num_queries):
    for score in (0.25, 0.0, -0.5, np.nan):
        given = _choice(implementation, np.full(4096, score), 2048, num_queries=num_queries, tiling=REAL_K)
        assert_same_bits(given, np.arange(2048, dtype=np.int32), f"score {score}")


@IMPLEMENTATIONS
@PATHS
@pytest.mark.parametrize("shape", ["rising", "falling", "one group"])
def test_indexer_topk_chooses_scores_in_any_order(implementation, num_queries, shape):
    # Keys of one group alone win in the last: far more than the group's list holds, so the query is done again.
    scores = np.arange(1, 2201, dtype=np.float32)
    if shape == "falling":
        scores = scores[::-1]
    elif shape == "one group":
        scores = np.where(np.arange(2200) % SMALL.groups == 7, 3000 - scores, -scores)
    expected = np.argsort(-scores, kind="stable")[:40].astype(np.int32)
    assert_same_bits(_choice(implementation, scores, 40, num_queries=num_queries), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_queries", [1, 2, 9, 19])  # few; a block and a rest; more than a chunk
def test_indexer_topk_tpu_equals_the_definition(num_queries, dtype):
    inputs = _integers(num_queries, 2, num_queries, 2_003, dtype=dtype)
    given, expected = (_candidates(name, *inputs, 300) for name in ("pallas_tpu", "xla"))
    assert_same_bits(given[1], expected[1], "slots")
    assert_same_bits(given[0], expected[0], "scores")


@PATHS
def test_indexer_topk_tpu_gives_scores_of_queries_done_again(num_queries):
    scores = np.where(np.arange(2200) % SMALL.groups == 7, 3000 - np.arange(2200.0), -5)
    scores[7 + SMALL.groups * np.arange(3)] = [np.nan, -np.inf, 0]  # of the winners' group; they rank last
    inputs = *_with_scores(scores, num_queries), np.full((1, num_queries), 2199, np.int32)
    given, expected = (_candidates(name, *inputs, 40) for name in ("pallas_tpu", "xla"))
    assert_same_bits(given[1], expected[1], "slots")
    assert_same_bits(given[0], expected[0], "scores")
    few = _candidates("pallas_tpu", *inputs[:3], np.full((1, num_queries), 8, np.int32), 40)
    assert_same_bits(few[0][0, 0, 8:], np.float32([np.finfo(np.float32).min] + 31 * [-np.inf]), "NaN, then nothing")
    assert (np.asarray(few[1])[..., 9:] == -1).all()


@PATHS
def test_indexer_topk_tpu_does_not_see_later_slots(num_queries):
    q, keys, head_weights, _ = _integers(3, 1, num_queries, 1_700)
    positions = jnp.full((1, num_queries), 1_200, jnp.int32)
    poisoned = keys.at[..., 1_201:].set(jnp.nan)
    given = _choose("pallas_tpu", q, poisoned, head_weights, positions, 300)
    assert_same_bits(given, _choose("xla", q, keys, head_weights, positions, 300))
    nothing = _choose("pallas_tpu", q, keys, head_weights, jnp.full_like(positions, -1), 300)
    assert (np.asarray(nothing) == -1).all()


@PATHS
def test_indexer_topk_tpu_scores_to_float32(num_queries):
    rng = np.random.default_rng(4)
    q, keys = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((1, num_queries, 32, 128), (1, 128, 1_700)))
    head_weights = rng.standard_normal((1, num_queries, 32)).astype(np.float32)
    positions = np.full((1, num_queries), 1_699, np.int32)
    found, given = map(np.asarray, _candidates("pallas_tpu", q, keys, head_weights, positions, 300))
    q, keys = (np.asarray(x).astype(np.float64) for x in (q, keys))
    dots = np.maximum(np.einsum("btij,bjs->btis", q, keys), 0)
    scores = np.einsum("btis,bti->bts", dots, head_weights.astype(np.float64))
    chosen = np.take_along_axis(scores, given, axis=-1)
    # Sums of 32 x 128 products, of magnitude up to 1e3, in float32: bfloat16 scores would be off by 1 or more.
    assert_close(found, chosen, atol=1e-4)
    assert (np.diff(chosen, axis=-1) <= 2e-4).all(), np.diff(chosen, axis=-1).max()
    np.put_along_axis(scores, given, -np.inf, axis=-1)
    assert (scores.max(axis=-1) <= chosen[..., -1] + 2e-4).all()


@PATHS
def test_indexer_topk_tpu_reads_no_uninitialised_memory_and_has_no_races(num_queries):
    inputs = _integers(5, 1, num_queries, 1_100)
    checked = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    given = _choose("pallas_tpu", *inputs, 150, interpret=checked)
    assert_same_bits(given, _choose("xla", *inputs, 150))


@pytest.mark.slow
@pytest.mark.parametrize("num_queries, spacing", [(1, 509), (1, 512), (9, 512)])  # 512: all winners in two groups
def test_indexer_topk_tpu_chooses_among_a_million_keys(num_queries, spacing):
    num_keys, top_k = 1_048_576, 2048
    winners = num_keys - 1 - spacing * np.arange(top_k)  # 1,048,576 x 2,048 does not fit into int32
    scores = np.zeros(num_keys, np.float32)
    scores[winners] = 1 + np.arange(top_k) // 16  # sixteen neighbours tie; bfloat16 holds the values
    q, keys, head_weights = _with_scores(scores, num_queries, jnp.bfloat16)
    q, head_weights = q[:, :, :2], head_weights[:, :, :2]  # the heads that score at all, for speed
    positions = jnp.full((1, num_queries), num_keys - 1, jnp.int32)
    if num_queries > 1:
        positions = positions.at[0, 1:].set(100)  # one long row is enough
    given = np.asarray(_choose("pallas_tpu", q, keys, head_weights, positions, top_k, tiling=INDEXER_TOPK_TPU))
    order = np.lexsort((winners, -scores[winners]))
    assert_same_bits(given[0, 0], winners[order].astype(np.int32))


def test_insert_keeps_equal_scores_in_order():
    scores, slots = [jnp.full(1, -jnp.inf)] * 3, [jnp.full(1, -1)] * 3
    for slot, score in enumerate([5.0, 5.0, 4.0, 6.0, 5.0, -jnp.inf]):
        scores, slots = insert(jnp.full(1, score), jnp.full(1, slot), scores, slots)
    assert np.ravel(scores).tolist() == [6, 5, 5]
    assert np.ravel(slots).tolist() == [3, 0, 1]


def test_indexer_topk_tpu_refusal_names_what_was_given():
    def refusal(top_k=2048, q_type=jnp.bfloat16, key_type=jnp.bfloat16, width=128, batch=1):
        q, keys = jax.ShapeDtypeStruct((1, 4, 64, width), q_type), jax.ShapeDtypeStruct((3, batch, width, 9), key_type)
        return indexer_topk_tpu_refusal(q, keys, top_k)

    assert refusal() is None and refusal(top_k=1) is None
    assert "96" in refusal(width=96) and "multiple of 128" in refusal(width=96)
    assert "(3, 2, 128, 9)" in refusal(batch=2) and "[L, B, J, S] is allowed" in refusal(batch=2)
    assert "float16" in refusal(q_type=jnp.float16)
    assert "float32" in refusal(key_type=jnp.float32)
    assert "7000" in refusal(top_k=7000) and "6656" in refusal(top_k=7000)
    with pytest.raises(NotImplementedError, match="indexer_topk_tpu: index width 96"):
        args = jnp.ones((1, 1, 8, 96)), jnp.ones((1, 1, 96, 9)), 0, jnp.ones((1, 1, 8)), jnp.zeros((1, 1), int)
        indexer_topk_tpu(*args, 4)
