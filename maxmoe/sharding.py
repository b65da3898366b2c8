"""Meshes of devices, and which mesh axis each logical axis of a weight is split over.

Mesh axes: `data` for batch rows, `seq` for tokens of one sequence, `expert` for experts, `tensor` for heads and
hidden columns.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxmoe import axes

MESH_AXES = ("data", "seq", "expert", "tensor")

# Logical axis -> the mesh axes that split it together. An axis that is not here is not split.
RULES: Mapping[str, tuple[str, ...]] = {
    axes.VOCAB: ("tensor",),
    axes.HEADS: ("tensor",),
    axes.MLP: ("tensor",),
    axes.EXPERT: ("expert", "tensor"),
}


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the given axes, e.g. {"expert": 4, "tensor": 2}; axes that are not given have size 1.

    Args:
      devices: As many as the product of the sizes; None takes the first of `jax.devices()`.
    Raises: ValueError for an unknown axis, a size below 1, or too few devices.
    """
    unknown = [name for name in sizes if name not in MESH_AXES]
    if unknown:
        raise ValueError(f"make_mesh: unknown axes {unknown}; allowed: {', '.join(MESH_AXES)}")
    shape = tuple(sizes.get(name, 1) for name in MESH_AXES)
    if min(shape) < 1:
        raise ValueError(f"make_mesh({dict(sizes)}): every size must be at least 1")
    devices = jax.devices() if devices is None else list(devices)
    count = math.prod(shape)
    if len(devices) < count:
        raise ValueError(f"make_mesh({dict(sizes)}) needs {count} devices; there are {len(devices)}")
    return Mesh(np.asarray(devices[:count]).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def weight_sharding(mesh: Mesh, names: Sequence[str | None], shape: Sequence[int], weight: str) -> NamedSharding:
    """How a weight lies on a mesh.

    Args:
      names: Logical axis of each dimension.
      weight: Its name, for messages.
    Raises: ValueError if a dimension does not divide, with the sizes that would do.
    """
    spec: list[tuple[str, ...] | None] = []
    for name, size in zip(names, shape, strict=True):
        used = tuple(axis for axis in RULES.get(name, ()) if mesh.shape.get(axis, 1) > 1)
        count = math.prod(mesh.shape[axis] for axis in used)
        if size % count:
            fitting = [n for n in range(1, min(size, 1024) + 1) if size % n == 0]
            raise ValueError(
                f"{weight}: axis {name!r} has {size} entries, which {count} devices on mesh axes {' x '.join(used)} "
                f"cannot share evenly; sizes that divide it: {', '.join(map(str, fitting))}"
            )
        taken = {axis for part in spec if part for axis in part}
        spec.append(used if used and not taken & set(used) else None)
    return NamedSharding(mesh, PartitionSpec(*spec))
