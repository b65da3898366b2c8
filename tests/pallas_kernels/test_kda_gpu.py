"""KDA for NVIDIA GPUs, run by the interpreter, which fills results with NaN first: prefill and one-token decode.

What the interpreter cannot show: products of bfloat16 factors on the chip, and orders between its threads.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda_chunk_gpu import kda_chunk_gpu, kda_chunk_gpu_refusal
from pallas_kernels.kda_decode_gpu import kda_decode_gpu, kda_decode_gpu_refusal
from tests.ops.closeness import assert_close, assert_same_bits
from tests.ops.kda_decode_reference import EPS, decode_inputs, plain_decode
from tests.ops.kda_reference import random_inputs, reference_forward

chunk = jax.jit(functools.partial(kda_chunk_gpu, interpret=True))


def _inputs(seed, num_tokens, gate="uniform", batch=1, heads=2, dim=128):
    return random_inputs(seed, num_tokens, gate, batch=batch, heads=heads, key_dim=dim, value_dim=dim)


@pytest.mark.parametrize(
    ("num_tokens", "gate"),
    [(1, "uniform"), (63, "weak"), (64, "bound"), (65, "strong"), (200, "uniform"), (200, "bound"), (200, "weak")],
)
def test_kda_chunk_equals_the_recurrence(num_tokens, gate):
    inputs = _inputs(num_tokens, num_tokens, gate, batch=2, heads=1, dim=32)
    out, state = chunk(*inputs)
    expected, states = reference_forward(*inputs)
    # Values of order 1; a decay is the exponential of a difference of running sums, of 320 at the bound, whose float32
    # rounding is 1.5e-5 there and counts where the decay itself is not small.
    assert_close(out, expected, atol=1e-5, label="output")
    assert_close(state, states[-1], atol=1e-5, label="state")


def test_kda_chunk_in_bfloat16_is_as_accurate_as_its_factors():
    inputs = _inputs(1, 150)
    inputs = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]] + list(inputs[3:])
    out, state = chunk(*inputs)
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    expected, states = reference_forward(*inputs)
    # Some five factors in a row are rounded to 2^-9 each, and sums of 128 such terms partly cancel.
    assert_close(out, expected, atol=0.01 * np.abs(expected).max(), label="output")
    assert_close(state, states[-1], atol=0.01 * np.abs(states[-1]).max(), label="state")


def test_kda_chunk_of_packed_sequences_keeps_them_apart_and_gives_states_inside():
    cu = np.array([0, 70, 71, 71, 135, 200], np.int32)
    tokens = _inputs(3, 210, dim=32)[:5]
    state = np.random.default_rng(0).standard_normal((5, 2, 32, 32)).astype(np.float32)
    positions = np.array([135, 64, 3, 64, 200, 100, 71], np.int32)
    out, final, inside = chunk(*tokens, state, cu_seqlens=cu, state_positions=positions)
    for n, (first, end) in enumerate(itertools.pairwise(cu)):
        if end == first:
            assert_same_bits(final[n], state[n], f"state of the empty sequence {n}")
            continue
        expected, states = reference_forward(*[x[:, first:end] for x in tokens], state[n : n + 1])
        assert_close(final[n], states[-1][0], atol=1e-5, label=f"final state {n}")
        assert_close(out[:, first:end], expected, atol=1e-5, label=f"outputs of sequence {n}")
        for j, position in enumerate(positions):
            if first < position <= end:
                assert_close(inside[0, j], states[position - first][0], atol=1e-5, label=f"state at {position}")
    assert not np.any(out[:, 200:])
    poisoned = state.copy()
    poisoned[1] = np.nan
    new_out, new_final = chunk(*tokens, poisoned, cu_seqlens=cu)
    others = np.r_[0:70, 71:200]
    # One program works on a sequence and cuts at positions move no sum across sequences, but change chunks.
    assert_close(new_out[:, others], out[:, others], atol=1e-5, label="sequences beside one that is NaN")
    assert np.isnan(new_final[1]).all() and not np.isnan(np.delete(new_final, 1, 0)).any()


def test_kda_chunk_prefix_ignores_all_that_is_later():
    inputs, others = _inputs(5, 130, "bound", dim=32), _inputs(6, 130, dim=32)
    out, _ = chunk(*inputs)
    for split in (1, 2, 7, 8, 9, 31, 33, 64, 100):
        mixed = [np.concatenate([x[:, :split], y[:, split:]], 1) for x, y in zip(inputs[:5], others, strict=False)]
        new, _ = chunk(*mixed, inputs[5])
        assert_same_bits(new[:, :split], out[:, :split], f"outputs before token {split}")


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_kda_chunk_keeps_its_accuracy_when_keys_repeat(dtype):
    q, k, v, g, beta, state = _inputs(7, 130, "weak", dim=32)
    k[:] = k[:, :1]
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    g, beta = np.full_like(g, -1e-3), np.full_like(beta, 0.999)
    out, _ = chunk(q, k, v, g, beta, state)
    expected, _ = reference_forward(q, k, v, g, beta, state)
    # A Neumann series would sum terms of up to 1e18. In bfloat16 the factors limit it, as in the test above.
    assert_close(out, expected, atol=1e-5 if dtype == np.float32 else 0.02, label="output")


def test_kda_chunk_refuses_what_it_cannot_do():
    shape = (1, 100, 96, 128)
    assert kda_chunk_gpu_refusal(shape, shape, jnp.bfloat16, 7, True) is None
    assert "K=96" in kda_chunk_gpu_refusal((1, 100, 96, 96), shape, jnp.bfloat16, 1, False)
    assert "float16" in kda_chunk_gpu_refusal(shape, shape, jnp.float16, 1, False)
    assert "batch=2 with cu_seqlens" in kda_chunk_gpu_refusal((2, *shape[1:]), shape, jnp.bfloat16, 2, True)
    with pytest.raises(NotImplementedError, match="batch=1 and 2 states"):
        chunk(*_inputs(8, 3)[:5], np.zeros((2, 2, 128, 128), np.float32))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize(("dtype", "heads"), [(jnp.float32, 3), (jnp.bfloat16, 2)])
def test_kda_decode_equals_the_plain_layer_and_touches_only_named_slots(dtype, heads, lower_bound):
    slots, real = np.asarray([4, -1, 0, 2], np.int32), np.array([0, 2, 3])
    rows, weights, state, conv = decode_inputs(0, 4, heads, 5, dtype)
    rows = [x.at[1].set(jnp.nan) for x in rows]
    decode = jax.jit(functools.partial(kda_decode_gpu, lower_bound=lower_bound, norm_eps=EPS, interpret=True))
    out, new_state, new_conv = decode(*rows, *weights, state, conv, slots)
    named = slots[real]
    expected, states, convs = plain_decode([x[real] for x in rows], weights, state[named], conv[named], lower_bound)
    assert out.dtype == dtype and new_state.dtype == jnp.float32 and new_conv.dtype == dtype
    # All float32: sums of 128 terms in another order. In bfloat16 q, k, v and o are rounded in both, and a sum that
    # stands at the middle between two values may fall to either.
    tolerance = {"atol": 2e-5, "rtol": 1e-5} if dtype == jnp.float32 else {"atol": 0.02, "rtol": 2**-7}
    assert_close(out[real], expected, **tolerance, label="output")
    assert not np.any(out[1]), "output of the padding row"
    assert_close(new_state[named], states, atol=1e-5 if dtype == jnp.float32 else 0.02, label="state")
    assert_same_bits(new_conv[named], convs, "conv")
    for untouched in (1, 3):
        assert_same_bits(new_state[untouched], state[untouched], f"state of slot {untouched}")
        assert_same_bits(new_conv[untouched], conv[untouched], f"conv of slot {untouched}")


def test_kda_decode_refuses_what_it_cannot_do():
    assert kda_decode_gpu_refusal(96, 128, 4, jnp.bfloat16, jnp.float32) is None
    assert "96 channels" in kda_decode_gpu_refusal(96, 96, 4, jnp.bfloat16, jnp.float32)
    assert "states of bfloat16" in kda_decode_gpu_refusal(96, 128, 4, jnp.bfloat16, jnp.bfloat16)
    assert "float16" in kda_decode_gpu_refusal(96, 128, 4, jnp.float16, jnp.float32)
