"""Sparse latent attention for TPU, run by the interpreters, against the plain op; unnamed rows are NaN."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from maxmoe.ops.latent_cache import LatentRows
from maxmoe.ops.mla import absorb_queries, split_kv_weight
from maxmoe.ops.sparse_mla import sparse_attention
from pallas_kernels import mla_sparse_backward_tpu
from pallas_kernels.mla_pages_tpu import pack_pages, unpack_pages
from pallas_kernels.mla_sparse_tpu import mla_sparse_tpu, mla_sparse_tpu_refusal
from tests.ops.closeness import assert_close

RANK, SHARED, OWN, VALUE = 512, 64, 16, 8  # the real sizes of a cache row; few values per head, which stay outside
SCALE = (OWN + SHARED) ** -0.5

# interpret=True reads rows through the same views of memory as a chip; the other interpreter finds unwritten memory
# that is read, and copies that are not waited for.
PLAIN = True
POISONED = pltpu.InterpretParams(uninitialized_memory="nan")
RACES = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
INTERPRETERS = pytest.mark.parametrize("interpret", [PLAIN, POISONED], ids=["plain", "poisoned"])


class Case:
    """Arguments of the plain op, and the same rows in pages in which everything that no index names is NaN."""

    def __init__(self, batch, num_queries, num_heads, top_k, page_size, pages, dtype=jnp.float32, seed=0):
        draw = np.random.default_rng(seed)
        num_keys = pages * page_size

        def normal(*shape):
            return jnp.asarray(draw.standard_normal(shape), dtype)

        self.q = normal(batch, num_queries, num_heads, OWN + SHARED)
        self.w_kv = normal(num_heads * (OWN + VALUE), RANK) * RANK**-0.5
        indices = draw.integers(0, num_keys, (batch, num_queries, top_k))
        indices[draw.random(indices.shape) < 0.1] = -1
        indices[0, 0, top_k // 4 :] = -1  # few keys, at the front
        indices[-1, 0, : top_k // 2] = num_keys + 10**6  # none at the front, and stale ones that are far too large
        indices[-1, -1] = -1  # none at all
        self.indices = jnp.asarray(indices, jnp.int32)
        rows = np.array(normal(batch, num_keys, RANK + SHARED).astype(jnp.float32))
        table = draw.permutation(batch * pages + 3)[: batch * pages].reshape(batch, pages)
        pool = np.full((batch * pages + 3, page_size, RANK + SHARED), np.nan, np.float32)
        for b in range(batch):
            named = np.unique(indices[b][(indices[b] >= 0) & (indices[b] < num_keys)])
            unnamed = np.setdiff1d(np.arange(num_keys), named)
            pool[table[b, named // page_size], named % page_size] = rows[b, named]
            rows[b, unnamed] = np.nan
        self.rows, self.pool = jnp.asarray(rows, dtype), jnp.asarray(pool, dtype)
        self.page_table = jnp.asarray(table, jnp.int32)

    def rows_of(self, pool):
        """The pool's rows in the order of each sequence's slots."""
        return pool[self.page_table].reshape(self.rows.shape)

    def absorbed(self, q, w_kv):
        """Queries that meet cache rows directly."""
        w_key, _ = split_kv_weight(w_kv, q, self.rows)
        return jnp.split(absorb_queries(q, w_key), [RANK], axis=-1)

    def plain(self, q, rows, w_kv):
        """`sparse_attention`, with the rows as the only layer of a cache."""
        cache = LatentRows(*(part[None] for part in pack_pages(rows)))
        return sparse_attention(q, cache, 0, w_kv, self.indices)

    def kernel(self, q, w_kv, pool, interpret):
        """What `sparse_attention` gives, by way of the kernel."""
        _, w_value = split_kv_weight(w_kv, q, self.rows)
        context, _ = mla_sparse_tpu(
            *self.absorbed(q, w_kv), *pack_pages(pool), self.page_table, self.indices, SCALE, interpret
        )
        return jnp.einsum("bthr,hvr->bthv", context, w_value, precision="highest")


def log_sum_exp(case):
    """In float64."""
    q = np.concatenate([np.asarray(part, np.float64) for part in case.absorbed(case.q, case.w_kv)], axis=-1)
    rows, indices = np.asarray(case.rows, np.float64), np.asarray(case.indices)
    out = np.full(q.shape[:3], -np.inf)
    for b, t in np.ndindex(*q.shape[:2]):
        named = indices[b, t][(indices[b, t] >= 0) & (indices[b, t] < rows.shape[1])]
        if named.size:
            out[b, t] = np.logaddexp.reduce(SCALE * q[b, t] @ rows[b, named].T, axis=-1)
    return out


def assert_near(found, expected, tolerance):
    """As a share of the largest expected value, or of 1."""
    expected = np.asarray(expected, np.float64)
    largest = np.abs(np.where(np.isfinite(expected), expected, 0)).max()
    assert_close(found, expected, atol=tolerance * max(1, largest))


# Float32 sums of 576 and 300 terms in another order.
EXACT = 2e-5
# Weights, contexts and gradients are rounded to bfloat16, relative 2**-9 each, before they are summed.
ROUNDED = 2e-2

CASES = {
    "decode": dict(batch=5, num_queries=1, num_heads=3, top_k=300, page_size=16, pages=30),
    "prefill": dict(batch=2, num_queries=9, num_heads=2, top_k=300, page_size=8, pages=50),
    "verify": dict(batch=2, num_queries=3, num_heads=12, top_k=385, page_size=64, pages=9),
    "one": dict(batch=1, num_queries=2, num_heads=1, top_k=1, page_size=4, pages=1),
}
SHAPES = pytest.mark.parametrize("shape", CASES.values(), ids=CASES.keys())


@INTERPRETERS
@SHAPES
def test_mla_sparse_tpu_equals_the_plain_op(shape, interpret):
    case = Case(**shape)
    expected = case.plain(case.q, case.rows, case.w_kv)
    assert_near(case.kernel(case.q, case.w_kv, case.pool, interpret), expected, EXACT)


@INTERPRETERS
def test_mla_sparse_tpu_equals_the_plain_op_in_bfloat16(interpret):
    case = Case(**CASES["verify"], dtype=jnp.bfloat16)
    expected = case.plain(case.q, case.rows, case.w_kv)
    assert_near(case.kernel(case.q, case.w_kv, case.pool, interpret), expected, ROUNDED)


@SHAPES
def test_mla_sparse_tpu_gives_the_log_sum_exp(shape):
    case = Case(**shape)
    args = (*case.absorbed(case.q, case.w_kv), *pack_pages(case.pool), case.page_table, case.indices)
    context, found = mla_sparse_tpu(*args, SCALE, PLAIN)
    expected = log_sum_exp(case)
    np.testing.assert_array_equal(context[np.isneginf(expected)], 0)
    assert_near(found, expected, EXACT)


def test_mla_sparse_tpu_has_no_race():
    case = Case(batch=3, num_queries=1, num_heads=1, top_k=600, page_size=16, pages=30)  # more blocks than slots
    expected = case.plain(case.q, case.rows, case.w_kv)
    assert_near(case.kernel(case.q, case.w_kv, case.pool, RACES), expected, EXACT)


def test_mla_sparse_tpu_finds_pages_in_long_tables_of_many_sequences():
    # Page tables of two and a half vector registers; sequences that fill two windows of the table and one in part.
    case = Case(batch=19, num_queries=1, num_heads=1, top_k=60, page_size=4, pages=300)
    expected = case.plain(case.q, case.rows, case.w_kv)
    assert_near(case.kernel(case.q, case.w_kv, case.pool, PLAIN), expected, EXACT)
    case = Case(batch=10, num_queries=2, num_heads=1, top_k=60, page_size=4, pages=300)
    expected = case.plain(case.q, case.rows, case.w_kv)
    assert_near(case.kernel(case.q, case.w_kv, case.pool, PLAIN), expected, EXACT)


@INTERPRETERS
def test_mla_sparse_tpu_counts_an_index_that_names_no_key_for_nothing(interpret):
    # Case B03: an index -1 that gathers the last row, too, gives 2.89076823.
    keys = jnp.zeros((1, 4, RANK + SHARED)).at[0, :3, RANK : RANK + 2].set([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    keys = keys.at[0, :3, 0].set([1.0, 2.0, 4.0]).at[0, 3].set(jnp.nan)
    q, q_shared = jnp.zeros((1, 1, 1, RANK)), jnp.zeros((1, 1, 1, SHARED)).at[..., 0].set(1)
    indices = jnp.asarray([[[0, 1, 2, -1]]], jnp.int32)
    context, _ = mla_sparse_tpu(q, q_shared, *pack_pages(keys), jnp.zeros((1, 1), jnp.int32), indices, 1.0, interpret)
    assert context[0, 0, 0, 0] == pytest.approx(2.42231880, abs=1e-6)


def test_mla_sparse_tpu_counts_a_key_as_often_as_it_is_named():
    case = Case(**CASES["verify"])
    once = case.indices[..., :130]
    args = (*case.absorbed(case.q, case.w_kv), *pack_pages(case.pool), case.page_table)
    context, lse = mla_sparse_tpu(*args, once, SCALE, PLAIN)
    twice_context, twice_lse = mla_sparse_tpu(*args, jnp.concatenate([once, once], -1), SCALE, PLAIN)
    assert_near(twice_context, context, EXACT)
    assert_near(twice_lse, lse + np.log(2), EXACT)


@INTERPRETERS
@pytest.mark.parametrize("value", [3, RANK + 3], ids=["latent", "shared"])
def test_mla_sparse_tpu_shows_a_nan_in_a_named_key(value, interpret):
    case = Case(batch=2, num_queries=2, num_heads=2, top_k=20, page_size=16, pages=2)
    key = int(case.indices[0, 1].max())
    pool = case.pool.at[case.page_table[0, key // 16], key % 16, value].set(jnp.nan)
    args = (*case.absorbed(case.q, case.w_kv), *pack_pages(pool), case.page_table, case.indices)
    context, lse = mla_sparse_tpu(*args, SCALE, interpret)
    assert jnp.isnan(context[0, 1, :, 3]).all() and jnp.isnan(lse[0, 1]).all()


def gradients(case, attend):
    """Of q, w_kv and the pool's named rows, for a loss that weighs every output on its own."""
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((*case.q.shape[:3], VALUE)), jnp.float32)

    def loss(q, w_kv, pool):
        return jnp.sum(weights * attend(q, w_kv, pool).astype(jnp.float32))

    return jax.grad(loss, (0, 1, 2))(case.q, case.w_kv, case.pool)


def assert_gradients_equal_those_of_the_plain_op(case, interpret, tolerance):
    found = gradients(case, functools.partial(case.kernel, interpret=interpret))

    # On the way back the plain op multiplies what it masks by zero, so it gets rows without NaN.
    def plain(q, w_kv, pool):
        return case.plain(q, case.rows_of(jnp.where(jnp.isnan(pool), 0, pool)), w_kv)

    for ours, theirs in zip(found, gradients(case, plain), strict=True):
        assert_near(ours, theirs, tolerance)


@pytest.mark.parametrize("name, interpret", [("decode", POISONED), ("decode", PLAIN), ("prefill", PLAIN)])
def test_gradients_equal_those_of_the_plain_op(name, interpret):
    assert_gradients_equal_those_of_the_plain_op(Case(**CASES[name]), interpret, 5 * EXACT)


def test_gradients_equal_those_of_the_plain_op_in_bfloat16():
    case = Case(**CASES["verify"], dtype=jnp.bfloat16)
    assert_gradients_equal_those_of_the_plain_op(case, PLAIN, 2 * ROUNDED)


def test_gradients_have_no_race():
    case = Case(batch=1, num_queries=2, num_heads=1, top_k=600, page_size=16, pages=40)
    assert_gradients_equal_those_of_the_plain_op(case, RACES, 5 * EXACT)


def test_gradients_do_not_depend_on_how_many_queries_are_taken_at_a_time(monkeypatch):
    monkeypatch.setattr(mla_sparse_backward_tpu, "ROW_GRADIENT_BYTES", 1)  # eight: of 9 queries, two stretches
    assert_gradients_equal_those_of_the_plain_op(Case(**CASES["prefill"]), PLAIN, 5 * EXACT)


def test_gradient_of_the_log_sum_exp_equals_that_of_the_plain_form():
    case = Case(batch=1, num_queries=3, num_heads=2, top_k=40, page_size=8, pages=4)
    q, q_shared = case.absorbed(case.q, case.w_kv)
    weights = jnp.asarray([[[1.0, -2.0], [3.0, 0.5], [0.0, 0.0]]])

    def loss(q, pool):
        args = (q, q_shared, *pack_pages(pool), case.page_table, case.indices, SCALE, PLAIN)
        return jnp.sum(jnp.where(weights == 0, 0, weights * mla_sparse_tpu(*args)[1]))

    def plain(q, pool):
        rows = case.rows_of(jnp.where(jnp.isnan(pool), 0, pool))[0]
        named = (case.indices[0] >= 0) & (case.indices[0] < rows.shape[0])
        chosen = rows[jnp.where(named, case.indices[0], 0)]
        scores = SCALE * jnp.einsum("thc,tkc->thk", jnp.concatenate([q, q_shared], -1)[0], chosen, precision="highest")
        scores = jnp.where(named[:, None], scores, -1e30)
        return jnp.sum(weights[0] * jax.nn.logsumexp(scores, axis=-1))

    for found, expected in zip(*(jax.grad(f, (0, 1))(q, case.pool) for f in (loss, plain)), strict=True):
        assert_near(found, expected, EXACT)


def test_pages_hold_the_rows_that_were_packed():
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8, RANK + SHARED)), jnp.float32)
    latent, shared = pack_pages(rows)
    assert latent.shape == (3, 8, 4, 128) and shared.shape == (3, 2, 2, 128)
    np.testing.assert_array_equal(unpack_pages(latent, shared), rows)


def refusal_arguments(**changes):
    shapes = dict(
        q=((2, 3, 12, 512), jnp.bfloat16),
        q_shared=((2, 3, 12, 64), jnp.bfloat16),
        latent_pages=((8, 16, 4, 128), jnp.bfloat16),
        shared_pages=((8, 4, 2, 128), jnp.bfloat16),
        page_table=((2, 4), jnp.int32),
        indices=((2, 3, 100), jnp.int32),
    )
    return {name: jax.ShapeDtypeStruct(*(changes.get(name) or shapes[name])) for name in shapes}


def test_mla_sparse_tpu_refusal_is_none_for_what_runs():
    assert mla_sparse_tpu_refusal(**refusal_arguments()) is None


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"q": ((2, 3, 12, 512), jnp.float32)}, "queries are float32 and bfloat16, pages bfloat16"),
        ({"q": ((2, 3, 12, 256), jnp.bfloat16)}, "q has 256 latent values, the pages 512"),
        ({"q_shared": ((2, 3, 12, 32), jnp.bfloat16)}, r"q_shared is \(2, 3, 12, 32\): only \(2, 3, 12, 64\)"),
        ({"latent_pages": ((8, 16, 5, 128), jnp.bfloat16)}, r"latent pages are \(8, 16, 5, 128\)"),
        ({"latent_pages": ((8, 24, 4, 128), jnp.bfloat16)}, "page_size is 24: a power of two"),
        ({"shared_pages": ((8, 16, 2, 128), jnp.bfloat16)}, r"only \(8, 4, 2, 128\) fits"),
        ({"indices": ((2, 4, 100), jnp.int32)}, "do not belong to q"),
        ({"indices": ((2, 3, 100), jnp.int16)}, "both must be int32"),
    ],
)
def test_mla_sparse_tpu_refusal_says_what_was_given_and_what_is_allowed(changes, reason):
    arguments = refusal_arguments(**changes)
    arrays = {name: jnp.zeros(x.shape, x.dtype) for name, x in arguments.items()}
    with pytest.raises(NotImplementedError, match=reason):
        mla_sparse_tpu(**arrays, scale=1.0)


def test_mla_sparse_tpu_tells_the_compiler_of_the_blocks_that_expected_keys_fill():
    case = Case(batch=2, num_queries=1, num_heads=4, top_k=1024, page_size=16, pages=4)
    args = (*case.absorbed(case.q, case.w_kv), *pack_pages(case.pool), case.page_table, case.indices)

    def told(expected_keys):
        call = functools.partial(mla_sparse_tpu, scale=SCALE, expected_keys=expected_keys)
        text = str(jax.make_jaxpr(call)(*args))
        return int(re.search(r"bytes_accessed=(\d+)", text)[1])

    row_bytes = 4 * (RANK + 256)  # a row's shared part comes with its neighbours
    assert told(None) == told(1024)
    assert told(1024) - told(130) == 2 * (1024 - 256) * row_bytes  # 130 keys are two blocks of 128
