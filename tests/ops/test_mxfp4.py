"""MXFP4: every code under every scale byte, rounding against an independent 4-bit float, products."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxmoe.ops import mxfp4
from tests.ops.closeness import assert_close, assert_same_bits

TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
quantize, encode = map(jax.jit, (mxfp4.quantize, mxfp4.encode))


@jax.jit
def matmul(x, packed, scale):
    return mxfp4.matmul(mxfp4.packed_order(x), packed, scale)


dequantize = jax.jit(mxfp4.dequantize, static_argnames="dtype")
# Each group of 32 holds every code twice: once in a low nibble, once in a high one.
ALL_CODES = np.stack([np.arange(16), 15 - np.arange(16)], -1).reshape(32)


def _pack(codes):
    codes = np.asarray(codes, np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _unpack(packed):
    packed = np.asarray(packed)
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def _decode(codes, scale):
    """The values in float64, exact; NaN under scale byte 255."""
    exponent = np.repeat(np.asarray(scale).astype(int) - 127, 32, axis=-1)
    return np.where(exponent == 128, np.nan, np.ldexp(TABLE[codes], exponent))


def _float32(values):
    with np.errstate(over="ignore"):
        return values.astype(np.float32)  # numpy keeps subnormals


def _random_weight(rng, *shape, scales=(110, 140)):
    """Codes, packed codes and scale bytes of a matrix; its last axis is a multiple of 32."""
    codes = rng.integers(0, 16, shape)
    scale = rng.integers(*scales, (*shape[:-1], shape[-1] // 32)).astype(np.uint8)
    return codes, _pack(codes), scale


def test_dequantize_reads_the_low_nibble_first():
    packed = np.full(16, 0x21, np.uint8)
    given = dequantize(packed, np.array([127], np.uint8))
    assert_same_bits(given, np.tile(np.float32([0.5, 1.0]), 16))


def test_dequantize_follows_the_table():
    given = np.asarray(dequantize(np.arange(0x20, 0x30, dtype=np.uint8), np.array([127], np.uint8)))
    assert_same_bits(given[0::2], TABLE.astype(np.float32), "even elements")
    assert_same_bits(given[1::2], np.ones(16, np.float32), "odd elements")


def test_dequantize_takes_a_scale_byte_as_a_power_of_two():
    packed = np.full(16, 0x22, np.uint8)
    assert_same_bits(dequantize(packed, np.array([120], np.uint8)), np.full(32, 0.0078125, np.float32))


def test_dequantize_keeps_the_sign_of_zero_and_spreads_nan():
    packed = np.zeros((2, 16), np.uint8)
    packed[:, :2] = _pack([0, 8, 2, 10])
    given = np.asarray(dequantize(packed, np.array([[127], [255]], np.uint8)))
    assert_same_bits(given[0, :4], np.float32([0, -0.0, 1, -1]))
    assert np.isnan(given[1]).all()


def test_dequantize_scales_along_the_rows():
    packed = np.full((2, 32), 0x22, np.uint8)
    given = dequantize(packed, np.array([[127, 128], [129, 130]], np.uint8))
    assert_same_bits(given, np.repeat(np.float32([[1, 2], [4, 8]]), 32, axis=1))


def _dequantize_bits(packed, scale):
    return jax.lax.bitcast_convert_type(mxfp4.dequantize(packed, scale), jnp.uint32)


@pytest.mark.parametrize("run", [_dequantize_bits, jax.jit(_dequantize_bits)], ids=["eager", "jit"])
@pytest.mark.parametrize("first, end", [(0, 256), (2, 253), (0, 2), (253, 255)])
def test_dequantize_is_exact_for_every_code_and_scale(run, first, end):
    scale = np.arange(first, end, dtype=np.uint8)[:, None]
    given = np.asarray(run(np.broadcast_to(_pack(ALL_CODES), (len(scale), 16)), scale)).view(np.float32)
    expected = _float32(_decode(ALL_CODES, scale))
    numbers = scale[:, 0] < 255
    # Bits, so that subnormals, which some platforms flush, and signed zeros count. Above the range it is infinite.
    assert_same_bits(given[numbers], expected[numbers])
    assert np.isnan(given[~numbers]).all()


def test_dequantize_is_exact_under_vmap():
    scale = np.arange(256, dtype=np.uint8)[:, None]
    packed = np.broadcast_to(_pack(ALL_CODES), (256, 16))
    given = jax.jit(jax.vmap(_dequantize_bits))(packed, scale)
    assert_same_bits(np.asarray(given)[:255], _float32(_decode(ALL_CODES, scale))[:255].view(np.uint32))


def test_dequantize_to_bfloat16_is_exact():
    scale = np.arange(2, 253, dtype=np.uint8)[:, None]
    packed = np.broadcast_to(_pack(ALL_CODES), (251, 16))
    given = dequantize(packed, scale, dtype=jnp.bfloat16)
    assert given.dtype == jnp.bfloat16
    assert_same_bits(given, _decode(ALL_CODES, scale).astype(ml_dtypes.bfloat16))


def test_quantize_returns_the_bytes_of_canonical_groups():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (253, 4, 32))
    codes[:, :, 7] = rng.choice([6, 7, 14, 15], (253, 4))  # the largest value of the group is 4 or 6
    scale = np.broadcast_to(np.arange(253, dtype=np.uint8)[:, None, None], (253, 4, 1))
    packed = _pack(codes)
    new_packed, new_scale = quantize(dequantize(packed, scale))
    assert_same_bits(new_scale, scale, "scale")
    assert_same_bits(new_packed, packed, "codes")


@pytest.mark.parametrize("largest", range(8))
def test_quantize_loses_nothing_of_data_on_the_grid(largest):
    rng = np.random.default_rng(largest)
    codes = rng.integers(0, largest + 1, (255, 32)) | rng.integers(0, 2, (255, 32)) << 3
    codes[:, 5] = largest
    scale = np.arange(255, dtype=np.uint8)[:, None]
    values = _float32(_decode(codes, scale))
    finite = np.isfinite(values).all(-1)
    assert finite.sum() >= 253
    values = np.where(finite[:, None], values, np.float32(1))
    assert_same_bits(dequantize(*quantize(values)), values)


def test_quantize_uses_the_floor_rule():
    x = np.full(32, 0.5, np.float32)
    x[0] = 7
    packed, scale = quantize(x)
    assert np.asarray(scale).tolist() == [127]  # the ceiling rule would say 128 and give 8
    assert_same_bits(dequantize(packed, scale), np.where(x == 7, np.float32(6), x))


def _expected_codes(x, scale):
    """Codes of ml_dtypes' 4-bit float: to nearest, ties to even, saturating."""
    unit = np.repeat(scale.astype(int), 32, axis=-1) - 127
    scaled = np.clip(np.ldexp(np.asarray(x).astype(np.float64), -unit), -6, 6)
    return scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def _floor_rule(x):
    largest = np.abs(np.asarray(x).astype(np.float64)).reshape(*x.shape[:-1], -1, 32).max(-1)
    exponent = np.frexp(largest)[1] - 1  # floor(log2), and of zero: any that is clipped to byte 0
    return np.where(largest > 0, np.clip(exponent - 2 + 127, 0, 254), 0).astype(np.uint8)


def _wide_data(rng):
    """Groups of all magnitudes, among them subnormals, zeros of both signs, and values on the rounding edges."""
    spread = np.ldexp(rng.standard_normal((300, 64)), rng.integers(-8, 4, (300, 64)))
    x = np.ldexp(spread, rng.integers(-148, 120, (300, 1))).astype(np.float32)
    edges = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7])
    x[:100] = np.ldexp(rng.choice(np.concatenate([edges, -edges]), (100, 64)), rng.integers(-140, 120, (100, 1)))
    x[rng.random(x.shape) < 0.05] = 0
    x[rng.random(x.shape) < 0.05] = -0.0
    x[0], x[1, :32], x[1, 32:] = 0, -0.0, np.float32(1e-45)
    x[2] = np.finfo(np.float32).max * rng.choice([-1, 1, 0.3], 64)
    return x


def test_quantize_rounds_like_a_4_bit_float():
    x = _wide_data(np.random.default_rng(1))
    packed, scale = quantize(x)
    assert packed.dtype == jnp.uint8 and packed.shape == (300, 32)
    assert_same_bits(scale, _floor_rule(x), "scale")
    assert_same_bits(_unpack(packed), _expected_codes(x, np.asarray(scale)), "codes")
    assert np.asarray(scale)[0].tolist() == [0, 0]


def test_quantize_takes_bfloat16():
    x = _wide_data(np.random.default_rng(2)).astype(ml_dtypes.bfloat16)
    x = np.where(np.isfinite(x.astype(np.float32)).all(-1, keepdims=True), x, np.ones_like(x))
    packed, scale = quantize(jnp.asarray(x))
    assert_same_bits(scale, _floor_rule(x), "scale")
    assert_same_bits(_unpack(packed), _expected_codes(x, np.asarray(scale)), "codes")


@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf, -np.inf])
def test_quantize_marks_groups_that_are_not_finite(odd):
    x = np.ones((2, 64), np.float32)
    x[1, 40] = odd
    packed, scale = quantize(x)
    assert np.asarray(scale).tolist() == [[125, 125], [125, 255]]
    assert not np.asarray(packed)[1, 16:].any()
    assert np.isnan(dequantize(packed, scale)[1, 32:]).all()


def test_encode_rounds_under_any_scale():
    rng = np.random.default_rng(3)
    x = rng.integers(0, 2**32, (200, 32), dtype=np.uint32).view(np.float32)
    x = np.where(np.isfinite(x), x, np.float32(1))
    magnitude = (x[:, 0].view(np.int32) >> 23) & 255
    near = np.clip(magnitude + rng.integers(-6, 7, 200), 0, 254)
    scale = np.where(rng.random(200) < 0.7, near, rng.integers(0, 255, 200)).astype(np.uint8)[:, None]
    x = np.where(rng.random(x.shape) < 0.5, x, x[:, :1] * rng.uniform(0.1, 1, x.shape).astype(np.float32))
    assert_same_bits(_unpack(encode(x, scale)), _expected_codes(x, scale))


def test_encode_saturates_infinities():
    x = np.array([np.inf, -np.inf] * 16, np.float32)
    assert _unpack(encode(x, np.array([200], np.uint8))).tolist() == [7, 15] * 16


@pytest.mark.parametrize("width", [1, 16, 33, 48])
def test_quantize_rejects_rows_that_are_not_whole_groups(width):
    with pytest.raises(ValueError, match=f"last axis is {width}.*multiple of 32"):
        mxfp4.quantize(jnp.ones((2, width)))


@pytest.mark.parametrize("lead", [(), (3,), (3, 2)])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_matmul_matches_float64(lead, num_rows):
    rng = np.random.default_rng(4)
    codes, packed, scale = _random_weight(rng, *lead, 7, 96)
    x = rng.standard_normal((*lead, num_rows, 96)).astype(np.float32)
    weight = _decode(codes, scale)
    expected = np.einsum("...ni,...oi->...no", x.astype(np.float64), weight)
    bound = np.einsum("...ni,...oi->...no", np.abs(x).astype(np.float64), np.abs(weight))
    # Relative to the sum of magnitudes, 96 float32 additions; the weights themselves are exact.
    given = np.asarray(matmul(x, packed, scale))
    assert_close(given / bound, expected / bound, atol=1e-6)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_matmul_in_bfloat16_rounds_once(num_rows):
    rng = np.random.default_rng(5)
    codes, packed, scale = _random_weight(rng, 7, 64, scales=(120, 130))
    x = jnp.asarray(rng.standard_normal((num_rows, 64)), jnp.bfloat16)
    given = matmul(x, packed, scale)
    assert given.dtype == jnp.bfloat16
    expected = np.asarray(x).astype(np.float64) @ _decode(codes, scale).T
    # Weights and products are exact, sums are float32: half a unit of bfloat16, and float32 noise near zero.
    assert_close(given, expected, rtol=2**-8, atol=1e-5 * np.abs(expected).max())


def test_matmul_reads_scales_outside_the_usual_range():
    rng = np.random.default_rng(6)
    codes, _, scale = _random_weight(rng, 3, 64)
    scale[0, 0], scale[1, 1], scale[2, 0] = 1, 255, 253
    codes[2, :32] &= 11  # values up to 1.5, so that nothing leaves the range
    x = (1e-3 * rng.standard_normal((1, 64))).astype(np.float32)
    expected = np.einsum("ni,oi->no", x.astype(np.float64), _decode(codes, scale))
    # Scale 253 makes one row huge: float32 sums of 64 terms, relative to the largest.
    assert_close(matmul(x, _pack(codes), scale), expected, rtol=1e-5)
