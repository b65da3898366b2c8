"""The definition of KDA and its gates, against the equations in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.ops.kda import bounded_gate, kda_chunked, kda_recurrent, kda_step, softplus_gate
from tests.ops.closeness import assert_close, assert_same_bits
from tests.ops.kda_reference import NAMES, random_inputs, reference_forward, reference_gradients

GATES = ("bound", "uniform", "weak", "strong")
recurrent = jax.jit(kda_recurrent)
chunked = jax.jit(functools.partial(kda_chunked, chunk_size=16))


@pytest.mark.parametrize("gate", GATES)
def test_kda_recurrent_follows_the_equation(gate):
    inputs = random_inputs(0, 65, gate)
    out, state = recurrent(*inputs)
    expected, states = reference_forward(*inputs)
    # Values are of order 1; each token rounds a few times and old errors decay or stay, 65 * 2^-24 at most.
    assert_close(out, expected, atol=5e-6, label="output")
    assert_close(state, states[-1], atol=5e-6, label="state")


@pytest.mark.parametrize("gate", GATES)
def test_kda_recurrent_gradients_follow_the_equation(gate):
    inputs = random_inputs(1, 65, gate)
    rng = np.random.default_rng(2)
    d_out, d_state = (rng.standard_normal(x.shape).astype(np.float32) for x in (inputs[2], inputs[5]))
    given = _recurrent_gradients(inputs, d_out, d_state)
    expected = reference_gradients(*inputs, d_out, d_state)
    for name, x, y in zip(NAMES, given, expected, strict=True):
        # Float32 over 65 tokens; entries are of order 1 to 10.
        assert_close(x, y, atol=1e-5, rtol=1e-5, label=f"gradient of {name}")


@jax.jit
def _recurrent_gradients(inputs, d_out, d_state):
    return jax.vjp(kda_recurrent, *inputs)[1]((d_out, d_state))


def test_kda_step_follows_the_equation():
    q, k, v, g, beta, state = random_inputs(3, 1)
    out, new_state = kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
    expected, states = reference_forward(q, k, v, g, beta, state)
    # One token of float32 arithmetic on values of order 1.
    assert_close(out, expected[:, 0], atol=1e-6, label="output")
    assert_close(new_state, states[-1], atol=1e-6, label="state")


@pytest.mark.parametrize("fn", [recurrent, chunked], ids=["recurrent", "chunked"])
def test_kda_returns_outputs_like_v_and_a_float32_state(fn):
    inputs = random_inputs(4, 20)
    low = tuple(jnp.asarray(x, jnp.bfloat16) for x in inputs)
    out, state = fn(*low)
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    expected, states = reference_forward(*low)
    # Inputs are widened before anything is computed: the state has float32 errors, the output one bfloat16 rounding.
    assert_close(state, states[-1], atol=2e-6, label="state")
    assert_close(out, expected, atol=1e-6, rtol=2**-8, label="output")


@pytest.mark.parametrize("fn", [recurrent, chunked], ids=["recurrent", "chunked"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kda_keeps_small_increments_of_the_state(fn, dtype):
    ones = jnp.ones((1, 4096, 1, 1), dtype)
    zeros = jnp.zeros((1, 1, 1, 1), dtype)
    _, state = fn(ones, ones, ones, 0 * ones, jnp.full((1, 4096, 1), 2.0**-10, dtype), zeros)
    # S = 1 - (1 - 2^-10)^4096. A state stored in bfloat16 stops growing at 0.25.
    assert_close(state, np.full((1, 1, 1, 1), 0.98172), atol=1e-5, label="state")
    # 4096 additions, each rounded to float32.
    assert_close(state, np.full((1, 1, 1, 1), 1 - (1 - 2.0**-10) ** 4096), rtol=2e-6, label="state")


@pytest.mark.parametrize("fn", [recurrent, chunked], ids=["recurrent", "chunked"])
@pytest.mark.parametrize("num_tokens", [1, 17])
def test_kda_nan_of_one_row_stays_in_it(fn, num_tokens):
    *tokens, state = random_inputs(5, num_tokens)
    clean_out, clean_state = fn(*tokens, state)
    for row, other in ((0, 1), (1, 0)):
        poisoned = state.copy()
        poisoned[row] = np.nan
        out, new_state = fn(*tokens, poisoned)
        assert_same_bits(out[other], clean_out[other], "output of the other row")
        assert_same_bits(new_state[other], clean_state[other], "its state")
        assert np.isnan(out[row]).all() and np.isnan(new_state[row]).all()


def test_bounded_gate_has_one_decay_rate_per_head():
    z, a_log = np.ones((1, 3, 2, 5), np.float32), np.array([0, np.log(2)], np.float32)
    # -5 sigmoid(1) and -5 sigmoid(2), to the digits stated and float32.
    expected = np.broadcast_to(np.array([-3.65529289, -4.40398539])[:, None], z.shape)
    assert_close(bounded_gate(z, a_log, -5.0), expected, rtol=3e-7)


def test_bounded_gate_is_no_clamp():
    rng = np.random.default_rng(6)
    z, a_log = 4 * rng.standard_normal((2, 3, 4, 5)), rng.uniform(-1, 2, 4)
    expected = -5 / (1 + np.exp(-np.exp(a_log)[:, None] * z))
    given = bounded_gate(z.astype(np.float32), a_log.astype(np.float32), -5.0)
    assert given.dtype == jnp.float32
    # exp(a_log) z reaches 60, whose float32 rounding moves a small sigmoid by 60 * 2^-24 of itself.
    assert_close(given, expected, atol=1e-30, rtol=1e-5)


def test_bounded_gate_stays_within_its_bound():
    z = jnp.asarray([-1e30, -1e4, 0, 1e4, 1e30], jnp.bfloat16)[None, None, None]
    assert_close(bounded_gate(z, np.array([3.0], np.float32), -5.0), [[[[0, 0, -2.5, -5, -5]]]])


def test_softplus_gate_follows_the_equation():
    rng = np.random.default_rng(7)
    z, a_log = 4 * rng.standard_normal((2, 3, 4, 5)), rng.uniform(-1, 2, 4)
    expected = -np.exp(a_log)[:, None] * np.log1p(np.exp(z))
    given = softplus_gate(z.astype(np.float32), a_log.astype(np.float32))
    # A few roundings; |z| up to 16 in the exponent counts for 16 * 2^-24.
    assert_close(given, expected, rtol=3e-6)
    assert_close(softplus_gate(jnp.full((1, 1, 1, 1), 50.0), jnp.zeros(1)), np.full((1, 1, 1, 1), -50), rtol=1e-6)
