"""Latent rows of stacked layers, laid out so that kernels fetch single rows without moving the cache.

A token's row is R latent values, then r that all heads share. A copy on TPU starts only between tiles of memory, and
a tile covers the last two axes of an array: so a row, or a few whole rows, must fill those two axes, with 128 values
on the last. Where the sizes do not allow that, each row lies on a line of its own, and only plain forms read it.
`pallas_kernels/mla_pages_tpu.py` tells which shapes XLA stores without padding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.mla_pages_tpu import GROUP_ROWS, GROUP_SHAPE, LANES, SHARED_DIM


class LatentRows(NamedTuple):
    """The two parts of the rows of L layers, B sequences and S slots."""

    latent: Float[Array, "L B S R/128 128"]  # or [L, B, S, 1, R]
    shared: Float[Array, "L B S/4 2 128"]  # or [L, B, S, 1, r]

    @property
    def num_slots(self) -> int:
        """S."""
        return self.latent.shape[2]

    @property
    def latent_dim(self) -> int:
        """R."""
        return self.latent.shape[3] * self.latent.shape[4]

    @property
    def shared_dim(self) -> int:
        """r."""
        return self.shared.shape[2] * self.shared.shape[3] * self.shared.shape[4] // self.num_slots

    @property
    def is_grouped(self) -> bool:
        """Whether the shared parts of four rows lie together."""
        return self.shared.shape[2] != self.num_slots


def empty_rows(
    num_layers: int, batch: int, num_slots: int, latent_dim: int, shared_dim: int, dtype: jnp.dtype
) -> LatentRows:
    """Rows of zeros: R = latent_dim, r = shared_dim, which may be 0.

    Raises: ValueError for another size below 1.
    """
    sizes = (num_layers, batch, num_slots, latent_dim)
    if min(sizes) < 1 or shared_dim < 0:
        given = f"layers, batch, slots and latent dim are {sizes}, shared dim {shared_dim}"
        raise ValueError(f"{given}: each must be at least 1, shared dim 0")
    latent = (1, latent_dim) if latent_dim % LANES else (latent_dim // LANES, LANES)
    grouped = shared_dim == SHARED_DIM and num_slots % GROUP_ROWS == 0
    shared = (num_slots // GROUP_ROWS, *GROUP_SHAPE) if grouped else (num_slots, 1, shared_dim)
    return LatentRows(
        jnp.zeros((num_layers, batch, num_slots, *latent), dtype), jnp.zeros((num_layers, batch, *shared), dtype)
    )


def write_rows(
    rows: LatentRows, layer: int | Int[Array, ""], slots: Int[Array, "B T"], new: Float[Array, "B T R+r"]
) -> LatentRows:
    """Puts rows into their slots of one layer; in place where the arrays are donated.

    Args:
      slots: Those outside 0..S-1 are dropped. No slot may stand twice in a sequence.
    """
    return _write_rows(rows, layer, jnp.asarray(slots), new.astype(rows.latent.dtype))


# With gradients of its own, because those of a scatter know nothing of slots that stand once. To promise that to the
# scatter would help, too; but then XLA moves it to the SparseCores of a tpu7x and counts the whole cache as traffic.
@jax.custom_vjp
def _write_rows(rows, layer, slots, new):
    batch, slots = jnp.arange(slots.shape[0])[:, None], within_or_behind(slots, rows.num_slots)
    latent, shared = jnp.split(new, [rows.latent_dim], axis=-1)
    latent = latent.reshape(*slots.shape, *rows.latent.shape[3:])
    latent = rows.latent.at[layer, batch, slots].set(latent, mode="drop")
    if not rows.is_grouped:
        return LatentRows(latent, rows.shared.at[layer, batch, slots].set(shared[:, :, None], mode="drop"))
    # Half a line per row: a window that starts inside an axis, which indexing cannot say.
    place = slots % GROUP_ROWS
    starts = jnp.broadcast_arrays(layer, batch, slots // GROUP_ROWS, place // 2, place % 2 * SHARED_DIM)
    starts = jnp.stack([start.astype(jnp.int32) for start in starts], axis=-1)
    half_lines = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2,), inserted_window_dims=(0, 1, 2, 3), scatter_dims_to_operand_dims=(0, 1, 2, 3, 4)
    )
    drop = jax.lax.GatherScatterMode.FILL_OR_DROP
    return LatentRows(latent, jax.lax.scatter(rows.shared, starts, shared, half_lines, mode=drop))


def _write_rows_keep(rows, layer, slots, new):
    return _write_rows(rows, layer, slots, new), (layer, slots)


def _write_rows_back(kept, gradient):
    layer, slots = kept
    within = (slots >= 0) & (slots < gradient.num_slots)
    written = jnp.concatenate(gather_rows(gradient, layer, jnp.where(within, slots, 0)), axis=-1)
    written = jnp.where(within[..., None], written, 0)
    return _write_rows(gradient, layer, slots, jnp.zeros_like(written)), None, None, written


_write_rows.defvjp(_write_rows_keep, _write_rows_back)


def within_or_behind(slots: Int[Array, "B T"], num_slots: int) -> Int[Array, "B T"]:
    """Slots for a scatter that drops what lies behind the end, but counts negative ones from there."""
    return jnp.where((slots >= 0) & (slots < num_slots), slots, num_slots)


def read_rows(rows: LatentRows, layer: int | Int[Array, ""]) -> Float[Array, "B S R+r"]:
    """All rows of one layer, put together: a copy, for attention that reads every row."""
    return jnp.concatenate(read_parts(rows, layer), axis=-1)


def read_parts(rows: LatentRows, layer: int | Int[Array, ""]) -> tuple[Float[Array, "B S R"], Float[Array, "B S r"]]:
    """The two parts of all rows of one layer."""
    latent, shared = (part[layer] for part in rows)
    lead = latent.shape[:2]
    return latent.reshape(*lead, rows.latent_dim), shared.reshape(*lead, rows.shared_dim)


def gather_rows(
    rows: LatentRows, layer: int | Int[Array, ""], slots: Int[Array, "B *n"]
) -> tuple[Float[Array, "B *n R"], Float[Array, "B *n r"]]:
    """The two parts of single rows of one layer, read where they lie.

    Args:
      slots: All within 0..S-1.
    """
    batch = jnp.arange(slots.shape[0]).reshape(-1, *[1] * (slots.ndim - 1))
    latent = rows.latent[layer, batch, slots].reshape(*slots.shape, -1)
    if not rows.is_grouped:
        return latent, rows.shared[layer, batch, slots].reshape(*slots.shape, -1)
    line = rows.shared[layer, batch, slots // GROUP_ROWS, slots % GROUP_ROWS // 2]
    is_late = (slots % 2 == 1)[..., None]
    return latent, jnp.where(is_late, line[..., SHARED_DIM:], line[..., :SHARED_DIM])


def as_pages(rows: LatentRows, layer: int | Int[Array, ""]) -> tuple[Array, Array, Int[Array, "B n"]]:
    """One layer's rows as the paged kernels take them: views of the whole arrays, and which pages are the layer's.

    Returns: Latent pages [L*B*n, page, ...], shared pages [L*B*n, page/4 or page, ...], and the page table. The page is
      the largest power of two that divides S, so that a table is short.
    """
    num_layers, batch, num_slots = rows.latent.shape[:3]
    page_size = num_slots & -num_slots
    per_sequence = num_slots // page_size
    first = (layer * batch + jnp.arange(batch, dtype=jnp.int32)) * per_sequence
    pages = [part.reshape(num_layers * batch * per_sequence, -1, *part.shape[3:]) for part in rows]
    return *pages, (first[:, None] + jnp.arange(per_sequence, dtype=jnp.int32)).astype(jnp.int32)
