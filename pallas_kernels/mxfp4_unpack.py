"""MXFP4 weights in vector memory to bfloat16 operands of the matrix unit, on TPU.

A weight is [out, in / 2] bytes, the code of an even input column in the low nibble; a scale byte s stands for
2^(s - 127) and belongs to 32 input columns (OCP Microscaling Formats 1.0). Two ways, chosen by chip:

- `float4` (tpu7x): the bytes are transposed, which makes the two nibbles of a byte neighbours along the packed axis,
  so that the chip's own float4 conversion yields rows of inputs in natural order. A group's scale is then one row.
- `float8`: an E2M1 code is a float8 E5M2 with a small exponent, value for value times 2^-14, so four weights become
  float8 with a few integer operations and the chip widens them. Weights stay [out, in], which the matrix unit takes
  transposed at no cost; scales are spread over their columns by a gather along lanes, for which that unit is idle.
  Low and high nibbles are not interleaved: x stands in *lane order* instead, each 256 columns as 128 even ones
  before 128 odd ones. `float8` (v6e) multiplies by the scale in bfloat16, `float8_f32` (v5p and older, which have
  no bfloat16 arithmetic) in float32.

All are exact where code * scale is a normal bfloat16; smaller products become zero. `float4` reads scale bytes 1 to
254, and byte 0 as a scale of zero. The others read bytes 0 to 240, and a larger one as infinity: its group gives
infinities and, where a code is 0, NaN. Byte 255, NaN, is what a loader has to refuse.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

GROUP = 32
LANES = 128
PAIR = 2 * LANES  # columns that one lane tile of packed bytes holds
MAX_COLUMNS = GROUP * LANES  # inputs whose scales fit the lanes of one register
METHODS = ("float4", "float8", "float8_f32")
_E5M2_SHIFT = 14  # an E2M1 code read as E5M2 is 2^-14 of its value
_BF16_MANTISSA, _F32_MANTISSA = 7, 23  # bits


def default_method() -> str:
    """The chip's method; `float8` where the chip is not known."""
    try:
        chip = pltpu.get_tpu_info()
    except ValueError:  # no TPU, and none that is compiled for
        return "float8"
    if chip.chip_version == pltpu.ChipVersion.TPU_7X:
        return "float4"
    return "float8" if chip.generation >= 6 else "float8_f32"


def uses_lane_order(method: str) -> bool:
    """Whether the columns of `dequantised` weights are in lane order."""
    return method != "float4"


def through_memory(method: str) -> bool:
    """Whether a kernel should keep unpacked weights in vector memory until it multiplies: registers hold too few."""
    return method == "float8_f32"


def lane_order(x: jax.Array) -> jax.Array:
    """Columns of x as weights in lane order meet them: of each 256, the even ones and then the odd ones.

    A product with a permutation matrix, exact in any dtype: a gather along lanes is slow outside a kernel.
    """
    return _permuted(x, _lane_permutation(x.dtype))


def from_lane_order(x: jax.Array) -> jax.Array:
    """The inverse of `lane_order`."""
    return _permuted(x, _lane_permutation(x.dtype).T)


def _lane_permutation(dtype):
    column = jnp.arange(PAIR)
    return (column[:, None] == (2 * column) % PAIR + column // LANES).astype(dtype)


def _permuted(x, permutation):
    blocks = x.reshape(*x.shape[:-1], -1, PAIR)
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("...i,ij->...j", blocks, permutation, precision=exact).astype(x.dtype).reshape(x.shape)


def lane_order_in_kernel(x: jax.Array) -> jax.Array:
    """`lane_order` of a bfloat16 [rows, columns] value inside a kernel; rows a multiple of 16."""
    words = pltpu.bitcast(x, jnp.int32)  # two rows to a word, moved together
    lane = lax.broadcasted_iota(jnp.int32, (words.shape[0], LANES), 1)
    in_first = lane < LANES // 2
    ordered = []
    for start in range(0, x.shape[1], PAIR):
        first, second = words[:, start : start + LANES], words[:, start + LANES : start + PAIR]
        for odd in (0, 1):
            source = (2 * lane + odd) % LANES
            taken = [jnp.take_along_axis(half, source, axis=1) for half in (first, second)]
            ordered.append(jnp.where(in_first, *taken))
    return pltpu.bitcast(jnp.concatenate(ordered, axis=1), jnp.bfloat16)


def from_lane_order_in_kernel(x: jax.Array) -> jax.Array:
    """The inverse of `lane_order` for a float32 [rows, columns] value inside a kernel."""
    lane = lax.broadcasted_iota(jnp.int32, (x.shape[0], LANES), 1)
    natural = []
    for start in range(0, x.shape[1], PAIR):
        even, odd = x[:, start : start + LANES], x[:, start + LANES : start + PAIR]
        for offset in (0, LANES // 2):
            taken = [jnp.take_along_axis(half, lane // 2 + offset, axis=1) for half in (even, odd)]
            natural.append(jnp.where(lane % 2 == 0, *taken))
    return jnp.concatenate(natural, axis=1)


def scale_scratch(method: str, num_groups: int, num_outputs: int) -> pltpu.VMEM:
    """Scratch memory for what `prepare_scales` stores of num_outputs rows of a weight."""
    if method == "float4":
        return pltpu.VMEM((num_groups, num_outputs), jnp.int32)
    if method == "float8":
        return pltpu.VMEM((num_outputs // 2, LANES), jnp.int32)
    return pltpu.VMEM((num_outputs, LANES), jnp.float32)


def prepare_scales(method: str, scale: jax.Array, prepared, first_output=0) -> None:
    """Turns scale bytes [groups, outputs] into what `dequantised` reads.

    Args:
      prepared: Reference to memory of the shape of `scale_scratch`.
      first_output: Where the first of these outputs lies in `prepared`; a multiple of 128.
    """
    num_groups, num_outputs = scale.shape
    if method == "float4":
        bits = scale.astype(jnp.int32) << _BF16_MANTISSA
        prepared[:, _span(first_output, num_outputs)] = bits | (bits << 16)  # of both rows in a word
    elif method == "float8":
        exponents = pltpu.bitcast(scale.T.astype(jnp.uint16), jnp.int32) + _both_halves(_E5M2_SHIFT)
        too_large = (exponents >> 8) & _both_halves(1)
        exponents = (exponents | (too_large << 8) - too_large) & _both_halves(255)
        prepared[_span(first_output // 2, num_outputs // 2), :num_groups] = exponents << _BF16_MANTISSA
    else:
        exponents = jnp.minimum(scale.T.astype(jnp.int32) + _E5M2_SHIFT, 255)
        scales = lax.bitcast_convert_type(exponents << _F32_MANTISSA, jnp.float32)
        prepared[_span(first_output, num_outputs), :num_groups] = scales


def dequantised(method: str, packed: jax.Array, prepared, first_group, first_output=0) -> jax.Array:
    """bfloat16 weights of packed bytes [outputs, columns / 2]; columns a multiple of 256.

    Args:
      prepared: Reference that `prepare_scales` filled.
      first_group, first_output: Where the group of the first column, and the first output, lie in `prepared`.
    Returns: [columns, outputs] in natural order for `float4`, else [outputs, columns] in lane order.
    """
    if method == "float4":
        return _from_float4(packed, prepared, first_group, first_output)
    return _from_float8(packed, prepared, first_group, first_output)


def times_weight(method: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x W^T in float32, for W from `dequantised` and x [rows, columns] in its order of columns."""
    return _product(x, weight, 0 if method == "float4" else 1)


def times_transpose(method: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x W in float32, for x [rows, outputs]; columns come out in the order of W's."""
    return _product(x, weight, 1 if method == "float4" else 0)


def _product(x, weight, axis):
    return lax.dot_general(x, weight, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _from_float4(packed, prepared, first_group, first_output):
    num_outputs, num_groups = packed.shape[0], 2 * packed.shape[1] // GROUP
    values = pltpu.bitcast(packed.T, jnp.float4_e2m1fn).astype(jnp.bfloat16)
    scales = prepared[_span(first_group, num_groups), _span(first_output, num_outputs)]
    rows = []
    for g in range(num_groups):
        scale = jnp.broadcast_to(scales[g : g + 1], (GROUP // 2, num_outputs))
        rows.append(values[g * GROUP : (g + 1) * GROUP] * pltpu.bitcast(scale, jnp.bfloat16))
    return jnp.concatenate(rows, axis=0)


def _from_float8(packed, prepared, first_group, first_output):
    codes = pltpu.bitcast(packed, jnp.int32)  # four rows to a word
    even = ((codes & _each_byte(0x07)) << 1) | ((codes & _each_byte(0x08)) << 4)
    odd = ((codes >> 3) & _each_byte(0x0E)) | (codes & _each_byte(0x80))
    even, odd = (pltpu.bitcast(bits, jnp.float8_e5m2) for bits in (even, odd))
    rows_per_word = 2 if prepared.dtype == jnp.int32 else 1
    rows = prepared[_span(first_output // rows_per_word, packed.shape[0] // rows_per_word), :]
    lane_group = lax.broadcasted_iota(jnp.int32, rows.shape, 1) // (GROUP // 2)
    tiles = []
    for t in range(packed.shape[1] // LANES):
        columns = slice(t * LANES, (t + 1) * LANES)
        scale = jnp.take_along_axis(rows, lane_group + (first_group + t * (PAIR // GROUP)), axis=1)
        scale = pltpu.bitcast(scale, jnp.bfloat16) if rows_per_word == 2 else scale
        tiles += [(half[:, columns].astype(scale.dtype) * scale).astype(jnp.bfloat16) for half in (even, odd)]
    return jnp.concatenate(tiles, axis=1)


def _both_halves(value):
    return jnp.int32(value * 0x00010001)


def _each_byte(value):
    word = value * 0x01010101
    return jnp.int32(word - (1 << 32) if word >> 31 else word)


def _span(start, size):
    return slice(start, start + size) if isinstance(start, int) else pl.ds(start, size)
