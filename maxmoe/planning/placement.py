"""Where weights, caches and tokens of a step lie on a mesh: shapes with their shardings, and no array."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from maxmoe import axes, sharding
from maxmoe.model.cache import Cache, cache_shardings, make_cache
from maxmoe.model.transformer import Transformer
from maxmoe.params import abstract_params
from maxmoe.training.step import Batch


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh of sizes without devices, for arithmetic."""
    shape = tuple(sizes.get(name, 1) for name in sharding.MESH_AXES)
    return AbstractMesh(shape, sharding.MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))


def placed_params(model: Transformer, mesh: Mesh | AbstractMesh) -> Any:
    """Every weight as stored, with its sharding.

    Raises: ValueError if a weight does not divide over the mesh.
    """
    rules = sharding.ShardingRules(mesh, model.config)

    def place(path, box):
        name = "/".join(str(getattr(key, "key", key)) for key in path)
        placed = rules.sharding(box.names, box.value.shape, name)
        return jax.ShapeDtypeStruct(box.value.shape, box.value.dtype, sharding=placed)

    # Weights are the same for every implementation, and a kernel's name is refused where its device is not.
    model = dataclasses.replace(model, implementation=None)
    return jax.tree_util.tree_map_with_path(place, abstract_params(model), is_leaf=_is_boxed)


def _is_boxed(leaf):
    return isinstance(leaf, nn.Partitioned)


def placed_cache(
    model: Transformer, mesh: Mesh | AbstractMesh, batch: int, max_len: int, dtype: Any = jnp.bfloat16
) -> Cache:
    """A cache of `make_cache`, with its shardings."""
    shapes = jax.eval_shape(lambda: make_cache(model.config, batch, max_len, jnp.dtype(dtype)))
    placed = cache_shardings(mesh, shapes)
    return jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), shapes, placed)


def placed_rows(mesh: Mesh | AbstractMesh, *shape: int) -> jax.ShapeDtypeStruct:
    """Int32 values of a step, [B] or [B, T], split as activations are."""
    spec = sharding.activation_spec(mesh, (axes.BATCH, axes.TOKENS)[: len(shape)], shape)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))


def placed_batch(mesh: Mesh | AbstractMesh, batch: int, num_tokens: int) -> Batch:
    """What a training step is given, split as activations are."""
    rows = placed_rows(mesh, batch, num_tokens)
    mask = jax.ShapeDtypeStruct(rows.shape, jnp.bool_, sharding=rows.sharding)
    return Batch(ids=rows, lengths=placed_rows(mesh, batch), mask=mask)


def token_axes(mesh: Mesh | AbstractMesh, batch: int, chunk: int) -> tuple[str, ...]:
    """Mesh axes that split the tokens of a step; devices along the others work on the same ones."""
    by_rows = sharding.activation_axes(mesh, axes.BATCH, batch)
    return by_rows + sharding.activation_axes(mesh, axes.TOKENS, chunk)


def device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
