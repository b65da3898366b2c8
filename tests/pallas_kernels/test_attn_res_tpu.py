"""Block attention residual and norm for TPU, run by the interpreter with poisoned memory, against the plain form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from maxmoe.ops import attn_res, dispatch
from maxmoe.ops.attn_res import mix, mix_and_norm
from maxmoe.ops.norm import rms_norm
from pallas_kernels import attn_res_tpu
from pallas_kernels.attn_res_tpu import attn_res_norm_tpu, attn_res_tpu_refusal
from tests.ops.closeness import assert_close, assert_same_bits
from tools.aot_compile import TOPOLOGIES, compile_for, is_available, static_cost

HERE = "tests.pallas_kernels.test_attn_res_tpu"
EPS, OUT_EPS = 1e-5, 1e-3
CHIPS = [
    pytest.param(chip, marks=pytest.mark.skipif(bool(is_available(chip)), reason=str(is_available(chip))))
    for chip in TOPOLOGIES
]


def _interpreter(detect_races=False):
    return pltpu.InterpretParams(uninitialized_memory="nan", detect_races=detect_races)


def _fused(detect_races=False):
    kernel = functools.partial(attn_res_norm_tpu, eps=EPS, out_eps=OUT_EPS, interpret=_interpreter(detect_races))
    return jax.jit(lambda c, b, n, norm, proj, out: kernel(c, b, n, norm.astype("f4") * proj.astype("f4"), out))


fused = _fused()


@jax.jit
def plain(current, bank, num_entries, norm, proj, out_norm):
    return rms_norm(mix(current, bank, num_entries, norm, proj, EPS), out_norm, OUT_EPS)


def _inputs(seed, rows, places, width, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    current, bank = rng.standard_normal((rows, width)), 3 * rng.standard_normal((places, rows, width))
    # Scores of order 1, so that every entry counts.
    norm, proj = 1 + 0.1 * rng.standard_normal(width), rng.standard_normal(width) / np.sqrt(width)
    out_norm = 1 + rng.standard_normal(width)
    return [jnp.asarray(x, dtype) for x in (current, bank)], [jnp.asarray(x, dtype) for x in (norm, proj, out_norm)]


def _check(given, expected, dtype):
    assert given.dtype == dtype
    # Float32: sums of up to 1,152 terms in another order. Bfloat16: mixture and normalised value are rounded in both,
    # and one that stands at the middle between two values may fall to either; two such steps of 2^-8.
    tolerance = {"atol": 2e-5, "rtol": 2e-5} if dtype == jnp.float32 else {"atol": 1e-6, "rtol": 2**-6}
    assert_close(given, expected, **tolerance)
    if dtype == jnp.bfloat16:
        assert np.mean(np.asarray(given != expected)) < 0.01


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("rows", "places", "num_entries", "width"),
    [(1, 1, 1, 128), (5, 3, 2, 384), (16, 8, 8, 256), (33, 8, 3, 1152), (40, 3, 1, 128), (300, 2, 2, 256)],
)
def test_attn_res_norm_equals_the_plain_form(rows, places, num_entries, width, dtype):
    (current, bank), weights = _inputs(0, rows, places, width, dtype)
    _check(fused(current, bank, num_entries, *weights), plain(current, bank, num_entries, *weights), dtype)


@pytest.mark.parametrize("num_entries", [0, 1, 2])
def test_attn_res_norm_ignores_entries_that_do_not_exist(num_entries):
    (current, bank), weights = _inputs(1, 21, 3, 256)
    expected = fused(current, bank.at[num_entries:].set(0), num_entries, *weights)
    for content in (bank, bank.at[num_entries:].multiply(1e30)):
        assert_same_bits(fused(current, content, num_entries, *weights), expected)
    if num_entries == 0:
        _check(expected, jax.jit(functools.partial(rms_norm, eps=OUT_EPS))(current, weights[2]), jnp.float32)


def test_attn_res_norm_row_does_not_depend_on_others():
    (current, bank), weights = _inputs(2, 37, 3, 256, jnp.bfloat16)
    clean = np.asarray(fused(current, bank, 2, *weights))
    bad = np.asarray(fused(current.at[17].set(jnp.nan), bank.at[:, 17].set(jnp.nan), 2, *weights))
    assert np.isnan(bad[17].astype(np.float32)).all()
    assert_same_bits(np.delete(bad, 17, 0), np.delete(clean, 17, 0))


def test_attn_res_norm_has_no_races():
    (current, bank), weights = _inputs(3, 50, 3, 128)
    assert_same_bits(_fused(detect_races=True)(current, bank, 2, *weights), fused(current, bank, 2, *weights))


def test_attn_res_norm_refuses_what_it_cannot_do():
    assert attn_res_tpu_refusal(8, 7168, jnp.bfloat16) is None
    assert "width 100" in attn_res_tpu_refusal(8, 100, jnp.bfloat16)
    assert "0 places" in attn_res_tpu_refusal(0, 128, jnp.bfloat16)
    assert "float16" in attn_res_tpu_refusal(8, 128, jnp.float16)
    assert "do not fit" in attn_res_tpu_refusal(16, 2**16, jnp.float32)
    (current, bank), weights = _inputs(4, 2, 1, 100)
    with pytest.raises(NotImplementedError, match="width 100"):
        fused(current, bank, 1, *weights)


@pytest.fixture
def as_on_tpu(monkeypatch):
    """The op takes the kernel, which the interpreter runs."""
    monkeypatch.setattr(dispatch, "choose", lambda op, implementation, kernels: kernels["pallas_tpu"]() or "pallas_tpu")
    kernel = functools.partial(attn_res_norm_tpu, interpret=_interpreter())
    monkeypatch.setattr(attn_res_tpu, "attn_res_norm_tpu", kernel)


def test_mix_and_norm_through_the_kernel_equals_the_plain_form(as_on_tpu):
    (current, bank), weights = _inputs(5, 6, 3, 128)
    current, bank = current.reshape(2, 3, 128), bank.reshape(3, 2, 3, 128)
    factors = jnp.asarray(np.random.default_rng(6).standard_normal(current.shape), jnp.float32)

    def loss(op, current, bank, norm, proj, out_norm):
        return jnp.sum(factors * op(current, bank, 2, norm, proj, EPS, out_norm))

    def plain_op(current, bank, count, norm, proj, eps, out_norm):
        return attn_res._plain(eps, current, bank, count, norm, proj, out_norm)

    for op in (mix_and_norm, plain_op):
        value, gradients = jax.value_and_grad(functools.partial(loss, op), argnums=(0, 1, 2, 3, 4))(
            current, bank, *weights
        )
        if op is mix_and_norm:
            given_value, given = value, gradients
    assert_close(given_value, value, rtol=1e-5, atol=1e-4)  # a sum of 768 terms of order 1
    for x, y, name in zip(given, gradients, ("current", "bank", "norm", "proj", "out_norm"), strict=True):
        assert_close(x, y, rtol=1e-5, atol=1e-5 * float(jnp.abs(y).max()), label=f"gradient of {name}")
    assert not given[1][2:].any()


def test_mix_and_norm_refuses_a_bank_of_another_dtype():
    (current, bank), _ = _inputs(7, 2, 1, 128)
    assert "the bank is bfloat16" in attn_res._refusal(current, bank.astype(jnp.bfloat16))


# Compiled for chips that are not here, at the full size


def _full_size(*rows):
    array = jax.ShapeDtypeStruct
    weight = array((7168,), jnp.bfloat16)
    return array((*rows, 7168), jnp.bfloat16), array((8, *rows, 7168), jnp.bfloat16), array((), jnp.int32), weight


def prefill():
    """1,024 tokens."""
    current, bank, count, weight = _full_size(1, 1024)
    return functools.partial(attn_res._fused, EPS), (current, bank, count, weight, weight, weight)


def decode():
    """One token of 64 sequences."""
    current, bank, count, weight = _full_size(64, 1)
    return functools.partial(attn_res._fused, EPS), (current, bank, count, weight, weight, weight)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", ["prefill", "decode"])
def test_attn_res_norm_compiles_without_a_copy_of_the_bank(chip, shape):
    cost = static_cost(chip, f"{HERE}:{shape}")
    (kernel,) = cost.kernels
    assert kernel.vmem_bytes < 16 * 2**20, f"{kernel.vmem_bytes / 2**20:.1f} MiB"
    # Score and output weights in the kernel's layout; the bank has 8 MiB and 117 MiB.
    assert cost.temp_bytes < 2**20, f"{cost.temp_bytes / 2**20:.2f} MiB"


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_attn_res_norm_reads_less_than_xla(chip):
    """The reason for the kernel: what XLA's form of the same accesses, against reading and writing everything once."""
    _, arguments = prefill()
    compiled = compile_for(chip, functools.partial(attn_res._plain, EPS), *arguments)
    costs = compiled.cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs
    unavoidable = (8 + 2) * 1024 * 7168 * 2
    assert costs["bytes accessed"] > 2 * unavoidable, "XLA has caught up: the kernel may no longer pay"
