"""Meshes of devices, and which mesh axes split each axis of a weight, a cache or an activation.

Mesh axes: `data` for batch rows, `seq` for tokens of one sequence, `expert` for experts, `tensor` for heads and
hidden columns. One table each says what lies where:

  weights      heads, vocabulary and FFN columns over `tensor`; experts over `expert`, `seq` and `tensor` together, as
               far as their number divides, and their hidden width over what is left of these axes. Training splits
               what is left whole over all other axes: FSDP.
  activations  batch rows over `data` and `expert`, tokens over `seq`, heads over `tensor`, cache slots over `seq` and
               `tensor`: latent rows have no heads, so that `tensor` would otherwise hold copies of them.

A weight that does not divide is refused. An activation that does not, such as a batch of one, stays whole. A step
that is traced under `jax.set_mesh` runs on that mesh: `current_mesh` is how model code sees it.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from maxmoe import axes
from maxmoe.config import MXFP4_GROUP, ModelConfig, MoEConfig

MESH_AXES = ("data", "seq", "expert", "tensor")

# Logical axis of a weight -> the mesh axis that splits it. Experts: see `split_experts`. Others are not split.
WEIGHT_RULES: Mapping[str, str] = {axes.VOCAB: "tensor", axes.HEADS: "tensor", axes.MLP: "tensor"}
EXPERT_AXES = ("expert", "seq", "tensor")

# Logical axis of an activation -> the mesh axes that split it together, as far as its size divides.
ACTIVATION_RULES: Mapping[str, tuple[str, ...]] = {
    axes.BATCH: ("data", "expert"),
    axes.TOKENS: ("seq",),
    axes.HEADS: ("tensor",),
    axes.VOCAB: ("tensor",),
    axes.SLOTS: ("seq", "tensor"),
    axes.EMBED: ("tensor",),  # only of what training keeps between layers
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


def parse_mesh(text: str, num_devices: int | None = None) -> dict[str, int]:
    """Reads a mesh such as "expert=4,tensor=16"; axes that are not given have size 1.

    Args:
      num_devices: How many the mesh must have; None for any number.
    Raises: ValueError for an unknown axis, a size that is none, or sizes whose product is not the number of devices.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, sep, size = part.strip().partition("=")
        if not sep or name not in MESH_AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"mesh {text!r}: {part.strip()!r} is not AXIS=SIZE, each axis once; axes are {', '.join(MESH_AXES)}, "
                "for example expert=4,tensor=2"
            )
        sizes[name] = int(size)
    count = math.prod(sizes.values())
    if num_devices is not None and count != num_devices:
        raise ValueError(
            f"mesh {text!r} has {count} devices, and there are {num_devices}: the sizes must multiply to {num_devices}"
        )
    return sizes


# ---- Weights --------------------------------------------------------------------------------------------------------


class ExpertSplit(NamedTuple):
    """The mesh axes that split the experts, major first, and those that split each expert's hidden width."""

    expert_axes: tuple[str, ...]
    hidden_axes: tuple[str, ...]


def split_experts(mesh: Mesh | AbstractMesh, config: MoEConfig) -> ExpertSplit:
    """Gives EXPERT_AXES to the experts as far as their number divides, and the others to their hidden width.

    `expert` comes first; of the others those split experts that together split them most. 896 experts are 2^7 x 7: 128
    devices hold 7 each, and more devices share experts' hidden columns, by MXFP4 groups. An axis other than `expert`
    that fits neither holds copies.

    Raises: ValueError if `expert` fits neither, with the sizes that would.
    """
    experts, groups = config.num_experts, config.expert_dim // MXFP4_GROUP
    sizes = {axis: mesh.shape[axis] for axis in EXPERT_AXES if mesh.shape.get(axis, 1) > 1}
    first = [axis for axis in ("expert",) if axis in sizes and experts % sizes[axis] == 0]
    others = [axis for axis in sizes if axis != "expert"]
    choices = [first + list(some) for n in range(len(others) + 1) for some in itertools.combinations(others, n)]
    products = {tuple(some): math.prod(sizes[axis] for axis in some) for some in choices}
    expert_axes = max((some for some in products if experts % products[some] == 0), key=products.__getitem__)
    hidden_axes = []
    for axis, size in sizes.items():
        if axis in expert_axes:
            continue
        if groups % size == 0:
            hidden_axes.append(axis)
            groups //= size
        elif axis == "expert":
            raise ValueError(
                f"mesh axis 'expert' of size {size}: neither {experts} experts nor {groups} groups of their hidden "
                f"width divide by it; sizes that divide the experts: {_divisors(experts)}"
            )
    return ExpertSplit(expert_axes, tuple(hidden_axes))


def fsdp_expert_axes(mesh: Mesh | AbstractMesh, config: MoEConfig) -> tuple[str, ...]:
    """The mesh axes that `split_experts` leaves: training splits the experts' latent width over them, by MXFP4 groups.

    A device can then pack its part of the masters on its own.
    """
    taken = {axis for part in split_experts(mesh, config) for axis in part}
    return _dividing(mesh, taken, config.latent_dim // MXFP4_GROUP)


def _dividing(mesh, taken, size):
    """Mesh axes that are not taken, as many as divide a size together."""
    used = []
    for axis in MESH_AXES:
        length = mesh.shape.get(axis, 1)
        if length > 1 and axis not in taken and size % length == 0:
            used.append(axis)
            size //= length
    return tuple(used)


class ShardingRules:
    """How the weights of a model lie on a mesh.

    Attributes:
      mesh: Of devices, or an abstract one for arithmetic.
      experts: Which axes split the experts.
    """

    def __init__(self, mesh: Mesh | AbstractMesh, config: ModelConfig, *, fsdp: bool = False):
        """Takes the facts that the rules need.

        Args:
          fsdp: For training: the width of the residual stream, or of a latent, is split over all axes that the weight's
            other dimensions leave, as far as it divides, so that no two devices hold the same part of a master weight
            or of an optimizer's state.
        Raises: What `split_experts` raises.
        """
        self.mesh, self.experts, self._fsdp = mesh, split_experts(mesh, config.moe), fsdp
        self._fsdp_experts = fsdp_expert_axes(mesh, config.moe)

    def sharding(self, names: Sequence[str | None], shape: Sequence[int], weight: str) -> NamedSharding:
        """How one weight lies on the mesh.

        Args:
          names: Logical axis of each dimension.
          weight: Its name, for messages.
        Raises: ValueError if a dimension does not divide, with the sizes that would do.
        """
        spec: list[Any] = []
        for name, size in zip(names, shape, strict=True):
            used = self._axes(name)
            count = math.prod(self.mesh.shape[axis] for axis in used)
            if size % count:
                raise ValueError(
                    f"{weight}: axis {name!r} has {size} entries, which {count} devices on mesh axes "
                    f"{' x '.join(used)} cannot share evenly; sizes that divide it: {_divisors(size)}"
                )
            taken = {axis for part in spec if part for axis in part}
            spec.append(used if used and not taken & set(used) else None)
        if self._fsdp:
            spec = self._spread(spec, names, shape)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def _spread(self, spec, names, shape):
        """Gives the axes that a weight leaves to the width of the residual stream, or of a latent."""
        if axes.EXPERT in names:
            spec[names.index(axes.EXPERT_EMBED)] = self._fsdp_experts or None
            return spec
        taken = {axis for part in spec if part for axis in part}
        for name in (axes.EMBED, axes.EXPERT_EMBED, axes.LATENT):
            if name in names:
                dim = names.index(name)
                spec[dim] = _dividing(self.mesh, taken, shape[dim]) or None
                taken |= set(spec[dim] or ())
        return spec

    def _axes(self, name):
        if name == axes.EXPERT:
            return self.experts.expert_axes
        if name == axes.EXPERT_MLP:
            return self.experts.hidden_axes
        axis = WEIGHT_RULES.get(name)
        return (axis,) if self.mesh.shape.get(axis, 1) > 1 else ()


def _divisors(size):
    return ", ".join(str(n) for n in range(1, min(size, 1024) + 1) if size % n == 0)


# ---- Activations ----------------------------------------------------------------------------------------------------


def current_mesh() -> AbstractMesh | None:
    """The mesh that the step being traced runs on; None for a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def activation_axes(mesh: Mesh | AbstractMesh, name: str | None, size: int) -> tuple[str, ...]:
    """The mesh axes that split a logical axis of an activation; those that do not divide its size are left out."""
    used, count = [], 1
    for axis in ACTIVATION_RULES.get(name, ()):
        if (length := mesh.shape.get(axis, 1)) > 1 and size % (count * length) == 0:
            used.append(axis)
            count *= length
    return tuple(used)


def activation_spec(mesh: Mesh | AbstractMesh, names: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """How an activation lies on a mesh, by the logical axis of each dimension."""
    return PartitionSpec(*(activation_axes(mesh, name, size) or None for name, size in zip(names, shape, strict=True)))


def constrain(x: Array, *names: str | None) -> Array:
    """x, laid out on the current mesh by the logical axis of each dimension; on a single device x itself."""
    mesh = current_mesh()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, activation_spec(mesh, names, x.shape)))


def shard_map(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`function` on each device's part of the current mesh. What it closes over must not depend on weights.

    Results that are equal on several devices are not typed as such, hence no check of that.
    """
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)
