"""One-token KDA for TPU, run by the interpreter with poisoned memory, against the layer's plain operations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda_decode_tpu import kda_decode_refusal, kda_decode_tpu
from tests.ops.closeness import assert_close, assert_same_bits
from tests.ops.kda_decode_reference import BOUND, EPS, decode_inputs, plain_decode


def _decode(lower_bound=BOUND, detect_races=False):
    mode = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=detect_races)
    return jax.jit(functools.partial(kda_decode_tpu, lower_bound=lower_bound, norm_eps=EPS, interpret=mode))


decode = _decode()


@pytest.mark.parametrize("lower_bound", [BOUND, None])
@pytest.mark.parametrize(("dtype", "heads"), [(jnp.float32, 3), (jnp.bfloat16, 16)])
def test_kda_decode_equals_the_plain_layer(dtype, heads, lower_bound):
    slots = np.asarray([4, 0, 2], np.int32)
    rows, weights, state, conv = decode_inputs(0, 3, heads, 5, dtype)
    out, new_state, new_conv = _decode(lower_bound)(*rows, *weights, state, conv, slots)
    expected, states, convs = plain_decode(rows, weights, state[slots], conv[slots], lower_bound)
    assert out.dtype == dtype and new_state.dtype == jnp.float32 and new_conv.dtype == dtype
    # All float32: sums of 128 terms in another order. In bfloat16 q, k, v and o are rounded in both, and a sum that
    # stands at the middle between two values may fall to either.
    out_tol = {"atol": 2e-5, "rtol": 1e-5} if dtype == jnp.float32 else {"atol": 0.02, "rtol": 2**-7}
    assert_close(out, expected, **out_tol, label="output")
    state_tol = 1e-5 if dtype == jnp.float32 else 0.02
    assert_close(new_state[slots], states, atol=state_tol, label="state")
    assert_same_bits(new_conv[slots], convs, "conv")
    for untouched in (1, 3):
        assert_same_bits(new_state[untouched], state[untouched], f"state of slot {untouched}")
        assert_same_bits(new_conv[untouched], conv[untouched], f"conv of slot {untouched}")


@pytest.mark.parametrize("slots", [[-1, 3, -1, 1], [-1, -1, -1, -1], [2, -1, -1, -1], [-1, -1, 0, 3]])
def test_kda_decode_padding_leaves_every_slot_alone(slots):
    rows, weights, state, conv = decode_inputs(1, 4, 2, 4, jnp.float32)
    rows = [jnp.where((np.asarray(slots) < 0)[:, None], jnp.nan, x) for x in rows]
    out, new_state, new_conv = decode(*rows, *weights, state, conv, np.asarray(slots, np.int32))
    for slot in range(4):
        if slot not in slots:
            assert_same_bits(new_state[slot], state[slot], f"state of slot {slot}")
            assert_same_bits(new_conv[slot], conv[slot], f"conv of slot {slot}")
            continue
        row = slots.index(slot)
        one = slice(row, row + 1)
        expected, states, _ = plain_decode([x[one] for x in rows], weights, state[slot][None], conv[slot][None])
        assert_close(out[one], expected, atol=2e-5, rtol=1e-5, label=f"output of row {row}")
        assert_close(new_state[slot], states[0], atol=1e-5, label=f"state of slot {slot}")
    for row, slot in enumerate(slots):
        if slot < 0:
            assert not np.any(out[row]), f"output of padding row {row}"


def test_kda_decode_nan_of_one_sequence_stays_in_it():
    rows, weights, state, conv = decode_inputs(2, 4, 2, 4, jnp.float32)
    slots = np.asarray([3, 1, 0, 2], np.int32)
    clean = decode(*rows, *weights, state, conv, slots)
    bad = decode(*[x.at[1].set(jnp.nan) for x in rows], *weights, state.at[1].set(jnp.nan), conv, slots)
    for row in (0, 2, 3):
        assert_same_bits(bad[0][row], clean[0][row], f"output of row {row}")
        assert_same_bits(bad[1][slots[row]], clean[1][slots[row]], f"state of row {row}")
    assert np.isnan(bad[0][1]).all() and np.isnan(bad[1][1]).all()


def test_kda_decode_convolution_follows_its_taps():
    rows, weights, state, conv = decode_inputs(3, 1, 1, 1, jnp.float32)
    conv, slots = jnp.zeros_like(conv), np.zeros(1, np.int32)
    for t in range(1, 7):
        rows[:3] = [jnp.full((1, 128), t, jnp.float32)] * 3
        _, state, conv = decode(*rows, *weights, state, conv, slots)
        assert_same_bits(conv[0, :, :, 0, 0], np.tile(np.maximum([t - 2, t - 1, t], 0).astype(np.float32), (3, 1)))


def test_kda_decode_has_no_races():
    rows, weights, state, conv = decode_inputs(4, 4, 2, 4, jnp.float32)
    slots = np.asarray([2, -1, 0, 1], np.int32)
    given = _decode(detect_races=True)(*rows, *weights, state, conv, slots)
    for x, y in zip(given, decode(*rows, *weights, state, conv, slots), strict=True):
        assert_same_bits(x, y)


def test_kda_decode_refuses_what_it_cannot_do():
    assert kda_decode_refusal(96, 128, 4, jnp.bfloat16, jnp.float32) is None
    assert "64 channels" in kda_decode_refusal(96, 64, 4, jnp.bfloat16, jnp.float32)
    assert "3 taps" in kda_decode_refusal(96, 128, 3, jnp.bfloat16, jnp.float32)
    assert "bfloat16" in kda_decode_refusal(96, 128, 4, jnp.bfloat16, jnp.bfloat16)
    assert "25 heads" in kda_decode_refusal(25, 128, 4, jnp.bfloat16, jnp.float32)
    rows, weights, state, conv = decode_inputs(5, 1, 1, 1, jnp.float16)
    with pytest.raises(NotImplementedError, match="projections of float16"):
        decode(*rows, *weights, state, conv, np.zeros(1, np.int32))
