"""Sparse latent attention for NVIDIA GPUs, in the interpreter, against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_sparse_gpu import mla_sparse_gpu, mla_sparse_gpu_refusal
from pallas_kernels.tiling import MLA_SPARSE_H200
from tests.ops.closeness import assert_close, assert_same_bits

SCALE, PAGE_SIZE, PAGES, SHARED = 192**-0.5, 16, 14, 64
WIDE = dataclasses.replace(MLA_SPARSE_H200, heads=(32, 16))
UNSPLIT = dataclasses.replace(MLA_SPARSE_H200, min_programs=1)


@functools.partial(jax.jit, static_argnames="tiling")
def _run(q, q_shared, latent, shared, table, indices, tiling):
    return mla_sparse_gpu(q, q_shared, latent, shared, table, indices, SCALE, tiling=tiling, interpret=True)


def _inputs(batch, num_queries, heads, latent_dim, top_k, dtype, seed=0):
    """Caches of 14 pages; page 13, NaN, belongs to no sequence. Fewer keys than top_k for most queries."""
    rng = np.random.default_rng(seed)
    latent, shared = (rng.standard_normal((PAGES, PAGE_SIZE, width)) for width in (latent_dim, SHARED))
    latent[-1], shared[-1] = np.nan, np.nan
    table = np.stack([rng.permutation(PAGES - 1) for _ in range(batch)]).astype(np.int32)
    slots = table.shape[1] * PAGE_SIZE
    indices = np.full((batch, num_queries, top_k), -1, np.int32)
    for place in np.ndindex(batch, num_queries):
        count = top_k if place[1] == 0 else rng.integers(0, top_k)
        indices[place][:count] = rng.permutation(slots)[:count]
    q, q_shared = (rng.standard_normal((batch, num_queries, heads, width)) for width in (latent_dim, SHARED))
    q, q_shared, latent, shared = (jnp.asarray(x, dtype) for x in (q, q_shared, latent, shared))
    latent = latent.reshape(PAGES, PAGE_SIZE, -1, 128)
    return q, q_shared, latent, shared.reshape(PAGES, PAGE_SIZE // 4, 2, 128), table, indices


def _reference(q, q_shared, latent, shared, table, indices):
    rows = [np.asarray(x, np.float64).reshape(PAGES * PAGE_SIZE, -1) for x in (latent, shared)]
    context = np.zeros(q.shape)
    log_sum = np.full(q.shape[:3], -np.inf)
    for b, t in np.ndindex(*q.shape[:2]):
        named = indices[b, t]
        named = named[(named >= 0) & (named < table.shape[1] * PAGE_SIZE)]
        if named.size:
            row = table[b, named // PAGE_SIZE] * PAGE_SIZE + named % PAGE_SIZE
            queries = [np.asarray(x[b, t], np.float64) for x in (q, q_shared)]
            scores = SCALE * sum(x @ r[row].T for x, r in zip(queries, rows, strict=True))
            top = scores.max(axis=-1, keepdims=True)
            weights = np.exp(scores - top)
            context[b, t] = weights @ rows[0][row] / weights.sum(axis=-1, keepdims=True)
            log_sum[b, t] = top[:, 0] + np.log(weights.sum(axis=-1))
    return context, log_sum


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("batch", "num_queries", "heads", "top_k", "tiling"),
    [(2, 1, 96, 200, MLA_SPARSE_H200), (1, 3, 96, 200, WIDE), (1, 5, 5, 130, UNSPLIT), (1, 2, 24, 64, UNSPLIT)],
)
def test_mla_sparse_equals_attention_to_the_named_rows(batch, num_queries, heads, top_k, tiling, dtype):
    inputs = _inputs(batch, num_queries, heads, 256, top_k, dtype)
    indices = inputs[5]
    indices[0, 0, 1] = 10**6  # beyond the table: an old entry of a buffer that is used again
    if num_queries > 2:
        indices[0, 2] = -1
    context, log_sum = _run(*inputs, tiling)
    assert context.dtype == dtype and log_sum.dtype == jnp.float32
    expected, expected_log = _reference(*inputs)
    # Float32: sums of some hundred terms. Bfloat16: weights are rounded to 2^-9 each, rows are of order 1 to 4.
    assert_close(context, expected, atol=5e-6 if dtype == jnp.float32 else 0.02, label="context")
    assert_close(log_sum, expected_log, atol=5e-6, label="log-sum-exp")


def test_mla_sparse_of_fewer_keys_than_asked_counts_no_key_twice():
    keys = np.zeros((1, 16, 16), np.float32)
    keys[0, :3, :2] = [[1, 0], [0, 1], [1, 1]]
    q = np.zeros((1, 1, 1, 16), np.float32)
    q[..., 0] = 1
    shared = np.zeros((1, 16, 16), np.float32)
    indices = np.array([[[0, 1, 2, -1]]], np.int32)
    context, log_sum = mla_sparse_gpu(q, q * 0, keys, shared, np.zeros((1, 1), np.int32), indices, 1.0, interpret=True)
    total = 2 * np.e + 1  # scores 1, 0, 1
    assert_close(context[0, 0, 0, :2], [2 * np.e / total, (1 + np.e) / total], atol=1e-6)
    assert_close(log_sum[0, 0, 0], np.log(total), atol=1e-6)


def test_mla_sparse_queries_do_not_depend_on_each_other():
    inputs = _inputs(1, 4, 16, 128, 130, jnp.bfloat16)
    clean = _run(*inputs, MLA_SPARSE_H200)
    bad = _run(inputs[0].at[0, 1].set(jnp.nan), *inputs[1:], MLA_SPARSE_H200)
    for name, given, expected in zip(("context", "log-sum-exp"), bad, clean, strict=True):
        assert_same_bits(given[:, [0, 2, 3]], expected[:, [0, 2, 3]], name)
    assert np.isnan(np.asarray(bad[0][0, 1], np.float32)).all()


def test_mla_sparse_refuses_what_it_cannot_do():
    def why(**changes):
        shapes = {
            "q": (8, 1, 96, 512),
            "q_shared": (8, 1, 96, 64),
            "latent_pages": (100, 64, 4, 128),
            "shared_pages": (100, 16, 2, 128),
            "page_table": (8, 10),
            "indices": (8, 1, 2048),
        }
        shapes.update(changes)
        types = {"page_table": jnp.int32, "indices": jnp.int32}
        return mla_sparse_gpu_refusal(
            **{name: jax.ShapeDtypeStruct(shape, types.get(name, jnp.bfloat16)) for name, shape in shapes.items()}
        )

    assert why() is None
    assert "latent width 576" in why(q=(8, 1, 96, 576))
    assert "shared pages" in why(shared_pages=(100, 8, 2, 128))
    assert "do not belong" in why(indices=(7, 1, 2048))
    assert "fewer than 2**31" in why(latent_pages=(2**25, 64, 4, 128), shared_pages=(2**25, 16, 2, 128))
