"""Runs a function over blocks of queries, so that what it holds per query stays within a budget."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

BUDGET = 2**26  # elements that the blocks' largest intermediate may hold


def map_query_blocks(
    fn: Callable[..., Shaped[Array, "B Q *out"]], elements_per_query: int, *queries: Shaped[Array, "B T *in"]
) -> Shaped[Array, "B T *out"]:
    """Applies fn to consecutive blocks of the arrays' second axis and joins the results.

    Args:
      elements_per_query: What fn's largest intermediate holds per query of the whole batch.
    """
    num_queries = queries[0].shape[1]
    block = max(1, min(num_queries, BUDGET // max(1, elements_per_query)))
    if block == num_queries:
        return fn(*queries)
    pad = -num_queries % block

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2), mode="edge")
        return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :num_queries]

    return jax.tree.map(join, jax.lax.map(lambda blocks: fn(*blocks), tuple(map(split, queries))))
