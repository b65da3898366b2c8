"""Which implementation of an op runs, and what is said where a named one cannot."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from maxmoe.ops import dispatch, indexer, kda
from pallas_kernels import indexer_topk_tpu, kda_chunk_backward_tpu


def _kda_inputs(num_tokens=70, key_dim=128):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, num_tokens, 2, key_dim)) / 12, jnp.float32) for _ in range(3))
    g = jnp.asarray(-rng.uniform(0, 5, (1, num_tokens, 2, key_dim)), jnp.float32)
    beta = jnp.asarray(rng.uniform(0, 1, (1, num_tokens, 2)), jnp.float32)
    return q, k, v, g, beta, jnp.zeros((1, 2, key_dim, key_dim), jnp.float32)


@pytest.fixture
def on_tpu(monkeypatch):
    """The process believes that it computes on a TPU; kernels run in the interpreter."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    for module, name in ((kda_chunk_backward_tpu, "kda_chunk_trainable_tpu"), (indexer_topk_tpu, "indexer_topk_tpu")):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, kernel=kernel: kernel(*args, interpret=pltpu.InterpretParams()))


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the Pallas interpreter before jax 0.12 can stop for ever")
def test_named_kernel_runs_and_agrees(on_tpu):
    inputs = _kda_inputs()
    out, state = kda.kda_chunked(*inputs, implementation="pallas_tpu")
    wanted, wanted_state = kda.kda_chunked(*inputs, implementation="xla")
    # Three-pass bfloat16 products of values of order 1.
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-4)
    np.testing.assert_allclose(state, wanted_state, rtol=0, atol=1e-4)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the Pallas interpreter before jax 0.12 can stop for ever")
def test_named_indexer_kernel_selects_the_same(on_tpu):
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.integers(-3, 4, (1, 5, 2, 128)), jnp.float32)
    keys = jnp.asarray(rng.integers(-3, 4, (2, 1, 128, 300)), jnp.float32)
    args = q, keys, 1, jnp.ones((1, 5, 2), jnp.float32), jnp.arange(295, 300)[None], 16
    scores, slots = indexer.select_candidates(*args, implementation="pallas_tpu")
    expected_scores, expected_slots = indexer.select_candidates(*args, implementation="xla")
    np.testing.assert_array_equal(slots, expected_slots)
    np.testing.assert_array_equal(scores, expected_scores)  # sums of integers


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pallas_tpu", "kda_chunked: implementation='pallas_tpu' cannot run: it runs on tpu, and this process"),
        ("pallas_gpu", "it runs on gpu, and this process computes on cpu. Give 'xla', or None for the best"),
    ],
)
def test_named_kernel_of_another_platform_says_why(name, says):
    with pytest.raises(NotImplementedError, match=says):
        kda.kda_chunked(*_kda_inputs(), implementation=name)


def test_named_kernel_says_which_shape_it_cannot_take(on_tpu):
    with pytest.raises(NotImplementedError, match="key and value dims 64 and 64: the TPU kernel handles 128 and 128"):
        kda.kda_chunked(*_kda_inputs(key_dim=64), implementation="pallas_tpu")


def test_kernel_that_an_op_lacks_is_named():
    with pytest.raises(NotImplementedError, match="select_candidates has no such kernel; it has xla, pallas_tpu"):
        indexer.select_tokens(
            jnp.ones((1, 1, 1, 128)),
            jnp.ones((1, 1, 128, 1)),
            0,
            jnp.ones((1, 1, 1)),
            jnp.zeros((1, 1), jnp.int32),
            1,
            "pallas_gpu",
        )


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'cuda': allowed are xla, pallas_tpu, pallas_gpu, tokamax, and None"):
        dispatch.choose("kda_chunked", "cuda", {})


def test_default_falls_back_to_the_plain_form_only_where_the_kernel_cannot_run(on_tpu, monkeypatch):
    monkeypatch.setitem(dispatch.DEFAULTS["kda_chunked"], "tpu", "pallas_tpu")
    assert dispatch.choose("kda_chunked", None, {"pallas_tpu": lambda: None}) == "pallas_tpu"
    assert dispatch.choose("kda_chunked", None, {"pallas_tpu": lambda: "too wide"}) == "xla"


def test_choice_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_logged", set())
    from absl import logging as absl_logging

    monkeypatch.setattr(absl_logging.get_absl_logger(), "propagate", True)
    with caplog.at_level(logging.INFO, logger="absl"):
        for _ in range(3):
            dispatch.choose("kda_chunked", None, {})
    assert [record.message for record in caplog.records] == ["kda_chunked: implementation xla on cpu"]
