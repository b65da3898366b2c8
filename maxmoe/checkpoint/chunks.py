"""The chunks in which an array is stored, and their checksums.

A checksum is the 64-bit XXH3 of a chunk's bytes in row-major, little-endian order: it finds damage, not forgery.
Source: https://xxhash.com, through the package `xxhash`.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor

import numpy as np
import xxhash

CHUNK_BYTES = 8 * 2**20  # the most that one chunk holds
HEX_DIGITS = 16  # of one checksum

Box = tuple[slice, ...]  # one slice per axis, with start and stop, step 1


def chunk_shape(
    shape: Sequence[int], itemsize: int, split_first: bool = False, whole: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The shape of an array's chunks: the longest axis goes to its next smaller divisor until a chunk is small enough.

    Axes that are split already, between devices or by `split_first`, come first. Orbax picks the same shape when it
    is given `CHUNK_BYTES`, so that a chunk with a checksum is a stored one.

    Args:
      shape: Of what one process writes of the array in one piece: all of it, or one device's shard.
      split_first: Whether each entry of the first axis, such as one expert, has chunks of its own.
      whole: The array's shape, if that is another one.
    """
    chunk = [max(1, size) for size in shape]
    divisors = [_divisors(size) for size in chunk]
    if split_first:
        chunk[0] = 1
    split = [i for i, (size, all_of_it) in enumerate(zip(shape, whole or shape, strict=True)) if size != all_of_it]
    while math.prod(chunk) * itemsize > CHUNK_BYTES:
        axes = [i for i in split if chunk[i] > 1] or range(len(chunk))
        axis = max(axes, key=lambda i: chunk[i])
        chunk[axis] = max(divisor for divisor in divisors[axis] if divisor < chunk[axis])
    return tuple(chunk)


def _divisors(size: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(size) + 1) if size % i == 0]
    return sorted({*small, *(size // i for i in small)})


def grid_shape(shape: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    """Chunks along each axis; a scalar has one chunk, an axis of length 0 none."""
    return tuple(-(-size // step) for size, step in zip(shape, chunk, strict=True))


def whole_chunks(box: Box, shape: Sequence[int], chunk: Sequence[int]) -> Box:
    """The smallest box of whole chunks around `box`."""
    return tuple(
        slice(part.start // step * step, min(size, -(-part.stop // step) * step))
        for part, size, step in zip(box, shape, chunk, strict=True)
    )


def checksums(array: np.ndarray, chunk: Sequence[int], executor: Executor | None = None) -> dict[tuple[int, ...], str]:
    """The checksum of every chunk of an array, by its place in the array's grid of chunks."""
    places = list(itertools.product(*map(range, grid_shape(array.shape, chunk))))
    run = map if executor is None else executor.map
    return dict(zip(places, run(lambda place: checksum(chunk_of(array, place, chunk)), places), strict=True))


def chunk_of(array: np.ndarray, place: Sequence[int], chunk: Sequence[int]) -> np.ndarray:
    """One chunk of an array, as a view."""
    return array[tuple(slice(i * step, (i + 1) * step) for i, step in zip(place, chunk, strict=True))]


def checksum(array: np.ndarray) -> str:
    """The checksum of one chunk, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def places_in(box: Box, chunk: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Places of the chunks in a box of whole chunks."""
    ranges = (range(part.start // step, -(-part.stop // step)) for part, step in zip(box, chunk, strict=True))
    return itertools.product(*ranges)


def parts_of(box: Box, chunk: Sequence[int], itemsize: int, part_bytes: int) -> list[Box]:
    """Cuts a box along borders of chunks into parts of at most `part_bytes`, or one chunk if that is more."""
    size = math.prod(part.stop - part.start for part in box) * itemsize
    for axis, (part, step) in enumerate(zip(box, chunk, strict=True)):
        first, last = part.start // step, -(-part.stop // step)
        if size > part_bytes and last - first > 1:
            middle = (first + last) // 2 * step
            halves = (slice(part.start, middle), slice(middle, part.stop))
            cut = [(*box[:axis], half, *box[axis + 1 :]) for half in halves]
            return [piece for half in cut for piece in parts_of(half, chunk, itemsize, part_bytes)]
    return [box]


def byte_runs(box: Box, shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
    """Offset and length in bytes of what a box takes of a row-major array: as few runs as there are, in its order."""
    whole_from = len(shape)
    while whole_from > 1 and box[whole_from - 1] == slice(0, shape[whole_from - 1]):
        whole_from -= 1
    *lead, part = box[:whole_from] or (slice(0, 1),)
    step = math.prod(shape[whole_from:]) * itemsize
    strides = [math.prod(shape[i + 1 :]) * itemsize for i in range(len(lead))]
    for place in itertools.product(*(range(axis.start, axis.stop) for axis in lead)):
        yield (
            sum(i * stride for i, stride in zip(place, strides, strict=True)) + part.start * step,
            (part.stop - part.start) * step,
        )


def box_of(index: tuple[int | slice, ...], shape: Sequence[int]) -> Box:
    """What an index takes: integers, or slices of step 1, for leading axes. Raises: IndexError."""
    if len(index) > len(shape):
        raise IndexError(f"{len(index)} indices for an array of shape {list(shape)}")
    box = []
    for part, size in zip(index, shape, strict=False):
        start, stop, step = part.indices(size) if isinstance(part, slice) else (part, part + 1, 1)
        if step != 1 or not 0 <= start <= size or stop > size:
            raise IndexError(f"index {part} for an axis of {size}; allowed: 0..{size - 1}, or slices of step 1")
        box.append(slice(start, max(start, stop)))
    return (*box, *(slice(0, size) for size in shape[len(index) :]))


def dropped(index: tuple[int | slice, ...]) -> tuple[int | slice, ...]:
    """Index into what was read of a box: as in NumPy, an integer drops its axis."""
    return tuple(slice(None) if isinstance(part, slice) else 0 for part in index)
