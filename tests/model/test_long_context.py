"""A token after a million: the steps that decode compiles, beside a model that scores, sorts and masks all tokens."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxmoe as mm
from maxmoe.inference.steps import decode_step_in_place
from maxmoe.model import mla_layer
from maxmoe.ops.latent_cache import read_rows
from maxmoe.ops.mla import absorb_queries

FOLDER = Path(mm.__file__).parent / "data/tiny"
NUM_SLOTS = 1_048_576
SEEN = NUM_SLOTS - 2  # tokens in the cache before the two that are decoded


def _every_score_sorted(q, keys, layer, head_weights, positions, top_k, implementation=None):
    """`select_tokens` by a stable sort of all scores."""
    assert implementation is None
    dots = jnp.einsum("btij,bjs->btis", q, keys[layer], precision="highest")
    scores = jnp.einsum("btis,bti->bts", jnp.maximum(dots, 0), head_weights, precision="highest")
    scores = jnp.where(jnp.arange(keys.shape[3]) <= positions[..., None], scores, -jnp.inf)
    return jnp.argsort(-scores, axis=-1, stable=True)[..., :top_k].astype(jnp.int32)


def _every_row_masked(q, rows, layer, w_kv, indices, implementation=None):
    """`sparse_attention` by a softmax over all rows, of which the selected ones count."""
    assert implementation is None
    rank, own_dim = rows.latent_dim, q.shape[-1] - rows.shared_dim
    w_kv = w_kv.reshape(q.shape[2], -1, rank)
    every = read_rows(rows, layer)
    chosen = jnp.zeros((*indices.shape[:2], every.shape[1]), bool)
    chosen = jnp.put_along_axis(chosen, indices, True, axis=-1, inplace=False)
    scores = jnp.einsum("bthr,bsr->bths", absorb_queries(q, w_kv[:, :own_dim]), every, precision="highest")
    weights = jax.nn.softmax(jnp.where(chosen[:, :, None], scores * q.shape[-1] ** -0.5, -jnp.inf))
    context = jnp.einsum("bths,bsr->bthr", weights, every[..., :rank], precision="highest")
    return jnp.einsum("bthr,hvr->bthv", context, w_kv[:, own_dim:], precision="highest")


@pytest.fixture(scope="module")
def long_model():
    """The packaged model, allowed a million tokens, in float32."""
    config = dataclasses.replace(mm.load_config(FOLDER), max_len=NUM_SLOTS)
    model = mm.Transformer(config)
    return model, mm.load_params(FOLDER, model, dtype="float32")


def _filled_cache(model):
    """A cache after `SEEN` tokens, of random values."""

    @jax.jit
    def fill():
        empty = mm.init_cache(model, 1, NUM_SLOTS)
        leaves, tree = jax.tree.flatten(empty)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        filled = [jax.random.normal(key, x.shape, jnp.float32) for key, x in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(tree, filled).replace(lengths=jnp.full(1, SEEN, jnp.int32))

    return fill()


@pytest.mark.slow
def test_decode_after_a_million_tokens_follows_every_score(long_model, monkeypatch):
    model, params = long_model
    tokens = [jnp.array([7], jnp.int32), jnp.array([300], jnp.int32)]
    found, cache = [], _filled_cache(model)
    for token in tokens:
        logits, cache = decode_step_in_place(model, params, token, cache)
        found.append(np.asarray(logits))
    assert np.asarray(cache.lengths) == [NUM_SLOTS]
    del cache

    monkeypatch.setattr(mla_layer, "select_tokens", _every_score_sorted)
    monkeypatch.setattr(mla_layer, "sparse_attention", _every_row_masked)
    step = jax.jit(lambda p, t, c: model.apply({"params": p}, t, c, method="decode"), donate_argnums=2)
    wanted, cache = [], _filled_cache(model)
    for token in tokens:
        logits, cache = step(params, token, cache)
        wanted.append(np.asarray(logits))
    scale = np.abs(wanted).max()
    assert scale > 0.1
    # Float32 sums in another order. A token chosen otherwise changes a logit by a hundredth and more: see below.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * scale)

    # The comparison would notice another choice: with the second best tokens instead, the logits are others.
    def next_best(*args, **how):
        return _every_score_sorted(*args[:-1], 2 * args[-1], **how)[..., args[-1] :]

    monkeypatch.setattr(mla_layer, "select_tokens", next_best)
    step = jax.jit(lambda p, t, c: model.apply({"params": p}, t, c, method="decode"), donate_argnums=2)
    other, _ = step(params, tokens[0], _filled_cache(model))
    assert np.abs(np.asarray(other) - wanted[0]).max() > 1e-3 * scale
