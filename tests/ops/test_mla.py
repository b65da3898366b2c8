"""Latent attention: expanded, absorbed and sparse forms against plain attention in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.ops import mla, query_blocks
from maxmoe.ops.latent_cache import empty_rows, write_rows
from maxmoe.ops.mla import absorbed_attention, attention, expanded_attention
from maxmoe.ops.sparse_mla import sparse_attention
from tests.ops.closeness import assert_close, assert_same_bits
from tests.ops.quick_jit import quick_jit

HEADS, OWN, SHARED, VALUE, RANK = 3, 6, 2, 5, 7
FORMS = {"expanded": expanded_attention, "absorbed": absorbed_attention}
BATCH, QUERIES, SLOTS = 2, 5, 9
POSITIONS = np.array([[2, 3, 4, 5, 6], [0, 1, 2, 3, 4]], np.int32)
TOLERANCE = 5e-6  # float32 scores and sums of values of order 1 to 10

jitted = {name: jax.jit(form) for name, form in FORMS.items()}


def _sparse_attention(q, rows, w_kv, indices):
    """With the rows in the second layer of a cache whose first one is NaN."""
    batch, num_slots, _ = rows.shape
    rank = w_kv.shape[-1]
    cache = empty_rows(2, batch, num_slots, rank, rows.shape[-1] - rank, rows.dtype)
    cache = jax.tree.map(lambda part: part.at[0].set(jnp.nan), cache)
    cache = write_rows(cache, 1, jnp.broadcast_to(jnp.arange(num_slots), (batch, num_slots)), rows)
    return sparse_attention(q, cache, 1, w_kv, indices)


sparse = jax.jit(_sparse_attention)


def _random_inputs(seed, dtype=np.float32, batch=BATCH, queries=QUERIES, slots=SLOTS):
    rng = np.random.default_rng(seed)
    shapes = ((batch, queries, HEADS, OWN + SHARED), (batch, slots, RANK + SHARED), (HEADS * (OWN + VALUE), RANK))
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def _poison(rows, positions=POSITIONS):
    """NaN in the slots after each row's last query."""
    stale = np.arange(rows.shape[1]) > positions.max(1, keepdims=True)
    return jnp.where(stale[..., None], jnp.nan, rows)


def _reference(q, rows, w_kv, sees):
    """Attention in float64; sees [B, T, S]. A query that sees nothing gets zeros."""
    q, rows, w_kv = (np.asarray(x).astype(np.float64) for x in (q, rows, w_kv))
    w = w_kv.reshape(HEADS, OWN + VALUE, RANK)
    out = np.zeros((*q.shape[:3], VALUE))
    for b, t, h in np.ndindex(*q.shape[:3]):
        visible = rows[b, sees[b, t]]
        if len(visible):
            keys = np.concatenate([visible[:, :RANK] @ w[h, :OWN].T, visible[:, RANK:]], -1)
            scores = keys @ q[b, t, h] / np.sqrt(OWN + SHARED)
            probs = np.exp(scores - scores.max())
            out[b, t, h] = probs / probs.sum() @ (visible[:, :RANK] @ w[h, OWN:].T)
    return out


def _causal(positions, slots=SLOTS):
    return np.arange(slots) <= positions[..., None]


@pytest.mark.parametrize("form", FORMS)
def test_attention_forms_equal_plain_attention(form):
    q, rows, w_kv = _random_inputs(0)
    given = jitted[form](q, _poison(rows), w_kv, POSITIONS)
    assert_close(given, _reference(q, rows, w_kv, _causal(POSITIONS)), atol=TOLERANCE)


def _form_and_where(form):
    """The function and its last argument, for every visible key."""
    if form == "sparse":
        return _sparse_attention, np.where(_causal(POSITIONS), np.arange(SLOTS), -1).astype(np.int32)
    return FORMS[form], POSITIONS


@pytest.mark.parametrize("form", [*FORMS, "sparse"])
def test_attention_forms_work_in_bfloat16(form):
    q, rows, w_kv = _random_inputs(1, jnp.bfloat16)
    fn, where = _form_and_where(form)
    given = jax.jit(fn)(q, _poison(rows), w_kv, where)
    assert given.dtype == jnp.bfloat16
    expected = _reference(q, rows, w_kv, _causal(POSITIONS))
    # Keys or queries, probabilities, values and output are rounded to 8 bits each; scores reach about 10, so that
    # their rounding moves a probability by a few percent.
    assert_close(given, expected, atol=0.03 * np.abs(expected).max())
    wide = [x.astype(jnp.float32) for x in (q, _poison(rows), w_kv)]
    gradients = (_gradients(fn, *inputs, where, expected) for inputs in ((q, _poison(rows), w_kv), wide))
    for name, low, high in zip(("q", "rows", "w_kv"), *gradients, strict=True):
        low, high = (np.asarray(x).astype(np.float64) for x in (low, high))
        assert np.linalg.norm(low - high) < 0.05 * np.linalg.norm(high), name  # the same roundings, once more


@pytest.mark.parametrize("form", [*FORMS, "sparse"])
def test_attention_row_does_not_depend_on_its_neighbours(form):
    inputs, others = _random_inputs(2), _random_inputs(3)
    mixed = [jnp.stack([x[0], y[1]]) for x, y in zip(inputs[:2], others[:2], strict=True)]
    fn, where = _form_and_where(form)
    # One program works on each row by itself, so not a bit may change.
    assert_same_bits(jax.jit(fn)(*mixed, inputs[2], where)[0], jax.jit(fn)(*inputs, where)[0])


def _compile_anew(fn):
    return quick_jit(lambda *args: fn(*args))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block", [1, 2])  # five queries: single ones; two blocks and one over
def test_attention_forms_do_not_depend_on_query_blocks(monkeypatch, form, block):
    q, rows, w_kv = _random_inputs(4)
    whole = jitted[form](q, _poison(rows), w_kv, POSITIONS)
    monkeypatch.setattr(query_blocks, "BUDGET", block * BATCH * HEADS * SLOTS)
    given = _compile_anew(FORMS[form])(q, _poison(rows), w_kv, POSITIONS)
    # The same sums, compiled for another number of queries.
    assert_close(given, whole, atol=TOLERANCE)


@pytest.mark.parametrize("block", [1, 2])
def test_sparse_attention_does_not_depend_on_query_blocks(monkeypatch, block):
    q, rows, w_kv = _random_inputs(5)
    indices = np.where(_causal(POSITIONS), np.arange(SLOTS), -1).astype(np.int32)
    whole = sparse(q, _poison(rows), w_kv, indices)
    monkeypatch.setattr(query_blocks, "BUDGET", block * BATCH * SLOTS * (RANK + SHARED))
    assert_close(_compile_anew(_sparse_attention)(q, _poison(rows), w_kv, indices), whole, atol=TOLERANCE)


def test_map_query_blocks_runs_blocks_of_the_budget(monkeypatch):
    monkeypatch.setattr(query_blocks, "BUDGET", 12)
    seen = []

    def double(x, y):
        seen.append(x.shape)
        return 2 * x + y[..., None]

    x, y = np.arange(28.0).reshape(2, 7, 2), np.arange(14).reshape(2, 7)
    assert_same_bits(query_blocks.map_query_blocks(double, 4, x, y), np.float32(2 * x + y[..., None]))
    assert set(seen) == {(2, 3, 2)}


@pytest.mark.parametrize(
    "queries, budget, form", [(1, 2**28, "absorbed"), (5, 2**28, "expanded"), (5, 100, "absorbed")]
)
def test_attention_picks_the_cheaper_form_that_fits(monkeypatch, queries, budget, form):
    q, rows, w_kv = _random_inputs(6, queries=queries, slots=5)
    positions = np.broadcast_to(np.arange(5 - queries, 5, dtype=np.int32), (BATCH, queries))
    expected = _reference(q, rows, w_kv, _causal(positions, 5))
    used = []

    def spy(name):
        return lambda *args: used.append(name) or FORMS[name](*args)

    monkeypatch.setattr(mla, "EXPANDED_BUDGET", budget)
    for name in FORMS:
        monkeypatch.setattr(mla, f"{name}_attention", spy(name))
    assert_close(_compile_anew(attention)(q, rows, w_kv, positions), expected, atol=TOLERANCE)
    assert used == [form]


def test_sparse_attention_does_not_count_a_missing_key():
    keys, values = [[1, 0], [0, 1], [1, 1]], [[1], [2], [4]]
    rows = np.concatenate([keys, values], -1).astype(np.float32)[None]  # a latent that holds key and value
    q = np.float32([[[[np.sqrt(2), 0]]]])  # its factor undoes the scale
    indices = np.array([[[0, 1, 2, -1]]], np.int32)
    given = sparse(q, rows, np.eye(3, dtype=np.float32), indices)
    # Dense attention over three keys. Counting slot -1, the last one, a second time would give 2.89076823.
    assert_close(given, [[[[2.42231880]]]], rtol=1e-6)
    for name, form in jitted.items():
        dense = form(q, rows, np.eye(3, dtype=np.float32), np.array([[2]], np.int32))
        assert_close(dense, [[[[2.42231880]]]], rtol=1e-6, label=name)


def _all_selected(rng, k):
    """Every visible slot, in random order, then entries that name no key."""
    indices = rng.choice([-1, -7, SLOTS, SLOTS + 5, 10**6, -(2**31), 2**31 - 1], (BATCH, QUERIES, k))
    for b, t in np.ndindex(BATCH, QUERIES):
        places = rng.permutation(k)[: POSITIONS[b, t] + 1]
        indices[b, t, places] = rng.permutation(POSITIONS[b, t] + 1)
    return indices.astype(np.int32)


@pytest.mark.parametrize("k", [7, 13])  # as many entries as the longest row sees, and more than there are slots
def test_sparse_attention_to_all_keys_equals_dense(k):
    q, rows, w_kv = _random_inputs(7)
    indices = _all_selected(np.random.default_rng(8), k)
    given = sparse(q, _poison(rows), w_kv, indices)
    assert_close(given, _reference(q, rows, w_kv, _causal(POSITIONS)), atol=TOLERANCE)
    assert_close(given, jitted["absorbed"](q, _poison(rows), w_kv, POSITIONS), atol=TOLERANCE, label="absorbed")


def test_sparse_attention_sees_only_the_selected():
    q, rows, w_kv = _random_inputs(9)
    rng = np.random.default_rng(10)
    indices = np.stack([rng.permutation(SLOTS)[:7] for _ in range(BATCH * QUERIES)])
    indices = indices.reshape(BATCH, QUERIES, 7).astype(np.int32)
    indices[0, 1, 2:], indices[1, 3, :6] = -1, SLOTS
    sees = (indices[..., None] == np.arange(SLOTS)).any(2)
    assert_close(sparse(q, rows, w_kv, indices), _reference(q, rows, w_kv, sees), atol=TOLERANCE)
    used = sees[1, 3].argmax()  # one query alone may hold this slot: the others of its row are pointed elsewhere
    indices[1, :3], indices[1, 4] = np.where(indices[1, :3] == used, -1, indices[1, :3]), -1
    poisoned = rows.at[1].set(jnp.where((np.arange(SLOTS) == used)[:, None], jnp.nan, rows[1]))
    clean, given = sparse(q, rows, w_kv, indices), np.asarray(sparse(q, poisoned, w_kv, indices))
    assert np.isnan(given[1, 3]).all()
    assert_same_bits(np.delete(given[1], 3, 0), np.delete(np.asarray(clean)[1], 3, 0), "queries beside it")


def test_sparse_attention_of_a_query_without_keys_is_zero():
    q, rows, w_kv = _random_inputs(11)
    indices = np.full((BATCH, QUERIES, 7), -1, np.int32)
    indices[1, 2, 0] = 4
    given = np.asarray(sparse(q, rows, w_kv, indices))
    expected = _reference(q, rows, w_kv, (indices[..., None] == np.arange(SLOTS)).any(2))
    assert_close(given, expected, atol=TOLERANCE)
    assert_same_bits(given[0], np.zeros_like(given[0]))


def _gradients(fn, q, rows, w_kv, where, factors):
    return quick_jit(jax.grad(lambda *args: jnp.sum(factors * fn(*args, where)), argnums=(0, 1, 2)))(q, rows, w_kv)


@pytest.mark.parametrize("form", [*FORMS, "sparse"])
def test_attention_gradients_equal_differences(form):
    q, rows, w_kv = _random_inputs(12)
    indices = _all_selected(np.random.default_rng(13), 7)
    sees = _causal(POSITIONS).copy()
    if form == "sparse":
        indices[0, 0], sees[0, 0] = -1, False  # a query without keys must not make a gradient NaN
    rng = np.random.default_rng(14)
    factors = rng.standard_normal((BATCH, QUERIES, HEADS, VALUE)).astype(np.float32)
    fn, where = _form_and_where(form)
    where = indices if form == "sparse" else where
    gradients = [np.asarray(d) for d in _gradients(fn, q, _poison(rows), w_kv, where, factors)]
    stale = np.arange(SLOTS) > POSITIONS.max(1, keepdims=True)
    assert not gradients[1][stale].any()  # and so no NaN of stale slots reaches a gradient
    inputs = [np.asarray(x).astype(np.float64) for x in (q, rows, w_kv)]
    for i, name in enumerate(("q", "rows", "w_kv")):
        for _ in range(3):
            step = 1e-5 * rng.standard_normal(inputs[i].shape)
            up, down = ([x + s * step if j == i else x for j, x in enumerate(inputs)] for s in (1, -1))
            expected = np.sum(factors * (_reference(*up, sees) - _reference(*down, sees))) / 2
            # Central differences in float64; the given gradient has float32 errors relative to its norm.
            atol = 1e-5 * np.linalg.norm(gradients[i]) * np.linalg.norm(step)
            assert_close(np.sum(gradients[i] * step), expected, atol=atol, label=f"gradient of {name}")
