"""The chunked form of KDA: the same numbers as the definition, forward and gradient, for every gate and length."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from maxmoe.ops.kda import kda_chunked, kda_recurrent, kda_step
from pallas_kernels import kda_chunk_backward_tpu, kda_chunk_gpu
from tests.ops.closeness import assert_close, assert_same_bits
from tests.ops.kda_reference import NAMES, random_inputs, reference_forward, reference_gradients
from tests.ops.quick_jit import quick_jit

GATES = ("bound", "uniform", "weak", "strong")
chunked = jax.jit(kda_chunked, static_argnames="chunk_size")


def _with_gradients(fn, optimised):
    def run(inputs, d_out, d_state):
        results, pull = jax.vjp(fn, *inputs)
        return results, pull((d_out, d_state))

    return jax.jit(run) if optimised else quick_jit(run)


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 257])
def test_kda_chunked_equals_the_recurrence_and_its_gradients(num_tokens):
    optimised = num_tokens == 64  # one is compiled as users do; the others in half the time
    run, run_steps = _with_gradients(kda_chunked, optimised), _with_gradients(kda_recurrent, optimised)
    for gate in GATES:
        inputs = random_inputs(num_tokens, num_tokens, gate)
        rng = np.random.default_rng(num_tokens)
        d_out, d_state = (rng.standard_normal(x.shape).astype(np.float32) for x in (inputs[2], inputs[5]))
        (out, state), grads = run(inputs, d_out, d_state)
        (step_out, step_state), step_grads = run_steps(inputs, d_out, d_state)
        expected, states = reference_forward(*inputs)
        expected_grads = reference_gradients(*inputs, d_out, d_state)
        # Values are of order 1. A chunk sums up to 64 terms twice, in another order than the recurrence.
        for what, given, step, exact in (
            ("output", out, step_out, expected),
            ("state", state, step_state, states[-1]),
        ):
            assert_close(given, exact, atol=1e-5, label=f"{gate}: {what}")
            assert_close(given, step, atol=1e-5, label=f"{gate}: {what}, against the recurrence")
        for name, given, step, exact in zip(NAMES, grads, step_grads, expected_grads, strict=True):
            # Absolute within one tensor: the gradient of a gate is a difference of sums over the chunk that are
            # of order 1, while at -50 its exact value is of order 1e-22.
            atol = 2e-5 * max(1, np.abs(exact).max())
            assert_close(given, exact, atol=atol, label=f"{gate}: gradient of {name}")
            assert_close(given, step, atol=atol, label=f"{gate}: gradient of {name}, against the recurrence")


def test_kda_chunked_survives_64_steps_at_the_bound():
    ones = np.ones((1, 64, 1, 1), np.float32)
    zero_state = np.zeros((1, 1, 1, 1), np.float32)
    out, state = chunked(ones, ones, ones, -5 * ones, 0.5 * ones[..., 0], zero_state)
    # S = 0.5 (1 + e^-5 S), to the digits stated; a float32 has 2^-25 around 0.5.
    given = [out[0, 0, 0, 0], out[0, 1, 0, 0], out[0, 63, 0, 0], state[0, 0, 0, 0]]
    assert_close(given, [0.5, 0.501684487, 0.501690181, 0.501690181], atol=1e-7)
    fixed_point = 0.5 / (1 - 0.5 * np.exp(-5.0))
    assert_close(out[0, 8:, 0, 0], np.full(56, fixed_point), atol=1e-7)


def test_kda_chunked_is_accurate_at_the_width_of_the_model():
    inputs = random_inputs(8, 64, "uniform", batch=1, heads=2, key_dim=128, value_dim=128)
    out, state = chunked(*inputs)
    expected, states = reference_forward(*inputs)
    # Within 1e-5 of the largest value, as products of 128 terms round in float32.
    assert_close(out, expected, atol=1e-5 * np.abs(expected).max(), label="output")
    assert_close(state, states[-1], atol=1e-5 * np.abs(states[-1]).max(), label="state")


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_kda_chunked_prefix_ignores_later_gates(dtype):
    inputs = [jnp.asarray(x, dtype) for x in random_inputs(9, 20, "bound")]
    changed = inputs[3].at[:, 18:].set(-0.25)
    out, state = chunked(*inputs, chunk_size=16)
    new_out, new_state = chunked(*inputs[:3], changed, *inputs[4:], chunk_size=16)
    assert_same_bits(new_out[:, :18], out[:, :18], "outputs before the change")
    assert np.abs(new_state - state).max() > 1e-3


@pytest.mark.parametrize("gate", ["bound", "weak"])
def test_kda_chunked_prefix_ignores_all_that_is_later(gate):
    inputs, others = random_inputs(10, 65, gate), random_inputs(11, 65, "uniform")
    out, _ = chunked(*inputs)
    for split in (1, 2, 3, 4, 7, 15, 16, 31, 32, 33, 48, 63, 64):
        mixed = [np.concatenate([x[:, :split], y[:, split:]], 1) for x, y in zip(inputs[:5], others, strict=False)]
        new_out, _ = chunked(*mixed, inputs[5])
        assert_same_bits(new_out[:, :split], out[:, :split], f"outputs before token {split}")


@pytest.mark.parametrize("chunk_size", [4, 16, 32, 64])
def test_kda_chunked_keeps_its_accuracy_when_keys_repeat(chunk_size):
    q, k, v, g, beta, state = random_inputs(12, 65, "weak")
    k[:] = k[:, :1]
    g, beta = np.full_like(g, -1e-3), np.full_like(beta, 0.999)
    out, new_state = chunked(q, k, v, g, beta, state, chunk_size=chunk_size)
    expected, states = reference_forward(q, k, v, g, beta, state)
    # A power series of the chunk's matrix would sum terms of up to 1e18. Solved by blocks, it is exact to float32.
    assert_close(out, expected, atol=1e-5, label="output")
    assert_close(new_state, states[-1], atol=1e-5, label="state")


@pytest.mark.parametrize("chunk_size", [4, 16, 32])
def test_kda_chunked_does_not_depend_on_the_chunk_size(chunk_size):
    inputs = random_inputs(13, 65)
    out, state = chunked(*inputs, chunk_size=chunk_size)
    for name, given, other in zip(("output", "state"), (out, state), chunked(*inputs), strict=True):
        # Other orders of the same float32 sums, of values of order 1.
        assert_close(given, other, atol=5e-6, label=name)


@pytest.mark.parametrize("chunk_size", [-64, 0, 1, 2, 3, 48, 65])
def test_kda_chunked_rejects_chunk_sizes_that_do_not_halve(chunk_size):
    with pytest.raises(ValueError, match=rf"chunk_size={chunk_size}: must be a power of two"):
        kda_chunked(*random_inputs(14, 3), chunk_size=chunk_size)


_PIECES = (1, 2, 17)


@functools.cache
def _long_sequence():
    inputs = random_inputs(15, 99)
    return inputs, *reference_forward(*inputs)


@hypothesis.given(st.lists(st.sampled_from(_PIECES), min_size=1, max_size=15))
@hypothesis.settings(max_examples=25)
def test_kda_chunked_pieces_join_to_the_whole(pieces):
    (*tokens, state), expected, states = _long_sequence()
    start = 0
    for length in pieces:
        if start + length > tokens[0].shape[1]:
            break
        piece = [x[:, start : start + length] for x in tokens]
        out, state = chunked(*piece, state, chunk_size=16)
        # As for one run: values of order 1 whose errors decay with the state.
        assert_close(out, expected[:, start : start + length], atol=1e-5, label=f"{pieces}: output at {start}")
        start += length
        assert_close(state, states[start], atol=1e-5, label=f"{pieces}: state after {start}")


def test_kda_step_continues_a_chunked_prefill():
    (*tokens, state), expected, states = _long_sequence()
    _, state = chunked(*[x[:, :17] for x in tokens], state, chunk_size=16)
    for t in range(17, 20):
        out, state = kda_step(*[x[:, t] for x in tokens], state)
        assert_close(out, expected[:, t], atol=1e-5, label=f"output of token {t}")
    assert_close(state, states[20], atol=1e-5, label="state")


def test_kda_chunked_row_does_not_depend_on_its_neighbours():
    inputs, others = random_inputs(16, 65), random_inputs(17, 65, "bound")
    out, state = chunked(*inputs)
    for row in range(2):
        mixed = [y.copy() for y in others]
        for x, y in zip(inputs, mixed, strict=True):
            y[row] = x[row]
        new_out, new_state = chunked(*mixed)
        # One program works on each row by itself, so not a bit may change.
        assert_same_bits(new_out[row], out[row], "output")
        assert_same_bits(new_state[row], state[row], "state")


@pytest.fixture
def interpreted(monkeypatch):
    """Makes the process believe in the platform of a kernel, which the interpreter runs."""
    kernels = {
        "pallas_tpu": (kda_chunk_backward_tpu, "kda_chunk_trainable_tpu", pltpu.InterpretParams()),
        "pallas_gpu": (kda_chunk_gpu, "kda_chunk_gpu", True),
    }

    def become(implementation):
        module, name, mode = kernels[implementation]
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), interpret=mode))
        monkeypatch.setattr(jax, "default_backend", lambda: implementation.removeprefix("pallas_"))

    return become


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the TPU interpreter before jax 0.12 can stop for ever")
def test_kda_chunked_kernel_for_tpu_takes_gradients(interpreted):
    interpreted("pallas_tpu")
    inputs = random_inputs(18, 70, batch=1, heads=1, key_dim=128, value_dim=128)
    rng = np.random.default_rng(19)
    d_out, d_state = (rng.standard_normal(x.shape).astype(np.float32) for x in (inputs[2], inputs[5]))

    def gradients(implementation):
        run = functools.partial(kda_chunked, implementation=implementation)
        return jax.jit(lambda inputs: jax.vjp(run, *inputs)[1]((d_out, d_state)))(inputs)

    for name, given, wanted in zip(NAMES, gradients("pallas_tpu"), gradients("xla"), strict=True):
        # The kernel's states, from products that leave out 2^-16 of each term, enter every gradient.
        assert_close(given, wanted, atol=1e-4 * np.abs(wanted).max(), label=f"gradient of {name}")


def test_kda_chunked_kernel_for_gpu_runs_and_refuses_a_gradient(interpreted):
    interpreted("pallas_gpu")
    inputs = random_inputs(20, 70, batch=2, heads=1, key_dim=32, value_dim=32)
    run = functools.partial(kda_chunked, implementation="pallas_gpu")
    out, state = jax.jit(run)(*inputs)
    wanted, wanted_state = chunked(*inputs)
    # Decays of differences of running sums, up to 100 nats here, in float32.
    assert_close(out, wanted, atol=1e-5, label="output")
    assert_close(state, wanted_state, atol=1e-5, label="state")
    with pytest.raises(NotImplementedError, match=r"has no gradient, and one was asked for with q of shape \(2, 70"):
        jax.grad(lambda q: run(q, *inputs[1:])[0].sum())(inputs[0])
