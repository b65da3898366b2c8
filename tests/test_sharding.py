"""Meshes and the rules that split weights over them: what does not divide is refused with what would."""

from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from maxmoe import axes
from maxmoe.config import load_config
from maxmoe.sharding import MESH_AXES, ShardingRules, activation_spec, make_mesh, parse_mesh, split_experts

CONFIG = load_config(Path(__file__).parents[1] / "configs/k3_1_pro.py")


def _mesh(**sizes):
    shape = tuple(sizes.get(name, 1) for name in MESH_AXES)
    return jax.sharding.AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def test_mesh_has_all_axes_in_order():
    mesh = make_mesh({"expert": 1})
    assert dict(mesh.shape) == {"data": 1, "seq": 1, "expert": 1, "tensor": 1}
    assert mesh.axis_types == (AxisType.Auto,) * 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"model": 2}, r"unknown axes \['model'\]; allowed: data, seq, expert, tensor"),
        ({"expert": 0}, "every size must be at least 1"),
        ({"expert": 64, "tensor": 64}, "needs 4096 devices; there are"),
    ],
)
def test_mesh_that_cannot_be_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(sizes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("expert=4,tensor=4", "must multiply to 64"),
        ("expert=4,model=16", "'model=16' is not AXIS=SIZE"),
        ("expert", "is not AXIS=SIZE"),
        ("expert=0", "is not AXIS=SIZE"),
        ("expert=8,expert=8", "each axis once"),
    ],
)
def test_parse_mesh_says_what_is_allowed(text, says):
    with pytest.raises(ValueError, match=says):
        parse_mesh(text, 64)


def test_parse_mesh_reads_axes_in_any_order():
    assert parse_mesh("tensor=16, data=4", 64) == {"tensor": 16, "data": 4}
    assert parse_mesh("seq=3") == {"seq": 3}


@pytest.mark.parametrize(
    ("names", "shape", "spec"),
    [
        ((axes.HEADS, axes.EMBED), (96, 64), PartitionSpec(("tensor",), None)),
        ((axes.EMBED, axes.MLP), (64, 96), PartitionSpec(None, ("tensor",))),
        ((axes.LAYERS, axes.EXPERT, axes.EXPERT_MLP), (3, 896, 64), PartitionSpec(None, ("expert", "tensor"), None)),
        ((axes.NORM,), (7,), PartitionSpec(None)),
    ],
)
def test_rules(names, shape, spec):
    assert ShardingRules(_mesh(expert=4, tensor=2), CONFIG).sharding(names, shape, "w").spec == spec


def test_axes_of_size_one_split_nothing():
    assert ShardingRules(_mesh(expert=4), CONFIG).sharding((axes.VOCAB, axes.EMBED), (5, 7), "w").spec == PartitionSpec(
        None, None
    )


@pytest.mark.parametrize(
    ("size", "count", "divisors"),
    [(96, 64, "1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96"), (163_840, 96, "1, 2, 4, 5, 8, 10, 16"), (5, 4, "1, 5")],
)
def test_what_does_not_divide_is_refused_with_what_would(size, count, divisors):
    with pytest.raises(ValueError, match=rf"layer/q_proj: axis 'heads' has {size} entries, .*: {divisors}"):
        ShardingRules(_mesh(tensor=count), CONFIG).sharding((axes.HEADS,), (size,), "layer/q_proj")


@pytest.mark.parametrize(
    ("sizes", "expert_axes", "hidden_axes"),
    [
        ({"expert": 8, "tensor": 16}, ("expert", "tensor"), ()),  # 7 experts a device
        ({"expert": 32, "tensor": 8}, ("expert",), ("tensor",)),  # 28 experts, an eighth of their hidden width
        ({"data": 2, "seq": 4, "expert": 2}, ("expert", "seq"), ()),
        ({"expert": 128, "seq": 2, "tensor": 16}, ("expert",), ("seq", "tensor")),
        ({"expert": 4, "seq": 2, "tensor": 32}, ("expert", "tensor"), ("seq",)),  # 7 a device, not 112 with 96 columns
        ({"tensor": 5}, (), ()),  # fits neither 896 experts nor 96 groups: copies
        ({"data": 8}, (), ()),
    ],
)
def test_experts_are_split_first_and_their_hidden_width_next(sizes, expert_axes, hidden_axes):
    assert split_experts(_mesh(**sizes), CONFIG.moe) == (expert_axes, hidden_axes)


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"'expert' of size 10: neither 896 experts nor 96 groups .*: 1, 2, 4, 7, 8"):
        ShardingRules(_mesh(expert=10), CONFIG)


def test_fsdp_splits_the_residual_width_over_data():
    names, shape = (axes.MLP, axes.EMBED), (96, 64)
    mesh = _mesh(data=4, tensor=2)
    assert ShardingRules(mesh, CONFIG, fsdp=True).sharding(names, shape, "w").spec == PartitionSpec(
        ("tensor",), ("data",)
    )
    assert ShardingRules(mesh, CONFIG).sharding(names, shape, "w").spec == PartitionSpec(("tensor",), None)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 6, 4), PartitionSpec(("data", "expert"), ("seq",), ("tensor",))),
        ((2, 5, 4), PartitionSpec(("data",), None, ("tensor",))),
        ((1, 1, 3), PartitionSpec(None, None, None)),
    ],
)
def test_activations_that_do_not_divide_stay_whole(shape, spec):
    mesh = _mesh(data=2, expert=4, seq=2, tensor=2)
    assert activation_spec(mesh, (axes.BATCH, axes.TOKENS, axes.HEADS), shape) == spec
