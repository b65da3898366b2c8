"""Routing: which experts a token takes, and with what weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.ops.router import route
from tests.ops.closeness import assert_close, assert_same_bits

routed = jax.jit(route, static_argnums=(3, 4))


def _route_logits(logits, bias, top_k, scale=1.0):
    """Routes tokens whose logits are given: the gate is the identity."""
    logits = np.asarray(logits, np.float32)
    ids, weights = route(logits, np.eye(logits.shape[-1], dtype=np.float32), np.float32(bias), top_k, scale)
    return np.asarray(ids), np.asarray(weights)


def _reference(x, w_gate, bias, top_k, scale):
    scores = 1 / (1 + np.exp(-np.asarray(x).astype(np.float64) @ np.asarray(w_gate).astype(np.float64).T))
    ids = np.argsort(-(scores + np.asarray(bias)), axis=-1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(scores, ids, -1)
    return ids, scale * chosen / chosen.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_route_follows_the_equation(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((13, 24)), dtype)
    w_gate = jnp.asarray(rng.standard_normal((11, 24)), dtype)
    bias = rng.uniform(-0.3, 0.3, 11).astype(np.float32)
    ids, weights = routed(x, w_gate, bias, 3, 2.5)
    expected_ids, expected = _reference(x, w_gate, bias, 3, 2.5)
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32
    assert_same_bits(ids, expected_ids.astype(np.int32))
    # Float32 logits of 24 terms; the sigmoid halves their error at least four times.
    assert_close(weights, expected, rtol=3e-6)
    assert_close(weights.sum(-1), np.full(13, 2.5), rtol=5e-7)


def test_route_computes_bfloat16_tokens_in_float32():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((13, 24)), jnp.bfloat16)
    w_gate, bias = rng.standard_normal((11, 24)).astype(np.float32), np.zeros(11, np.float32)
    low, wide = routed(x, w_gate, bias, 3, 1.0), routed(x.astype(jnp.float32), w_gate, bias, 3, 1.0)
    for name, given, expected in zip(("ids", "weights"), low, wide, strict=True):
        assert_same_bits(given, expected, name)


def test_route_bias_selects_but_does_not_weigh():
    scores = np.array([[0.9, 0.8, 0.1]])
    ids, weights = _route_logits(np.log(scores / (1 - scores)), [0, 0, 1.0], 2)
    assert ids.tolist() == [[2, 0]]
    # Sigmoid of a logit, in float32; a biased weight would be 1.1 / 2.
    assert_close(weights, [[0.1, 0.9]], atol=1e-6)


@pytest.mark.parametrize("logit", [-90.0, -200.0, -1e30])
def test_route_weights_are_zero_where_every_score_underflows(logit):
    ids, weights = _route_logits([[logit, logit, 3.0]], [2.0, 2.0, 0.0], 2)
    assert ids.tolist() == [[0, 1]]
    # sigmoid(-90) is 8e-40, a subnormal that some platforms flush: either way far below the 1e-20 of the sum.
    assert_close(weights, [[0, 0]], atol=1e-19)


def test_route_breaks_ties_towards_the_lower_id():
    ids, weights = _route_logits([[0.5] * 9, [0, 1, 0, 1, 0, 1, 0, 1, 0]], np.zeros(9), 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4], [1, 3, 5, 7, 0]]
    assert_close(weights[0], np.full(5, 0.2), rtol=3e-7)  # five equal parts, in float32


def test_route_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(2)
    x, others = (rng.standard_normal((13, 24)).astype(np.float32) for _ in range(2))
    w_gate, bias = rng.standard_normal((11, 24)).astype(np.float32), np.zeros(11, np.float32)
    others[5] = x[5]
    for given, expected in zip(routed(others, w_gate, bias, 3, 1.0), routed(x, w_gate, bias, 3, 1.0), strict=True):
        assert_same_bits(given[5], expected[5])


def test_route_gradient_does_not_reach_the_bias():
    rng = np.random.default_rng(3)
    x, w_gate = rng.standard_normal((5, 8)).astype(np.float32), rng.standard_normal((6, 8)).astype(np.float32)
    factors = rng.standard_normal((5, 2)).astype(np.float32)

    def loss(x, bias):
        return jnp.sum(factors * route(x, w_gate, bias, 2, 1.0)[1])

    bias = np.zeros(6, np.float32)
    d_x, d_bias = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, bias)
    assert not np.asarray(d_bias).any()
    step = 1e-5 * rng.standard_normal(x.shape)
    up, down = (_reference(x.astype(np.float64) + s, w_gate, bias, 2, 1.0) for s in (step, -step))
    assert up[0].tolist() == down[0].tolist()  # the choice is the same, so the difference is a derivative
    expected = np.sum(factors * (up[1] - down[1])) / 2
    # Central difference in float64, error about step^2; the given gradient is float32.
    assert_close(np.sum(np.asarray(d_x) * step), expected, rtol=1e-4)
