"""Master weights: what training updates, and what the model's own weights are made from.

A master tree has the shape of the model's tree, but each `StackedExperts` holds floats `gate`, `up` and `down`, which
are rounded to MXFP4 wherever the model uses them. It is kept in two trees of that shape, with None where the other has
the weight: those that training updates, and those that it leaves alone, bit for bit.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from maxmoe.model.transformer import Transformer
from maxmoe.ops import mxfp4
from maxmoe.ops.experts import ExpertMasters
from maxmoe.params import PACKED, SCALE, abstract_params
from maxmoe.sharding import ShardingRules

_EXPERT_NAMES = ExpertMasters._fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainable:
    """Which weights training updates.

    Attributes:
      router: Projections of the experts' routers. A router that moves is not the one that sampled the tokens. The
        correction bias, which selects and does not weigh, has no gradient and never moves.
      indexer: Indexers of full-attention layers. The selection has no gradient: they need a loss of their own.
    """

    router: bool = False
    indexer: bool = False

    def updates(self, path: tuple[str, ...]) -> bool:
        """Whether a weight is updated, by its path in the tree."""
        if path[-1] == "router_bias":
            return False
        if path[-1] == "router":
            return self.router
        return self.indexer or "indexer" not in path


class MasterWeights(NamedTuple):
    """The two parts of a master tree."""

    trained: Any
    frozen: Any

    def whole(self) -> Any:
        """Both parts as one tree."""
        return jax.tree.map(lambda a, b: b if a is None else a, self.trained, self.frozen, is_leaf=_is_none)


class Declared(NamedTuple):
    """A master weight as its module declares it."""

    shape: tuple[int, ...]
    dtype: Any
    names: tuple[str, ...]  # logical axes


def declared_masters(model: Transformer) -> Any:
    """Shapes, dtypes and logical axes of a whole master tree; experts in bfloat16. No array is made."""
    # Weights are the same for every implementation, and a kernel's name is refused where its device is not.
    boxed = abstract_params(dataclasses.replace(model, implementation=None))

    def of_experts(group):
        for name in _EXPERT_NAMES:
            box = group[name + PACKED]
            *lead, width = box.value.shape
            yield name, Declared((*lead, 2 * width), jnp.dtype(jnp.bfloat16), box.names)

    def declared(box):
        return Declared(box.value.shape, box.value.dtype, box.names)

    return _map_groups(boxed, of_experts, declared)


def make_masters(params: Any, trainable: Trainable) -> MasterWeights:
    """Masters from the model's weights. Those of experts take the embedding's dtype, which holds them exactly.

    Args:
      params: What `load_params` or `init_params` give.
    """
    dtype = params["embedding"].dtype

    def of_experts(group):
        for name in _EXPERT_NAMES:
            yield name, mxfp4.dequantize(group[name + PACKED], group[name + SCALE], dtype)

    return split_masters(_map_groups(params, of_experts, lambda leaf: leaf), trainable)


def pack_masters(masters: MasterWeights) -> Any:
    """The model's own weights: what training's forward pass saw, for rollouts, checkpoints and export."""

    def of_experts(group):
        for name in _EXPERT_NAMES:
            packed, scale = mxfp4.quantize(group[name])
            yield name + PACKED, packed
            yield name + SCALE, scale

    return _map_groups(masters.whole(), of_experts, lambda leaf: leaf)


def split_masters(whole: Any, trainable: Trainable, is_leaf: Callable[[Any], bool] | None = None) -> MasterWeights:
    """A whole master tree as the part that is trained and the part that is not."""

    def pick(wanted):
        def of_leaf(path, leaf):
            return leaf if trainable.updates(path_names(path)) == wanted else None

        return jax.tree_util.tree_map_with_path(of_leaf, whole, is_leaf=is_leaf)

    return MasterWeights(pick(True), pick(False))


def expert_masters(group: Mapping[str, Array]) -> ExpertMasters:
    """The masters of one `StackedExperts`."""
    return ExpertMasters(*(group[name] for name in _EXPERT_NAMES))


def is_declared(leaf: Any) -> bool:
    """For tree functions: a weight of `declared_masters` is one leaf."""
    return isinstance(leaf, Declared)


def path_names(path: Any) -> tuple[str, ...]:
    """The keys of a tree path as strings."""
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def master_shardings(model: Transformer, mesh: Mesh | AbstractMesh) -> Any:
    """How a whole master tree lies on a mesh: no two devices hold the same part, as far as sizes divide.

    Raises: ValueError if a weight does not divide over the mesh.
    """
    rules = ShardingRules(mesh, model.config, fsdp=True)

    def place(path, leaf):
        return rules.sharding(leaf.names, leaf.shape, "/".join(path_names(path)))

    return jax.tree_util.tree_map_with_path(place, declared_masters(model), is_leaf=is_declared)


def _is_none(leaf):
    return leaf is None


def _map_groups(tree, of_experts, of_leaf):
    """The tree with each group of expert weights rebuilt by of_experts -> pairs, and of_leaf of everything else."""
    if not isinstance(tree, Mapping):
        return of_leaf(tree)
    return {
        name: dict(of_experts(child)) if name.startswith("experts_") else _map_groups(child, of_experts, of_leaf)
        for name, child in tree.items()
    }
