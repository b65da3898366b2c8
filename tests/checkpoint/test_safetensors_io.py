"""Safetensors written and read back: every dtype bit for bit, few files open, whole files or none."""

import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from maxmoe.checkpoint import safetensors_io
from maxmoe.checkpoint.safetensors_io import (
    CheckpointError,
    CheckpointReader,
    numpy_dtype,
)
from maxmoe.checkpoint.safetensors_writer import (
    write_checkpoint,
    write_safetensors,
)

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/tiny_k3"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PLAIN_DTYPES = [
    *("BOOL U8 I8 U16 I16 U32 I32 U64 I64 F16 BF16 F32 F64 C64".split()),
    *("F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ F8_E8M0".split()),
]


def _same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal dtype, shape and bytes: NaNs and signed zeros count too."""
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def _random(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    target = numpy_dtype(dtype)
    num_bytes = int(np.prod(shape)) * target.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "BOOL" else 256, num_bytes, np.uint8)
    return raw.view(target).reshape(shape)


def _file(path: Path, header: object, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def _entry(dtype: str, shape: object, begin: object, end: object) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# Dtypes and round trips


@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (7,), (3, 5), (1, 1, 1, 3)])
def test_read_returns_the_bits_that_were_written(tmp_path, dtype, shape):
    tensor = _random(dtype, shape)
    write_safetensors(tmp_path / SINGLE, {"x": tensor})
    with CheckpointReader(tmp_path) as reader:
        assert reader.tensors["x"].dtype == dtype
        assert reader.tensors["x"].shape == reader.tensors["x"].array_shape == shape
        assert reader.total_bytes == reader.tensors["x"].num_bytes == tensor.nbytes
        assert _same_bits(reader.read("x"), tensor)


def test_read_returns_four_bit_floats_packed_low_nibble_first(tmp_path):
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).reshape(2, 8)
    write_safetensors(tmp_path / SINGLE, {"x": values})
    reader = CheckpointReader(tmp_path)
    info, packed = reader.tensors["x"], reader.read("x")
    assert (info.dtype, info.shape, info.array_shape, info.num_bytes) == ("F4", (2, 8), (2, 4), 8)
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(packed, [[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]])
    codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(2, 8)
    assert _same_bits(codes.view(ml_dtypes.float4_e2m1fn), values)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_write_safetensors_refuses_four_bit_floats_that_do_not_fill_bytes(tmp_path, shape):
    with pytest.raises(ValueError, match=r"'x': shape .* of F4 needs an even last dimension"):
        write_safetensors(tmp_path / SINGLE, {"x": np.zeros(shape, ml_dtypes.float4_e2m1fn)})


@st.composite
def _tensor_dicts(draw):
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), unique=True, max_size=6))
    tensors = {}
    for name in names:
        shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
        tensors[name] = _random(draw(st.sampled_from(PLAIN_DTYPES)), shape, draw(st.integers(0, 2**32 - 1)))
    tensors.pop("__metadata__", None)
    return tensors


@given(tensors=_tensor_dicts(), max_shard_bytes=st.sampled_from([None, 1, 40, 10_000]))
def test_random_tensors_round_trip_bit_for_bit(tmp_path_factory, tensors, max_shard_bytes):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, tensors, max_shard_bytes)
    with CheckpointReader(folder) as reader:
        read = {name: reader.read(name) for name in reader.tensors}
        assert reader.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert _same_bits(read[name], tensor), name
        assert read[name].flags.aligned and not read[name].flags.writeable


# Reading


def test_reader_reads_the_golden_checkpoint():
    with CheckpointReader(GOLDEN) as reader:
        infos = dict(reader.tensors)
        layer = "language_model.model.layers.0.self_attn."
        assert len(infos) == 618
        assert {info.dtype for info in infos.values()} == {"BF16", "F32", "U8"}
        assert (infos[layer + "A_log"].dtype, infos[layer + "A_log"].shape) == ("F32", (128,))
        assert reader.total_bytes == (GOLDEN / SINGLE).stat().st_size - 8 - 82_000
        assert [info.begin for info in infos.values()] == sorted(info.begin for info in infos.values())
        decay = reader.read(layer + "A_log")
        for name, info in infos.items():
            array = reader.read(name)
            assert (array.dtype, array.shape) == (numpy_dtype(info.dtype), info.shape), name
            if info.dtype != "U8":
                assert np.isfinite(array.astype(np.float32)).all(), name
    # The published layout pads A_log to 128 entries with zeros.
    assert np.any(decay) and decay[-1] == 0.0


def test_read_is_a_view_that_outlives_the_reader(tmp_path):
    expected = np.arange(64, dtype=np.int64)
    write_safetensors(tmp_path / SINGLE, {"x": expected})
    reader = CheckpointReader(tmp_path)
    first, second = reader.read("x"), reader.read("x")
    assert np.shares_memory(first, second), "a copy was made"
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
    with pytest.raises(ValueError):
        first.flags.writeable = True
    reader.close()
    del reader, second
    np.testing.assert_array_equal(first, expected)


def test_read_copies_where_the_offset_does_not_suit_the_dtype(tmp_path):
    tensors = {"odd": np.ones(3, np.uint8), "x": np.arange(5.0), "y": np.arange(4, dtype=np.complex64)}
    write_safetensors(tmp_path / SINGLE, tensors)
    reader = CheckpointReader(tmp_path)
    assert reader.tensors["x"].begin % 8 == 3
    for name, tensor in tensors.items():
        array = reader.read(name)
        assert array.flags.aligned and not array.flags.writeable and _same_bits(array, tensor)
    assert not np.shares_memory(reader.read("x"), reader.read("x"))


def test_read_says_what_is_wrong_with_the_request(tmp_path):
    write_safetensors(tmp_path / SINGLE, {"x": np.ones(3)})
    reader = CheckpointReader(tmp_path)
    with pytest.raises(KeyError, match=r"no tensor 'y'.* 1 names"):
        reader.read("y")
    with pytest.raises(TypeError):
        reader.tensors["y"] = None
    reader.close()
    with pytest.raises(ValueError, match="closed; open a new one"):
        reader.read("x")


def test_read_refuses_a_file_that_changed_since_it_was_checked(tmp_path):
    write_safetensors(tmp_path / SINGLE, {"x": np.ones(3)})
    reader = CheckpointReader(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"short")
    with pytest.raises(CheckpointError, match="has changed since"):
        reader.read("x")


def test_read_refuses_booleans_that_are_neither_true_nor_false(tmp_path):
    _file(tmp_path / SINGLE, {"x": _entry("BOOL", [3], 0, 3)}, b"\0\1\2")
    with pytest.raises(CheckpointError, match=r"'x'.*other than 0 and 1"):
        CheckpointReader(tmp_path).read("x")


def test_read_from_several_threads_gives_the_same_values(tmp_path):
    tensors = {f"t{i}": np.full(9, i, np.float32) for i in range(40)}
    write_checkpoint(tmp_path, tensors, max_shard_bytes=36)
    reader = CheckpointReader(tmp_path)
    wrong = []

    def read_all():
        wrong.extend(name for name, tensor in tensors.items() if not _same_bits(reader.read(name), tensor))

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


_MANY_SHARDS = """
import resource, sys
import numpy as np
from maxmoe.checkpoint.safetensors_io import CheckpointReader
resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
with CheckpointReader(sys.argv[1]) as reader:
    assert len({info.file for info in reader.tensors.values()}) == 100
    print(int(sum(reader.read(name).sum() for name in reader.tensors)))
"""


def test_reader_keeps_few_files_open(tmp_path):
    write_checkpoint(tmp_path, {f"t{i}": np.full(3, i, np.int64) for i in range(100)}, max_shard_bytes=24)
    command = [sys.executable, "-c", _MANY_SHARDS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 3 * sum(range(100))


_RESIDENT = """
import resource, sys
from maxmoe.checkpoint.safetensors_io import CheckpointReader
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with CheckpointReader(sys.argv[1]) as reader:
    for name in reader.tensors:
        assert int(reader.read(name).max()) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_reading_all_shards_keeps_a_few_resident(tmp_path):
    shard_bytes, names = 4 << 20, [f"t{i}" for i in range(64)]
    weight_map = {}
    for name in names:
        file = f"model-{name}.safetensors"
        weight_map[name] = file
        _file(tmp_path / file, {name: _entry("U8", [shard_bytes], 0, shard_bytes)})
        with open(tmp_path / file, "r+b") as opened:  # A sparse file: it takes no disk.
            opened.truncate((tmp_path / file).stat().st_size + shard_bytes)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    command = [sys.executable, "-c", _RESIDENT, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    grown = int(done.stdout) * 1024
    # One map more than is kept exists for a moment; the rest is Python's own.
    assert grown < (safetensors_io.MAX_CACHED_MAPS + 4) * shard_bytes, f"{grown:,} bytes for 64 shards"


def test_opening_reads_headers_only(tmp_path):
    """Half a terabyte of weights in sparse files: opening must not depend on their size."""
    num_bytes, weight_map, total_size = 64 << 20, {}, 0
    for shard in range(8):
        file = f"model-{shard + 1:05d}-of-00008.safetensors"
        names = [f"layers.{shard}.experts.{i}.packed" for i in range(1_000)]
        header = {n: _entry("U8", [8192, 8192], i * num_bytes, (i + 1) * num_bytes) for i, n in enumerate(names)}
        _file(tmp_path / file, header)
        with open(tmp_path / file, "r+b") as opened:
            opened.truncate((tmp_path / file).stat().st_size + 1_000 * num_bytes)
        weight_map |= dict.fromkeys(names, file)
        total_size += 1_000 * num_bytes
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}))
    with CheckpointReader(tmp_path) as reader:
        assert len(reader.tensors) == 8_000 and reader.total_bytes == total_size
        assert not reader.read("layers.7.experts.999.packed")[-1].any()


# Writing


def test_write_safetensors_is_deterministic_and_padded(tmp_path):
    tensors = {"b": np.ones(3, np.uint8), "a": np.arange(4.0)}
    for name in ("one", "two"):
        write_safetensors(tmp_path / name, tensors, {"format": "pt"})
    content = (tmp_path / "one").read_bytes()
    assert content == (tmp_path / "two").read_bytes()
    size = int.from_bytes(content[:8], "little")
    assert size % 8 == 0 and len(content) == 8 + size + 3 + 32
    header = json.loads(content[8 : 8 + size])
    assert list(header) == ["__metadata__", "b", "a"] and header["__metadata__"] == {"format": "pt"}
    assert header["a"] == _entry("F64", [4], 3, 35)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_write_safetensors_stores_values_not_memory_layout(tmp_path):
    base = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    tensors = {
        "transposed": base.T,
        "strided": base[:, ::2, ::-1],
        "big_endian": base.astype(">i4"),
        "scalar": np.float32(3),
    }
    write_safetensors(tmp_path / SINGLE, tensors)
    reader = CheckpointReader(tmp_path)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(reader.read(name), tensor)
    assert reader.read("big_endian").dtype == np.int32 and reader.tensors["scalar"].shape == ()


@pytest.mark.parametrize(
    ("tensors", "metadata", "says"),
    [
        (
            {"x": np.zeros(2, ml_dtypes.float8_e4m3)},
            None,
            r"'x' has dtype float8_e4m3, .*allowed: .*float8_e4m3fn",
        ),
        ({"x": np.array(["a"])}, None, r"'x' has dtype <U1"),
        ({"x": np.zeros(2, np.complex128)}, None, r"'x' has dtype complex128"),
        ({"__metadata__": np.zeros(2)}, None, r"cannot be named '__metadata__'"),
        ({3: np.zeros(2)}, None, r"cannot be named 3"),
        ({"x": np.zeros(2)}, {"a": 1}, r"metadata must map strings to strings"),
        ({"\ud800": np.zeros(2)}, None, r"surrogates"),
    ],
)
def test_write_safetensors_refuses_what_the_format_lacks(tmp_path, tensors, metadata, says):
    with pytest.raises(ValueError, match=says):
        write_safetensors(tmp_path / SINGLE, tensors, metadata)
    assert not list(tmp_path.iterdir())


def test_write_safetensors_leaves_the_old_file_when_it_fails(tmp_path):
    class Failing(dict):
        calls = itertools.count()

        def __getitem__(self, name):
            if next(self.calls) == 3:  # the second tensor's bytes, after the first one's are written
                raise RuntimeError("no space")
            return super().__getitem__(name)

    path = tmp_path / SINGLE
    write_safetensors(path, {"x": np.ones(3)})
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="no space"):
        write_safetensors(path, Failing(a=np.ones(2), b=np.ones(2)))
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [SINGLE]


def test_write_safetensors_notices_tensors_that_change_meanwhile(tmp_path):
    class Growing(dict):
        sizes = itertools.count(1)

        def __getitem__(self, name):
            return np.ones(next(self.sizes))

    with pytest.raises(ValueError, match="tensors changed"):
        write_safetensors(tmp_path / SINGLE, Growing(a=None))
    assert not list(tmp_path.iterdir())


def test_write_checkpoint_fills_shards_up_to_the_limit(tmp_path):
    sizes = {"a": 10, "b": 10, "big": 50, "c": 5, "d": 15, "e": 1}
    tensors = {name: np.full(size, 7, np.uint8) for name, size in sizes.items()}
    write_checkpoint(tmp_path, tensors, max_shard_bytes=20)
    index = json.loads((tmp_path / INDEX).read_text())
    shard = {name: int(file.split("-")[1]) for name, file in index["weight_map"].items()}
    assert shard == {"a": 1, "b": 1, "big": 2, "c": 3, "d": 3, "e": 4}
    assert index["metadata"] == {"total_size": 91}
    with CheckpointReader(tmp_path) as reader:
        assert all(_same_bits(reader.read(name), tensor) for name, tensor in tensors.items())


def test_write_checkpoint_without_need_of_shards_is_one_file(tmp_path):
    write_checkpoint(tmp_path / "a", {"x": np.ones(3)})
    write_checkpoint(tmp_path / "b", {"x": np.ones(3)}, max_shard_bytes=1)
    write_checkpoint(tmp_path / "c", {})
    for name in "abc":
        assert [path.name for path in (tmp_path / name).iterdir()] == [SINGLE]


def test_write_checkpoint_refuses_bad_requests(tmp_path):
    with pytest.raises(ValueError, match=r"max_shard_bytes is 0; allowed: .* > 0"):
        write_checkpoint(tmp_path, {"x": np.ones(3)}, max_shard_bytes=0)
    write_checkpoint(tmp_path, {"x": np.ones(3)})
    with pytest.raises(ValueError, match=rf"already holds {SINGLE}; give an empty folder"):
        write_checkpoint(tmp_path, {"x": np.ones(3)})
