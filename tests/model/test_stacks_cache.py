"""How layers are grouped into stacks and scanned, and what a cache holds: kinds, shapes, dtypes, bytes."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import maxmoe as mm
from maxmoe.config import load_config
from maxmoe.model.cache import (
    Cache,
    KDACache,
    MLACache,
    Spans,
    cache_bytes,
    cache_shardings,
    from_plain,
    make_cache,
    to_plain,
)
from maxmoe.model.stacks import FFN, LayerKind, Mixer, StackPlan, plan_stacks
from maxmoe.ops.latent_cache import empty_rows, read_rows
from maxmoe.sharding import MESH_AXES

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
    assert (kda.conv.shape, kda.conv.dtype) == ((1, 2, 3, 3, 4, 16), dtype)
    assert (kda.state.shape, kda.state.dtype) == ((1, 2, 4, 16, 16), jnp.float32)
    assert (mla.rows.latent.shape, mla.rows.latent.dtype) == ((1, 2, 10, 1, 32), dtype)
    assert (mla.rows.shared.shape, mla.rows.shared.dtype) == ((1, 2, 10, 1, 8), dtype)
    assert (mla.index_keys.shape, mla.index_keys.dtype) == ((1, 2, 16, 10), dtype)
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


@pytest.mark.parametrize(("rank", "shared_dim", "num_slots"), [(32, 8, 10), (128, 64, 12), (256, 64, 10)])
def test_plain_caches_hold_one_row_per_token_and_come_back_as_they_were(rank, shared_dim, num_slots):
    """With the layout that fits any sizes, and with those for rows of whole lines."""
    rng = np.random.default_rng(0)
    rows = empty_rows(2, 3, num_slots, rank, shared_dim, jnp.float32)
    filled = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), rows)
    keys = jnp.asarray(rng.normal(size=(2, 3, 16, num_slots)), jnp.float32)
    cache = Cache(lengths=jnp.zeros(3, jnp.int32), stacks=((MLACache(rows=filled, index_keys=keys),),))
    plain = to_plain(cache)
    entry = plain.stacks[0][0]
    for layer in (0, 1):
        assert np.array_equal(entry.rows[layer], read_rows(filled, layer))
    assert np.array_equal(entry.index_keys[1, 2, 5], keys[1, 2, :, 5])
    back = from_plain(plain, rank)
    assert jax.tree.structure(back) == jax.tree.structure(cache)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(cache), strict=True))


def test_slots_of_real_tokens_are_their_positions_and_padding_has_none():
    spans = Spans(start=jnp.array([1, 4, 2]), lengths=jnp.array([2, 3, 0]))
    assert spans.slots(3).tolist() == [[1, 2, -1], [4, 5, 6], [-1, -1, -1]]


@pytest.mark.parametrize(
    ("sizes", "batch", "slots", "heads"),
    [
        ({"expert": 4, "tensor": 2}, ("expert",), ("tensor",), ("tensor",)),
        ({"data": 2, "seq": 4}, ("data",), ("seq",), None),
        ({"data": 2, "seq": 2, "tensor": 3}, ("data",), ("seq",), None),  # 3 divides neither 4 heads nor 128 slots
        ({"expert": 3}, None, None, None),  # a batch that does not divide stays whole
    ],
)
def test_cache_shardings(sizes, batch, slots, heads):
    shape = tuple(sizes.get(name, 1) for name in MESH_AXES)
    mesh = jax.sharding.AbstractMesh(shape, MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(MESH_AXES))
    found = cache_shardings(mesh, jax.eval_shape(lambda: make_cache(TINY, 4, 128, jnp.float32)))
    kda, mla = found.stacks[0][0], found.stacks[0][-1]
    assert found.lengths.spec == PartitionSpec()
    assert kda.state.spec == PartitionSpec(None, batch, heads, None, None)
    assert kda.conv.spec == PartitionSpec(None, batch, None, None, heads, None)
    assert mla.rows.latent.spec == mla.rows.shared.spec == PartitionSpec(None, batch, slots)
    assert mla.index_keys.spec == PartitionSpec(None, batch, None, slots)


def test_spans_positions_and_real_tokens():
    spans = Spans(start=jnp.array([5, 0, 7]), lengths=jnp.array([3, 1, 0]))
    assert spans.positions(4).tolist() == [[5, 6, 7, 7], [0, 0, 0, 0], [6, 6, 6, 6]]
    assert spans.real(4).astype(int).tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert Spans(start=jnp.array([0]), lengths=jnp.array([0])).positions(2).tolist() == [[0, 0]]
