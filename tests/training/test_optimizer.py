"""The optimizer's parts: what is clipped how, which weight gets which rule, and the schedule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxmoe.params import abstract_params
from maxmoe.training.masters import Trainable, make_masters, path_names
from maxmoe.training.optimizer import OptimizerSettings, clip_by_global_norm, global_norm, make_optimizer
from tests.training.smallest import smallest_model

PLAIN = OptimizerSettings(peak_lr=0.5, warmup_steps=0, num_steps=10, weight_decay=0.0, clip_norm=1e9)


def test_the_norm_of_bfloat16_gradients_is_summed_in_float32():
    tree = {"a": jnp.full(2**16, 0.5, jnp.bfloat16), "b": jnp.full(2**16, 0.5, jnp.bfloat16)}
    assert float(global_norm(tree)) == pytest.approx(0.5 * 2**8.5, rel=1e-6)
    clipped, _ = clip_by_global_norm(2.0).update(tree, optax.EmptyState())
    assert float(global_norm(clipped)) == pytest.approx(2.0, rel=1e-6)
    kept, _ = clip_by_global_norm(1e3).update(tree, optax.EmptyState())
    np.testing.assert_array_equal(kept["a"], tree["a"].astype(jnp.float32))


@pytest.fixture(scope="module")
def shapes():
    """The smallest model, and zeros for its trained masters."""
    model = smallest_model()
    params = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.tree.map(_value, abstract_params(model), is_leaf=_is_box)
    )
    return model, make_masters(params, Trainable()).trained


def _is_box(leaf):
    return hasattr(leaf, "names")


def _value(box):
    return box.value


def _first_update(model, masters, settings, fill=1.0):
    optimizer = make_optimizer(model, settings, Trainable())
    gradients = jax.tree.map(lambda leaf: jnp.full(leaf.shape, fill, jnp.float32), masters)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), masters)
    return optimizer.update(gradients, optimizer.init(wide), wide)


def test_matrices_get_muon_and_everything_else_adamw(shapes):
    model, masters = shapes
    updates, state = jax.eval_shape(lambda masters: _first_update(model, masters, PLAIN), masters)
    assert jax.tree.structure(updates) == jax.tree.structure(masters)
    paths = [path_names(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    muon = {"/".join(path[path.index("momentum") + 1 :]) for path in paths if "momentum" in path}
    adam = {"/".join(path[path.index("nu") + 1 :]) for path in paths if "nu" in path}
    everything = {"/".join(path_names(path)) for path, _ in jax.tree_util.tree_leaves_with_path(masters)}
    assert muon | adam == everything and not muon & adam
    block = "stacks_0/superblocks_0"
    assert {"stacks_0/experts_1/gate", f"{block}/layers_0/mixer/q_proj", f"{block}/layers_1/ffn/shared/down"} <= muon
    assert {"embedding", "lm_head", f"{block}/layers_0/mixer/q_conv", f"{block}/layers_2/mixer/q_norm"} <= adam


def test_each_head_is_orthogonalised_alone(shapes):
    """A gradient of rank one in each head gives an update whose every head has the same size."""
    model, masters = shapes
    gradient = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), masters)
    rows = jnp.repeat(jnp.array([1.0, 1e-3]), 8)  # two heads of width 8
    mixer = gradient["stacks_0"]["superblocks_0"]["layers_0"]["mixer"]
    mixer["q_proj"] = rows[:, None] * jnp.ones(32)
    mixer["out_proj"] = mixer["q_proj"].T
    optimizer = make_optimizer(model, PLAIN, Trainable())
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), masters)
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(wide), wide)
    mixer = updates["stacks_0"]["superblocks_0"]["layers_0"]["mixer"]
    norms = jnp.linalg.norm(mixer["q_proj"].reshape(2, 8, 32), axis=(1, 2))
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-3)
    np.testing.assert_allclose(mixer["out_proj"], mixer["q_proj"].T, atol=1e-5)


def test_weight_decay_reaches_matrices_and_tables_alone(shapes):
    model, masters = shapes
    settings = dataclasses.replace(PLAIN, weight_decay=0.1)
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, jnp.float32), masters)
    updates, _ = jax.jit(lambda masters: _first_update(model, masters, settings, fill=0.0))(ones)
    mixer = updates["stacks_0"]["superblocks_0"]["layers_0"]["mixer"]
    for decayed in (updates["embedding"], mixer["q_proj"], updates["stacks_0"]["experts_1"]["down"]):
        np.testing.assert_allclose(decayed, -0.5 * 0.1, rtol=1e-6)
    for kept in (updates["final_norm"], mixer["q_conv"], mixer["dt_bias"], mixer["out_norm"]):
        assert not np.any(kept)


def test_schedule_rises_and_falls():
    schedule = OptimizerSettings(peak_lr=1.0, end_lr=0.1, warmup_steps=10, num_steps=110).schedule()
    assert [float(schedule(step)) for step in (0, 5, 10)] == pytest.approx([0, 0.5, 1.0])
    assert float(schedule(60)) == pytest.approx(0.55) and float(schedule(500)) == pytest.approx(0.1)


@pytest.mark.parametrize("wrong", [{"warmup_steps": 10, "num_steps": 10}, {"peak_lr": 0.0}, {"clip_norm": -1.0}])
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        OptimizerSettings(**wrong)
