"""Grouped FFN of routed experts on TPU, interpreted: uneven and empty groups, both unpackings, the gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from maxmoe.ops import mxfp4
from maxmoe.ops.experts import ExpertWeights, expert_outputs
from maxmoe.ops.situ import situ_glu
from pallas_kernels import moe_experts_tpu as kernels
from pallas_kernels import mxfp4_unpack
from pallas_kernels.moe_visits_tpu import plan_visits
from pallas_kernels.tiling import MoeExpertsTpuTiling
from tests.ops.closeness import assert_close, assert_same_bits

POISONED = pltpu.InterpretParams(uninitialized_memory="nan")
SMALL = MoeExpertsTpuTiling(rows=16, hidden=256, width=256, units=128, outputs=128)
LAYERS, EXPERTS, DIM, HIDDEN = 2, 4, 512, 768  # three blocks of the axis that is tiled in the grid
GATE_BETA, LINEAR_BETA = 4.0, 25.0
METHODS = pytest.mark.parametrize("method", mxfp4_unpack.METHODS)


@functools.cache
def _experts(dim=DIM, hidden=HIDDEN):
    rng = np.random.default_rng(0)

    def weight(num_outputs, num_columns):
        lead = (LAYERS, EXPERTS, num_outputs)
        # Scales of both sides of 1/64: gate and up reach a few units, where the activation bends.
        return (
            rng.integers(0, 256, (*lead, num_columns // 2)).astype(np.uint8),
            rng.integers(119, 123, (*lead, num_columns // 32)).astype(np.uint8),
        )

    return kernels.Mxfp4Experts(*weight(hidden, dim), *weight(hidden, dim), *weight(dim, hidden))


def _rows(num_rows, seed=1, dim=DIM):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(0.5 * rng.standard_normal((num_rows, dim)), jnp.bfloat16) for _ in range(2))


def _plain(x, group_sizes, experts, layer):
    """float32 throughout."""
    pairs = zip(experts[::2], experts[1::2], strict=True)
    gate_w, up_w, down_w = (mxfp4.dequantize(packed[layer], scale[layer]) for packed, scale in pairs)
    dot = functools.partial(jnp.dot, precision="highest")
    out, row = [], 0
    for expert, size in enumerate(group_sizes):
        rows = x[row : row + size].astype(jnp.float32)
        hidden = situ_glu(dot(rows, gate_w[expert].T), dot(rows, up_w[expert].T), GATE_BETA, LINEAR_BETA)
        out.append(dot(hidden, down_w[expert].T))
        row += size
    return jnp.concatenate([*out, jnp.zeros((x.shape[0] - row, x.shape[1]))])


def _run(method, experts, layer, interpret=POISONED, tiling=SMALL):
    """Jitted: out and dx of x, group sizes and dout."""

    @jax.jit
    def run(x, group_sizes, dout):
        def ffn(x):
            return kernels.moe_experts_tpu(
                x,
                group_sizes,
                experts,
                layer,
                GATE_BETA,
                LINEAR_BETA,
                method=method,
                tiling=tiling,
                interpret=interpret,
            )

        out, pull = jax.vjp(ffn, x)
        return out, pull(dout)[0]

    return run


def _assert_matches_plain(run, num_rows, group_sizes, experts=None, dim=DIM):
    x, dout = _rows(num_rows, dim=dim)
    out, dx = jax.block_until_ready(run(x, jnp.asarray(group_sizes, jnp.int32), dout))
    expected, pull = jax.vjp(lambda x: _plain(x, group_sizes, experts or _experts(), 1), x.astype(jnp.float32))
    dx_expected = pull(dout.astype(jnp.float32))[0]
    assert out.shape == x.shape and out.dtype == dx.dtype == jnp.bfloat16
    # What comes out after the last group means nothing.
    out, expected, dx, dx_expected = (value[: sum(group_sizes)] for value in (out, expected, dx, dx_expected))
    # Hidden rows, their gradients and results each round to bfloat16 (2^-9), over sums of 768 terms of random sign:
    # relative to the largest, since a sum may cancel.
    assert_close(out, expected, atol=2**-7 * float(jnp.abs(expected).max(initial=0)), label="out")
    assert_close(dx, dx_expected, atol=2**-7 * float(jnp.abs(dx_expected).max(initial=0)), label="dx")


@METHODS
@pytest.mark.parametrize(
    "num_rows, group_sizes",
    [
        (53, (17, 0, 23, 13)),  # groups cross tiles of 16, one is empty, rows are no multiple of a tile
        (50, (0, 0, 50, 0)),  # one expert takes all rows
        (40, (1, 2, 0, 1)),  # three experts in a tile; after the last group rows, and tiles that are not visited
        (1, (0, 0, 0, 1)),
        (20, (0, 0, 0, 0)),
    ],
    ids=["uneven", "one_expert", "few", "one_row", "none"],
)
def test_moe_experts_tpu_and_its_gradient_match_the_plain_ffn(method, num_rows, group_sizes):
    _assert_matches_plain(_run(method, _experts(), 1), num_rows, group_sizes)


def test_moe_experts_tpu_takes_an_odd_number_of_tiles_through_memory():
    experts, tiling = _experts(768, 256), dataclasses.replace(SMALL, outputs=256)  # three tiles of down
    _assert_matches_plain(_run("float8_f32", experts, 1, tiling=tiling), 9, (4, 0, 5, 0), experts, 768)


def test_moe_experts_tpu_on_two_cores(monkeypatch):
    monkeypatch.setattr(kernels, "_num_cores", lambda: 2)
    doubled = _with_hidden_twice(_experts())
    x, dout = _rows(21)
    out, dx = jax.block_until_ready(_run("float8", doubled, 0)(x, jnp.asarray((5, 0, 14, 0), jnp.int32), dout))
    expected, pull = jax.vjp(lambda x: 2 * _plain(x, (5, 0, 14, 0), _experts(), 0), x.astype(jnp.float32))
    # As above: bfloat16 rounding relative to the largest.
    assert_close(out[:19], expected[:19], atol=2**-7 * float(jnp.abs(expected).max()), label="out")
    dx_expected = pull(dout.astype(jnp.float32))[0]
    assert_close(dx[:19], dx_expected[:19], atol=2**-7 * float(jnp.abs(dx_expected).max()), label="dx")


def _with_hidden_twice(experts):
    """Experts of twice the hidden size whose second half repeats the first: they give twice the output."""
    wide = [np.concatenate([leaf, leaf], axis=2) for leaf in experts[:4]]
    return kernels.Mxfp4Experts(*wide, *(np.concatenate([leaf, leaf], axis=3) for leaf in experts[4:]))


@pytest.mark.parametrize("method", ["float4", "float8"])
def test_moe_experts_tpu_has_no_race(method):
    checked = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    _assert_matches_plain(_run(method, _experts(), 1, checked), 20, (9, 0, 0, 11))


def test_moe_experts_tpu_reads_only_experts_that_have_rows():
    group_sizes = (0, 18, 0, 4)
    marked = _experts()._replace(
        **{name: leaf.copy() for name, leaf in _experts()._asdict().items() if name.endswith("scale")}
    )
    for scale in marked[1::2]:
        scale[:, [0, 2]] = 255  # NaN, which a masked product would spread
        scale[0] = 255  # the other layer
    x, dout = _rows(22)
    sizes = jnp.asarray(group_sizes, jnp.int32)
    for given, expected in zip(
        _run("float8", marked, 1)(x, sizes, dout), _run("float8", _experts(), 1)(x, sizes, dout), strict=True
    ):
        assert_same_bits(given, expected)


def test_moe_experts_tpu_takes_a_traced_layer():
    x, _ = _rows(5)
    sizes = jnp.asarray((2, 0, 3, 0), jnp.int32)

    @jax.jit
    def run(layer):
        return kernels.moe_experts_tpu(
            x, sizes, _experts(), layer, GATE_BETA, LINEAR_BETA, method="float8", tiling=SMALL, interpret=POISONED
        )

    for layer in range(LAYERS):
        expected = _plain(x, (2, 0, 3, 0), _experts(), layer)
        # bfloat16 rounding of hidden rows and outputs, relative to the largest.
        assert_close(run(layer), expected, atol=2**-7 * float(jnp.abs(expected).max()), label=f"layer {layer}")


def test_moe_experts_tpu_agrees_with_the_op():
    group_sizes = (3, 0, 4, 2)
    x, _ = _rows(9)
    ids = np.repeat(np.arange(EXPERTS), group_sizes)[:, None]
    stack = ExpertWeights(*map(jnp.asarray, _experts()))
    expected = expert_outputs(x, jnp.asarray(ids), stack, 1, GATE_BETA, LINEAR_BETA)[:, 0]
    given = kernels.moe_experts_tpu(
        x,
        jnp.asarray(group_sizes, jnp.int32),
        _experts(),
        1,
        GATE_BETA,
        LINEAR_BETA,
        method="float8",
        tiling=SMALL,
        interpret=POISONED,
    )
    # The op rounds gate and up to bfloat16 before the activation, the kernel does not: three roundings of 2^-9.
    assert_close(given, expected, atol=2**-7 * float(jnp.abs(expected.astype(jnp.float32)).max()))


@pytest.mark.parametrize("seed", range(40))
def test_visits_cover_each_row_once_and_name_no_empty_expert(seed):
    rng = np.random.default_rng(seed)
    num_experts, tile_rows, num_tiles = rng.integers(1, 9), 16, rng.integers(1, 7)
    group_sizes = rng.multinomial(rng.integers(0, tile_rows * num_tiles + 1), rng.dirichlet([0.3] * num_experts))
    plan = jax.tree.map(np.asarray, plan_visits(jnp.asarray(group_sizes, jnp.int32), num_tiles, tile_rows))
    expert_of_row = np.repeat(np.arange(num_experts), group_sizes)
    covered, fetched = np.zeros(num_tiles * tile_rows, int), []
    assert plan.count <= len(plan.tile)
    for tile, expert, start, end in list(zip(*plan[:4], strict=True))[: plan.count]:
        own = np.arange(max(start, tile * tile_rows), min(end, (tile + 1) * tile_rows))
        assert (end > start) == (len(own) > 0)
        covered[own] += 1
        assert (expert_of_row[own] == expert).all()
        fetched.append(expert)
    assert (covered == (np.arange(len(covered)) < len(expert_of_row))).all()
    # Tiles that have rows rise without a gap, so that each is written once, whole; experts rise, so that none is
    # fetched twice.
    tiles_in_use = max(1, -(-len(expert_of_row) // tile_rows))
    assert (np.unique(plan.tile[: plan.count]) == np.arange(tiles_in_use)).all()
    assert (np.diff(plan.tile[: plan.count]) >= 0).all() and (np.diff(fetched) >= 0).all()
    assert set(fetched) == set(expert_of_row) or not len(expert_of_row)


def _shapes(dim, hidden, experts=2, **changed):
    shapes = {
        name: (1, experts, *shape)
        for part in ("gate", "up", "down")
        for name, shape in (
            (f"{part}_packed", (dim, hidden // 2) if part == "down" else (hidden, dim // 2)),
            (f"{part}_scale", (dim, hidden // 32) if part == "down" else (hidden, dim // 32)),
        )
    }
    shapes |= changed
    return kernels.Mxfp4Experts(**{name: jax.ShapeDtypeStruct(shape, jnp.uint8) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    "x_shape, dtype, experts, words",
    [
        ((4, 256), jnp.float32, _shapes(256, 256), "not float32"),
        ((0, 256), jnp.bfloat16, _shapes(256, 256), "M > 0"),
        ((4, 256), jnp.bfloat16, _shapes(256, 256, up_scale=(1, 2, 256, 4)), "up_scale is"),
        ((4, 320), jnp.bfloat16, _shapes(320, 256), "D=320"),
        ((4, 256), jnp.bfloat16, _shapes(256, 96), "F=96"),
        ((4, 256), jnp.bfloat16, _shapes(256, 4352), "F=4352"),
    ],
)
def test_moe_experts_tpu_says_why_it_refuses(x_shape, dtype, experts, words):
    assert words in kernels.moe_experts_tpu_refusal(x_shape, dtype, experts)
    with pytest.raises(NotImplementedError, match=words):
        kernels.moe_experts_tpu(jnp.zeros(x_shape, dtype), jnp.zeros(2, jnp.int32), experts, 0, 4.0, 25.0)


def test_moe_experts_tpu_refuses_no_real_shape():
    assert kernels.moe_experts_tpu_refusal((1, 3584), jnp.bfloat16, _shapes(3584, 3072, experts=7)) is None


def _told_bytes(function, *args):
    """What the first kernel that a function calls tells the compiler that it moves."""
    calls = [eqn for eqn in jax.make_jaxpr(function)(*args).eqns if eqn.primitive.name == "pallas_call"]
    calls += [eqn for call in jax.make_jaxpr(function)(*args).eqns for eqn in _inner(call)]
    return calls[0].params["cost_estimate"].bytes_accessed


def _inner(eqn):
    for value in eqn.params.values():
        jaxpr = getattr(value, "jaxpr", value)
        for inner in getattr(jaxpr, "eqns", ()):
            if inner.primitive.name == "pallas_call":
                yield inner
            yield from _inner(inner)


def test_moe_experts_tpu_tells_the_compiler_of_the_experts_that_expected_rows_choose():
    experts = _shapes(256, 512, experts=8)
    of_one = sum(leaf.size for leaf in experts) // 8

    def told(expected_rows):
        def call(x, sizes, experts):
            return kernels.moe_experts_tpu(x, sizes, experts, 0, 4.0, 25.0, expected_rows=expected_rows)

        rows = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32)
        return _told_bytes(call, *rows, experts)

    # 3 rows fall on 8 (1 - (7/8)^3) experts, and a tile of 64 rows is read and written; all rows fall on every expert.
    assert told(3) == round(of_one * 8 * (1 - (7 / 8) ** 3)) + 64 * 256 * (2 + 2)
    assert told(None) == told(512) == pytest.approx(8 * of_one + 512 * 256 * (2 + 2), rel=1e-6)


def test_moe_experts_tpu_computes_more_rows_than_were_expected():
    method = mxfp4_unpack.METHODS[0]
    x, _ = _rows(53)
    sizes = jnp.asarray((17, 0, 23, 13), jnp.int32)
    out = kernels.moe_experts_tpu(
        x, sizes, _experts(), 1, GATE_BETA, LINEAR_BETA, expected_rows=2, method=method, interpret=POISONED
    )
    expected = _plain(x, sizes.tolist(), _experts(), 1)
    assert_close(out, expected, atol=2**-7 * float(jnp.abs(expected).max()), label="out")  # as in the first test
