"""Latent cache rows on their way from paged memory, by index, on TPU: what the sparse attention kernels share.

One asynchronous copy moves one row's latent part, and another its shared part (`mla_pages_tpu` describes the layout).
Up to three blocks of 128 rows are on their way while a fourth is in use.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.in_hbm_tpu import in_hbm
from pallas_kernels.mla_fetch_tpu import BLOCK_KEYS, QUERIES, Fetch, find_rows
from pallas_kernels.mla_pages_tpu import GROUP_ROWS, GROUP_SHAPE, LANES, SHARED_DIM

NUM_SCRATCH = 9  # references that `Fetch.scratch` makes
HIGH_HALF = -(1 << 16)


def call_kernel(
    kernel: Callable[..., None],
    fetch: Fetch,
    pages: tuple[jax.Array, jax.Array],
    operands: list[jax.Array],
    *,
    out_specs: list[pl.BlockSpec],
    out_shape: list[jax.ShapeDtypeStruct],
    scratch_shapes: list,
    multiplications: int,
    expected_keys: int,
    interpret: bool | pltpu.InterpretParams | None,
) -> list[jax.Array]:
    """Runs a kernel that fetches rows: kernel(latent_pages, shared_pages, *operands, *outputs, *scratch).

    Args:
      pages: Latent and shared pages.
      operands: The page table, then arrays [B, T, ...], of which each program gets its window.
      scratch_shapes: What the kernel needs beyond `Fetch.scratch`, which comes first.
      multiplications: For each pair of a head and a fetched row.
      expected_keys: Indices of a query that name a key, as a rule: for what the compiler is told of costs.
    """
    small = sum(x.size * x.dtype.itemsize for x in (*operands, *out_shape))
    rows = fetch.batch * fetch.num_queries * min(fetch.top_k, -(-expected_keys // BLOCK_KEYS) * BLOCK_KEYS)
    row_values = fetch.latent_dim + GROUP_SHAPE[0] * LANES  # a row's shared part comes with its neighbours
    in_place = pl.BlockSpec(memory_space=pl.ANY)
    windows = [fetch.window(*operand.shape[2:]) for operand in operands[1:]]
    return pl.pallas_call(
        kernel,
        grid=fetch.grid,
        in_specs=[in_place, in_place, fetch.table_window(), *windows],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[*fetch.scratch(), *scratch_shapes],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            disable_bounds_checks=True,  # they cost as much as starting a copy; `Rows.prepare` keeps rows in bounds
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * multiplications * rows * fetch.num_heads,
            bytes_accessed=rows * row_values * fetch.dtype.itemsize + small,
            transcendentals=rows * fetch.num_heads,
        ),
        interpret=interpret or False,
    )(*(in_hbm(part.reshape(-1, *part.shape[2:])) for part in pages), *operands)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a program's queries on their way into vector memory.

    Attributes:
      numbers, numbers_smem: [8, 1, top_k + 128] row number of every index; the tail holds the query's block count.
      kinds: [8, 1, top_k] place of each row in its group, or -1 where an index names no key.
      latent, shared: [num_slots, 128, ...] fetched rows.
      own: [128, 128] shared parts of the block in use, without their neighbours.
      q_twice: [8, H, 128] shared parts of the queries, twice, as a row's shared part is in either half of the lanes.
    """

    fetch: Fetch
    latent_pages: jax.Ref
    shared_pages: jax.Ref
    numbers: jax.Ref
    numbers_smem: jax.Ref
    kinds: jax.Ref
    latent: jax.Ref
    shared: jax.Ref
    own: jax.Ref
    q_twice: jax.Ref
    arrived: jax.Ref
    sent: jax.Ref

    def prepare(self, page_table: jax.Ref, indices: jax.Ref, q_shared: jax.Ref, num_keys: int) -> None:
        """Finds the row number of every index and sends them to scalar memory; fills `q_twice`."""
        fetch = self.fetch
        find_rows(fetch, page_table, indices, num_keys, self.numbers, self.kinds)
        copy = pltpu.make_async_copy(self.numbers, self.numbers_smem, self.sent)
        copy.start()

        def double(query, _):
            line = q_shared[fetch.locate(query)]
            self.q_twice[query] = jnp.concatenate([line, line], axis=1)

        lax.fori_loop(0, fetch.count(), double, None)
        copy.wait()

    def num_blocks(self, query: jax.Array) -> jax.Array:
        """Blocks up to the last index of a query that names a key; 1 where none does."""
        return self.numbers_smem[query, 0, self.fetch.top_k]

    def start(self, query: jax.Array, block: jax.Array, slot: jax.Array, part: int) -> None:
        """Starts the copies of one of the parts of a block into a slot."""
        num_rows = BLOCK_KEYS // self.fetch.parts
        first = pl.multiple_of(block * BLOCK_KEYS, BLOCK_KEYS) + part * num_rows
        # Addressing the numbers from here, not from the start of the array, saves an instruction per row.
        numbers = self.numbers_smem.at[query, 0, pl.ds(first, num_rows)]
        latent = self.latent.at[slot, pl.ds(part * num_rows, num_rows)]
        shared = self.shared.at[slot, pl.ds(part * num_rows, num_rows)]
        arrived = self.arrived.at[slot]

        def start_row(row, _):
            number = numbers[row]
            pltpu.make_async_copy(self.latent_pages.at[number], latent.at[row], arrived).start()
            group = lax.shift_right_logical(number, 2)
            pltpu.make_async_copy(self.shared_pages.at[group], shared.at[row], arrived).start()

        lax.fori_loop(0, num_rows, start_row, None, unroll=num_rows if self.fetch.parts > 1 else 1)

    def wait(self, slot: jax.Array) -> None:
        """Waits until a slot holds its block; one wait for all its copies, as a semaphore counts bytes."""
        for buffer in (self.latent, self.shared):
            pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], self.arrived.at[slot]).wait()

    def for_each_block(self, compute: Callable[..., Iterator[None]], finish: Callable[[jax.Array], None]) -> jax.Array:
        """Calls compute(query, block, slot, step) for each block, and finish(query) after the last one of a query.

        Each computation is accompanied by the copies of the block that comes `num_slots - 1` steps later. Where compute
        yields, which it may do any number of times, some of them start; the rest follow it. Scalar units work on that
        while vector units compute. Instructions that touch memory keep their order, so the two are interleaved here.

        Returns: The number of blocks.
        """
        num_slots, count = self.fetch.num_slots, self.fetch.count()
        total = lax.fori_loop(0, count, lambda query, sum: sum + self.num_blocks(query), 0)

        def following(query, block):
            is_last = block + 1 == self.num_blocks(jnp.minimum(query, QUERIES - 1))
            return jnp.where(is_last, query + 1, query), jnp.where(is_last, 0, block + 1)

        def launch(step, place):
            for part in range(self.fetch.parts):
                self.start(*place, lax.rem(step, num_slots), part)
            return following(*place)

        def leave(place):
            after = following(*place)
            pl.when(after[1] == 0)(lambda: finish(place[0]))
            return after

        def launch_and_use(step, carry):
            place, ahead = carry
            self.wait(lax.rem(step, num_slots))
            parts = range(self.fetch.parts)
            for _, part in itertools.zip_longest(compute(*place, lax.rem(step, num_slots), step), parts):
                if part is not None:
                    self.start(*ahead, lax.rem(step + num_slots - 1, num_slots), part)
            return leave(place), following(*ahead)

        def use(step, place):
            self.wait(lax.rem(step, num_slots))
            for _ in compute(*place, lax.rem(step, num_slots), step):
                pass
            return leave(place)

        first = (jnp.int32(0), jnp.int32(0))
        ahead = lax.fori_loop(0, jnp.minimum(num_slots - 1, total), launch, first)
        both = jnp.maximum(total - (num_slots - 1), 0)
        place, _ = lax.fori_loop(0, both, launch_and_use, (first, ahead))
        lax.fori_loop(both, total, use, place)
        return total

    def latent_line(self, slot: jax.Array, i: int) -> jax.Array:
        """Values 128 i to 128 i + 127 of a slot's latent parts, [128, 128]."""
        n = self.fetch.chunks
        # A value of [128, n, 128] would have to be rearranged; loads with a stride arrive as they are needed.
        if not self.fetch.has_views:
            return self.latent[slot][:, i]
        if self.latent.dtype == jnp.float32:
            return _flat(self.latent)[slot, pl.ds(i, BLOCK_KEYS, stride=n), :]
        pair = _flat(self.latent.bitcast(jnp.int32))[slot, pl.ds(i // 2, BLOCK_KEYS, stride=n // 2), :]
        return _rounded(pair & HIGH_HALF if i % 2 else pair << 16)

    def keep_own_shared(self, slot: jax.Array, kind: jax.Array) -> None:
        """Puts the shared parts of a slot into `own`: each in one half of the lanes, with zeros in the other half.

        Its neighbours in the group, which the copy brought along, are cleared, as they may hold anything, NaN included.
        """
        down = jnp.broadcast_to(kind, (BLOCK_KEYS, LANES)).T
        is_late = down >= GROUP_ROWS // 2
        half = lax.broadcasted_iota(jnp.int32, down.shape, 1) // SHARED_DIM
        is_own = half == jnp.where(is_late, down - GROUP_ROWS // 2, down)
        if not self.fetch.has_views:
            early, late = self.shared[slot][:, 0], self.shared[slot][:, 1]
        elif self.shared.dtype == jnp.float32:
            early, late = (_flat(self.shared)[slot, pl.ds(i, BLOCK_KEYS, stride=2), :] for i in range(2))
        else:
            pair = _flat(self.shared.bitcast(jnp.int32))[slot]
            self.own[...] = _rounded(jnp.where(is_own, jnp.where(is_late, pair & HIGH_HALF, pair << 16), 0))
            return
        self.own[...] = jnp.where(is_own, jnp.where(is_late, late, early), 0)

    def scores(self, q: jax.Ref, query: jax.Array, block: jax.Array, slot: jax.Array) -> Iterator[None]:
        """Products of a query with the rows of its block, [H, 128], not scaled; and their kinds, [1, 128].

        A part of a computation (see `for_each_block`), so call it as `scores, kind = yield from rows.scores(...)`.
        """
        kind = self.kinds[query, :, pl.ds(pl.multiple_of(block * BLOCK_KEYS, BLOCK_KEYS), BLOCK_KEYS)]
        self.keep_own_shared(slot, kind)
        yield
        out = dot(self.q_twice[query], self.own[...], "hr,kr->hk")  # last, it would take more registers than there are
        yield
        for i in range(self.fetch.chunks):
            line = q[(*self.fetch.locate(query), slice(None), pl.ds(i * LANES, LANES))]
            out += dot(line, self.latent_line(slot, i), "hr,kr->hk")
            yield
        return out, kind


def dot(left: jax.Array, right: jax.Array, formula: str) -> jax.Array:
    """Product of matrices in float32: "hr,kr->hk", "hk,kr->hr" or "hk,hr->kr"."""
    inputs, _ = formula.split("->")
    contracted = tuple(part.index((set(inputs[:2]) & set(inputs[3:])).pop()) for part in inputs.split(","))
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(left, right, dims, precision=precision, preferred_element_type=jnp.float32)


def _flat(buffer):
    """A view of a buffer [num_slots, rows, n, 128] with one line per row and n."""
    num_slots, num_rows, n, lanes = buffer.shape
    return buffer.reshape(num_slots, num_rows * n, lanes)


def _rounded(bits):
    """The bfloat16 that stands in the upper half of each word, whose lower half is zero."""
    return lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)
