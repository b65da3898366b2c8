"""Weights, declared once: shape, dtype, logical axes and initial values of a weight stand on adjacent lines.

Modules call `declare`; abstract trees, counts and bytes all come from tracing the module, without an array.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxmoe.ops import mxfp4

Init = Callable[[jax.Array, Sequence[int], Any], Array]
INIT_STD = 0.02  # the published initializer_range

normal: Init = nn.initializers.normal(INIT_STD)
ones: Init = nn.initializers.ones
zeros: Init = nn.initializers.zeros

# A name's ending tells how many weights a stored element stands for, where that is not one.
PACKED, SCALE = "_packed", "_scale"


def declare(module: nn.Module, name: str, shape: Sequence[int], dtype: Any, axes: Sequence[str], init: Init) -> Array:
    """Declares one weight of a module and returns its value.

    Args:
      dtype: What the published checkpoint stores and `init` makes; loaded values may have been cast.
      axes: One logical axis name of `maxmoe.axes` per dimension.
    """
    if len(axes) != len(shape):
        raise ValueError(f"weight {name!r}: shape {tuple(shape)} needs one axis name per dimension, got {axes}")
    return module.param(name, nn.with_logical_partitioning(init, tuple(axes)), tuple(shape), dtype)


_MXFP4_SCALE_BYTE = 127 + round(math.log2(INIT_STD / 1.28))  # spreads normal values over most of the codes


def mxfp4_codes(key: jax.Array, shape: Sequence[int], dtype: Any) -> Array:
    """Packed codes of normal values under the constant scale of `mxfp4_scales`."""
    values = INIT_STD * jax.random.normal(key, (*shape[:-1], 2 * shape[-1]))
    scale = jnp.full((*shape[:-1], values.shape[-1] // mxfp4.GROUP), _MXFP4_SCALE_BYTE, jnp.uint8)
    return mxfp4.encode(values, scale).astype(dtype)


def mxfp4_scales(key: jax.Array, shape: Sequence[int], dtype: Any) -> Array:
    """The scale byte under which `mxfp4_codes` are normal with the initial standard deviation."""
    return jnp.full(shape, _MXFP4_SCALE_BYTE, dtype)


def count_weights(tree: Any) -> int:
    """Weights in a parameter tree, arrays or shapes alike: a packed byte is two, a shared scale is none."""
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(nn.unbox(tree)):
        name = path[-1].key
        total += math.prod(leaf.shape) * (2 if name.endswith(PACKED) else 0 if name.endswith(SCALE) else 1)
    return total


def count_bytes(tree: Any) -> int:
    """Bytes of a parameter tree as stored."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(nn.unbox(tree)))


@functools.lru_cache(maxsize=16)
def abstract_params(model: nn.Module) -> Any:
    """Shapes and dtypes of every weight, boxed with its logical axes; no array is made. Do not change the tree."""
    one_token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)), one_token)["params"]


def init_params(model: nn.Module, seed: int = 0) -> Any:
    """Random weights in the published dtypes, for training from scratch and for speed figures."""
    one_token = jnp.zeros((1, 1), jnp.int32)
    return nn.unbox(jax.jit(model.init)(jax.random.key(seed), one_token)["params"])
