"""MXFP4 to bfloat16 in the registers of an NVIDIA GPU, two weights per operation.

A Hopper core has time for some three integer operations on a byte of weights while memory delivers the next, so that
decoding code by code cannot keep up. Here a register holds two 16-bit words, each with four codes, and codes at the
same place of both words become the two halves of one result, by two shifts, two logic operations and one product:

    s e e m  ->  s 000000ee m000000  =  e2m1(code) * 2^-126  ->  times 2^(scale - 1)

The bits of a magnitude lie over the low end of the exponent and the top of the mantissa of a bfloat16. The code of one
half is a subnormal, which bfloat16 products take as it is. So that one factor reaches over all scales in use, results
carry a further 2^-64, `SHRUNK_BY`, which sums of products in float32 are freed of at the end.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import gpu_compat as gpu

GROUP = 32  # weights that share a scale
CODES = 4  # per 16-bit word
SHRUNK_BY = 2.0**-64
MIN_SCALE, MAX_SCALE = 65, 192  # scale bytes whose weights are exact, 2^-62 to 2^65

_SPLAT = 0x0001_0001
_NAN = 0x7FC0 * _SPLAT

# $1 holds two words, $2 and $3 the factor of each, twice; $0 gets two weights.
_UNPACK = """{{
.reg .b32 s, m;
{magnitude}
{sign}
and.b32 m, m, 0x01C001C0;
and.b32 s, s, 0x80008000;
or.b32 m, m, s;
mul.rn.bf16x2 $0, m, $2;
}}"""
UNPACK = tuple(
    _UNPACK.format(magnitude=magnitude, sign=sign)
    for magnitude, sign in (
        ("shl.b32 m, $1, 6;", "shl.b32 s, $1, 12;"),
        ("shl.b32 m, $1, 2;", "shl.b32 s, $1, 8;"),
        ("shr.u32 m, $1, 2;", "shl.b32 s, $1, 4;"),
        ("shr.u32 m, $1, 6;", "mov.b32 s, $1;"),
    )
)


def as_words(packed: jax.Array) -> jax.Array:
    """Bytes [..., I / 2] as little-endian 16-bit words [..., I / 4]: the same memory, so that nothing is copied."""
    return jax.lax.bitcast_convert_type(packed.reshape(*packed.shape[:-1], -1, 2), jnp.uint16)


def by_code(x: jax.Array) -> jax.Array:
    """Columns in the order in which `decode` gives weights: 0, 4, 8, ...; then 1, 5, 9, ...; and so on."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, CODES), -1, -2).reshape(x.shape)


def decode(words: jax.Array, scale: jax.Array, dtype: jnp.dtype, in_registers: bool) -> list[jax.Array]:
    """Weights times `SHRUNK_BY` by their place in a word: four arrays [N, words], columns 0, 4, ... to 3, 7, ...

        weight = e2m1(code) * 2^(scale - 127)

    Exact for scale bytes from `MIN_SCALE` to `MAX_SCALE`. Weights of smaller scales lose bits or become 0; all of a
    group are NaN where its scale is larger, as they are by definition where it is 255.

    Args:
      words: uint16 [N, words], the first of four columns in the lowest bits.
      scale: uint8 [N, words / 8].
      dtype: bfloat16, or float32 where a reference is wanted.
      in_registers: Use the assembly, which only the GPU runs and which gives bfloat16.
    """
    each = words.shape[1] // scale.shape[1]
    factor = _factor(scale)
    wide = jax.lax.broadcast_in_dim(factor, (*scale.shape, each), (0, 1)).reshape(words.shape)
    if in_registers and dtype == jnp.bfloat16:
        result = [jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)]

        def run(text):
            return gpu.inline_asm(text, args=[words, wide], constraints="=r,r,r,r", pack=2, result_shape_dtypes=result)[
                0
            ]

        return [run(text) for text in UNPACK]
    codes = words.astype(jnp.int32)
    # The factor is that of magnitudes times 2^-126, which a reference in float32 does not need.
    power = jax.lax.bitcast_convert_type(wide << 16, jnp.float32) * 2.0**-126
    return [(e2m1((codes >> 4 * place) & 15) * power).astype(dtype) for place in range(CODES)]


def _factor(scale):
    """2^(scale - 1 - 64) as a bfloat16, in both halves of an int32; NaN for scales beyond `MAX_SCALE`."""
    scale = scale.astype(jnp.int32)
    exponent_at_zero = 127 - 1 - 64
    return jnp.where(scale > MAX_SCALE, _NAN, scale * (_SPLAT << 7) + exponent_at_zero * (_SPLAT << 7))


def e2m1(code: jax.Array) -> jax.Array:
    """float32 values of 4-bit codes held in int32: a sign above an index into 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    magnitude = code & 7
    half = 126 << 23
    bits = jnp.where(magnitude > 1, half + (magnitude << 22), jnp.where(magnitude == 1, half, 0))
    return jax.lax.bitcast_convert_type(bits | (code & 8) << 28, jnp.float32)
