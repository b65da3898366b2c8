"""Weights far larger than a new model's, so that tokens are told apart clearly."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from maxmoe.params import PACKED, SCALE, abstract_params


def random_weights(model, dtype=None):
    """The parameters of a model: floats of `dtype`, or of the dtypes that are published."""
    rng = np.random.default_rng(0)

    def fill(path, leaf):
        name = path[-1].key
        if name.endswith(PACKED):
            return jnp.asarray(rng.integers(0, 256, leaf.shape, np.uint8))
        if name.endswith(SCALE):
            return jnp.full(leaf.shape, 124, jnp.uint8)  # 2^-3
        center = 1.0 if "norm" in name else 0.0
        return jnp.asarray(center + 0.2 * rng.normal(size=leaf.shape), dtype or leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, nn.unbox(abstract_params(model)))
