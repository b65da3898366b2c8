"""Masters: which are trained, what the model sees of them, how they lie on a mesh."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import maxmoe as mm
from maxmoe.ops import mxfp4
from maxmoe.params import abstract_params, count_weights
from maxmoe.planning.placement import abstract_mesh
from maxmoe.training import masters
from maxmoe.training.masters import Trainable, declared_masters, make_masters, master_shardings, pack_masters
from tests.training.smallest import smallest_model

FULL = mm.Transformer(mm.load_config(Path(__file__).parents[2] / "configs/k3_1_pro.py"))


@pytest.fixture(scope="module")
def small():
    model = smallest_model()
    return model, mm.init_params(model)


def _paths(tree):
    return {"/".join(masters.path_names(path)) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


def test_what_was_packed_comes_back_value_for_value(small):
    _, params = small
    again = pack_masters(make_masters(params, Trainable()))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    experts, before = (tree["stacks_0"]["experts_1"] for tree in (again, params))
    for name in ("gate", "up", "down"):
        pairs = ((group[f"{name}_packed"], group[f"{name}_scale"]) for group in (experts, before))
        np.testing.assert_array_equal(*(mxfp4.dequantize(*pair) for pair in pairs))
    np.testing.assert_array_equal(again["lm_head"], params["lm_head"])


def test_what_the_model_sees_is_masters_rounded_to_mxfp4_bit_for_bit(small):
    _, params = small
    whole = make_masters(params, Trainable()).whole()
    moved = jax.tree.map(lambda leaf: leaf + jnp.asarray(0.3, leaf.dtype) * leaf**2, whole)
    seen = pack_masters(masters.MasterWeights(moved, jax.tree.map(lambda _: None, moved)))
    group, master = seen["stacks_0"]["experts_2"], moved["stacks_0"]["experts_2"]["up"]
    packed, scale = mxfp4.quantize(master)
    assert group["up_packed"].tobytes() == packed.tobytes() and group["up_scale"].tobytes() == scale.tobytes()
    # Rounding is idempotent: what is seen, packed once more, is the same bytes.
    again, again_scale = mxfp4.quantize(mxfp4.dequantize(packed, scale, jnp.bfloat16))
    np.testing.assert_array_equal(mxfp4.dequantize(again, again_scale), mxfp4.dequantize(packed, scale))


def test_routers_and_indexers_are_frozen_unless_asked(small):
    _, params = small
    default = make_masters(params, Trainable())
    frozen, trained = _paths(default.frozen), _paths(default.trained)
    assert not frozen & trained and all("router" in path or "indexer" in path for path in frozen)
    assert sum(path.endswith("/router") for path in frozen) == 2 and any("indexer/q_proj" in path for path in frozen)
    asked = make_masters(params, Trainable(router=True, indexer=True))
    assert _paths(asked.frozen) == {path for path in frozen if path.endswith("router_bias")}
    assert jax.tree.structure(asked.whole()) == jax.tree.structure(default.whole())


def test_masters_of_the_full_model_are_all_its_weights():
    declared = declared_masters(FULL)
    leaves = jax.tree.leaves(declared, is_leaf=masters.is_declared)
    assert sum(math.prod(leaf.shape) for leaf in leaves) == count_weights(abstract_params(FULL))


def test_on_1024_devices_no_master_of_size_lies_twice():
    mesh = abstract_mesh({"data": 8, "expert": 32, "tensor": 4})
    shardings, declared = master_shardings(FULL, mesh), declared_masters(FULL)
    kept = whole = 0
    leaves = jax.tree.leaves(declared, is_leaf=masters.is_declared)
    for leaf, sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        part = math.prod(sharding.shard_shape(leaf.shape))
        kept, whole = kept + 1024 * part, whole + math.prod(leaf.shape)
    # Vectors, short convolutions and the decay gates' second matrices are copies on some devices; all else lies once.
    assert whole < kept < 1.005 * whole
    experts = shardings["stacks_1"]["experts_0"]
    assert experts["gate"].spec == PartitionSpec(None, ("expert", "tensor"), None, ("data",))
    assert experts["down"].spec == PartitionSpec(None, ("expert", "tensor"), ("data",), None)
