"""Steps compiled with options: those of the device at hand, and only outermost."""

import jax
import jax.numpy as jnp
import pytest

from maxmoe import step_jit
from maxmoe.step_jit import StepJit


@pytest.fixture
def options(monkeypatch):
    """Options for the devices here, which tests may change."""
    found = {}
    monkeypatch.setitem(step_jit.COMPILER_OPTIONS, step_jit.device_kind(), found)
    return found


def test_step_jit_compiles_once_per_shape_as_jit_does():
    scale = StepJit(lambda factor, x: factor * x, static_argnums=0)
    assert scale(2, jnp.arange(3)).tolist() == scale(2, jnp.arange(3)).tolist() == [0, 2, 4]
    assert scale(3, jnp.arange(3)).tolist() == [0, 3, 6]
    assert scale._cache_size() == 2
    assert scale.lower(2, jnp.arange(3)).compile()(jnp.arange(3)).tolist() == [0, 2, 4]


def test_step_jit_gives_its_options_to_the_compiler(options):
    options["no_such_option"] = "1"
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        StepJit(lambda x: x + 1)(jnp.arange(3))


def test_step_jit_takes_no_options_inside_another_program(options):
    options["xla_backend_optimization_level"] = "0"
    double = StepJit(lambda x: 2 * x)
    assert double(jnp.arange(3)).tolist() == [0, 2, 4]
    assert jax.jit(lambda x: double(x) + 1)(jnp.arange(3)).tolist() == [1, 3, 5]
    assert jax.grad(lambda x: double(x).sum())(jnp.ones(2)).tolist() == [2, 2]
