"""How layers are grouped into stacks and scanned, and what a cache holds: kinds, shapes, dtypes, bytes."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import maxmoe as mm
from maxmoe.config import load_config
from maxmoe.model.cache import KDACache, MLACache, Spans, cache_bytes, make_cache
from maxmoe.model.stacks import FFN, LayerKind, Mixer, StackPlan, plan_stacks

ROOT = Path(__file__).resolve().parents[2]
TINY = load_config(ROOT / "configs/tiny.py")
KDA_DENSE, KDA_MOE = LayerKind(Mixer.KDA, FFN.DENSE), LayerKind(Mixer.KDA, FFN.MOE)
MLA_DENSE, MLA_MOE = LayerKind(Mixer.MLA, FFN.DENSE), LayerKind(Mixer.MLA, FFN.MOE)


def _tiny(num_layers, full, num_dense=1):
    return dataclasses.replace(
        TINY, num_layers=num_layers, full_attention_layers=tuple(full), num_dense_layers=num_dense
    )


@pytest.mark.parametrize("name", ["k3", "k3_1_pro"])
def test_plan_stacks_of_the_published_depth(name):
    assert plan_stacks(load_config(ROOT / f"configs/{name}.py")) == (
        StackPlan(0, 1, (KDA_DENSE, KDA_MOE, KDA_MOE, MLA_MOE)),
        StackPlan(4, 22, (KDA_MOE, KDA_MOE, KDA_MOE, MLA_MOE)),
        StackPlan(92, 1, (MLA_MOE,)),
    )


@pytest.mark.parametrize(
    ("num_layers", "full", "num_dense", "wanted"),
    [
        (1, (), 1, (StackPlan(0, 1, (KDA_DENSE,)),)),
        (3, (), 0, (StackPlan(0, 1, (KDA_MOE,) * 3),)),
        (3, (0, 1, 2), 0, (StackPlan(0, 3, (MLA_MOE,)),)),
        (3, (0, 1, 2), 2, (StackPlan(0, 2, (MLA_DENSE,)), StackPlan(2, 1, (MLA_MOE,)))),
        (5, (1, 3), 0, (StackPlan(0, 2, (KDA_MOE, MLA_MOE)), StackPlan(4, 1, (KDA_MOE,)))),
    ],
)
def test_plan_stacks_of_odd_models(num_layers, full, num_dense, wanted):
    assert plan_stacks(_tiny(num_layers, full, num_dense)) == wanted


@given(data=st.data(), num_layers=st.integers(1, 40))
def test_plan_stacks_names_every_layer_once_and_in_order(data, num_layers):
    full = sorted(data.draw(st.sets(st.integers(0, num_layers - 1))))
    num_dense = data.draw(st.integers(0, num_layers))
    kinds = []
    for plan in plan_stacks(_tiny(num_layers, full, num_dense)):
        assert plan.first == len(kinds) and plan.count >= 1 and plan.size == len(plan.layers)
        kinds += plan.count * plan.layers
    assert [kind.mixer is Mixer.MLA for kind in kinds] == [layer in full for layer in range(num_layers)]
    assert [kind.ffn is FFN.DENSE for kind in kinds] == [layer < num_dense for layer in range(num_layers)]


def test_scanned_superblocks_equal_unrolled_ones(rearranged):
    """Two superblocks in one stack; a block of residuals begins with the first and inside the second.

    Not bit for bit, for the compiler fuses the body of a loop otherwise: 1e-5 is some roundings of logits of size 2.
    """
    config, folder = rearranged([1, 3, 2, 7], full_attention_layers=(1, 3), num_dense_layers=0, attn_res_block_size=3)
    assert [plan.count for plan in plan_stacks(config)] == [2]
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 20), np.int32)
    model = mm.Transformer(config, False)
    params = mm.load_params(folder, model, dtype="float32")
    wanted = [mm.prefill(model, params, ids, mm.init_cache(model, 2, 20), lengths)[0] for lengths in ([17, 5], [18, 6])]
    model = mm.Transformer(config, True)
    params = mm.load_params(folder, model, dtype="float32")
    first, cache = mm.prefill(model, params, ids, mm.init_cache(model, 2, 20), [17, 5])
    second, cache = mm.decode_step(model, params, ids[np.arange(2), [17, 5]], cache)
    np.testing.assert_allclose([first, second], wanted, rtol=0, atol=1e-5, equal_nan=False)
    leaves = jax.tree.leaves(cache.stacks)
    assert all(np.any(leaf[i, row]) for leaf in leaves for i in (0, 1) for row in (0, 1))


# Caches


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_make_cache_has_an_entry_per_layer_kind_and_keeps_states_in_float32(dtype):
    config = _tiny(9, (3, 7, 8))
    cache = make_cache(config, 2, 10, dtype)
    assert cache.batch_size == 2 and cache.max_len == 10
    assert cache.lengths.dtype == jnp.int32 and cache.lengths.tolist() == [0, 0]
    assert [[type(entry) for entry in stack] for stack in cache.stacks] == [
        [KDACache, KDACache, KDACache, MLACache],
        [KDACache, KDACache, KDACache, MLACache],
        [MLACache],
    ]
    kda, mla = cache.stacks[1][0], cache.stacks[2][0]
    assert (kda.conv.shape, kda.conv.dtype) == ((1, 2, 3, 3, 64), dtype)
    assert (kda.state.shape, kda.state.dtype) == ((1, 2, 4, 16, 16), jnp.float32)
    assert (mla.rows.shape, mla.rows.dtype) == ((1, 2, 10, 32 + 8), dtype)
    assert (mla.index_keys.shape, mla.index_keys.dtype) == ((1, 2, 10, 16), dtype)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(cache))
    assert cache_bytes(config, 2, 10, dtype) == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


def test_cache_without_full_attention_has_no_length_limit():
    assert make_cache(_tiny(3, ()), 1, 5, jnp.float32).max_len is None


@pytest.mark.parametrize(("batch", "max_len"), [(0, 8), (2, 0), (-1, 8)])
def test_make_cache_refuses_sizes_below_one(batch, max_len):
    with pytest.raises(ValueError, match=rf"batch={batch}, max_len={max_len}.*at least 1"):
        make_cache(TINY, batch, max_len, jnp.float32)


def test_cache_bytes_at_full_size():
    """The published model's bytes per token and per sequence, in bfloat16 but for the KDA states."""
    k3, k31 = load_config(ROOT / "configs/k3.py"), load_config(ROOT / "configs/k3_1_pro.py")
    sequence = cache_bytes(k3, 1, 1, jnp.bfloat16) - 24 * 1152 - 4  # 4: its length
    assert sequence == 69 * (96 * 128 * 128 * 4 + 3 * 12_288 * 3 * 2) == 69 * (6_291_456 + 221_184)
    assert cache_bytes(k3, 1, 1_048_576, jnp.bfloat16) == sequence + 4 + 1_048_576 * 27_648
    assert cache_bytes(k31, 1, 1_048_576, jnp.bfloat16) == sequence + 4 + 1_048_576 * (27_648 + 6144)
    assert cache_bytes(k31, 3, 4096, jnp.bfloat16) == 3 * (sequence + 4 + 4096 * (27_648 + 6144))


def test_append_writes_real_tokens_at_their_positions_and_drops_the_rest():
    """Row 0 takes two of three tokens from slot 1 on; row 1 has one slot left; row 2 takes none."""
    start, lengths = jnp.array([1, 4, 2]), jnp.array([2, 3, 0])
    cache = MLACache(rows=jnp.full((2, 3, 5, 2), -1.0), index_keys=jnp.full((2, 3, 5, 1), -1.0))
    rows = jnp.arange(1.0, 19.0).reshape(3, 3, 2)
    new = cache.append(1, Spans(start=start, lengths=lengths), rows, 100 * rows[..., :1])
    wanted = np.full((2, 3, 5, 2), -1.0)
    wanted[1, 0, 1:3] = rows[0, :2]
    wanted[1, 1, 4] = rows[1, 0]
    assert np.array_equal(new.rows, wanted)
    assert np.array_equal(new.index_keys, np.where(wanted[..., :1] < 0, -1.0, 100 * wanted[..., :1]))


def test_spans_positions_and_real_tokens():
    spans = Spans(start=jnp.array([5, 0, 7]), lengths=jnp.array([3, 1, 0]))
    assert spans.positions(4).tolist() == [[5, 6, 7, 7], [0, 0, 0, 0], [6, 6, 6, 6]]
    assert spans.real(4).astype(int).tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert Spans(start=jnp.array([0]), lengths=jnp.array([0])).positions(2).tolist() == [[0, 0]]
