"""Prefill and decode, claim by claim, on three layers of every kind with the weights of a golden model.

What no arithmetic may touch is compared bit for bit. Where another split or another batch changes the order of
sums, caches may differ by 1e-5 of an array's largest value and logits, of size 2, by 1e-5: some roundings per layer.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import maxmoe as mm
from maxmoe.model.cache import PlainMLACache, from_plain, to_plain
from maxmoe.model.moe_layer import DenseFFN, LatentMoE
from maxmoe.ops.experts import ExpertWeights

WIDTH = 24  # every chunk is padded to it, so that nothing is compiled twice
MAX_LEN = 32
ROUNDING = 1e-5
IDS = np.random.default_rng(0).integers(0, 320, (2, MAX_LEN + 8), np.int32)


def _prefill(model_and_params, rows, cache, padding=0):
    """Prefills rows of unequal length, padded at the end to the common width."""
    ids = np.full((len(rows), WIDTH), padding, np.int32)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    return mm.prefill(*model_and_params, ids, cache, [len(row) for row in rows])


def _fresh(model_and_params, batch=2):
    return mm.init_cache(model_and_params[0], batch, MAX_LEN)


def _row(cache, row):
    """What a cache holds of one row; nothing but what is written in those arrays that grow."""
    length = int(cache.lengths[row])

    def take(entry):
        entry = jax.tree.map(lambda leaf: np.asarray(leaf[:, row]), entry)
        return jax.tree.map(lambda leaf: leaf[:, :length], entry) if isinstance(entry, PlainMLACache) else entry

    stacks = jax.tree.map(take, to_plain(cache).stacks, is_leaf=lambda leaf: isinstance(leaf, PlainMLACache))
    return np.asarray(cache.lengths[row]), stacks


def _close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=ROUNDING, equal_nan=False)


# Splits and batches


@st.composite
def _chunk_sizes(draw):
    """Sizes that add up to the width, zeros among them."""
    cuts = draw(st.lists(st.integers(0, WIDTH), max_size=5))
    return np.diff([0, *sorted(cuts), WIDTH]).tolist()


@settings(max_examples=30)
@given(first=_chunk_sizes(), second=_chunk_sizes())
def test_prefill_any_split_gives_the_same_state_and_logits(short_model, assert_trees, first, second):
    """Each row is cut on its own, so that a long chunk meets short and empty ones."""
    wanted_logits, wanted = _prefill(short_model, IDS[:, :WIDTH], _fresh(short_model))
    cache, logits = _fresh(short_model), np.zeros_like(wanted_logits)
    done = [0, 0]
    for call in range(max(len(first), len(second))):
        rows = []
        for row, sizes in enumerate((first, second)):
            size = sizes[call] if call < len(sizes) else 0
            rows.append(IDS[row, done[row] : done[row] + size])
            done[row] += size
        out, cache = _prefill(short_model, rows, cache)
        for row in (0, 1):
            if len(rows[row]):
                logits[row] = out[row]
    _close(logits, wanted_logits)
    assert_trees(cache, wanted, relative=ROUNDING)


def test_decode_step_gives_what_prefill_gives(short_model, assert_trees):
    wanted_logits, wanted = _prefill(short_model, IDS[:, :WIDTH], _fresh(short_model))
    cache = _fresh(short_model)
    for position in range(WIDTH):
        logits, cache = mm.decode_step(*short_model, IDS[:, position], cache)
    _close(logits, wanted_logits)
    assert_trees(cache, wanted, relative=ROUNDING)


@pytest.mark.parametrize("lengths", [(1, WIDTH), (9, 2), (3, 3)])
def test_prefill_row_is_independent_of_its_neighbour(short_model, assert_trees, lengths):
    """Alone means a batch of one: another shape, so other sums, so equal within rounding."""
    rows = [IDS[row, :length] for row, length in enumerate(lengths)]
    logits, cache = _prefill(short_model, rows, _fresh(short_model))
    for row in (0, 1):
        alone_logits, alone = _prefill(short_model, rows[row : row + 1], _fresh(short_model, 1))
        _close(logits[row], alone_logits[0])
        assert_trees(_row(cache, row), _row(alone, 0), relative=ROUNDING)


def test_prefill_row_is_bitwise_independent_of_its_neighbours_tokens(short_model, assert_trees):
    """In one shape a row's bits do not depend on what the other row holds, even if that is NaN."""
    wanted_logits, wanted = _prefill(short_model, [IDS[0, :11], IDS[1, :WIDTH]], _fresh(short_model))
    logits, cache = _prefill(short_model, [IDS[1, 5:9], IDS[1, :WIDTH]], _fresh(short_model))
    assert np.array_equal(logits[1], wanted_logits[1])
    assert_trees(_row(cache, 1), _row(wanted, 1))
    poisoned = jax.tree.map(lambda leaf: leaf.at[:, 0].set(jnp.nan), _fresh(short_model).stacks)
    poisoned = _fresh(short_model).replace(stacks=poisoned)
    logits, cache = _prefill(short_model, [IDS[0, :11], IDS[1, :WIDTH]], poisoned)
    assert np.isnan(logits[0]).all() and np.array_equal(logits[1], wanted_logits[1])
    assert_trees(_row(cache, 1), _row(wanted, 1))
    (logits, after), (wanted_logits, _) = (
        mm.decode_step(*short_model, IDS[:, 30], before) for before in (cache, wanted)
    )
    assert np.isnan(logits[0]).all() and np.array_equal(logits[1], wanted_logits[1])
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(_row(after, 1)))


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_prompt_shorter_than_the_conv_window_equals_steps(short_model, assert_trees, batch, length):
    """Padded prefill of 1 to 3 tokens, then two more: the same as a step per token in a batch of two."""
    logits, cache = _prefill(short_model, IDS[:batch, :length], _fresh(short_model, batch))
    steps = _fresh(short_model)
    for position in range(length):
        step_logits, steps = mm.decode_step(*short_model, IDS[:, position], steps)
    _close(logits, step_logits[:batch])
    logits, cache = _prefill(short_model, IDS[:batch, length : length + 2], cache)
    for position in (length, length + 1):
        step_logits, steps = mm.decode_step(*short_model, IDS[:, position], steps)
    _close(logits, step_logits[:batch])
    for row in range(batch):
        assert_trees(_row(cache, row), _row(steps, row), relative=ROUNDING)


def test_prefill_padded_equals_forward_unpadded(short_model):
    length = 3
    padded, _ = _prefill(short_model, IDS[:, :length], _fresh(short_model))
    _close(padded, mm.forward(*short_model, IDS[:, :length])[:, -1])


def test_bfloat16_model_gives_the_same_bits_with_a_bfloat16_cache(short_model, load_short_model):
    """Its rows are bfloat16 already. Against float32 its logits, of size 2, are off by 0.05; a wrong product by 1."""
    model = load_short_model(None)
    results = []
    for dtype in (jnp.float32, jnp.bfloat16):
        logits, cache = _prefill(model, IDS[:, :20], mm.init_cache(model[0], 2, MAX_LEN, dtype))
        assert logits.dtype == jnp.float32
        assert {leaf.dtype for leaf in jax.tree.leaves(cache.stacks)} == {jnp.dtype(jnp.float32), jnp.dtype(dtype)}
        results.append(np.asarray(logits))
    assert np.array_equal(*results)
    wanted, _ = _prefill(short_model, IDS[:, :20], _fresh(short_model))
    assert np.abs(results[0] - wanted).max() < 0.2


# Padding and what a cache holds elsewhere


@settings(max_examples=20)
@given(
    lengths=st.tuples(st.integers(0, WIDTH), st.integers(0, WIDTH)),
    padding=st.lists(st.integers(0, 319), min_size=WIDTH, max_size=WIDTH),
)
def test_prefill_padding_touches_nothing(short_model, assert_trees, lengths, padding):
    """Bit for bit, whatever the padding says: a token that is not real is not routed, mixed, or kept."""
    rows = [IDS[row, :length] for row, length in enumerate(lengths)]
    wanted_logits, wanted = _prefill(short_model, rows, _fresh(short_model))
    ids = np.tile(np.int32(padding), (2, 1))
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    logits, cache = mm.prefill(*short_model, ids, _fresh(short_model), lengths)
    used = [row for row in (0, 1) if lengths[row]]
    assert np.array_equal(logits[used, :], wanted_logits[used, :])
    assert_trees(cache, wanted)


def test_padding_is_not_routed(short_model):
    """A padding token gets the shared experts' output alone, and even NaN in it does not reach a real token."""
    (model, params), rng = short_model, np.random.default_rng(0)
    config, stack = model.config, params["stacks_0"]
    weights = stack["superblocks_0"]["layers_1"]["ffn"]
    experts = ExpertWeights(**stack["experts_1"])
    ffn = LatentMoE(config.moe, config.situ, config.model_dim, config.norm_eps)
    apply = jax.jit(lambda x, real: ffn.apply({"params": weights}, x, real, experts, 0))
    shared = DenseFFN(config.situ, config.model_dim, config.moe.shared_dim)
    x = rng.standard_normal((2, 7, config.model_dim), np.float32)
    real = np.arange(7) < np.array([[2], [6]])
    alone = np.asarray(shared.apply({"params": weights["shared"]}, x))
    out = np.asarray(apply(x, real))
    _close(out[~real], alone[~real])
    assert np.abs(out - alone).max(axis=-1)[real].min() > 100 * ROUNDING
    spoiled = np.asarray(apply(np.where(real[..., None], x, np.nan), real))
    assert np.array_equal(spoiled[real], out[real])


def test_prefill_leaves_a_row_of_length_zero_as_it_was(short_model, assert_trees):
    _, before = _prefill(short_model, [IDS[0, :9], IDS[1, :14]], _fresh(short_model))
    _, after = _prefill(short_model, [IDS[0, 9:9], IDS[1, 14:19]], before, padding=319)
    assert_trees(_row(after, 0), _row(before, 0))
    assert int(after.lengths[1]) == 19
    assert_trees(_prefill(short_model, [[], []], before, padding=7)[1], before)


@pytest.mark.parametrize("kind", ["short_model", "dense_model"])
def test_stale_rows_do_not_matter(request, assert_trees, kind):
    """Slots beyond a row's length may hold anything, such as NaN of an earlier tenant, with and without an indexer."""
    model = request.getfixturevalue(kind)
    lengths = (9, 14)
    _, clean = _prefill(model, [IDS[row, :length] for row, length in enumerate(lengths)], _fresh(model))
    unused = np.arange(MAX_LEN) >= np.array(lengths)[:, None]

    def spoil(entry):
        if not isinstance(entry, PlainMLACache):
            return entry
        return jax.tree.map(lambda leaf: jnp.where(unused[..., None], jnp.nan, leaf), entry)

    plain = to_plain(clean)
    stacks = jax.tree.map(spoil, plain.stacks, is_leaf=lambda leaf: isinstance(leaf, PlainMLACache))
    stale = from_plain(plain.replace(stacks=stacks), model[0].config.mla.kv_lora_rank)
    assert any(np.isnan(leaf).any() for leaf in jax.tree.leaves(stale))
    rows = [IDS[0, 9:12], IDS[1, 14:22]]
    for _ in range(2):
        (clean_logits, clean), (stale_logits, stale) = (_prefill(model, rows, cache) for cache in (clean, stale))
        assert np.array_equal(clean_logits, stale_logits)
        (clean_logits, clean), (stale_logits, stale) = (
            mm.decode_step(*model, IDS[:, 30], cache) for cache in (clean, stale)
        )
        assert np.array_equal(clean_logits, stale_logits) and np.isfinite(clean_logits).all()
        rows = [IDS[0, 12:13], []]
    for row in (0, 1):
        assert_trees(_row(stale, row), _row(clean, row))


# A full cache


def test_decode_step_into_a_full_row_gives_nan_for_that_row_only(short_model, assert_trees):
    _, cache = _prefill(short_model, [IDS[0, :WIDTH], IDS[1, :5]], _fresh(short_model))
    _, roomy = _prefill(short_model, [IDS[0, WIDTH : MAX_LEN - 1], IDS[1, 5:9]], cache)
    _, full = _prefill(short_model, [IDS[0, WIDTH:MAX_LEN], IDS[1, 5:9]], cache)
    assert full.lengths.tolist() == [MAX_LEN, 9]
    wanted_logits, wanted = mm.decode_step(*short_model, IDS[:, 30], roomy)
    assert np.isfinite(wanted_logits).all()
    kept = _row(full, 0)[1]
    for _ in range(2):
        logits, full = mm.decode_step(*short_model, IDS[:, 30], full)
        assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
        if int(full.lengths[1]) == 10:
            assert np.array_equal(logits[1], wanted_logits[1])
            assert_trees(_row(full, 1), _row(wanted, 1))
    entries = zip(jax.tree.leaves(kept[0][2]), jax.tree.leaves(_row(full, 0)[1][0][2]), strict=True)
    assert all(np.array_equal(before, after) for before, after in entries)  # no slot was overwritten


def test_prefill_refuses_what_does_not_fit(short_model):
    _, cache = _prefill(short_model, [IDS[0, :WIDTH], IDS[1, :9]], _fresh(short_model))
    with pytest.raises(ValueError, match=rf"\[{WIDTH}, 9\] tokens and \[9, 1\] more do not fit .*max_len={MAX_LEN}"):
        _prefill(short_model, [IDS[0, :9], IDS[1, :1]], cache)
    _prefill(short_model, [IDS[0, :8], IDS[1, :1]], cache)  # this does
    ids = IDS[:, :WIDTH]
    for lengths, wanted in (([-1, 2], r"\[-1, 2\] must lie in 0\.\.24"), ([3, 25], r"\[3, 25\] must lie in 0\.\.24")):
        with pytest.raises(ValueError, match=wanted):
            mm.prefill(*short_model, ids, cache, lengths)
    for bad_ids, lengths in ((ids[:1], None), (ids, [3]), (ids[:, :0], None), (ids[0], None), (ids + 0.5, None)):
        with pytest.raises(ValueError, match="prefill|ids must be integers of rank 2"):
            mm.prefill(*short_model, bad_ids, cache, lengths)
    with pytest.raises(ValueError, match="token must be integers of rank 1"):
        mm.decode_step(*short_model, ids, cache)


# The indexer


def test_fewer_keys_than_top_k_equals_dense_attention(short_model, dense_model):
    """The cache has more slots than top-k, so the selecting path runs; the two paths order their sums otherwise."""
    top_k = short_model[0].config.indexer.top_k
    assert top_k == 8 < MAX_LEN
    (sparse, sparse_cache), (dense, dense_cache) = (
        _prefill(model, [IDS[0, :5], IDS[1, :3]], _fresh(model)) for model in (short_model, dense_model)
    )
    _close(sparse, dense)
    for position in range(5, 12):
        (sparse, sparse_cache), (dense, dense_cache) = (
            mm.decode_step(*model, IDS[:, position], cache)
            for model, cache in ((short_model, sparse_cache), (dense_model, dense_cache))
        )
        for row in (0, 1):
            if int(sparse_cache.lengths[row]) <= top_k:
                _close(sparse[row], dense[row])
            else:  # now keys are left out, and it shows
                assert np.abs(sparse[row] - dense[row]).max() > 100 * ROUNDING


# Compilation, copies


@pytest.fixture(scope="module")
def traced():
    """Names of the functions that JAX has traced since the list was last cleared."""
    names = []

    def note(event, _, fun_name="", **__):
        if event == "/jax/core/compile/jaxpr_trace_duration":
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    return names


def test_steps_compile_once_per_shape(short_model, traced):
    """A model of its own, so that nothing is compiled yet; then no call traces anything, not even a cast."""
    model = mm.Transformer(dataclasses.replace(short_model[0].config, max_len=MAX_LEN))
    own = (model, short_model[1])
    traced.clear()
    cache = _fresh(own)
    _, stepped = mm.decode_step(*own, IDS[:, 0], cache)
    assert traced.count("_decode_body") == 1
    _, cache = _prefill(own, [IDS[0, :WIDTH], IDS[1, :3]], cache)
    assert traced.count("_prefill") == 1
    traced.clear()
    for position in range(3):
        _, stepped = mm.decode_step(*own, IDS[:, position], stepped)
        _, stepped = mm.decode_step(*own, jnp.asarray(IDS[:, position]), stepped)
    for lengths in ((1, 0), (0, 3), (2, 19)):
        _, cache = _prefill(own, [IDS[0, : lengths[0]], IDS[1, : lengths[1]]], cache, padding=lengths[0])
        _, cache = mm.decode_step(*own, IDS[:, 5], cache)
    _, fresh = mm.decode_step(*own, IDS[:, 5], _fresh(own))
    _, _ = _prefill(own, [IDS[0, :3], IDS[1, :2]], fresh)
    assert traced == []


def test_cache_copied_to_numpy_and_back_continues_bitwise(short_model, assert_trees):
    """And every array of it matters: none is all zero in any row, so that half a copy would show."""
    logits, cache = _prefill(short_model, [IDS[0, :21], IDS[1, :2]], _fresh(short_model))
    for leaf in jax.tree.leaves(cache.stacks):
        assert np.all(np.any(np.asarray(leaf) != 0, axis=tuple(range(2, leaf.ndim))))
    copy = jax.tree.map(lambda leaf: np.array(leaf), cache)
    for position in (25, 26):
        (logits, cache), (copy_logits, copy) = (
            mm.decode_step(*short_model, IDS[:, position], old) for old in (cache, copy)
        )
        assert np.array_equal(logits, copy_logits)
    assert_trees(copy, cache)


def test_cache_may_be_continued_twice(short_model, assert_trees):
    """A prefix is computed once and its cache serves two continuations; each equals a run of its own."""
    _, prefix = _prefill(short_model, IDS[:, :16], _fresh(short_model))
    before = jax.tree.map(np.array, prefix)
    for start in (20, 30):
        warm_logits, warm = _prefill(short_model, IDS[:, start : start + 5], prefix)
        _, cold = _prefill(short_model, IDS[:, :16], _fresh(short_model))
        cold_logits, cold = _prefill(short_model, IDS[:, start : start + 5], cold)
        assert np.array_equal(warm_logits, cold_logits)
        assert_trees(warm, cold)
        mm.decode_step(*short_model, IDS[:, start], prefix)
    assert_trees(prefix, before)


def test_ids_outside_the_vocabulary_are_refused(short_model):
    model, params = short_model
    vocab_size = model.config.vocab_size
    cache = mm.init_cache(model, 1, 16)
    for ids in ([[0, vocab_size]], [[-1, 0]]):
        with pytest.raises(ValueError, match=f"0 to {vocab_size - 1}"):
            mm.forward(model, params, np.array(ids))
        with pytest.raises(ValueError, match=f"0 to {vocab_size - 1}"):
            mm.prefill(model, params, np.array(ids), cache)
    with pytest.raises(ValueError, match=f"0 to {vocab_size - 1}"):
        mm.decode_step(model, params, np.array([vocab_size]), cache)
    with pytest.raises(ValueError, match="rank 2"):
        mm.forward(model, params, np.array([1, 2]))
