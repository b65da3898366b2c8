"""Block attention residuals against the equation in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.ops.attn_res import mix, mix_and_norm
from maxmoe.ops.norm import rms_norm
from tests.ops.closeness import assert_close, assert_same_bits
from tests.ops.quick_jit import quick_jit

mixed = jax.jit(functools.partial(mix, eps=1e-5))
ENTRIES = 3


def _random_inputs(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    current, bank = rng.standard_normal((2, 5, 7)), 3 * rng.standard_normal((ENTRIES, 2, 5, 7))
    weights = (jnp.asarray(1 + rng.standard_normal(7), dtype), jnp.asarray(rng.standard_normal(7), dtype))
    return jnp.asarray(current, dtype), jnp.asarray(bank, dtype), *weights


def _reference(current, bank, num_entries, norm_weight, proj_weight, eps=1e-5):
    current, bank, norm_weight, proj_weight = (
        np.asarray(x).astype(np.float64) for x in (current, bank, norm_weight, proj_weight)
    )
    values = np.concatenate([bank[:num_entries], current[None]])
    normed = values / np.sqrt(np.mean(np.square(values), -1, keepdims=True) + eps)
    scores = normed @ (norm_weight * proj_weight)
    weights = np.exp(scores - scores.max(0))
    return np.sum((weights / weights.sum(0))[..., None] * values, 0)


@pytest.mark.parametrize("num_entries", range(ENTRIES + 1))
def test_mix_follows_the_equation(num_entries):
    current, bank, *weights = _random_inputs(0)
    given = mixed(current, bank, num_entries, *weights)  # a traced count
    expected = _reference(current, bank, num_entries, *weights)
    # Scores of order 10 in float32 move the weights by 1e-6 of values of order 5.
    assert_close(given, expected, atol=1e-5)
    static = quick_jit(functools.partial(mix, num_entries=num_entries, eps=1e-5))
    given = static(current, bank, norm_weight=weights[0], proj_weight=weights[1])
    assert_close(given, expected, atol=1e-5, label="static count")


def test_mix_in_bfloat16_rounds_once():
    current, bank, *weights = _random_inputs(1, jnp.bfloat16)
    given = mixed(current, bank, ENTRIES, *weights)
    assert given.dtype == jnp.bfloat16
    # Float32 inside, also the product of the two weights; one rounding at the end.
    assert_close(given, _reference(current, bank, ENTRIES, *weights), atol=2e-5, rtol=2**-8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_mix_of_an_empty_bank_is_the_running_sum(dtype):
    current, bank, *weights = _random_inputs(2, dtype)
    for content in (jnp.zeros_like(bank), bank, 1e30 * bank):
        assert_same_bits(mixed(current, content, 0, *weights), current)
    assert_same_bits(mixed(current, bank[:0], 0, *weights), current, "a bank without room")


@pytest.mark.parametrize("num_entries", [1, 2])
def test_mix_ignores_entries_that_do_not_exist(num_entries):
    current, bank, *weights = _random_inputs(3)
    zeros = bank.at[num_entries:].set(0)
    huge = bank.at[num_entries:].multiply(1e30)
    expected = mixed(current, zeros, num_entries, *weights)
    for content in (bank, huge):
        assert_same_bits(mixed(current, content, num_entries, *weights), expected)


def test_mix_token_does_not_depend_on_its_neighbours():
    current, bank, *weights = _random_inputs(4)
    others, other_bank, *_ = _random_inputs(5)
    others, other_bank = others.at[1, 3].set(current[1, 3]), other_bank.at[:, 1, 3].set(bank[:, 1, 3])
    given, expected = (mixed(c, b, 2, *weights) for c, b in ((others, other_bank), (current, bank)))
    assert_same_bits(given[1, 3], expected[1, 3])


def test_mix_eps_stands_inside_the_root():
    current, bank = np.full((1, 8), 1e-3, np.float32), np.full((1, 1, 8), -1e-3, np.float32)
    ones = np.ones(8, np.float32)
    given = mixed(current, bank, 1, ones, ones)
    score = 8 / np.sqrt(11)  # mean(x^2) = 1e-6 beside 1e-5; the entry has the opposite score
    assert_close(given, np.full((1, 8), 1e-3 * np.tanh(score)), rtol=3e-6)  # float32 scores


@pytest.mark.parametrize("num_entries", [0, 2])
def test_mix_gradients_equal_differences(num_entries):
    current, bank, *weights = _random_inputs(6)
    bank = bank.at[num_entries:].set(0)  # as the bank starts: its root must not make a gradient NaN
    rng = np.random.default_rng(7)
    factors = rng.standard_normal(current.shape).astype(np.float32)

    def loss(current, bank, *weights):
        return jnp.sum(factors * mix(current, bank, num_entries, *weights, 1e-5))

    gradients = [np.asarray(d) for d in quick_jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(current, bank, *weights)]
    assert not gradients[1][num_entries:].any()
    if num_entries == 0:
        # The score's own gradient is the difference of two equal sums, each rounded in float32.
        assert_close(gradients[0], factors, atol=3e-6, label="gradient of the running sum")
    inputs = [np.asarray(x).astype(np.float64) for x in (current, bank, *weights)]
    for i, name in enumerate(("current", "bank", "norm_weight", "proj_weight")):
        step = 1e-5 * rng.standard_normal(inputs[i].shape)
        ends = []
        for sign in (1, -1):
            c, b, *w = (x + sign * step if j == i else x for j, x in enumerate(inputs))
            ends.append(np.sum(factors * _reference(c, b, num_entries, *w)))
        # Central differences in float64; the given gradient has float32 errors relative to its norm, or, where
        # it is zero because a lone entry has weight 1, to the terms of order 1 that cancel.
        atol = (1e-5 * np.linalg.norm(gradients[i]) + 3e-6) * np.linalg.norm(step)
        assert_close(np.sum(gradients[i] * step), (ends[0] - ends[1]) / 2, atol=atol, label=f"gradient of {name}")


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_mix_and_norm_is_the_norm_of_the_mixture(implementation):
    current, bank, *weights = _random_inputs(8, jnp.bfloat16)
    out_norm = jnp.asarray(np.random.default_rng(9).standard_normal(7), jnp.float32)
    both = jax.jit(functools.partial(mix_and_norm, eps=1e-5, implementation=implementation))
    given = both(current, bank, 2, *weights, out_norm=out_norm)
    assert given.dtype == jnp.bfloat16
    normed = jax.jit(functools.partial(rms_norm, eps=1e-5))
    assert_same_bits(given, normed(mixed(current, bank, 2, *weights), out_norm))


def test_mix_and_norm_says_why_a_kernel_cannot_run():
    current, bank, *weights = _random_inputs(10)
    with pytest.raises(NotImplementedError, match="mix_and_norm.*runs on tpu"):
        mix_and_norm(current, bank, 1, *weights, 1e-5, weights[0], implementation="pallas_tpu")
    with pytest.raises(NotImplementedError, match="no such kernel"):
        mix_and_norm(current, bank, 1, *weights, 1e-5, weights[0], implementation="pallas_gpu")
    with pytest.raises(ValueError, match="fast"):
        mix_and_norm(current, bank, 1, *weights, 1e-5, weights[0], implementation="fast")
