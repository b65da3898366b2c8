"""KDA through tokamax equals the definition. Its plain form runs here; its kernel needs a TPU."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.ops import kda, tokamax_kda

needs_tokamax = pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed")


def _inputs(batch=2, num_tokens=70, heads=3, width=16):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, batch, num_tokens, heads, width)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = -5 * rng.random(q.shape, np.float32)
    beta = rng.random((batch, num_tokens, heads), np.float32)
    state = rng.normal(size=(batch, heads, width, width)).astype(np.float32)
    return tuple(map(jnp.asarray, (q * width**-0.5, k, v, g, beta, state)))


def _by_tokamax(*inputs):
    return tokamax_kda.kda_chunked(*inputs, kernel="xla")


@needs_tokamax
def test_tokamax_equals_the_definition():
    inputs = _inputs()
    for got, wanted in zip(_by_tokamax(*inputs), kda.kda_recurrent(*inputs), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, atol=1e-5)  # float32 sums of 16 terms up to 4, in another order


@needs_tokamax
def test_gradients_of_tokamax_equal_the_definition():
    def of(form):
        return jax.grad(lambda *inputs: sum(jnp.sum(jnp.sin(x)) for x in form(*inputs)), argnums=range(6))

    inputs = _inputs(1, 20, 2)
    for got, wanted in zip(of(_by_tokamax)(*inputs), of(kda.kda_recurrent)(*inputs), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)  # as above, through 20 tokens


def test_the_name_is_refused_where_it_cannot_run(monkeypatch):
    with pytest.raises(NotImplementedError, match="implementation='tokamax' cannot run: it runs on tpu"):
        kda.kda_chunked(*_inputs(), implementation="tokamax")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'maxmoe[tokamax]'" in tokamax_kda.refusal()
