"""Which program of `kda_chunk_tpu` works on which rows: chunks cut at sequence borders and wanted states."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NOTHING, COMPUTE, CLEAR = 0, 1, 2

_ASKED, _GRID, _START, _TAIL = range(4)  # kinds of border, in their order at one position


class Item(NamedTuple):
    """Rows start..end of the item's chunk; what to do with them, and with the state before and after."""

    start: jax.Array
    end: jax.Array
    mode: jax.Array  # NOTHING, COMPUTE or CLEAR (rows behind the last sequence)
    first: jax.Array  # load the sequence's state before
    emit: jax.Array  # write the state to the item's slot after


def unpack_item(meta: jax.Array) -> Item:
    """The fields of one entry of the last array of `work_list`."""
    return Item(meta & 255, (meta >> 8) & 255, (meta >> 16) & 3, ((meta >> 18) & 1) == 1, ((meta >> 19) & 1) == 1)


def work_list(
    starts: jax.Array | np.ndarray, asked: jax.Array | np.ndarray | None, num_tokens: int, chunk: int
) -> tuple[jax.Array | np.ndarray, ...]:
    """Cuts `num_tokens` rows at multiples of `chunk`, at `starts` [N + 1] and at `asked` [P].

    Every border opens an item that ends at the next border, maybe at once. At one position a wanted state comes
    first, as it belongs to what ends there, and sequences of no tokens follow one another in order.

    Borders that are numpy arrays are worked out while tracing, and cost nothing at run time.

    Returns: int32 arrays of W = ceil(num_tokens / chunk) + N + P + 1 entries: the item's chunk, its sequence, the
      entry of `asked` whose state is written next, and the fields of `Item` packed in one word.
    """
    xp = np if isinstance(starts, np.ndarray) and not isinstance(asked, jax.Array) else jnp
    grid = xp.arange(0, num_tokens, chunk, dtype=xp.int32)
    starts = starts.astype(xp.int32)
    asked = np.zeros(0, np.int32) if asked is None else asked
    borders = [asked, grid, starts[:-1], starts[-1:]]
    position = xp.concatenate(borders)
    kind = xp.concatenate([xp.full(x.shape, i, xp.int32) for i, x in enumerate(borders)])
    order = xp.argsort(position, stable=True)
    start, kind = position[order], kind[order]
    end = xp.concatenate([start[1:], xp.full(1, num_tokens, xp.int32)])

    def count(what):
        return xp.cumsum(kind == what, dtype=xp.int32)

    chunk_of = xp.maximum(count(_GRID) - 1, 0)
    seq_of = xp.maximum(count(_START) - 1, 0)
    first = kind == _START
    behind = count(_TAIL) > 0
    mode = xp.where(start >= end, NOTHING, xp.where(behind, CLEAR, COMPUTE))
    emit = xp.concatenate([kind[1:] == _ASKED, xp.zeros(1, bool)])
    slot = xp.zeros_like(start)
    if asked.shape[0]:
        by_position = xp.argsort(asked, stable=True).astype(xp.int32)
        slot = by_position[xp.minimum(count(_ASKED), asked.shape[0] - 1)]
    meta = (start - chunk_of * chunk) & 255 | ((end - chunk_of * chunk) & 255) << 8 | mode << 16
    meta = meta | first.astype(xp.int32) << 18 | emit.astype(xp.int32) << 19
    return chunk_of, seq_of, slot, meta.astype(xp.int32)
