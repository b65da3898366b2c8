"""Which rows a program of the sparse attention kernels fetches, on TPU.

The page of every index is looked up with vector gathers in a table in vector memory; the row numbers go to scalar
memory afterwards, from where the copies start. Scalar lookups in a table in scalar memory, one index after the other,
were counted at 6 instruction bundles per row, beside 8 for starting both copies; the vector gathers take one per row.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla_pages_tpu import GROUP_ROWS, GROUP_SHAPE, LANES

QUERIES = 8  # of one program: indices fill the 8 sublanes of a vector register
PARTS = 16  # of a block, on a chip
BLOCK_KEYS = 128  # rows of one block; their scores fill the lanes of a vector register


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetch:
    """Sizes of one program's work: up to 8 queries, each with its own rows, fetched block by block.

    Attributes:
      num_queries: T of the call. A program takes 8 queries of one sequence, or one each of `sequences` where T is 1.
      sequences: At most 8.
      top_k: Indices of a query, a multiple of 128.
      num_slots: Blocks that vector memory holds: one in use, the others on their way.
      has_views: Whether references can be reshaped and bitcast: on a chip and with interpret=True, but not in the
        interpreter that finds races.
      parts: Of a block, whose copies start one part after the other, in straight-line code. The interpreters have one
        part and a loop, as compilers for CPU take long over more.
      table_rows, table_len: Of the page table's window: 8 rows or all, and pages per sequence, a multiple of 128.
    """

    batch: int
    num_queries: int
    sequences: int
    top_k: int
    num_slots: int
    table_rows: int
    table_len: int
    num_pages: int
    page_size: int
    num_heads: int
    chunks: int
    dtype: jnp.dtype
    has_views: bool
    parts: int

    @property
    def queries(self) -> int:
        """Queries of one sequence that a program takes."""
        return min(self.num_queries, QUERIES)

    @property
    def grid(self) -> tuple[int, int]:
        """Programs: over sequences, over queries. Windows that stick out are cut."""
        return pl.cdiv(self.batch, self.sequences), pl.cdiv(self.num_queries, self.queries)

    @property
    def latent_dim(self) -> int:
        """R."""
        return self.chunks * LANES

    def window(self, *tail: int) -> pl.BlockSpec:
        """A program's part of an array [B, T, *tail]."""
        zeros = (0,) * len(tail)
        return pl.BlockSpec((self.sequences, self.queries, *tail), lambda i, j: (i, j, *zeros))

    def table_window(self) -> pl.BlockSpec:
        """A program's part of the page table."""
        return pl.BlockSpec((self.table_rows, self.table_len), lambda i, j: (i * self.sequences // self.table_rows, 0))

    def locate(self, query: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where a program's query stands in its windows: (sequence, query of the sequence)."""
        return (query, 0) if self.num_queries == 1 else (0, query)

    def count(self) -> jax.Array:
        """Queries that this program really has."""
        if self.num_queries == 1:
            return jnp.minimum(self.sequences, self.batch - pl.program_id(0) * self.sequences)
        return jnp.minimum(self.queries, self.num_queries - pl.program_id(1) * self.queries)

    def scratch(self) -> list:
        """Scratch memory: the last `NUM_SCRATCH` fields of `Rows`, in order."""
        lines = (QUERIES, 1, self.top_k + LANES)
        return [
            pltpu.VMEM(lines, jnp.int32),
            pltpu.SMEM(lines, jnp.int32),
            pltpu.VMEM((QUERIES, 1, self.top_k), jnp.int32),
            pltpu.VMEM((self.num_slots, BLOCK_KEYS, self.chunks, LANES), self.dtype),
            pltpu.VMEM((self.num_slots, BLOCK_KEYS, *GROUP_SHAPE), self.dtype),
            pltpu.VMEM((BLOCK_KEYS, LANES), self.dtype),
            pltpu.VMEM((QUERIES, self.num_heads, LANES), self.dtype),
            pltpu.SemaphoreType.DMA((self.num_slots,)),
            pltpu.SemaphoreType.DMA(()),
        ]


def plan_fetch(
    q: jax.Array,
    latent_pages: jax.Array,
    page_table: jax.Array,
    indices: jax.Array,
    *,
    num_slots: int,
    sequences: int,
    interpret: bool | pltpu.InterpretParams | None,
) -> tuple[Fetch, jax.Array, jax.Array]:
    """Sizes for a call, and its page table and indices, padded where their lengths are odd."""
    batch, num_queries, top_k = indices.shape
    indices = jnp.pad(indices, [(0, 0), (0, 0), (0, -top_k % BLOCK_KEYS)], constant_values=-1)
    page_table = jnp.pad(page_table, [(0, 0), (0, -page_table.shape[1] % LANES)])
    fetch = Fetch(
        batch=batch,
        num_queries=num_queries,
        sequences=min(sequences, batch) if num_queries == 1 else 1,
        top_k=indices.shape[-1],
        num_slots=num_slots,
        table_rows=min(batch, QUERIES),
        table_len=page_table.shape[1],
        num_pages=latent_pages.shape[0],
        page_size=latent_pages.shape[1],
        num_heads=q.shape[2],
        chunks=latent_pages.shape[2],
        dtype=latent_pages.dtype,
        has_views=not isinstance(interpret, pltpu.InterpretParams),
        parts=1 if interpret else PARTS,
    )
    return fetch, page_table, indices


def find_rows(
    fetch: Fetch, page_table: jax.Ref, indices: jax.Ref, num_keys: int, numbers: jax.Ref, kinds: jax.Ref
) -> None:
    """Finds the row number of every index.

    An index that names no key gets the row of one of the same query that does: what lies in an unwritten row, NaN
    perhaps, must not meet a weight of zero.

    Args:
      numbers: [8, 1, top_k + 128] row numbers, to be written. The tail gets the count of the query's blocks up to its
        last index that names a key; 1 where none does, so that every query has a last block.
      kinds: [8, 1, top_k] place of each row in its group, or -1 where an index names no key; to be written.
    """
    num_chunks = fetch.top_k // LANES
    lane = lax.broadcasted_iota(jnp.int32, (QUERIES, LANES), 1)

    def survey(i, carry):
        largest, length = carry
        chunk = _eight_queries(fetch, indices, i)
        named = (chunk >= 0) & (chunk < num_keys)
        length = jnp.maximum(length, jnp.where(named, lane + (i * LANES + 1), 0))
        return jnp.maximum(largest, jnp.where(named, chunk, 0)), length

    start = jnp.zeros_like(lane), jnp.ones_like(lane)
    largest, length = lax.fori_loop(0, num_chunks, survey, start)
    substitute = jnp.max(largest, axis=1, keepdims=True)
    blocks = (jnp.max(length, axis=1, keepdims=True) + (BLOCK_KEYS - 1)) // BLOCK_KEYS
    for query in range(QUERIES):
        tail = jnp.broadcast_to(blocks[query : query + 1], (1, LANES))
        numbers[query, :, pl.ds(fetch.top_k, LANES)] = tail
    first = lax.rem(pl.program_id(0) * fetch.sequences, fetch.table_rows)
    shift = fetch.page_size.bit_length() - 1
    used_parts = (jnp.max(largest) >> shift) // LANES + 1  # of the table, 128 pages each
    together = next(n for n in (4, 2, 1) if num_chunks % n == 0)  # gathers take long, but overlap

    def find_chunks(group, _):
        chunks = [_eight_queries(fetch, indices, group * together + i) for i in range(together)]
        named = [(chunk >= 0) & (chunk < num_keys) for chunk in chunks]
        chunks = [jnp.where(ok, chunk, substitute) for ok, chunk in zip(named, chunks, strict=True)]

        def look_up(part, pages):
            table = _eight_tables(fetch, page_table, part, first)
            for i, chunk in enumerate(chunks):
                wanted = chunk >> shift
                here = jnp.take_along_axis(table, wanted % LANES, axis=1, mode="promise_in_bounds")
                pages[i] = jnp.where(wanted // LANES == part, here, pages[i])
            return pages

        pages = lax.fori_loop(0, used_parts, look_up, [jnp.zeros_like(lane)] * together)
        for i in range(together):
            # Copies are not bounds checked, so a page that does not exist must not be asked for.
            page = jnp.clip(pages[i], 0, fetch.num_pages - 1)
            number = (page << shift) | (chunks[i] & (fetch.page_size - 1))
            kind = jnp.where(named[i], number % GROUP_ROWS, -1)
            lanes = pl.ds(pl.multiple_of((group * together + i) * LANES, LANES), LANES)
            for query in range(QUERIES):
                numbers[query, :, lanes] = number[query : query + 1]
                kinds[query, :, lanes] = kind[query : query + 1]

    lax.fori_loop(0, num_chunks // together, find_chunks, None)


def _eight_queries(fetch, indices, i):
    """The i-th 128 indices of the program's queries, one query per sublane; -1 where there is none."""
    lanes = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
    lines = [indices[i, :, lanes] for i in range(fetch.sequences)]  # one sequence, unless each has a single query
    missing = QUERIES - sum(line.shape[0] for line in lines)
    if missing:
        lines.append(jnp.full((missing, LANES), -1, jnp.int32))
    return jnp.concatenate(lines, axis=0) if len(lines) > 1 else lines[0]


def _eight_tables(fetch, page_table, part, first):
    """128 pages of each query's sequence, one sequence per sublane; first is the sequence's place in the window."""
    window = page_table[:, pl.ds(pl.multiple_of(part * LANES, LANES), LANES)]
    if fetch.num_queries > 1:
        sublane = lax.broadcasted_iota(jnp.int32, window.shape, 0)
        line = jnp.sum(jnp.where(sublane == first, window, 0), axis=0, keepdims=True)
        return jnp.broadcast_to(line, (QUERIES, LANES))
    lines = window
    for start in range(fetch.sequences, fetch.table_rows, fetch.sequences):
        turned = jnp.concatenate([window[start:], window[:start]], axis=0)
        lines = jnp.where(first == start, turned, lines)
    missing = QUERIES - fetch.table_rows
    return jnp.concatenate([lines, jnp.zeros((missing, LANES), jnp.int32)], axis=0) if missing else lines
