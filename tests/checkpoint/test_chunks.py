"""The shape of chunks is the one that Orbax stores, whatever the array's shape; a checksum covers one chunk."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from maxmoe.checkpoint import chunks, files
from maxmoe.checkpoint.array_store import save_arrays
from maxmoe.checkpoint.stored_arrays import StoredArrays

SIZES = st.sampled_from([1, 2, 3, 4, 6, 7, 12, 13, 16, 25, 36, 41, 60])
SHAPES = st.lists(SIZES, max_size=4).map(tuple).filter(lambda shape: math.prod(shape) <= 60_000)


def stored_chunks(folder, name: str) -> tuple[int, ...]:
    """The chunk shape in the stored array's own metadata."""
    kvstore = {"driver": "ocdbt", "base": files.kvstore(folder), "path": name.replace("/", ".") + "/"}
    store = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, read=True, open=True).result()
    return tuple(store.chunk_layout.read_chunk.shape or ())


@pytest.mark.parametrize(
    ("shape", "itemsize", "split_first", "expected"),
    [
        ((896, 3072, 1792), 1, True, (1, 3072, 1792)),  # one expert of K3
        ((896, 3072, 112), 1, True, (1, 3072, 112)),  # its scales
        ((12288, 7168), 2, False, (2048, 1792)),  # halved in turn, whichever axis is longer
        ((163840, 7168), 2, False, (2048, 1792)),
        ((7168,), 4, False, (7168,)),
        ((), 4, False, ()),
        ((1, 5), 4, True, (1, 5)),
        ((8_388_593,), 2, False, (1,)),  # a prime number of values: the only smaller divisor is 1
    ],
)
def test_chunk_shape_of_known_weights(shape, itemsize, split_first, expected):
    assert chunks.chunk_shape(shape, itemsize, split_first) == expected


def test_chunk_shape_stored_by_orbax_is_the_same_at_the_real_limit(tmp_path):
    """Weights as wide as K3's. Bytes of zeros: only the shapes matter here."""
    arrays = {
        "experts": np.zeros((2, 3072, 1792), np.uint8),
        "scales": np.zeros((2, 3072, 112), np.uint8),
        "kernel": np.zeros((1536, 7168), ml_dtypes.bfloat16),
    }
    save_arrays(tmp_path / "x", arrays, {}, frozenset({"experts", "scales"}))
    found = {name: info.chunk for name, info in StoredArrays(tmp_path / "x").arrays.items()}
    assert found == {name: stored_chunks(tmp_path / "x", name) for name in arrays}
    assert (found["experts"], found["scales"]) == ((1, 3072, 1792), (1, 3072, 112))
    assert math.prod(found["kernel"]) * 2 <= chunks.CHUNK_BYTES


@settings(max_examples=8)
@given(
    shapes=st.lists(st.tuples(SHAPES, st.sampled_from(["uint8", "bfloat16", "float32"]), st.booleans()), min_size=20),
    limit=st.sampled_from([8, 96, 1024, 4096]),
)
def test_chunk_shape_stored_by_orbax_is_the_same_for_any_shape(tmp_path_factory, shapes, limit):
    folder = tmp_path_factory.mktemp("chunks") / "x"
    arrays, split = {}, set()
    for i, (shape, dtype, split_first) in enumerate(shapes):
        # A few thousand chunks per save are enough, and quick.
        shape = shape if math.prod(shape) < 100 * limit else shape[:2]
        arrays[f"a{i}"] = np.zeros(shape, dtype)
        if split_first and shape:
            split.add(f"a{i}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", limit)
        save_arrays(folder, arrays, {}, frozenset(split))
        for name, info in StoredArrays(folder).arrays.items():
            assert info.chunk == stored_chunks(folder, name), (arrays[name].shape, name in split)
            assert math.prod(info.chunk) * info.dtype.itemsize <= limit
            assert name not in split or info.chunk[0] == 1


@given(shape=st.lists(SIZES, min_size=1, max_size=3), limit=st.integers(4, 400), split_first=st.booleans())
def test_chunk_shape_divides_the_shape(shape, limit, split_first):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", limit)
        chunk = chunks.chunk_shape(shape, 4, split_first)
    assert all(size % step == 0 for size, step in zip(shape, chunk, strict=True))


def test_chunk_shape_splits_axes_that_devices_split_first(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1024)
    assert chunks.chunk_shape((8, 64), 4) == (8, 32)
    assert chunks.chunk_shape((8, 64), 4, whole=(16, 64)) == (4, 64)


@st.composite
def _boxes(draw):
    shape = draw(st.lists(st.integers(1, 12), max_size=3))
    chunk = [draw(st.sampled_from([i for i in range(1, size + 1) if size % i == 0])) for size in shape]
    ends = [sorted((draw(st.integers(0, size - 1)), draw(st.integers(1, size)))) for size in shape]
    return shape, chunk, tuple(slice(start, stop + (start == stop)) for start, stop in ends)


@given(_boxes())
def test_whole_chunks_and_places_in_cover_a_box_and_no_more(case):
    shape, chunk, box = case
    outer = chunks.whole_chunks(box, shape, chunk)
    touched = {
        place
        for place in itertools.product(*map(range, chunks.grid_shape(shape, chunk)))
        if all(
            i * step < part.stop and part.start < (i + 1) * step
            for i, step, part in zip(place, chunk, box, strict=True)
        )
    }
    assert set(chunks.places_in(outer, chunk)) == touched
    for part, size, wide in zip(box, shape, outer, strict=True):
        assert 0 <= wide.start <= part.start and part.stop <= wide.stop <= size


@given(_boxes(), st.integers(1, 300))
def test_parts_of_a_box_are_small_and_touch_each_chunk_once(case, part_bytes):
    shape, chunk, box = case
    count, touched = np.zeros(shape, int), []
    for part in chunks.parts_of(box, chunk, 2, part_bytes):
        count[part] += 1
        places = set(chunks.places_in(chunks.whole_chunks(part, shape, chunk), chunk))
        touched += places
        assert 2 * math.prod(i.stop - i.start for i in part) <= part_bytes or len(places) == 1
    expected = np.zeros(shape, int)
    expected[box] = 1
    np.testing.assert_array_equal(count, expected)
    assert len(touched) == len(set(touched))


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_checksums_are_xxh3_of_each_chunk_in_row_major_order(threads):
    array = np.random.default_rng(0).integers(0, 2**32, (6, 10), np.uint32)
    expected = {
        (i, j): xxhash.xxh3_64_hexdigest(array[3 * i : 3 * i + 3, 5 * j : 5 * j + 5].tobytes())
        for i in range(2)
        for j in range(2)
    }
    if threads:
        with ThreadPoolExecutor(threads) as executor:
            assert chunks.checksums(array, (3, 5), executor) == expected
    assert chunks.checksums(np.asfortranarray(array), (3, 5)) == expected
    assert chunks.checksums(array[0, 0], ()) == {(): xxhash.xxh3_64_hexdigest(array[0, 0].tobytes())}


def test_checksum_depends_on_every_byte():
    array = np.zeros((5, 7), ml_dtypes.bfloat16)
    seen = {chunks.checksum(array)}
    for i in range(array.nbytes):
        other = array.copy()
        other.reshape(-1).view(np.uint8)[i] ^= 1
        seen.add(chunks.checksum(other))
    assert len(seen) == array.nbytes + 1
    assert all(len(text) == chunks.HEX_DIGITS for text in seen)
