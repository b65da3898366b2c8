"""`maxmoe.ops.experts` by its TPU kernels, interpreted, against its plain form, with ids that name no expert."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from maxmoe.ops.experts import (
    ExpertMasters,
    ExpertWeights,
    expert_outputs,
    expert_outputs_from_masters,
    routed_experts,
)
from pallas_kernels import moe_experts_master_tpu, moe_experts_tpu
from tests.ops.closeness import assert_close

DIM, HIDDEN, LAYERS, EXPERTS = 256, 512, 2, 4
BETAS = (4.0, 25.0)
# Of the plain form and of the kernel, which rounds gate and up not before but after the activation: three roundings
# to bfloat16 (2^-9) relative to the largest value, since a sum may cancel.
ROUNDING = 2**-7


@pytest.fixture(autouse=True)
def on_tpu(monkeypatch):
    """The process believes that it computes on a TPU; kernels run in the interpreter, on memory full of NaN."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    interpret = pltpu.InterpretParams(uninitialized_memory="nan")
    for module, name in ((moe_experts_tpu, "moe_experts_tpu"), (moe_experts_master_tpu, "quantised_forward")):
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), interpret=interpret))


def _inputs(num_tokens, top_k, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(0.5 * rng.standard_normal((num_tokens, DIM)), jnp.bfloat16)
    # Of a shard that holds the middle third of the experts: most ids are below or above its own.
    ids = rng.integers(-EXPERTS, 2 * EXPERTS, (num_tokens, top_k)).astype(np.int32)
    ids[0], ids[1] = [-1] * top_k, [2] * top_k
    return x, jnp.asarray(ids), jnp.asarray(rng.uniform(0.1, 1, ids.shape), jnp.float32)


def _experts():
    rng = np.random.default_rng(1)

    def matrix(out, width):
        lead = (LAYERS, EXPERTS, out)
        scale = rng.integers(119, 123, (*lead, width // 32), dtype=np.uint8)
        return jnp.asarray(rng.integers(0, 256, (*lead, width // 2), dtype=np.uint8)), jnp.asarray(scale)

    return ExpertWeights(*matrix(HIDDEN, DIM), *matrix(HIDDEN, DIM), *matrix(DIM, HIDDEN))


def _assert_near(given, expected, label):
    assert given.dtype == expected.dtype
    assert_close(given, expected, atol=ROUNDING * float(jnp.abs(expected.astype(jnp.float32)).max()), label=label)


@pytest.mark.parametrize("num_tokens, top_k", [(7, 3), (40, 2)])
def test_routed_experts_by_kernel_agree_with_the_plain_form(num_tokens, top_k):
    x, ids, weights = _inputs(num_tokens, top_k)
    x = x.at[0].set(jnp.nan)  # a token without an expert may hold anything
    d_out = jnp.asarray(np.random.default_rng(2).standard_normal(x.shape), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=4)
    def run(x, weights, experts, d_out, implementation):
        def fn(x, weights):
            return routed_experts(x, ids, weights, experts, 1, *BETAS, implementation=implementation)

        out, pull = jax.vjp(fn, x, weights)
        return out, *pull(d_out)

    results = (run(x, weights, _experts(), d_out, name) for name in ("pallas_tpu", "xla"))
    for label, given, expected in zip(("out", "dx", "dweights"), *map(jax.block_until_ready, results), strict=True):
        _assert_near(given, expected, label)
        assert not np.asarray(given[0], np.float32).any()


def test_routed_experts_by_kernel_add_nothing_where_no_id_names_an_expert():
    x, ids, weights = _inputs(5, 2)
    run = jax.jit(lambda *args: routed_experts(*args, 0, *BETAS, implementation="pallas_tpu"))
    assert not np.asarray(run(x, 0 * ids - 1, weights, _experts()), np.float32).any()


def test_expert_outputs_from_masters_by_kernel_agree_with_the_plain_form():
    x, ids, _ = _inputs(12, 2)
    x = x.at[0].set(jnp.nan)  # a token without an expert may hold anything
    rng = np.random.default_rng(3)
    shapes = ((HIDDEN, DIM), (HIDDEN, DIM), (DIM, HIDDEN))
    made = (0.05 * rng.standard_normal((LAYERS, EXPERTS, *shape)) for shape in shapes)
    masters = ExpertMasters(*(jnp.asarray(leaf, jnp.bfloat16) for leaf in made))
    named = ((ids >= 0) & (ids < EXPERTS))[..., None]
    d_out = jnp.asarray(rng.standard_normal((*ids.shape, DIM)), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=3)
    def run(x, masters, d_out, implementation):
        def fn(x, masters):
            out = expert_outputs_from_masters(x, ids, masters, 1, *BETAS, implementation=implementation)
            return jnp.where(named, out, 0)

        out, pull = jax.vjp(fn, x, masters)
        return out, *pull(d_out)

    results = (jax.block_until_ready(run(x, masters, d_out, name)) for name in ("pallas_tpu", "xla"))
    (out, dx, d_masters), (expected, dx_expected, d_expected) = results
    for label, a, b in (("out", out, expected), ("dx", dx, dx_expected)):
        _assert_near(a, b, label)
    for label, a, b in zip(ExpertMasters._fields, d_masters, d_expected, strict=True):
        _assert_near(a, b, f"d{label}")
        assert not np.asarray(a[0], np.float32).any()


def test_expert_outputs_by_kernel_say_why_they_cannot_run():
    x, ids, _ = _inputs(3, 2)
    with pytest.raises(NotImplementedError, match="takes x in bfloat16, not float32"):
        expert_outputs(x.astype(jnp.float32), ids, _experts(), 0, *BETAS, implementation="pallas_tpu")
