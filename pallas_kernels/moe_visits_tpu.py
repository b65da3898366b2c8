"""Which expert meets which tile of rows, where rows are sorted by expert: the steps of a grouped kernel on TPU."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Visits(NamedTuple):
    """One expert on one tile each: int32 [V], and how many there are. Entries from the count on mean nothing."""

    tile: jax.Array
    expert: jax.Array
    start: jax.Array  # the expert's rows, start to end; none for such a visit
    end: jax.Array
    count: jax.Array


def plan_visits(group_sizes: jax.Array, num_tiles: int, tile_rows: int) -> Visits:
    """Visits in the order of rows: every expert that has rows and every tile that has some, and no other.

    Where there are no rows at all, one visit, without rows: a grid has to have a step.

    Args:
      group_sizes: int32 [E], rows of each expert; at most num_tiles * tile_rows in all.
    """
    num_experts = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    starts = ends - group_sizes
    first_tile = starts // tile_rows
    tiles = jnp.where(group_sizes > 0, (ends - 1) // tile_rows - first_tile + 1, 0)
    first_tile, tiles = jnp.append(first_tile, 0), jnp.append(tiles, ends[-1] == 0)
    visit_ends = jnp.cumsum(tiles)
    visit = jnp.arange(num_tiles + num_experts, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(visit_ends, visit, side="right"), num_experts).astype(jnp.int32)
    last_used = jnp.max(jnp.where(group_sizes > 0, jnp.arange(num_experts), 0))
    return Visits(
        tile=(first_tile[group] + visit - (visit_ends - tiles)[group]).astype(jnp.int32),
        expert=jnp.minimum(group, last_used).astype(jnp.int32),
        start=jnp.append(starts, 0)[group].astype(jnp.int32),
        end=jnp.append(ends, 0)[group].astype(jnp.int32),
        count=visit_ends[-1].astype(jnp.int32),
    )


def rows_of_visits(by_visit: jax.Array, visits: Visits, num_rows: int) -> jax.Array:
    """[M, F], from [V, tile_rows, F], of what each visit wrote for its own rows; 0 after the last group."""
    bm = by_visit.shape[1]
    visit = jnp.arange(visits.tile.size, dtype=jnp.int32)[:, None]
    row = visits.tile[:, None] * bm + jnp.arange(bm)
    own = (visit < visits.count) & (row >= visits.start[:, None]) & (row < visits.end[:, None])
    visit_of_row = jnp.full(num_rows, -1).at[jnp.where(own, row, num_rows)].set(visit, mode="drop")
    found = by_visit[jnp.maximum(visit_of_row, 0), jnp.arange(num_rows) % bm]
    return jnp.where(visit_of_row[:, None] >= 0, found, 0)
