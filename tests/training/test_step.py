"""The training step on one device: it learns, leaves frozen weights alone, and its gradients are those of the model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.model import moe_layer
from maxmoe.ops.situ import situ_glu
from maxmoe.planning.placement import abstract_mesh
from maxmoe.training import step as step_module
from maxmoe.training.forward import final_hidden, head_weight
from maxmoe.training.loss import next_token_loss
from maxmoe.training.masters import Trainable, make_masters
from maxmoe.training.optimizer import OptimizerSettings
from maxmoe.training.step import Trainer, round_by_chance
from tests.ops.quick_jit import quick_jit
from tests.training.smallest import float32_params, random_batch, two_layers

MODEL = two_layers()
TRAINER = Trainer(model=MODEL, optimizer=OptimizerSettings(peak_lr=3e-3, warmup_steps=0, num_steps=100))


@pytest.fixture(scope="module")
def params():
    return float32_params(MODEL)


def _host(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.fixture(scope="module")
def run(params):
    """Twelve steps on one batch: the states before the first, after it and after the last, and the metrics of each."""
    state, batch = TRAINER.init(params), random_batch(MODEL, 4)
    states, metrics = [_host(state)], []
    step = quick_jit(TRAINER.step)
    for _ in range(12):
        state, found = step(state, batch)
        states.append(_host(state))
        metrics.append(_host(found))
    return states[0], states[1], states[-1], metrics


@pytest.mark.slow
def test_the_loss_of_a_batch_falls(run):
    *_, metrics = run
    losses = [float(m.loss) for m in metrics]
    assert losses[0] == pytest.approx(np.log(64), abs=0.1)  # random weights: all tokens alike
    assert losses[-1] < losses[0] - 0.5 and not any(m.skipped for m in metrics)


@pytest.mark.slow
def test_frozen_weights_keep_their_bits_and_trained_ones_move(run):
    begin, _, end, _ = run
    assert end.step == 12
    for before, after in zip(*(jax.tree.leaves(state.masters.frozen) for state in (begin, end)), strict=True):
        assert before.tobytes() == after.tobytes()
    still = [
        jax.tree_util.keystr(path)
        for (path, before), after in zip(
            jax.tree_util.tree_leaves_with_path(begin.masters.trained),
            jax.tree.leaves(end.masters.trained),
            strict=True,
        )
        if before.tobytes() == after.tobytes()
    ]
    # The first layer's mixer reads an empty bank: its mixture's weights have no effect.
    assert all("layers_0" in name and "mixer_res" in name for name in still)


def _loss_of(trained, masters, batch):
    whole = masters._replace(trained=trained).whole()
    hidden = final_hidden(MODEL, whole, batch.ids, batch.lengths)
    total, count = next_token_loss(hidden, head_weight(MODEL, whole), batch.ids, batch.mask)
    return total / count


def _plain_outputs(x, ids, masters, layer, gate_beta, linear_beta, packed=None, implementation=None):
    """Every expert of every token, by masters as they are, and then those that were asked for."""
    assert packed is None
    dot = functools.partial(jnp.einsum, precision="highest")
    gate, up = (dot("nd,efd->nef", x, m[layer]) for m in (masters.gate, masters.up))
    outputs = dot("nef,edf->ned", situ_glu(gate, up, gate_beta, linear_beta), masters.down[layer])
    return jnp.take_along_axis(outputs, jnp.minimum(ids, outputs.shape[1] - 1)[..., None], axis=1)


@pytest.fixture(scope="module")
def differentiated(params):
    """Masters, a batch, a compiled function for loss and gradient, and what it gives there."""
    masters, batch = make_masters(params, Trainable()), random_batch(MODEL, 2, num_tokens=16, seed=1)
    differentiate = quick_jit(jax.value_and_grad(_loss_of))
    return masters, batch, differentiate, differentiate(masters.trained, masters, batch)


@pytest.mark.slow
def test_gradients_of_masters_are_those_of_the_plain_form(differentiated, monkeypatch):
    """Masters just made are on the MXFP4 grid, so that the form that never rounds has the same values and gradients."""
    masters, batch, _, (loss, ours) = differentiated
    monkeypatch.setattr(moe_layer, "expert_outputs_from_masters", _plain_outputs)
    plain = quick_jit(jax.value_and_grad(lambda *args: _loss_of(*args)))
    plain_loss, wanted = plain(masters.trained, masters, batch)
    assert float(loss) == pytest.approx(float(plain_loss), rel=1e-6)
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(wanted), strict=True):
        largest = float(jnp.abs(want).max())
        # Sums in another order, through norms that enlarge a rounding of 1e-7.
        np.testing.assert_allclose(got, want, atol=2e-4 * largest + 1e-9, err_msg=jax.tree_util.keystr(path))
    experts = ours["stacks_0"]["experts_1"]
    assert all(float(jnp.abs(experts[name]).max()) > 0 for name in ("gate", "up", "down"))


@pytest.mark.slow
def test_gradients_are_slopes_of_the_loss(differentiated):
    """Along the gradient of what stands behind the last choice of experts: a choice that changes is a jump."""
    masters, batch, differentiate, (_, ours) = differentiated
    direction = jax.tree.map(jnp.zeros_like, ours)
    behind = direction["stacks_0"]["superblocks_0"]["layers_1"]["ffn"]
    behind |= ours["stacks_0"]["superblocks_0"]["layers_1"]["ffn"]
    direction |= {name: ours[name] for name in ("lm_head", "final_norm", "final_res_proj")}
    direction["stacks_0"]["superblocks_0"]["layers_1"]["ffn"] = behind
    length = np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(direction)))
    eps = 3e-3

    def at(sign):
        moved = jax.tree.map(lambda m, d: m + sign * eps / length * d, masters.trained, direction)
        return float(differentiate(moved, masters, batch)[0])

    # Losses near 4 are rounded to 5e-7, and eps**2 is left of the curvature.
    assert (at(1) - at(-1)) / (2 * eps) == pytest.approx(length, rel=3e-3)


@pytest.mark.slow
def test_two_micro_batches_are_one_batch(params, run):
    _, once, _, (m1, *_) = run
    trainer = dataclasses.replace(TRAINER, micro_batches=2)
    twice, m2 = quick_jit(trainer.step)(trainer.init(params), random_batch(MODEL, 4))
    assert float(m1.num_tokens) == float(m2.num_tokens)
    assert float(m1.loss) == pytest.approx(float(m2.loss), rel=1e-6)
    assert float(m1.gradient_norm) == pytest.approx(float(m2.gradient_norm), rel=1e-5)
    pairs = zip(jax.tree_util.tree_leaves_with_path(twice.optimizer), jax.tree.leaves(once.optimizer), strict=True)
    for (path, got), want in pairs:  # what the optimizer keeps of the first gradient
        np.testing.assert_allclose(
            got, want, atol=2e-4 * np.abs(want).max() + 1e-12, err_msg=jax.tree_util.keystr(path)
        )


def test_the_compiled_step_uses_up_its_state(params):
    """`train_step` is `Trainer.step`, compiled; its text says that masters are updated in place."""
    lowered = step_module._step.lower(TRAINER, jax.eval_shape(TRAINER.init, params), random_batch(MODEL, 4))
    assert "tf.aliasing_output" in lowered.as_text() or "jax.buffer_donor" in lowered.as_text()


def test_rows_that_do_not_divide_are_refused():
    trainer = dataclasses.replace(TRAINER, micro_batches=3)
    with pytest.raises(ValueError, match="4 rows cannot be cut into micro_batches=3"):
        jax.eval_shape(trainer.step, trainer.abstract_state(abstract_mesh({})), random_batch(MODEL, 4))


def test_rounding_by_chance_has_the_right_mean_and_keeps_exact_values():
    x = jnp.full(40_000, 1.0 + 0.3 * 2**-7)  # three tenths of the way between neighbours
    rounded = round_by_chance(x, (0, 7)).astype(jnp.float32)
    assert set(np.unique(rounded)) == {1.0, 1.0 + 2**-7}
    assert float(rounded.mean()) == pytest.approx(float(x[0]), abs=5 * 0.46 * 2**-7 / 200)  # five standard errors
    other = round_by_chance(x, (0, 8)).astype(jnp.float32)
    assert 0.38 < float(jnp.mean(other != rounded)) < 0.46  # independent: 2 * 0.3 * 0.7
    exact = jnp.asarray([0.0, -1.5, 3e38, jnp.inf, -jnp.inf], jnp.bfloat16)
    np.testing.assert_array_equal(round_by_chance(exact.astype(jnp.float32), (1,)), exact)
    assert jnp.isnan(round_by_chance(jnp.asarray([jnp.nan]), (2,))[0])
