"""MXFP4 product on TPU, interpreted: both ways of unpacking against the plain definition, and its gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from maxmoe.ops import mxfp4
from pallas_kernels import mxfp4_unpack
from pallas_kernels.mxfp4_matmul_tpu import mxfp4_matmul_tpu, mxfp4_matmul_tpu_refusal
from pallas_kernels.tiling import Mxfp4MatmulTpuTiling
from tests.ops.closeness import assert_close, assert_same_bits

POISONED = pltpu.InterpretParams(uninitialized_memory="nan")
# Blocks of up to three tiles of outputs, in each of the ways in which tiles follow each other.
SMALL = {
    "float4": Mxfp4MatmulTpuTiling(rows=16, outputs=384, columns=256, at_a_time=128),
    "float8": Mxfp4MatmulTpuTiling(rows=16, outputs=384, columns=256, at_a_time=128, unrolled=False),
    "float8_f32": Mxfp4MatmulTpuTiling(rows=16, outputs=384, columns=256, at_a_time=128, buffers=2),
}
LARGEST_SCALE = {"float4": 252, "float8": 240, "float8_f32": 240}  # byte; 252 is where 6 * scale leaves bfloat16
METHODS = pytest.mark.parametrize("method", mxfp4_unpack.METHODS)


def _matmul(method, interpret=POISONED):
    return jax.jit(functools.partial(mxfp4_matmul_tpu, method=method, tiling=SMALL[method], interpret=interpret))


def _weight(rng, num_outputs, num_columns, scales=(110, 135)):
    packed = rng.integers(0, 256, (num_outputs, num_columns // 2)).astype(np.uint8)
    scale = rng.integers(*scales, (num_outputs, num_columns // 32)).astype(np.uint8)
    return packed, scale, np.asarray(mxfp4.dequantize(packed, scale)).astype(np.float64)


# Of one product relative to the sum of magnitudes: bfloat16 rounds once, to half of 2^-8; float32 x is three exact
# products whose float32 sums of up to 768 terms round.
TOLERANCE = {jnp.bfloat16: 2**-8, jnp.float32: 1e-6}


@METHODS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["bfloat16", "float32"])
@pytest.mark.parametrize("num_rows", [1, 37])
def test_mxfp4_matmul_tpu_and_its_gradient_match_the_definition(method, dtype, num_rows):
    rng = np.random.default_rng(num_rows)
    packed, scale, weight = _weight(rng, 384, 768)
    x = jnp.asarray(rng.standard_normal((num_rows, 768)), dtype)
    dout = jnp.asarray(rng.standard_normal((num_rows, 384)), dtype)

    @jax.jit
    def run(x, dout):
        out, pull = jax.vjp(lambda x: _matmul(method)(x, packed, scale), x)
        return out, pull(dout)[0]

    out, dx = run(x, dout)
    assert out.dtype == dx.dtype == dtype
    for given, value, factor, label in ((out, x, weight.T, "out"), (dx, dout, weight, "dx")):
        value = np.asarray(value).astype(np.float64)
        bound = np.abs(value) @ np.abs(factor)
        assert_close(given / bound, (value @ factor) / bound, atol=TOLERANCE[dtype], label=label)


@METHODS
def test_mxfp4_matmul_tpu_reads_every_code_under_every_scale(method):
    # 256 rows, one scale byte each; every byte of codes appears in every row.
    packed = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(2, 128).reshape(1, 256), (256, 256)).copy()
    scale = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, 16)).copy()
    x = jnp.eye(512, dtype=jnp.float32)  # picks columns out, so that the product is the weight itself
    given = np.asarray(_matmul(method)(x, packed, scale)).T
    expected = np.asarray(mxfp4.dequantize(packed, scale))
    normal = np.abs(expected) >= 2.0**-126
    first = 1 if method == "float4" else 0  # byte 0 is a scale of zero for float4
    inside = np.arange(256)[:, None] <= LARGEST_SCALE[method]
    exact = normal & inside & (np.arange(256)[:, None] >= first)
    assert_same_bits(given[exact], expected[exact])
    # What is too small for a normal number may become zero, and nothing else.
    small = inside & ~exact
    assert np.abs(given[small] - expected[small]).max() <= 6 * 2.0**-127
    # What is too large never looks like a number.
    assert not np.isfinite(given[LARGEST_SCALE[method] + 1 :]).any()


@METHODS
def test_mxfp4_matmul_tpu_keeps_low_nibbles_first_and_scales_by_row(method):
    packed = np.zeros((128, 128), np.uint8)
    packed[:, 0] = 0x21  # 0.5 and 1
    packed[1, 16] = 0x72  # 1 and 6, of the second group
    scale = np.full((128, 8), 127, np.uint8)
    scale[1, :2] = 128, 120
    x = jnp.asarray(np.eye(256, dtype=np.float32), jnp.bfloat16)
    weight = np.asarray(_matmul(method)(x, packed, scale)).astype(np.float64).T
    assert weight[0, :2].tolist() == [0.5, 1] and weight[1, :2].tolist() == [1, 2]
    assert weight[1, 32:34].tolist() == [2.0**-7, 6 * 2.0**-7]
    assert np.count_nonzero(weight) == 128 * 2 + 2


@METHODS
def test_mxfp4_matmul_tpu_takes_more_columns_than_scales_fit_lanes(method):
    rng = np.random.default_rng(3)
    packed, scale, weight = _weight(rng, 128, 5120, scales=(120, 125))
    x = jnp.asarray(rng.standard_normal((3, 5120)), jnp.bfloat16)
    value = np.asarray(x).astype(np.float64)
    bound = np.abs(value) @ np.abs(weight.T)
    # bfloat16 rounds once.
    assert_close(_matmul(method)(x, packed, scale) / bound, (value @ weight.T) / bound, atol=2**-8)


@METHODS
def test_mxfp4_matmul_tpu_has_no_race(method):
    rng = np.random.default_rng(4)
    packed, scale, weight = _weight(rng, 256, 512)
    x = jnp.asarray(rng.standard_normal((20, 512)), jnp.bfloat16)
    checked = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    given = jax.block_until_ready(_matmul(method, checked)(x, packed, scale))
    bound = np.abs(np.asarray(x).astype(np.float64)) @ np.abs(weight.T)
    # bfloat16 rounds once.
    assert_close(given / bound, (np.asarray(x).astype(np.float64) @ weight.T) / bound, atol=2**-8)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_lane_order_takes_even_columns_before_odd_ones_and_back(dtype):
    x = jnp.asarray(np.random.default_rng(5).standard_normal((3, 512)), dtype)
    ordered = np.asarray(mxfp4_unpack.lane_order(x))
    for start in (0, 256):
        assert_same_bits(ordered[:, start : start + 128], np.asarray(x)[:, start : start + 256 : 2])
        assert_same_bits(ordered[:, start + 128 : start + 256], np.asarray(x)[:, start + 1 : start + 256 : 2])
    assert_same_bits(mxfp4_unpack.from_lane_order(ordered), x)


@pytest.mark.parametrize(
    "x_shape, dtype, packed_shape, scale_shape, words",
    [
        ((4, 256), jnp.float16, (128, 128), (128, 8), "not float16"),
        ((0, 256), jnp.bfloat16, (128, 128), (128, 8), "M > 0"),
        ((4, 256), jnp.bfloat16, (128, 256), (128, 8), "do not fit"),
        ((4, 256), jnp.bfloat16, (128, 128), (128, 4), "do not fit"),
        ((4, 320), jnp.bfloat16, (128, 160), (128, 10), "not K=320"),
        ((4, 256), jnp.bfloat16, (96, 128), (96, 8), "N=96"),
        ((4, 4352), jnp.bfloat16, (128, 2176), (128, 136), "multiples of 1024, not 4352"),
    ],
)
def test_mxfp4_matmul_tpu_says_why_it_refuses(x_shape, dtype, packed_shape, scale_shape, words):
    assert words in mxfp4_matmul_tpu_refusal(x_shape, dtype, packed_shape, scale_shape)
    with pytest.raises(NotImplementedError, match=words.replace("(", r"\(")):
        mxfp4_matmul_tpu(jnp.zeros(x_shape, dtype), np.zeros(packed_shape, np.uint8), np.zeros(scale_shape, np.uint8))


def test_mxfp4_matmul_tpu_refuses_no_real_shape():
    for n, k in ((3072, 3584), (3584, 3072)):
        assert mxfp4_matmul_tpu_refusal((1, k), jnp.bfloat16, (n, k // 2), (n, k // 32)) is None
