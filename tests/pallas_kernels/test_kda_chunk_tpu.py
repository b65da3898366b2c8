"""Chunked KDA for TPU, run by the interpreter with poisoned memory: the definition's numbers, for every packing."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tiling as tilings
from pallas_kernels.kda_chunk_tpu import kda_chunk_refusal, kda_chunk_tpu
from pallas_kernels.kda_work_list_tpu import work_list
from tests.ops.closeness import assert_close, assert_same_bits
from tests.ops.kda_reference import random_inputs, reference_forward

GATES = ("bound", "uniform", "weak", "strong")
POISON = pltpu.InterpretParams(uninitialized_memory="nan")
RACES = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
chunked = jax.jit(functools.partial(kda_chunk_tpu, interpret=POISON))

inputs_of = functools.partial(random_inputs, batch=1, heads=2, key_dim=128, value_dim=128)

# Products leave out 2^-16 of each term. Outputs, with queries of length 128^-1/2, are of order 0.1; a state of order 1.
OUT_TOL, STATE_TOL = {"atol": 3e-6, "rtol": 1e-5}, {"atol": 2e-5, "rtol": 2e-5}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("batch", "heads", "num_tokens"), [(1, 2, 150), (2, 3, 200)])
def test_kda_chunk_follows_the_equation(gate, batch, heads, num_tokens):
    inputs = inputs_of(0, num_tokens, gate, batch=batch, heads=heads)
    out, state = chunked(*inputs)
    expected, states = reference_forward(*inputs)
    assert_close(out, expected, **OUT_TOL, label="output")
    assert_close(state, states[-1], **STATE_TOL, label="state")


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 192])
def test_kda_chunk_takes_every_length(num_tokens):
    inputs = inputs_of(1, num_tokens)
    out, state = chunked(*inputs)
    expected, states = reference_forward(*inputs)
    assert_close(out, expected, **OUT_TOL, label="output")
    assert_close(state, states[-1], **STATE_TOL, label="state")


def test_kda_chunk_of_bfloat16_values_rounds_outputs_once():
    inputs = inputs_of(2, 100)
    low = tuple(jnp.asarray(x, jnp.bfloat16) for x in inputs[:5])
    out, state = chunked(*low, inputs[5])
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    expected, states = reference_forward(*low, inputs[5])
    assert_close(state, states[-1], **STATE_TOL, label="state")
    assert_close(out, expected, atol=3e-6, rtol=2**-8, label="output")


@pytest.mark.parametrize(
    ("name", "heads"), [("KDA_CHUNK_V5P", 6), ("KDA_CHUNK_V6E", 7), ("KDA_CHUNK_V6E", 12), ("KDA_CHUNK_TPU7X", 9)]
)
def test_kda_chunk_follows_the_equation_with_the_heads_of_each_chip(name, heads):
    inputs = inputs_of(18, 70, heads=heads)
    tiling = getattr(tilings, name)
    assert heads <= tiling.heads_per_program, "one program takes them all"
    out, state = jax.jit(functools.partial(kda_chunk_tpu, tiling=tiling, interpret=POISON))(*inputs)
    expected, states = reference_forward(*inputs)
    assert_close(out, expected, **OUT_TOL, label="output")
    assert_close(state, states[-1], **STATE_TOL, label="state")


def test_kda_chunk_in_one_branch_gives_the_same():
    inputs = inputs_of(19, 70)
    tiling = dataclasses.replace(tilings.KDA_CHUNK_V5P, branch_per_stage=False)
    given = jax.jit(functools.partial(kda_chunk_tpu, tiling=tiling, interpret=POISON))(*inputs)
    for x, y in zip(given, chunked(*inputs), strict=True):
        # The same operations; one program of the compiler may contract a product and a sum where the other does not.
        assert_close(x, y, atol=1e-6)


def test_kda_chunk_survives_64_steps_at_the_bound():
    unit = np.zeros((1, 64, 1, 128), np.float32)
    unit[..., 0] = 1
    state = np.zeros((1, 1, 128, 128), np.float32)
    beta = np.full((1, 64, 1), 0.5, np.float32)
    out, state = chunked(unit, unit, unit, np.full_like(unit, -5), beta, state)
    # S = 0.5 (1 + e^-5 S), to the digits stated; a product leaves out up to 2^-16 of e^-5, in each of several factors.
    given = [out[0, 0, 0, 0], out[0, 1, 0, 0], out[0, 63, 0, 0], state[0, 0, 0, 0]]
    assert_close(given, [0.5, 0.501684487, 0.501690181, 0.501690181], atol=1e-6)


def test_kda_chunk_takes_gates_that_no_float_can_divide_by():
    inputs = list(inputs_of(3, 130))
    rng = np.random.default_rng(4)
    inputs[3] = np.where(rng.uniform(size=inputs[3].shape) < 0.1, -300.0, -0.01).astype(np.float32)
    out, state = chunked(*inputs)
    expected, states = reference_forward(*inputs)
    assert_close(out, expected, **OUT_TOL, label="output")
    assert_close(state, states[-1], **STATE_TOL, label="state")


def test_kda_chunk_keeps_its_accuracy_when_keys_repeat():
    q, k, v, g, beta, state = inputs_of(5, 130, "weak")
    k[:] = k[:, :1]
    g, beta = np.full_like(g, -1e-3), np.full_like(beta, 0.999)
    out, new_state = chunked(q, k, v, g, beta, state)
    expected, states = reference_forward(q, k, v, g, beta, state)
    # A power series of the chunk's matrix would sum terms of up to 1e18. Here all 64 tokens write one place, and
    # each entry of the inverse is a difference of numbers near 1: 2^-16 of a few of them, where outputs reach 0.4.
    assert_close(out, expected, atol=2e-5, label="output")
    assert_close(new_state, states[-1], atol=1e-4, label="state")


def test_kda_chunk_keeps_small_increments_of_the_state():
    unit = np.zeros((1, 4096, 1, 128), np.float32)
    unit[..., 0] = 1
    beta = np.full((1, 4096, 1), 2.0**-10, np.float32)
    _, state = chunked(unit, unit, unit, 0 * unit, beta, np.zeros((1, 1, 128, 128), np.float32))
    # S = 1 - (1 - 2^-10)^4096; a state kept in bfloat16 stops at 0.25. 64 updates, each of 2^-16 relative.
    assert_close(state[0, 0, 0, 0], 0.98172, atol=3e-5)


PACKINGS = {
    "one_token_between": [0, 70, 71, 135],
    "short_ones": [0, 5, 5, 9],
    "empty_at_both_ends": [0, 0, 64, 128, 128],
    "many_in_a_chunk": [0, 1, 2, 3, 17, 40, 64, 65, 190],
    "rows_left_over": [0, 70, 150],
}


def _packed_inputs(seed, starts, num_tokens, gate="uniform"):
    tokens = inputs_of(seed, num_tokens, gate)[:5]
    states = np.random.default_rng(seed).standard_normal((len(starts) - 1, 2, 128, 128)).astype(np.float32)
    return tokens, states, np.asarray(starts, np.int32)


@pytest.mark.parametrize("name", PACKINGS)
def test_kda_chunk_of_packed_sequences_is_each_by_itself(name):
    starts = PACKINGS[name]
    num_tokens = 231 if name == "rows_left_over" else starts[-1]
    tokens, states, starts = _packed_inputs(6, starts, num_tokens)
    out, new_states = chunked(*tokens, states, cu_seqlens=starts)
    for n, (a, b) in enumerate(itertools.pairwise(starts)):
        if a == b:
            assert_same_bits(new_states[n], states[n], f"state of empty sequence {n}")
            continue
        expected, after = reference_forward(*[x[:, a:b] for x in tokens], states[n : n + 1])
        assert_close(out[:, a:b], expected, **OUT_TOL, label=f"output of sequence {n}")
        assert_close(new_states[n], after[-1][0], **STATE_TOL, label=f"state of sequence {n}")
    assert not np.any(out[:, starts[-1] :]), "rows of no sequence are 0"


def test_kda_chunk_nan_of_one_sequence_stays_in_it():
    tokens, states, starts = _packed_inputs(7, PACKINGS["one_token_between"], 135)
    clean_out, clean_states = chunked(*tokens, states, cu_seqlens=starts)
    for bad in range(3):
        poisoned, bad_tokens = states.copy(), [x.copy() for x in tokens]
        poisoned[bad] = np.nan
        for x in bad_tokens:
            x[:, starts[bad + 1] - 1] = np.nan
        out, new_states = chunked(*bad_tokens, poisoned, cu_seqlens=starts)
        for n in range(3):
            rows = slice(starts[n], starts[n + 1])
            if n == bad:
                assert np.isnan(out[:, rows]).all() and np.isnan(new_states[n]).all()
                continue
            assert_same_bits(out[:, rows], clean_out[:, rows], f"output of {n} beside {bad}")
            assert_same_bits(new_states[n], clean_states[n], f"state of {n} beside {bad}")


@pytest.mark.parametrize("positions", [[64, 128, 192], [199, 3, 64, 64, 100], [200]])
def test_kda_chunk_returns_the_states_asked_for(positions):
    inputs = inputs_of(8, 200, batch=2)
    out, state, asked = chunked(*inputs, state_positions=np.asarray(positions, np.int32))
    expected, states = reference_forward(*inputs)
    assert asked.shape == (2, len(positions), 2, 128, 128)
    for i, position in enumerate(positions):
        assert_close(asked[:, i], states[position], **STATE_TOL, label=f"state after {position}")
    assert_close(out, expected, **OUT_TOL, label="output")
    assert_close(state, states[-1], **STATE_TOL, label="state")


def test_kda_chunk_states_at_borders_belong_to_what_ends_there():
    tokens, states, starts = _packed_inputs(9, [0, 70, 70, 150], 160)
    positions = jnp.asarray([150, 70, 71, 160], jnp.int32)
    _, new_states, asked = chunked(*tokens, states, cu_seqlens=starts, state_positions=positions)
    for i, n in ((0, 2), (1, 0), (3, 2)):
        assert_same_bits(asked[0, i], new_states[n], f"position {positions[i]}")
    _, after = reference_forward(*[x[:, 70:71] for x in tokens], states[2:])
    assert_close(asked[0, 2], after[-1][0], **STATE_TOL)


@pytest.mark.parametrize("split", [1, 5, 18, 32, 63, 65, 100])
def test_kda_chunk_prefix_ignores_all_that_is_later(split):
    inputs, others = inputs_of(10, 130, "bound"), inputs_of(11, 130, "uniform")
    out, _ = chunked(*inputs)
    mixed = [np.concatenate([x[:, :split], y[:, split:]], 1) for x, y in zip(inputs[:5], others, strict=False)]
    new_out, _ = chunked(*mixed, inputs[5])
    assert_same_bits(new_out[:, :split], out[:, :split], f"outputs before token {split}")


def test_kda_chunk_has_no_races():
    tokens, states, starts = _packed_inputs(12, [0, 70, 70, 150], 160)
    positions = np.asarray([64, 71], np.int32)
    given = kda_chunk_tpu(*tokens, states, cu_seqlens=starts, state_positions=positions, interpret=RACES)
    for x, y in zip(given, chunked(*tokens, states, cu_seqlens=starts, state_positions=positions), strict=True):
        assert_close(x, y, atol=1e-6)


def test_work_list_is_the_same_from_numpy_and_from_traced_borders():
    starts, asked = np.asarray([0, 5, 5, 130, 200], np.int32), np.asarray([130, 64, 7], np.int32)
    traced = jax.jit(work_list, static_argnums=(2, 3))(starts, asked, 210, 64)
    for x, y in zip(work_list(starts, asked, 210, 64), traced, strict=True):
        assert_same_bits(x, y)


def test_kda_chunk_refuses_what_it_cannot_do():
    assert kda_chunk_refusal((1, 5, 2, 128), (1, 5, 2, 128), jnp.bfloat16) is None
    assert "64 and 128" in kda_chunk_refusal((1, 5, 2, 64), (1, 5, 2, 128), jnp.bfloat16)
    assert "float16" in kda_chunk_refusal((1, 5, 2, 128), (1, 5, 2, 128), jnp.float16)
    with pytest.raises(NotImplementedError, match="key and value dims 5 and 7"):
        kda_chunk_tpu(*random_inputs(13, 4))
    *tokens, state = inputs_of(14, 8)
    with pytest.raises(ValueError, match="3 states for 1 rows"):
        kda_chunk_tpu(*tokens, np.concatenate([state] * 3))
    with pytest.raises(ValueError, match=r"cu_seqlens of shape \(4,\)"):
        kda_chunk_tpu(*tokens, state, cu_seqlens=np.zeros(4, np.int32))
