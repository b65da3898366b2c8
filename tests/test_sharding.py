"""Meshes and the rules that split weights over them: what does not divide is refused with what would."""

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from maxmoe import axes
from maxmoe.sharding import MESH_AXES, make_mesh, weight_sharding


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
    ("names", "shape", "spec"),
    [
        ((axes.HEADS, axes.EMBED), (96, 64), PartitionSpec(("tensor",), None)),
        ((axes.EMBED, axes.MLP), (64, 96), PartitionSpec(None, ("tensor",))),
        ((axes.LAYERS, axes.EXPERT, axes.EXPERT_MLP), (3, 896, 64), PartitionSpec(None, ("expert", "tensor"), None)),
        ((axes.NORM,), (7,), PartitionSpec(None)),
    ],
)
def test_rules(names, shape, spec):
    assert weight_sharding(_mesh(expert=4, tensor=2), names, shape, "w").spec == spec


def test_axes_of_size_one_split_nothing():
    assert weight_sharding(_mesh(expert=4), (axes.VOCAB, axes.EMBED), (5, 7), "w").spec == PartitionSpec(None, None)


@pytest.mark.parametrize(
    ("size", "count", "divisors"),
    [(96, 64, "1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96"), (163_840, 96, "1, 2, 4, 5, 8, 10, 16"), (5, 4, "1, 5")],
)
def test_what_does_not_divide_is_refused_with_what_would(size, count, divisors):
    with pytest.raises(ValueError, match=rf"layer/q_proj: axis 'heads' has {size} entries, .*: {divisors}"):
        weight_sharding(_mesh(tensor=count), (axes.HEADS,), (size,), "layer/q_proj")


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(
        ValueError, match="axis 'expert' has 896 entries, which 48 devices on mesh axes expert x tensor"
    ):
        weight_sharding(_mesh(expert=16, tensor=3), (axes.EXPERT,), (896,), "gate_packed")
