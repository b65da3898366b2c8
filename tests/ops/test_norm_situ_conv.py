"""Norms, the SiTU activation and the short convolution, against float64."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxmoe.ops.linear import linear
from maxmoe.ops.norm import gated_rms_norm, l2_norm, layer_norm, rms_norm
from maxmoe.ops.short_conv import short_conv
from maxmoe.ops.situ import situ_glu
from tests.ops.closeness import assert_close, assert_same_bits

F32_TOLERANCE = 2e-6  # a mean of a few values, a root and two products in float32, relative
convolve = jax.jit(short_conv)


def _normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _rms(x, eps):
    return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + eps)


def test_rms_norm_follows_the_equation():
    x, weight = _normal(0, 3, 5, 37), _normal(1, 37)
    expected = weight * _rms(x.astype(np.float64), 1e-5)
    assert_close(rms_norm(x, weight, 1e-5), expected, rtol=F32_TOLERANCE)


def test_rms_norm_eps_stands_inside_the_root():
    x = np.full((1, 8), 1e-3, np.float32)
    # mean(x^2) = 1e-6 beside 1e-5 and 1e-6.
    assert_close(rms_norm(x, np.ones(8, np.float32), 1e-5), np.full((1, 8), 1 / np.sqrt(11)), rtol=F32_TOLERANCE)
    assert_close(rms_norm(x, np.ones(8, np.float32), 1e-6), np.full((1, 8), 1 / np.sqrt(2)), rtol=F32_TOLERANCE)


def test_rms_norm_rounds_before_the_weight():
    x, weight = _normal(2, 64, 40).astype(ml_dtypes.bfloat16), _normal(3, 40).astype(ml_dtypes.bfloat16)
    given = rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-5)
    normed = _rms(x.astype(np.float64), 1e-5)
    early = normed.astype(np.float32).astype(ml_dtypes.bfloat16) * weight
    late = (normed * weight.astype(np.float64)).astype(np.float32).astype(ml_dtypes.bfloat16)
    assert given.dtype == jnp.bfloat16
    # A float32 error may tip a rounding here and there; rounding once, after the weight, differs in many places.
    assert np.mean(np.asarray(given) == early) > 0.995
    assert np.mean(np.asarray(given) == late) < 0.9


def test_layer_norm_follows_the_equation():
    x, weight, bias = 3 + _normal(4, 3, 5, 37), _normal(5, 37), _normal(6, 37)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    expected = _rms(centred, 1e-5) * weight + bias
    # Centring a mean of 3 leaves an absolute error of a few 2^-24 * 3.
    assert_close(layer_norm(x, weight, bias, 1e-5), expected, atol=4e-6)
    low = layer_norm(jnp.asarray(x, jnp.bfloat16), weight, bias, 1e-5)
    assert low.dtype == jnp.bfloat16


def test_layer_norm_takes_the_eps_it_is_given():
    x = np.array([[1e-3, -1e-3]], np.float32)
    for eps, expected in ((1e-5, 1 / np.sqrt(11)), (1e-6, 1 / np.sqrt(2))):
        given = layer_norm(x, np.ones(2, np.float32), np.zeros(2, np.float32), eps)
        assert_close(given, [[expected, -expected]], rtol=F32_TOLERANCE)


def test_l2_norm_follows_the_equation():
    x = _normal(7, 3, 5, 4, 37)
    expected = x / np.sqrt(np.sum(np.square(x.astype(np.float64)), -1, keepdims=True) + 1e-6)
    assert_close(l2_norm(x), expected, rtol=F32_TOLERANCE)
    assert l2_norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.float32
    small = np.full((1, 4), 1e-3, np.float32)  # sum(x^2) = 4e-6 beside an eps of 1e-6
    assert_close(l2_norm(small), np.full((1, 4), 1 / np.sqrt(5)), rtol=F32_TOLERANCE)
    assert_same_bits(l2_norm(np.zeros((2, 4), np.float32)), np.zeros((2, 4), np.float32))


def test_gated_rms_norm_follows_the_equation():
    x, gate, weight = _normal(8, 3, 2, 37), 3 * _normal(9, 3, 2, 37), _normal(10, 37)
    expected = _rms(x.astype(np.float64), 1e-5) * weight / (1 + np.exp(-gate.astype(np.float64)))
    assert_close(gated_rms_norm(x, gate, weight, 1e-5), expected, rtol=F32_TOLERANCE)
    low = gated_rms_norm(x, jnp.asarray(gate, jnp.bfloat16), weight, 1e-5)
    exact_gate = np.asarray(jnp.asarray(gate, jnp.bfloat16)).astype(np.float64)
    expected = _rms(x.astype(np.float64), 1e-5) * weight / (1 + np.exp(-exact_gate))
    assert low.dtype == jnp.bfloat16
    assert_close(low, expected, rtol=2**-8)  # one rounding to bfloat16


@pytest.mark.parametrize(
    "gate, up, expected", [(10, 30, 82.2458215), (-3, 2, -0.240467171), (1, 1, 0.715817828), (1e4, 1e4, 100.0)]
)
def test_situ_glu_has_the_published_values(gate, up, expected):
    given = situ_glu(np.float32([gate]), np.float32([up]), 4.0, 25.0)
    assert_close(given, [expected], rtol=1e-6)  # nine digits stated, float32 arithmetic


def test_situ_glu_follows_the_equation():
    gate, up = 5 * _normal(11, 3, 41), 30 * _normal(12, 3, 41)
    for dtype, tolerance in ((jnp.float32, 3e-6), (jnp.bfloat16, 2**-8)):  # float32, or rounded once to bfloat16
        g, u = jnp.asarray(gate, dtype), jnp.asarray(up, dtype)
        wide_g, wide_u = (np.asarray(x).astype(np.float64) for x in (g, u))
        expected = 4 * np.tanh(wide_g / 4) / (1 + np.exp(-wide_g)) * 25 * np.tanh(wide_u / 25)
        given = situ_glu(g, u, 4.0, 25.0)
        assert given.dtype == dtype
        assert_close(given, expected, rtol=tolerance)


def test_linear_multiplies_in_float32_and_rounds_once():
    x, weight = _normal(13, 2, 3, 37), _normal(14, 11, 37)
    # 37 terms of order 1 in float32.
    assert_close(linear(x, weight), x.astype(np.float64) @ weight.T.astype(np.float64), atol=1e-5)
    low = jnp.asarray(x, jnp.bfloat16)
    given = linear(low, jnp.asarray(weight, jnp.bfloat16))
    exact_weight = weight.astype(ml_dtypes.bfloat16).astype(np.float64)
    assert given.dtype == jnp.bfloat16
    assert_close(given, np.asarray(low).astype(np.float64) @ exact_weight.T, atol=1e-5, rtol=2**-8)


def _splits(total):
    """Every way to write the total as an ordered sum."""
    for cuts in itertools.product([False, True], repeat=total - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [total]
        yield np.diff([0, *ends]).tolist()


def test_short_conv_gives_the_same_for_every_split():
    x = np.arange(1, 7, dtype=np.float32)
    weight = np.array([[1, 2, 3, 4]], np.float32)
    for split in _splits(6):
        state, outs, start = np.zeros((1, 3, 1), np.float32), [], 0
        for length in split:
            before = state.copy()
            piece = x[None, start : start + length, None]
            out, new_state = convolve(piece, weight, state, np.array([length], np.int32))
            assert_same_bits(state, before, f"{split}: the state given")
            outs, state, start = [*outs, out], np.asarray(new_state), start + length
            expected_state = np.concatenate([np.zeros(3, np.float32), x[:start]])[-3:]
            assert_same_bits(state[0, :, 0], expected_state, f"{split}: state after {start}")
        given = np.concatenate(outs, 1)[0, :, 0]
        assert_same_bits(given, np.float32([4, 11, 20, 30, 40, 50]), f"{split}: outputs")


def _reference_conv(x, weight, state):
    extended = np.concatenate([state, x], 1).astype(np.float64)
    taps = weight.shape[1]
    return np.stack([np.einsum("bwc,cw->bc", extended[:, t : t + taps], weight) for t in range(x.shape[1])], 1)


def test_short_conv_follows_the_equation():
    x, weight, state = _normal(15, 3, 9, 5), _normal(16, 5, 4), _normal(17, 3, 3, 5)
    out, new_state = convolve(x, weight, state, np.full(3, 9, np.int32))
    assert_close(out, _reference_conv(x, weight, state), atol=2e-6)  # four products of order 1 in float32
    assert_same_bits(new_state, x[:, -3:])


def test_short_conv_padding_does_not_touch_the_state():
    x, weight, state = _normal(18, 5, 6, 2), _normal(19, 2, 4), _normal(20, 5, 3, 2)
    lengths = np.array([0, 1, 2, 4, 6], np.int32)
    padded = np.where(np.arange(6)[None, :, None] < lengths[:, None, None], x, np.nan)
    out, new_state = convolve(padded, weight, state, lengths)
    expected = _reference_conv(x, weight, state)
    for row, length in enumerate(lengths):
        assert_close(out[row, :length], expected[row, :length], atol=2e-6, label=f"{length} tokens: output")
        kept = np.concatenate([state[row], x[row, :length]])[-3:]
        assert_same_bits(new_state[row], kept, f"{length} tokens: state")


def test_short_conv_returns_float32_and_a_state_like_the_one_given():
    x, weight, state = _normal(21, 1, 5, 2), _normal(22, 2, 4), _normal(23, 1, 3, 2)
    low, low_state = jnp.asarray(x, jnp.bfloat16), jnp.asarray(state, jnp.bfloat16)
    out, new_state = convolve(low, weight, low_state, np.array([5], np.int32))
    assert out.dtype == jnp.float32 and new_state.dtype == jnp.bfloat16
    # Products of bfloat16 inputs in float32, not rounded to bfloat16.
    assert_close(out, _reference_conv(np.asarray(low), weight, np.asarray(low_state)), atol=2e-6)
    assert_same_bits(new_state, low[:, -3:])


def test_short_conv_gradient_is_the_same_for_pieces():
    x, weight, state, factors = _normal(24, 1, 6, 2), _normal(25, 2, 4), _normal(26, 1, 3, 2), _normal(27, 1, 6, 2)

    def loss(x, weight, state, split):
        total, start = 0.0, 0
        for length in split:
            out, state = short_conv(x[:, start : start + length], weight, state, jnp.array([length]))
            total += jnp.sum(factors[:, start : start + length] * out**2)
            start += length
        return total + jnp.sum(state**3)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)
    whole, pieces = gradients(x, weight, state, (6,)), gradients(x, weight, state, (2, 1, 3))
    for name, given, expected in zip(("x", "weight", "state"), pieces, whole, strict=True):
        # The same terms added in another order.
        assert_close(given, expected, atol=1e-5, label=f"gradient of {name}")
