"""MXFP4: 4-bit floats (E2M1) in groups of 32 that share a power-of-two scale (E8M0).

A byte holds two neighbours of a row, the earlier in the low nibble. A code is a sign bit above an index
into {0, 0.5, 1, 1.5, 2, 3, 4, 6}; a scale byte s stands for 2^(s - 127), and 255 for NaN.
All arithmetic is on integer bit patterns, so that float32 subnormals survive on platforms that flush them.
Source: OCP Microscaling Formats 1.0; the pair order is that of the published checkpoint.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

GROUP = 32
_LOW, _HIGH = 0, 4  # bit of a byte at which the code of an even and of an odd column starts
_MANTISSA = 23  # bits of a float32 mantissa
_EXPONENT_ONES = 0xFF << _MANTISSA
_NAN = 0x7FC00000


def dequantize(
    packed: UInt8[Array, "*b I/2"], scale: UInt8[Array, "*b I/32"], dtype: jnp.dtype = jnp.float32
) -> Float[Array, "*b I"]:
    """value * 2^(scale - 127), exact in float32; a product beyond its range is infinite, scale byte 255 gives NaN.

    Args:
      dtype: What the exact value is rounded to; bfloat16 holds every value that is normal there.
    """
    return jnp.swapaxes(_decoded(packed, scale, dtype), -1, -2).reshape(*packed.shape[:-1], -1)


def packed_order(x: Array, axis: int = -1) -> Array:
    """Reorders an axis as `matmul` wants it: what meets low nibbles, 0, 2, 4, ..., and then what meets high ones."""
    axis %= x.ndim
    pairs = x.reshape(*x.shape[:axis], -1, 2, *x.shape[axis + 1 :])
    return jnp.swapaxes(pairs, axis, axis + 1).reshape(x.shape)


def matmul(
    x: Float[Array, "*b N I"], packed: UInt8[Array, "*b O I/2"], scale: UInt8[Array, "*b O I/32"]
) -> Float[Array, "*b N O"]:
    """x dequantize(packed, scale)^T in x's dtype, accumulated in float32, for x in `packed_order`.

    The order spares the weights an interleaving of their nibbles.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = functools.partial(
        jnp.einsum, "...ni,...oi->...no", precision=precision, preferred_element_type=jnp.float32
    )
    if x.shape[-2] > 1:
        weights = _decoded(packed, scale, x.dtype)
        return product(x, weights.reshape(*weights.shape[:-2], -1)).astype(x.dtype)
    # A single row reads each weight once: two products save writing the weights out side by side.
    halves = zip(jnp.split(x, 2, axis=-1), (_LOW, _HIGH), strict=True)
    return sum(product(half, _decoded(packed, scale, x.dtype, shift)) for half, shift in halves).astype(x.dtype)


def _decoded(packed, scale, dtype, shift=None):
    """Weights of the low or of the high nibbles, [..., I/2]; without a shift those of both, [..., 2, I/2]."""
    if shift is None:
        packed, scale, shift = packed[..., None, :], scale[..., None, :], jnp.array([[_LOW], [_HIGH]])

    def run(decode):
        def branch(packed, scale):
            exponent = jnp.repeat(scale.astype(jnp.int32), GROUP // 2, axis=-1)
            bits = decode((packed.astype(jnp.int32) >> shift) & 15, exponent)
            return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)

        return branch

    usual = jnp.all((scale >= 2) & (scale <= 252))
    return jax.lax.cond(usual, run(_decode_usual), run(_decode_any), packed, scale)


def _decode_usual(code, exponent):
    """Float32 bits of codes whose result is neither subnormal nor out of range: scale bytes 2 to 252."""
    # A magnitude index of 2 or more is itself a float of 2 exponent and 1 mantissa bits, biased by 1; 1 is 2^-1.
    magnitude = code & 7
    bits = ((exponent - 1) << _MANTISSA) + jnp.where(magnitude > 1, magnitude << (_MANTISSA - 1), 0)
    return jnp.where(magnitude == 0, 0, bits) | ((code & 8) << 28)


def _decode_any(code, exponent):
    """Float32 bits of codes under any scale byte."""
    magnitude, sign = code & 7, (code & 8) << 28
    bits = _decode_usual(code, exponent) & ~sign
    subnormal = (exponent == 0) & (magnitude < 4) | (exponent == 1) & (magnitude < 2)
    bits = jnp.where(subnormal, magnitude << (_MANTISSA - 2 + exponent), bits)
    too_large = (exponent + jnp.maximum(magnitude >> 1, 1) - 1 > 254) & (magnitude > 0)
    bits = jnp.where(too_large, _EXPONENT_ONES, bits) | sign
    return jnp.where(exponent == 255, _NAN, bits)


def quantize(x: Float[Array, "*b I"]) -> tuple[UInt8[Array, "*b I/2"], UInt8[Array, "*b I/32"]]:
    """Rounds each group of 32 along the last axis to MXFP4.

    The scale is 2^(floor(log2(max|x|)) - 2), the floor rule of the OCP specification, so that values above
    6 times the scale saturate to 6; elements round to nearest, ties to even. Data on the MXFP4 grid comes back
    value for value, and byte for byte where a group reaches 4 or 6 times its scale. A group of zeros gets
    scale byte 0, and a group that holds an infinity or NaN scale byte 255.

    Raises: ValueError if the last axis is not a multiple of 32.
    """
    if x.shape[-1] % GROUP:
        raise ValueError(f"last axis is {x.shape[-1]}: MXFP4 needs a multiple of {GROUP}; pad the weight")
    magnitude = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    largest = jnp.max(magnitude.reshape(*x.shape[:-1], -1, GROUP), axis=-1)
    scale = jnp.maximum((largest >> _MANTISSA) - 2, 0)  # biased exponents subtract
    scale = jnp.where(largest < _EXPONENT_ONES, scale, 255).astype(jnp.uint8)
    return encode(x, scale), scale


def encode(x: Float[Array, "*b I"], scale: UInt8[Array, "*b I/32"]) -> UInt8[Array, "*b I/2"]:
    """Rounds x to codes under given scales: to nearest, ties to even, saturating at 6 times the scale.

    Under scale byte 255 every code is 0.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    scale = jnp.repeat(scale.astype(jnp.int32), GROUP, axis=-1)
    # |x| / 2^(scale - 127) in units of 2^-26. A negative shift means below 1/4, which rounds to 0; above 5 a
    # normal value exceeds 6 (a subnormal one cannot reach it: its shift is at most 4).
    exponent = (bits >> _MANTISSA) & 0xFF
    significand = (bits & ((1 << _MANTISSA) - 1)) | jnp.where(exponent > 0, 1 << _MANTISSA, 0)
    shift = jnp.maximum(exponent, 1) - scale + 3
    fixed = jnp.where(shift >= 0, significand << jnp.clip(shift, 0, 5), 0)
    fixed = jnp.where(shift > 5, 6 * 2**26, fixed)
    code = sum(jnp.where(up, fixed >= edge, fixed > edge).astype(jnp.int32) for edge, up in _EDGES)
    code = jnp.where(scale < 255, code | ((bits >> 28) & 8), 0).reshape(*x.shape[:-1], -1, 2)
    return (code[..., 0] | code[..., 1] << 4).astype(jnp.uint8)


# Midpoints between neighbouring magnitudes in units of 2^-26, and whether a value on one rounds up, to an even code.
_EDGES = tuple(
    (round(edge * 2**26), up)
    for edge, up in (
        (0.25, False),
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    )
)
