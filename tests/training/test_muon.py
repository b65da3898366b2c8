"""Muon: singular values, independence of stacked matrices, heads, and the update rule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxmoe.training.muon import Matrices, orthogonalized, scale_by_muon


def _random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16)])
def test_orthogonalized_keeps_the_singular_vectors_and_pushes_the_values_to_one(shape):
    m, n = shape
    rank = min(shape)
    left, _ = np.linalg.qr(np.asarray(_random(m, rank, seed=1)))
    right, _ = np.linalg.qr(np.asarray(_random(n, rank, seed=2)))
    values = np.geomspace(0.03, 3.0, rank).astype(np.float32)
    out = np.asarray(orthogonalized(jnp.asarray(left * values @ right.T)))
    in_basis = left.T @ out @ right
    # Five rounds of the quintic leave values between 0.68 and 1.13 (its extrema), from 0.5 % of the norm up.
    assert np.all((np.diag(in_basis) > 0.65) & (np.diag(in_basis) < 1.15)), np.diag(in_basis)
    off_diagonal = in_basis - np.diag(np.diag(in_basis))
    assert np.abs(off_diagonal).max() < 2e-5  # rounding of float32 only


def test_orthogonalized_is_optax_for_one_matrix():
    x = _random(10, 17)
    theirs = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, ns_steps=5)
    wanted, _ = theirs.update(x, theirs.init(x))
    scale = np.sqrt(max(1, 17 / 10))  # what optax puts on top
    ours = orthogonalized(x)
    close = min(np.abs(ours - wanted / s).max() for s in (1.0, scale))
    assert close < 1e-5


def test_stacked_matrices_are_independent_and_zeros_stay_zeros():
    x = _random(3, 2, 8, 6).at[1, 0].set(0)
    out = orthogonalized(x)
    alone = jnp.stack([jnp.stack([orthogonalized(x[i, j]) for j in range(2)]) for i in range(3)])
    np.testing.assert_allclose(out, alone, atol=1e-5)  # batched products may sum in another order
    assert not np.any(out[1, 0])


@pytest.mark.parametrize("head_axis", [-2, -1])
def test_heads_are_matrices_of_their_own(head_axis):
    heads = [_random(4, 10, seed=seed) for seed in range(3)]
    joined = jnp.concatenate(heads) if head_axis == -2 else jnp.concatenate([h.T for h in heads], axis=1)
    muon = scale_by_muon({"w": Matrices(num_heads=3, head_axis=head_axis)}, 0.9, jnp.float32)
    updates, _ = muon.update({"w": joined[None]}, muon.init({"w": joined[None]}))
    per_head = [0.2 * np.sqrt(10) * orthogonalized(1.9 * h) for h in heads]
    wanted = jnp.concatenate(per_head) if head_axis == -2 else jnp.concatenate([h.T for h in per_head], axis=1)
    np.testing.assert_allclose(updates["w"][0], wanted, atol=1e-5)


def test_momentum_is_nesterov_and_kept_in_its_dtype():
    first, second = _random(6, 9), _random(6, 9, seed=1)
    muon = scale_by_muon({"w": Matrices()}, 0.5, jnp.bfloat16)
    state = muon.init({"w": first})
    _, state = muon.update({"w": first}, state)
    updates, state = muon.update({"w": second}, state)
    momentum = 0.5 * first.astype(jnp.bfloat16).astype(jnp.float32) + second
    assert state.momentum["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.momentum["w"], momentum.astype(jnp.bfloat16))
    wanted = 0.2 * 3.0 * orthogonalized(second + 0.5 * momentum)
    np.testing.assert_allclose(updates["w"], wanted, atol=1e-5)
    # Entries of a full-rank update have a root mean square near 0.2, whatever the gradient's size.
    big, _ = muon.update({"w": 1e6 * first}, muon.init({"w": first}))
    rms = float(jnp.sqrt(jnp.mean(jnp.square(big["w"]))) / np.sqrt(6 * 9 / (6 * 9)))
    assert 0.1 < rms < 0.3


def test_gradients_of_bfloat16_give_float32_updates():
    muon = scale_by_muon({"w": Matrices()}, 0.9, jnp.float32)
    updates, _ = jax.eval_shape(muon.update, {"w": jnp.ones((4, 4), jnp.bfloat16)}, muon.init({"w": jnp.ones((4, 4))}))
    assert updates["w"].dtype == jnp.float32
