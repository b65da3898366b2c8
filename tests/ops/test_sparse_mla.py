"""Attention to rows of a cache that are named by slot: one body over its implementations, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from maxmoe.ops import query_blocks
from maxmoe.ops.latent_cache import LatentRows, empty_rows, read_rows, write_rows
from maxmoe.ops.sparse_mla import combine, dense_context, sparse_context
from pallas_kernels import mla_sparse_gpu, mla_sparse_tpu
from tests.ops.closeness import assert_close, assert_same_bits
from tests.ops.quick_jit import quick_jit

LAYERS, BATCH, QUERIES, HEADS, SLOTS, TOP_K = 3, 2, 3, 5, 40, 21
LATENT, SHARED, SCALE = 256, 64, 0.07
# Float32 sums of 320 products of order 1, and of 21 terms, in another order.
TOLERANCE = 1e-5

_OLD = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the TPU interpreter before jax 0.12 can stop for ever"
)
_TPU = pytest.param(("pallas_tpu", True), marks=_OLD, id="pallas_tpu")
_RACES = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
_TPU_POISONED = pytest.param(("pallas_tpu", _RACES), marks=_OLD, id="pallas_tpu-poisoned")
IMPLEMENTATIONS = ["xla", _TPU, pytest.param(("pallas_gpu", True), id="pallas_gpu")]


@pytest.fixture
def attend(monkeypatch, implementation):
    """`sparse_context` by the implementation; its kernel, interpreted, on what the process believes to be its chip."""
    if implementation == "xla":
        return functools.partial(sparse_context, implementation="xla")
    name, interpret = implementation
    monkeypatch.setattr(jax, "default_backend", lambda: name.removeprefix("pallas_"))
    for module, kernel in ((mla_sparse_tpu, "mla_sparse_tpu"), (mla_sparse_gpu, "mla_sparse_gpu")):
        monkeypatch.setattr(module, kernel, functools.partial(getattr(module, kernel), interpret=interpret))
    return functools.partial(sparse_context, implementation=name)


def _inputs(seed, dtype=jnp.float32, latent_dim=LATENT, shared_dim=SHARED, slots=SLOTS):
    """Queries, the rows of three layers and indices. What no index of the middle layer names is NaN."""
    rng = np.random.default_rng(seed)
    q, q_shared = (rng.standard_normal((BATCH, QUERIES, HEADS, n)) for n in (latent_dim, shared_dim))
    indices = np.stack([rng.permutation(slots)[:TOP_K] for _ in range(BATCH * QUERIES)])
    indices = indices.reshape(BATCH, QUERIES, TOP_K)
    indices[rng.random(indices.shape) < 0.2] = -1
    indices[0, 1] = -1  # sees nothing
    indices[1, 0, :5] = [slots, slots + 1, 2**31 - 1, -(2**31), -slots]
    values = rng.standard_normal((BATCH, slots, latent_dim + shared_dim))
    for b in range(BATCH):
        values[b, np.setdiff1d(np.arange(slots), indices[b])] = np.nan
    cache = empty_rows(LAYERS, BATCH, slots, latent_dim, shared_dim, dtype)
    cache = LatentRows(*(jnp.full_like(part, jnp.nan) for part in cache))
    cache = write_rows(cache, 1, jnp.broadcast_to(jnp.arange(slots), (BATCH, slots)), jnp.asarray(values, dtype))
    return jnp.asarray(q, dtype), jnp.asarray(q_shared, dtype), cache, jnp.asarray(indices, jnp.int32)


def _reference(q, q_shared, rows, indices):
    """In float64, from the rows of one layer, [B, S, R + r]."""
    latent_dim, rows = q.shape[-1], np.asarray(rows).astype(np.float64)
    q = np.concatenate([np.asarray(x).astype(np.float64) for x in (q, q_shared)], axis=-1)
    context, log_sum_exp = np.zeros((*q.shape[:3], latent_dim)), np.full(q.shape[:3], -np.inf)
    for b, t in np.ndindex(*q.shape[:2]):
        named = np.asarray(indices[b, t])
        seen = rows[b, named[(named >= 0) & (named < rows.shape[1])]]
        if len(seen):
            scores = SCALE * q[b, t] @ seen.T
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            context[b, t] = weights @ seen[:, :latent_dim] / weights.sum(-1, keepdims=True)
            log_sum_exp[b, t] = scores.max(-1) + np.log(weights.sum(-1))
    return context, log_sum_exp


def _assert_equals_reference(given, q, q_shared, cache, indices, atol=TOLERANCE):
    expected = _reference(q, q_shared, read_rows(cache, 1), indices)
    assert_close(given[0], expected[0], atol=atol, label="context")
    assert_close(given[1], expected[1], atol=TOLERANCE, label="log-sum-exp")


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, _TPU_POISONED])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sparse_context_follows_the_equation(attend, dtype):
    q, q_shared, cache, indices = _inputs(0, dtype)
    attend = quick_jit(functools.partial(attend, scale=SCALE))
    context, log_sum_exp = attend(q, q_shared, cache, jnp.int32(1), indices)
    assert context.dtype == dtype and log_sum_exp.dtype == jnp.float32
    # In bfloat16 weights and context are rounded to 2^-9 of themselves; rows are of order 1 to 4.
    atol = TOLERANCE if dtype == jnp.float32 else 0.02
    _assert_equals_reference((context, log_sum_exp), q, q_shared, cache, indices, atol)
    assert not np.asarray(context[0, 1], np.float32).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sparse_context_of_one_query_reads_the_layer_asked_for(attend):
    q, q_shared, cache, indices = _inputs(1)
    q, q_shared, indices = (x[:, 2:] for x in (q, q_shared, indices))
    moved = LatentRows(*(part.at[0].set(part[1]).at[1].set(jnp.nan) for part in cache))
    given = quick_jit(functools.partial(attend, scale=SCALE))(q, q_shared, moved, 0, indices)
    _assert_equals_reference(given, q, q_shared, cache, indices)


@pytest.mark.parametrize("latent_dim, shared_dim, slots", [(7, 2, 33), (128, 64, 34), (130, 64, 36)])
def test_sparse_context_reads_rows_of_any_size(latent_dim, shared_dim, slots):
    inputs = _inputs(2, latent_dim=latent_dim, shared_dim=shared_dim, slots=slots)
    given = quick_jit(functools.partial(sparse_context, scale=SCALE))(*inputs[:3], 1, inputs[3])
    _assert_equals_reference(given, *inputs)


def test_sparse_context_keeps_queries_wider_than_the_cache():
    q, q_shared, cache, indices = _inputs(3, jnp.bfloat16)
    q, q_shared = q.astype(jnp.float32) + 1e-3, q_shared.astype(jnp.float32)
    given = sparse_context(q, q_shared, cache, 1, indices, SCALE)
    assert given[0].dtype == jnp.float32
    _assert_equals_reference(given, q, q_shared, cache, indices)


@pytest.mark.parametrize("block", [1, 2])  # of three queries: single ones; two, and one with padding
@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_contexts_do_not_depend_on_query_blocks(monkeypatch, form, block):
    q, q_shared, cache, indices = _inputs(4)
    positions = jnp.asarray([[7, -1, 30], [3, 4, 5]])
    if form == "sparse":
        fn, elements = (
            functools.partial(sparse_context, q, q_shared, cache, 1, indices, SCALE),
            TOP_K * (LATENT + SHARED),
        )
    else:
        cache = LatentRows(*(jnp.nan_to_num(part) for part in cache))
        fn, elements = functools.partial(dense_context, q, q_shared, cache, 1, positions, SCALE), HEADS * SLOTS
    whole = fn()
    monkeypatch.setattr(query_blocks, "BUDGET", block * BATCH * elements)
    for part, expected in zip(fn(), whole, strict=True):
        assert part.shape == expected.shape
        assert_close(part, expected, atol=TOLERANCE)


def test_dense_context_sees_what_stands_at_and_before_a_position():
    q, q_shared, cache, _ = _inputs(5)
    values = np.random.default_rng(6).standard_normal((BATCH, SLOTS, LATENT + SHARED)).astype(np.float32)
    positions = np.asarray([[0, -1, 17], [SLOTS - 1, 5, -9]], np.int32)
    values[0, 18:] = np.nan  # stale: after the last query of the sequence
    cache = write_rows(cache, 1, jnp.broadcast_to(jnp.arange(SLOTS), (BATCH, SLOTS)), jnp.asarray(values))
    indices = np.where(np.arange(SLOTS) <= positions[..., None], np.arange(SLOTS), -1)
    given = quick_jit(functools.partial(dense_context, scale=SCALE))(q, q_shared, cache, 1, positions)
    _assert_equals_reference(given, q, q_shared, cache, indices)
    assert_same_bits(given[1][0, 1], np.full(HEADS, -np.inf, np.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_combine_joins_the_shards_of_a_cache(attend, num_shards):
    q, q_shared, cache, indices = _inputs(7)
    size = -(-SLOTS // num_shards)
    # A shard holds a stretch of the slots; some queries have nothing in it.
    shards = [jnp.where(indices // size == i, indices, -1) for i in range(num_shards)]
    attend = quick_jit(functools.partial(attend, scale=SCALE))
    partials = [attend(q, q_shared, cache, 1, shard) for shard in shards]
    given = combine(*(jnp.stack(part) for part in zip(*partials, strict=True)))
    _assert_equals_reference(given, q, q_shared, cache, indices)


def test_combine_of_nothing_is_zeros_and_has_finite_gradients():
    contexts, lses = jnp.zeros((2, 1, 1, 3, 8)), jnp.full((2, 1, 1, 3), -jnp.inf)
    context, lse = combine(contexts, lses)
    assert (context == 0).all() and jnp.isneginf(lse).all()
    assert context.shape == (1, 1, 3, 8) and lse.shape == (1, 1, 3)
    gradient = jax.grad(lambda contexts: combine(contexts, lses)[0].sum())(contexts)
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("implementation", ["xla", _TPU])
def test_sparse_context_gradients_equal_differences(attend):
    q, q_shared, cache, indices = _inputs(8)
    rng = np.random.default_rng(9)
    weights = [rng.standard_normal(s).astype(np.float32) for s in ((BATCH, QUERIES, HEADS, LATENT), q.shape[:3])]
    weights[1][0, 1] = 0  # of the query that sees nothing, and gives -inf

    def loss(q, q_shared, cache):
        context, lse = attend(q, q_shared, cache, 1, indices, SCALE)
        return jnp.sum(weights[0] * context) + jnp.sum(jnp.where(weights[1] == 0, 0, weights[1] * lse))

    given = quick_jit(jax.grad(loss, (0, 1, 2)))(q, q_shared, cache)
    unnamed = np.isnan(np.asarray(read_rows(cache, 1)))
    assert not np.asarray(read_rows(given[2], 1))[unnamed].any()
    assert not np.asarray(read_rows(given[2], 0)).any() and not np.asarray(read_rows(given[2], 2)).any()

    def exact(q, q_shared, rows):
        context, lse = _reference(q, q_shared, rows, indices)
        return np.sum(weights[0] * context) + np.sum(weights[1] * np.where(np.isinf(lse), 0, lse))

    inputs = [np.asarray(x, np.float64) for x in (q, q_shared, read_rows(cache, 1))]
    gradients = [np.asarray(x) for x in (*given[:2], read_rows(given[2], 1))]
    for i, name in enumerate(("q", "q_shared", "rows")):
        step = 1e-5 * rng.standard_normal(inputs[i].shape)
        up, down = ([x + s * step if j == i else x for j, x in enumerate(inputs)] for s in (1, -1))
        # Central differences in float64; the given gradient has float32 errors relative to its norm.
        atol = 1e-5 * np.linalg.norm(gradients[i]) * np.linalg.norm(step)
        assert_close(np.sum(gradients[i] * step), (exact(*up) - exact(*down)) / 2, atol=atol, label=name)


@pytest.mark.parametrize(
    "name, sizes, reason",
    [
        ("pallas_tpu", dict(slots=38), "38 slots with rows of 256 and 64 values: a multiple of 4 slots"),
        ("pallas_tpu", dict(shared_dim=32), "rows of 256 and 32 values: a multiple of 4 slots and rows of 128 times 2"),
        ("pallas_tpu", dict(latent_dim=128), "R/128 in 2, 4, 8"),
        ("pallas_gpu", dict(latent_dim=130), "latent width 130: powers of two from 16 to 512"),
    ],
)
def test_sparse_context_kernels_say_which_rows_they_cannot_read(monkeypatch, name, sizes, reason):
    monkeypatch.setattr(jax, "default_backend", lambda: name.removeprefix("pallas_"))
    q, q_shared, cache, indices = _inputs(10, **sizes)
    with pytest.raises(NotImplementedError, match=f"sparse_context: implementation='{name}' cannot run: .*{reason}"):
        sparse_context(q, q_shared, cache, 1, indices, SCALE, name)
