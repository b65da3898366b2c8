"""Routed experts for NVIDIA GPUs: the kernel in the interpreter, and its assembly, carried out step by step."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxmoe.ops import mxfp4
from maxmoe.ops.situ import situ_glu
from pallas_kernels import mxfp4_registers_gpu as registers
from pallas_kernels.moe_experts_gpu import moe_experts_gpu, moe_experts_gpu_refusal
from pallas_kernels.tiling import MOE_EXPERTS_H200_DECODE, MOE_EXPERTS_H200_PREFILL
from tests.ops.closeness import assert_close, assert_same_bits

BETAS = (4.0, 25.0)
LAYERS, EXPERTS, HIDDEN, DIM = 2, 5, 192, 320  # hidden rows and outputs in 3 and 5 tiles of 64


def _experts(seed=0):
    rng = np.random.default_rng(seed)
    leaves = []
    for outputs, inner in ((HIDDEN, DIM), (HIDDEN, DIM), (DIM, HIDDEN)):
        leaves.append(rng.integers(0, 256, (LAYERS, EXPERTS, outputs, inner // 2)).astype(np.uint8))
        leaves.append(rng.integers(117, 123, (LAYERS, EXPERTS, outputs, inner // 32)).astype(np.uint8))
    return leaves


@functools.partial(jax.jit, static_argnames="tiling")
def _run(x, group_sizes, experts, layer, tiling=None):
    return moe_experts_gpu(x, group_sizes, experts, layer, *BETAS, tiling=tiling, interpret=True)


def _plain(x, group_sizes, experts, layer):
    out, first = np.zeros(x.shape, np.float32), 0
    for expert, size in enumerate(group_sizes):
        rows = x[first : first + size]
        gate, up, down = (mxfp4.dequantize(*(leaf[layer, expert] for leaf in experts[i : i + 2])) for i in (0, 2, 4))
        hidden = situ_glu(*(_product(rows, w) for w in (gate, up)), *BETAS)
        out[first : first + size] = _product(hidden, down).astype(jnp.float32)
        first += size
    return out


def _product(rows, weights):
    return jnp.dot(rows.astype(jnp.float32), weights.T, precision="highest").astype(rows.dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("sizes", [[3, 0, 17, 40, 1], [0, 0, 0, 70, 0], [1, 0, 0, 0, 0], [0] * 5])
def test_moe_experts_equals_the_plain_ffn(sizes, dtype):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((77, DIM)), dtype)
    x = x.at[sum(sizes) :].set(jnp.nan)
    given = _run(x, np.asarray(sizes, np.int32), _experts(), 1)
    assert given.dtype == dtype
    # Float32: sums of 320 terms in another order. Bfloat16: a sum between two values may fall to either, in the hidden
    # rows and again in the outputs.
    tolerance = {"atol": 5e-6} if dtype == jnp.float32 else {"atol": 0.01, "rtol": 2**-7}
    assert_close(given, _plain(x, sizes, _experts(), 1), **tolerance)


@pytest.mark.parametrize("tiling", [MOE_EXPERTS_H200_DECODE, MOE_EXPERTS_H200_PREFILL])
def test_moe_experts_of_one_token_reads_only_its_experts(tiling):
    experts = _experts()
    for leaf in experts[1::2]:
        leaf[0], leaf[:, [0, 2, 4]] = 255, 255  # NaN wherever it is read
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, DIM)), jnp.bfloat16)
    sizes = np.array([0, 1, 0, 1, 0], np.int32)
    given = _run(x, sizes, experts, 1, tiling)
    assert_close(given, _plain(x, sizes, experts, 1), atol=0.01, rtol=2**-7)


def test_moe_experts_rows_do_not_depend_on_each_other():
    x = jnp.asarray(np.random.default_rng(3).standard_normal((40, DIM)), jnp.bfloat16)
    sizes = np.array([10, 0, 20, 10, 0], np.int32)
    clean = _run(x, sizes, _experts(), 0)
    bad = _run(x.at[12].set(jnp.nan), sizes, _experts(), 0)
    others = np.delete(np.arange(40), 12)
    assert_same_bits(bad[others], clean[others])
    assert np.isnan(np.asarray(bad[12], np.float32)).all()


def test_moe_experts_refuses_what_it_cannot_do():
    experts = _experts()
    assert moe_experts_gpu_refusal((7, DIM), jnp.bfloat16, experts) is None
    assert "float16" in moe_experts_gpu_refusal((7, DIM), jnp.float16, experts)
    assert "experts[0]" in moe_experts_gpu_refusal((7, DIM + 64), jnp.bfloat16, experts)
    assert "M > 0" in moe_experts_gpu_refusal((0, DIM), jnp.bfloat16, experts)


def _carry_out(text, words, factor):
    """What the assembly computes for registers of two 16-bit words, in numpy."""
    values = {"$1": words.astype(np.uint32), "$2": np.broadcast_to(factor.astype(np.uint32), words.shape)}

    def read(name):
        return values[name] if name in values else np.uint32(int(name, 0))

    def halves(x):
        return np.stack([x & 0xFFFF, x >> 16]).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)

    for line in re.findall(r"([a-z][\w.]*) ([^;{}]+);", text.replace("\n", " ")):
        operation, (to, *given) = line[0], [part.strip() for part in line[1].split(",")]
        a, b = read(given[0]), read(given[-1])
        if operation == "mul.rn.bf16x2":
            product = (halves(a) * halves(b)).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
            values[to] = product[0] | product[1] << 16
        else:
            values[to] = {
                "mov.b32": lambda a, b: a,
                "shl.b32": lambda a, b: a << b,
                "shr.u32": lambda a, b: a >> b,
                "and.b32": lambda a, b: a & b,
                "or.b32": lambda a, b: a | b,
            }[operation](a, b)
    return halves(values["$0"])


@pytest.mark.parametrize("scale", [registers.MIN_SCALE, 100, 127, registers.MAX_SCALE])
def test_unpacking_assembly_is_exact_for_every_word(scale):
    low = np.arange(2**16, dtype=np.uint32)
    high = np.random.default_rng(0).permutation(low)
    factor = np.asarray(registers._factor(np.full((1,), scale, np.uint8))).view(np.uint32)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    for place, text in enumerate(registers.UNPACK):
        text = text.split("\n", 2)[2]  # what follows the declaration of registers
        given = _carry_out(text, low | high << 16, factor)
        for word, half in zip((low, high), given, strict=True):
            code = word >> 4 * place & 15
            expected = np.where(code & 8, -1, 1) * table[code & 7] * np.float32(2.0) ** (scale - 127)
            assert_same_bits(half, (expected * np.float32(registers.SHRUNK_BY)).astype(np.float32), f"place {place}")


def test_decode_follows_the_definition_and_its_limits():
    packed = np.arange(256, dtype=np.uint8).repeat(16).reshape(256, 16)
    words = registers.as_words(packed)
    for scale in (65, 120, 192):
        scales = np.full((256, 1), scale, np.uint8)
        given = jnp.stack(registers.decode(words, scales, jnp.float32, False), axis=-1).reshape(256, 32)
        assert_same_bits(given, mxfp4.dequantize(packed, scales) * np.float32(registers.SHRUNK_BY), f"scale {scale}")
    for scale in (193, 255):
        given = registers.decode(words, np.full((256, 1), scale, np.uint8), jnp.float32, False)
        assert np.isnan(given).all(), "a scale out of range must not pass for a number"
