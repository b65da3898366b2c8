"""The loss against log-softmax written out, values and gradients; masks; a vocabulary in several steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.training import loss

VOCAB, WIDTH = 37, 8


def _inputs(dtype=jnp.float32, num_tokens=12):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((2, num_tokens, WIDTH)), dtype)
    head = jnp.asarray(3 * rng.standard_normal((VOCAB, WIDTH)), dtype)
    return hidden, head, jnp.asarray(rng.integers(0, VOCAB, (2, num_tokens)), jnp.int32)


def _plain(hidden, head, labels):
    logits = jnp.einsum("btd,vd->btv", hidden, head, precision="highest")
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize("tokens_at_once", [1, 4, 100])
def test_token_losses_are_those_of_log_softmax(monkeypatch, tokens_at_once):
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", tokens_at_once * VOCAB)
    hidden, head, labels = _inputs()
    weights = jnp.arange(24.0).reshape(2, 12)

    def total(losses):
        return lambda hidden, head: jnp.sum(weights * losses(hidden, head, labels))

    np.testing.assert_allclose(loss.token_losses(hidden, head, labels), _plain(hidden, head, labels), atol=1e-5)
    ours, wanted = (jax.grad(total(f), argnums=(0, 1))(hidden, head) for f in (loss.token_losses, _plain))
    for got, want in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * float(jnp.abs(want).max()))


def test_statistics_are_float32_for_bfloat16_states(monkeypatch):
    """The gradient of the head adds up 512 equal small terms: in bfloat16 the sum would stop growing early."""
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", VOCAB)
    hidden, head, labels = _inputs(jnp.bfloat16, 256)
    hidden, labels = jnp.broadcast_to(hidden[:1, :1], hidden.shape), jnp.full_like(labels, 5)
    losses = loss.token_losses(hidden, head, labels)
    assert losses.dtype == jnp.float32
    logits = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.bfloat16).astype(jnp.float32)
    wanted = -jax.nn.log_softmax(logits)[..., 5]
    np.testing.assert_allclose(losses, wanted, atol=2e-2)  # logits up to 15 are rounded to bfloat16
    gradient = jax.grad(lambda head: jnp.sum(loss.token_losses(hidden, head, labels)))(head)
    one = jax.grad(lambda head: jnp.sum(loss.token_losses(hidden[:1, :1], head, labels[:1, :1])))(head)
    largest = float(jnp.abs(one.astype(jnp.float32)).max())
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient.astype(jnp.float32), 512 * one.astype(jnp.float32), atol=512 * largest / 128)


def test_each_masked_token_is_predicted_from_those_before_it():
    hidden, head, ids = _inputs()
    mask = jnp.zeros((2, 12), bool).at[0, 3].set(True).at[1, 0].set(True).at[1, 11].set(True)
    total, count = loss.next_token_loss(hidden, head, ids, mask)
    wanted = _plain(hidden[0:1, 2:3], head, ids[0:1, 3:4]).sum() + _plain(hidden[1:, 10:11], head, ids[1:, 11:]).sum()
    assert float(count) == 2  # the first token of a row has nothing before it
    np.testing.assert_allclose(float(total), float(wanted), rtol=1e-5)


def test_without_a_token_to_predict_the_sum_is_zero():
    hidden, head, ids = _inputs()
    assert [float(x) for x in loss.next_token_loss(hidden, head, ids, jnp.zeros((2, 12), bool))] == [0.0, 0.0]
