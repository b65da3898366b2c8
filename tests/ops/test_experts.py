"""Routed experts against a plain loop in float64, on every way the rows can be cut into blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.ops import experts as experts_module
from maxmoe.ops import mxfp4
from maxmoe.ops.experts import (
    ExpertMasters,
    ExpertWeights,
    expert_outputs,
    expert_outputs_from_masters,
    routed_experts,
)
from tests.ops.closeness import assert_close, assert_same_bits
from tests.ops.quick_jit import quick_jit

DIM, HIDDEN, LAYERS = 64, 32, 2
TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
ALL = 2**30  # every block in one step
BY_TWO = 2 * 3 * DIM * HIDDEN  # two blocks to a step
BETAS = {"gate_beta": 4.0, "linear_beta": 25.0}


@pytest.fixture(autouse=True)
def _all_blocks_at_once(monkeypatch):
    """Sizes here are tiny, so that one step does it all, unless a test says otherwise."""
    monkeypatch.setattr(experts_module, "AT_ONCE", ALL)


@functools.cache
def _compiled(at_once):
    """The op compiled for one value of AT_ONCE: the module holds it, and is read only when compiling."""
    del at_once
    return quick_jit(functools.partial(routed_experts, **BETAS))


def _run(x, ids, weights, experts, layer):
    return _compiled(experts_module.AT_ONCE)(x, ids, weights, experts, layer)


def _random_experts(num_experts, seed=0):
    rng = np.random.default_rng(seed)

    def matrix(out, width):
        lead = (LAYERS, num_experts, out)
        scale = rng.integers(122, 126, (*lead, width // 32), dtype=np.uint8)
        return jnp.asarray(rng.integers(0, 256, (*lead, width // 2), dtype=np.uint8)), jnp.asarray(scale)

    return ExpertWeights(*matrix(HIDDEN, DIM), *matrix(HIDDEN, DIM), *matrix(DIM, HIDDEN))


def _decode(packed, scale):
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return np.ldexp(TABLE[codes], np.repeat(scale.astype(int), 32, axis=-1) - 127)


def _reference(x, ids, weights, experts, layer):
    """One token and one choice at a time, in float64."""
    x, weights = (np.asarray(a).astype(np.float64) for a in (x, weights))
    leaves = [np.asarray(leaf)[layer] for leaf in experts]
    gates, ups, downs = (_decode(*leaves[i : i + 2]) for i in (0, 2, 4))
    out = np.zeros_like(x)
    for n, k in np.ndindex(*ids.shape):
        e = ids[n, k]
        if 0 <= e < len(gates):
            g, u = gates[e] @ x[n], ups[e] @ x[n]
            hidden = 4 * np.tanh(g / 4) / (1 + np.exp(-g)) * 25 * np.tanh(u / 25)
            out[n] += weights[n, k] * (downs[e] @ hidden)
    return out


def _inputs(num_tokens, top_k, num_experts, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, DIM)).astype(np.float32)
    ids = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    return x, ids, weights


def _assert_matches(given, expected, rtol=3e-6):
    """Float32 products of 64 and 32 terms and a sum of a few experts, relative to the largest value."""
    assert_close(given, expected, atol=rtol * max(1e-3, np.abs(expected).max()))


# 7 experts for 6 assignments: one row per block. 5 experts for 57: blocks of 32 rows.
@pytest.mark.parametrize(
    "num_tokens, top_k, num_experts, at_once",
    [(3, 2, 7, ALL), (3, 2, 7, BY_TWO), (3, 2, 7, 0), (19, 3, 5, ALL), (19, 3, 5, BY_TWO)],
)
def test_routed_experts_equals_a_loop(monkeypatch, num_tokens, top_k, num_experts, at_once):
    monkeypatch.setattr(experts_module, "AT_ONCE", at_once)
    x, ids, weights = _inputs(num_tokens, top_k, num_experts)
    experts = _random_experts(num_experts)
    for layer in range(LAYERS):  # a traced index
        given = _run(x, ids, weights, experts, layer)
        _assert_matches(given, _reference(x, ids, weights, experts, layer))


def _crowded(seed):
    """40 tokens that all choose expert 3 first: 40 rows in blocks of 16, while some experts get none."""
    x, ids, weights = _inputs(40, 2, 16, seed)
    ids[:, 0], ids[:, 1] = 3, np.random.default_rng(seed).choice([0, 5, 11, 15], 40)
    return x, ids, weights


@pytest.mark.parametrize("at_once", [ALL, BY_TWO])
def test_routed_experts_serves_an_expert_with_many_blocks(monkeypatch, at_once):
    monkeypatch.setattr(experts_module, "AT_ONCE", at_once)
    x, ids, weights = _crowded(2)
    experts = _random_experts(16)
    expected = _reference(x, ids, weights, experts, 1)
    _assert_matches(_run(x, ids, weights, experts, 1), expected)
    everyone = np.stack([np.full(40, 15), np.full(40, 3)], -1).astype(np.int32)  # the last expert is full too
    _assert_matches(_run(x, everyone, weights, experts, 1), _reference(x, everyone, weights, experts, 1))


@pytest.mark.parametrize("num_tokens, top_k, num_experts", [(3, 2, 7), (19, 3, 5)])
def test_routed_experts_adds_nothing_for_ids_that_name_none(num_tokens, top_k, num_experts):
    x, ids, weights = _inputs(num_tokens, top_k, num_experts)
    experts = _random_experts(num_experts)
    none = np.random.default_rng(3).choice([-1, -7, num_experts, num_experts + 1, 2**31 - 1, -(2**31)], ids.shape)
    none = none.astype(np.int32)
    assert_same_bits(_run(x, none, weights, experts, 0), np.zeros_like(x), "no id names an expert")
    mixed = np.where(np.random.default_rng(4).random(ids.shape) < 0.5, ids, none)
    mixed[1] = none[1]
    expected = _reference(x, mixed, weights, experts, 0)
    x[1] = np.nan  # a token without an expert may hold anything
    _assert_matches(_run(x, mixed, weights, experts, 0), expected)


def test_routed_experts_reads_minus_one_as_no_expert():
    x, ids, weights = _inputs(3, 2, 7)
    experts = _random_experts(7)
    ids[:] = [-1, 1]
    given = _run(x, ids, weights, experts, 0)
    _assert_matches(given, _reference(x, ids[:, 1:], weights[:, 1:], experts, 0))
    ids[:, 0] = 6
    as_last = _run(x, ids, weights, experts, 0)  # what table[-1] would add
    assert np.abs(np.asarray(as_last) - np.asarray(given)).max() > 0.1


def test_routed_experts_padding_costs_real_tokens_nothing():
    x, ids, weights = _inputs(6, 1, 2)
    ids[:] = 0  # all prefer one expert
    experts = _random_experts(2)
    padded_ids, padded_x = ids.copy(), x.copy()
    padded_ids[[1, 4]], padded_x[[1, 4]] = 2, np.nan
    given = np.asarray(_run(padded_x, padded_ids, weights, experts, 0))
    assert not given[[1, 4]].any()
    real = [0, 2, 3, 5]
    _assert_matches(given[real], _reference(x[real], ids[real], weights[real], experts, 0))


def test_plan_blocks_counts_only_named_experts():
    ids = np.array([[0], [2], [0], [-1], [0], [0]], np.int32)  # four real tokens of expert 0, two of padding
    plan = quick_jit(experts_module._plan_blocks, static_argnums=(1, 2))(ids, 2, 16)
    assert np.asarray(plan.block_experts).tolist().count(0) == 1  # one block of 16 rows holds all four
    assert np.asarray(plan.block_assignments)[0].tolist() == [0, 2, 4, 5] + 12 * [-1]
    assert sorted(np.asarray(plan.slots)[np.asarray(plan.named)].tolist()) == [0, 1, 2, 3]
    assert np.asarray(plan.named)[:, 0].tolist() == [True, False, True, False, True, True]


@pytest.mark.parametrize("make", [lambda: (*_inputs(19, 3, 5), 5), lambda: (*_crowded(5), 16)], ids=["19", "40"])
def test_routed_experts_token_does_not_depend_on_others(make):
    x, ids, weights, num_experts = make()
    experts = _random_experts(num_experts)
    together = np.asarray(_run(x, ids, weights, experts, 0))
    # Rows meet the same weights in another block, whose products may be summed in another order: float32 rounding
    # of 64 and 32 terms, relative to the largest value.
    tolerance = 3e-6 * np.abs(together).max()
    alone = np.concatenate([_run(x[n : n + 1], ids[n : n + 1], weights[n : n + 1], experts, 0) for n in (0, 4)])
    assert_close(alone, together[[0, 4]], atol=tolerance, label="alone")
    order = np.random.default_rng(6).permutation(len(x))
    shuffled = np.asarray(_run(x[order], ids[order], weights[order], experts, 0))
    assert_close(shuffled, together[order], atol=tolerance, label="in another order")
    others = 100 * np.flip(x, 0)
    others[4] = x[4]
    assert_close(_run(others, ids, weights, experts, 0)[4], together[4], atol=tolerance, label="among others")


def test_routed_experts_in_bfloat16_rounds_each_product_once():
    x, ids, weights = _inputs(9, 2, 5)
    experts, x = _random_experts(5), jnp.asarray(x, jnp.bfloat16)
    given = _run(x, ids, weights, experts, 0)
    assert given.dtype == jnp.bfloat16
    expected = _reference(x, ids, weights, experts, 0)
    # Gate, up, hidden, output and sum are rounded to 8 bits each; the errors of 32 hidden values partly cancel.
    assert_close(given, expected, atol=2**-7 * np.abs(expected).max())


def _gradients(x, ids, weights, experts, factors):
    def loss(x, weights):
        return jnp.sum(factors * routed_experts(x, ids, weights, experts, 1, **BETAS))

    return quick_jit(jax.grad(loss, argnums=(0, 1)))(x, weights)


@pytest.mark.parametrize("num_tokens, top_k, num_experts, at_once", [(3, 2, 7, ALL), (9, 2, 5, BY_TWO)])
def test_routed_experts_gradients_equal_differences(monkeypatch, num_tokens, top_k, num_experts, at_once):
    monkeypatch.setattr(experts_module, "AT_ONCE", at_once)
    x, ids, weights = _inputs(num_tokens, top_k, num_experts)
    ids[1, 0], ids[-1] = -1, num_experts  # the last token is padding
    experts = _random_experts(num_experts)
    rng = np.random.default_rng(7)
    factors = rng.standard_normal(x.shape).astype(np.float32)
    d_x, d_weights = (np.asarray(d) for d in _gradients(x, ids, weights, experts, factors))
    assert d_weights[1, 0] == 0 and not d_weights[-1].any() and not d_x[-1].any()

    def loss(x, weights):
        return np.sum(factors * _reference(x, ids, weights, experts, 1))

    for _ in range(4):
        step_x, step_w = 1e-5 * rng.standard_normal(x.shape), 1e-5 * rng.standard_normal(weights.shape)
        by_x = (loss(x + step_x, weights) - loss(x - step_x, weights)) / 2
        by_w = (loss(x, weights + step_w) - loss(x, weights - step_w)) / 2
        # Central differences in float64 err by step^2; the given gradients have float32 errors that a random
        # direction adds up like the gradient itself.
        assert_close(np.sum(d_x * step_x), by_x, atol=1e-5 * np.linalg.norm(d_x) * np.linalg.norm(step_x))
        assert_close(np.sum(d_weights * step_w), by_w, atol=1e-5 * np.linalg.norm(d_weights) * np.linalg.norm(step_w))


def test_expert_outputs_says_that_kernels_take_no_places(monkeypatch):
    x, ids, _ = _inputs(3, 2, 7)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(NotImplementedError, match="only the plain form takes `places`"):
        expert_outputs(
            x, ids, _random_experts(7), 0, **BETAS, places=np.arange(7, dtype=np.int32), implementation="pallas_tpu"
        )


def _random_masters(num_experts, dtype, seed=8):
    rng = np.random.default_rng(seed)
    shapes = ((HIDDEN, DIM), (HIDDEN, DIM), (DIM, HIDDEN))
    made = (0.2 * rng.standard_normal((LAYERS, num_experts, *shape)) for shape in shapes)
    return ExpertMasters(*(jnp.asarray(leaf, dtype) for leaf in made))


def _packed(masters):
    return ExpertWeights(*(leaf for master in masters for leaf in mxfp4.quantize(master)))


@pytest.mark.parametrize("num_tokens, top_k, num_experts, dtype", [(3, 2, 7, jnp.float32), (19, 3, 5, jnp.bfloat16)])
def test_expert_outputs_from_masters_are_those_of_packed_masters(monkeypatch, num_tokens, top_k, num_experts, dtype):
    monkeypatch.setattr(experts_module, "AT_ONCE", BY_TWO)
    x, ids, _ = _inputs(num_tokens, top_k, num_experts)
    ids[0, 1], x = -1, jnp.asarray(x, dtype)
    masters = _random_masters(num_experts, dtype)

    @quick_jit
    def run(x, masters):
        given = expert_outputs_from_masters(x, ids, masters, 1, **BETAS)
        return given, expert_outputs(x, ids, _packed(masters), 1, **BETAS)

    given, expected = (np.asarray(out)[ids >= 0] for out in run(x, masters))
    assert_same_bits(given, expected)


def _dense_outputs(x, ids, dense, layer):
    """Each assignment by its own weights, in float32; zero where an id names no expert."""
    chosen = jnp.clip(ids, 0, dense.gate.shape[1] - 1)
    gate_w, up_w, down_w = (leaf[layer, chosen] for leaf in dense)
    dot = functools.partial(jnp.einsum, precision="highest")
    gate, up = dot("nd,nkfd->nkf", x, gate_w), dot("nd,nkfd->nkf", x, up_w)
    hidden = 4 * jnp.tanh(gate / 4) * jax.nn.sigmoid(gate) * 25 * jnp.tanh(up / 25)
    out = dot("nkf,nkdf->nkd", hidden, down_w)
    return jnp.where(((ids >= 0) & (ids < dense.gate.shape[1]))[..., None], out, 0)


@pytest.mark.parametrize("num_tokens, top_k, num_experts, at_once", [(3, 2, 7, ALL), (19, 3, 5, BY_TWO)])
def test_expert_outputs_from_masters_pass_gradients_of_the_packed_weights_straight_on(
    monkeypatch, num_tokens, top_k, num_experts, at_once
):
    monkeypatch.setattr(experts_module, "AT_ONCE", at_once)
    x, ids, _ = _inputs(num_tokens, top_k, num_experts)
    ids[1, 0], ids[-1] = -1, num_experts  # the last token is padding
    ids[ids == 2] = 1  # an expert of whom nobody asks
    d_out = np.random.default_rng(9).standard_normal((*ids.shape, DIM)).astype(np.float32)
    masters = _random_masters(num_experts, jnp.float32)

    @quick_jit
    def run(x, masters):
        given = jax.vjp(lambda *args: expert_outputs_from_masters(args[0], ids, args[1], 1, **BETAS), x, masters)[1]
        packed = _packed(masters)
        dense = ExpertMasters(*(mxfp4.dequantize(*packed[i : i + 2]) for i in (0, 2, 4)))
        return given(d_out), jax.vjp(lambda *args: _dense_outputs(args[0], ids, args[1], 1), x, dense)[1](d_out)

    (d_x, d_masters), (d_x_expected, d_expected) = run(jnp.asarray(x), masters)
    # Float32 sums of at most 64 terms and 19 tokens in another order, relative to the largest.
    _assert_matches(d_x, np.asarray(d_x_expected), rtol=1e-5)
    assert not np.asarray(d_x)[-1].any()
    for given, expected in zip(d_masters, d_expected, strict=True):
        _assert_matches(given, np.asarray(expected), rtol=1e-5)
        assert np.asarray(given[1]).any() and not np.asarray(given[0]).any() and not np.asarray(given[1, 2]).any()


def test_expert_outputs_from_masters_ignore_a_token_that_is_not_routed():
    x, ids, _ = _inputs(6, 2, 5)
    ids[0], x[0] = 5, np.nan
    masters = _random_masters(5, jnp.bfloat16)

    def loss(masters):
        out = expert_outputs_from_masters(jnp.asarray(x, jnp.bfloat16), ids, masters, 0, **BETAS)
        return jnp.sum(jnp.where((ids < 5)[..., None], out, 0).astype(jnp.float32))

    for leaf in quick_jit(jax.grad(loss))(masters):
        assert leaf.dtype == jnp.bfloat16 and np.isfinite(np.asarray(leaf, np.float32)).all()
