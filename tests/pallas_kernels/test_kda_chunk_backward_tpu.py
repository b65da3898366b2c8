"""Gradients of chunked KDA for TPU: those of the definition, for every gate and packing."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from maxmoe.ops.kda import kda_recurrent
from pallas_kernels.kda_chunk_backward_tpu import kda_chunk_trainable_tpu
from tests.ops.closeness import assert_close
from tests.ops.kda_reference import NAMES, random_inputs, reference_gradients
from tests.ops.quick_jit import quick_jit

POISON = pltpu.InterpretParams(uninitialized_memory="nan")
inputs_of = functools.partial(random_inputs, batch=1, heads=2, key_dim=128, value_dim=128)


@functools.partial(quick_jit, static_argnames="stride")
def _gradients(inputs, cotangents, cu_seqlens=None, stride=2):
    fn = functools.partial(
        kda_chunk_trainable_tpu, cu_seqlens=cu_seqlens, items_per_checkpoint=stride, interpret=POISON
    )
    return jax.vjp(fn, *inputs)[1](cotangents)


def _cotangents(seed, inputs):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(x.shape).astype(np.float32) for x in (inputs[2], inputs[5]))


def _compare(given, expected, what=""):
    for name, x, y in zip(NAMES, given, expected, strict=True):
        # Within one tensor: the gradient of a gate is a sum over both dims of the state, of terms as large as its
        # largest entries, while at -50 its exact value is of order 1e-22.
        assert_close(x, y, atol=2e-5 * max(1, np.abs(y).max()), label=f"{what} gradient of {name}")


@pytest.mark.parametrize("gate", ["bound", "uniform", "weak", "strong"])
def test_kda_chunk_gradients_follow_the_equation(gate):
    inputs = inputs_of(0, 150, gate)
    cotangents = _cotangents(1, inputs)
    _compare(_gradients(inputs, cotangents), reference_gradients(*inputs, *cotangents), gate)


def test_kda_chunk_gradients_equal_those_of_the_recurrence():
    inputs = inputs_of(2, 80, batch=2)
    cotangents = _cotangents(3, inputs)
    expected = jax.jit(lambda inputs, cotangents: jax.vjp(kda_recurrent, *inputs)[1](cotangents))(inputs, cotangents)
    _compare(_gradients(inputs, cotangents), expected)


@pytest.mark.parametrize("stride", [1, 3, 16])
def test_kda_chunk_gradients_of_packed_sequences(stride):
    starts = np.asarray([0, 70, 70, 71, 150], np.int32)
    *tokens, _ = inputs_of(4, 170)
    states = np.random.default_rng(5).standard_normal((4, 2, 128, 128)).astype(np.float32)
    inputs = (*tokens, states)
    d_out, d_states = _cotangents(6, inputs)
    given = _gradients(inputs, (d_out, d_states), jnp.asarray(starts), stride=stride)
    for n, (a, b) in enumerate(itertools.pairwise(starts)):
        own = [x[:, a:b] for x in tokens]
        expected = reference_gradients(*own, states[n : n + 1], d_out[:, a:b], d_states[n : n + 1]) if b > a else None
        if expected is None:
            assert_close(given[5][n], d_states[n], label=f"gradient of empty sequence {n}")
            continue
        _compare([x[:, a:b] for x in given[:5]] + [given[5][n : n + 1]], expected, f"sequence {n}:")
    for name, x in zip(NAMES, given[:5], strict=False):
        assert not np.any(x[:, 150:]), f"gradient of {name} behind the last sequence"


def test_kda_chunk_gradients_have_the_dtypes_of_their_inputs():
    inputs = inputs_of(7, 65)
    low = tuple(jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]) + inputs[3:]
    d_out, d_state = _cotangents(8, inputs)
    given = _gradients(low, (jnp.asarray(d_out, jnp.bfloat16), d_state))
    assert [x.dtype for x in given] == [jnp.bfloat16] * 3 + [jnp.float32] * 3
    expected = reference_gradients(*low, jnp.asarray(d_out, jnp.bfloat16), d_state)
    for name, x, y in zip(NAMES, given, expected, strict=True):
        # One rounding to bfloat16 at the end.
        assert_close(x, y, atol=2e-5 * max(1, np.abs(y).max()), rtol=2**-8, label=name)


def test_kda_chunk_trainable_rejects_a_stride_of_none():
    with pytest.raises(ValueError, match="items_per_checkpoint=0"):
        kda_chunk_trainable_tpu(*inputs_of(9, 3), items_per_checkpoint=0)
