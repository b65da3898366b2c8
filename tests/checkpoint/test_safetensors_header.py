"""Damaged checkpoints: every kind of damage is reported by name, and all of it in one error."""

import json
import pickle
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from maxmoe.checkpoint.safetensors_header import MAX_SHOWN_PER_KIND
from maxmoe.checkpoint.safetensors_io import (
    CheckpointError,
    CheckpointReader,
    numpy_dtype,
)
from maxmoe.checkpoint.safetensors_writer import (
    write_checkpoint,
    write_safetensors,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def _file(path: Path, header: object, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def _entry(dtype: str, shape: object, begin: object, end: object) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _problems(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as raised:
        CheckpointReader(folder)
    error = raised.value
    assert isinstance(error, ValueError) and str(folder) in str(error)
    return error.problems


def _three_shards(folder: Path) -> dict[str, np.ndarray]:
    tensors = {f"layer.{i}.weight": np.full((5, 3), i, np.float32) for i in range(3)}
    write_checkpoint(folder, tensors, max_shard_bytes=60)
    return tensors


def _edit_index(folder: Path, **changes: object) -> None:
    path = folder / INDEX
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# Dtypes


def test_numpy_dtype_covers_the_format():
    names = "BOOL U8 I8 U16 I16 U32 I32 U64 I64 F16 BF16 F32 F64 C64 F4"
    for name in [*names.split(), "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"]:
        bits = {"BOOL": 8, "BF16": 16, "C64": 64, "F4": 8}.get(name) or int("".join(name.split("_")[0][1:]))
        assert numpy_dtype(name).itemsize * 8 == bits
    assert numpy_dtype("BF16") == ml_dtypes.bfloat16
    assert numpy_dtype("F8_E4M3") == ml_dtypes.float8_e4m3fn
    assert numpy_dtype("F8_E8M0") == ml_dtypes.float8_e8m0fnu


@pytest.mark.parametrize("name", ["F6_E2M3", "F6_E3M2"])
def test_numpy_dtype_refuses_six_bit_floats_by_name(name):
    with pytest.raises(NotImplementedError, match=rf"{name}.*6-bit.*allowed: BOOL"):
        numpy_dtype(name)


@pytest.mark.parametrize("name", ["bf16", "F128", "", 7, None])
def test_numpy_dtype_names_the_unknown_and_the_allowed(name):
    with pytest.raises(ValueError, match=rf"unknown safetensors dtype {name!r}; allowed: .*BF16.*F8_E8M0"):
        numpy_dtype(name)


# Damage: one file

X = _entry("F32", [2, 3], 0, 24)
DATA = bytes(24)
BROKEN_FILES = {
    # what is wrong: (header, data, what the one problem must say)
    "negative dim": (
        {"x": _entry("F32", [-2, -3], 0, 24)},
        DATA,
        r"tensor entry: .*'x' has shape \[-2, -3\]",
    ),
    "fractional dim": ({"x": _entry("F32", [2.0, 3], 0, 24)}, DATA, r"'x' has shape \[2.0, 3\]"),
    "boolean dim": ({"x": _entry("F32", [True, 6], 0, 24)}, DATA, r"'x' has shape \[True, 6\]"),
    "shape is no list": ({"x": _entry("F32", 6, 0, 24)}, DATA, r"'x' has shape 6; needs a list"),
    "too many dims": ({"x": _entry("U8", [1] * 33, 0, 1)}, b"0", r"at most 32"),
    "empty but huge": ({"x": _entry("F32", [0, 2**62], 0, 0)}, b"", r"beyond any array"),
    "shape against bytes": (
        {"x": _entry("F32", [2, 2], 0, 24)},
        DATA,
        r"\[2, 2\] of F32, which takes 16.*hold 24",
    ),
    "offsets missing": (
        {"x": {"dtype": "F32", "shape": [6]}},
        DATA,
        r"'x' has keys \['dtype', 'shape'\]; needs",
    ),
    "unknown key": ({"x": X | {"stride": 1}}, DATA, r"'x' has keys .*stride"),
    "entry is no object": ({"x": [1, 2]}, DATA, r"'x' has \[1, 2\]; needs exactly"),
    "offsets negative": (
        {"x": _entry("F32", [6], -24, 0)},
        DATA,
        r"data_offsets \[-24, 0\].*0 <= begin <= end",
    ),
    "offsets reversed": (
        {"x": _entry("F32", [6], 24, 0)},
        DATA,
        r"data_offsets \[24, 0\].*0 <= begin <= end",
    ),
    "offsets of strings": ({"x": _entry("F32", [6], "0", 24)}, DATA, r"needs two integers"),
    "unknown dtype": (
        {"x": _entry("F99", [6], 0, 24)},
        DATA,
        r"unknown safetensors dtype 'F99'; allowed: .*BF16",
    ),
    "dtype is a list": ({"x": _entry(["F32"], [6], 0, 24)}, DATA, r"unknown safetensors dtype \['F32'\]"),
    "six-bit float": ({"x": _entry("F6_E2M3", [4], 0, 3)}, b"000", r"'F6_E2M3', 6-bit floats"),
    "overlap": (
        {"x": X, "y": _entry("U8", [8], 20, 28)},
        bytes(28),
        r"byte layout: .*an overlap of 4 bytes between 'x' and 'y'",
    ),
    "odd number of 4-bit floats": (
        {"x": _entry("F4", [2, 3], 0, 3)},
        b"000",
        r"of F4 needs an even last dimension",
    ),
    "4-bit scalar": ({"x": _entry("F4", [], 0, 1)}, b"0", r"of F4 needs an even last dimension"),
    "inside another": (
        {"x": X, "y": _entry("U8", [4], 4, 8)},
        DATA,
        r"byte layout: .*an overlap of 20 bytes between 'x' and 'y'",
    ),
    "hole": ({"x": X, "y": _entry("U8", [4], 26, 30)}, bytes(30), r"a hole of 2 bytes between 'x' and 'y'"),
    "hole at the start": (
        {"x": _entry("U8", [4], 4, 8)},
        bytes(8),
        r"a hole of 4 bytes between the header and 'x'",
    ),
    "truncated by 1 byte": (
        {"x": X},
        DATA[:-1],
        r"file size: .*truncated by 1 bytes: it has \d+ bytes, .*needs \d+",
    ),
    "no data at all": ({"x": X}, b"", r"truncated by 24 bytes"),
    "trailing byte": ({"x": X}, DATA + b"0", r"file size: .* has 1 trailing bytes"),
    "not JSON": (b'{"x": ', b"", r"header: .*is not JSON"),
    "endless nesting": (b'{"x":' + b"[" * 100_000, b"", r"header: .*is not JSON"),
    "JSON of a list": (b"[1]", b"", r"is not JSON of one object: it starts with '\[1\]'"),
    "empty header": (b"", b"", r"is not JSON of one object: it starts with ''"),
    "not UTF-8": (b'{"\xff": 1}', b"", r"header: .*is not UTF-8 at byte 2"),
    "UTF-16": ('{"x": 1}'.encode("utf-16"), b"", r"is not UTF-8 at byte 0"),
    "name twice": (
        b'{"x":%s,"x":%s}' % ((json.dumps(X).encode(),) * 2),
        DATA,
        r"header: .*key 'x' occurs twice",
    ),
    "key twice": (
        b'{"x":{"dtype":"U8","dtype":"F32","shape":[6],"data_offsets":[0,24]}}',
        DATA,
        r"key 'dtype' occurs twice",
    ),
    "metadata of numbers": (
        {"__metadata__": {"a": 1}, "x": X},
        DATA,
        r"__metadata__ must map strings to strings",
    ),
}


@pytest.mark.parametrize("what", BROKEN_FILES)
def test_reader_names_what_is_wrong_with_a_file(tmp_path, what):
    header, data, says = BROKEN_FILES[what]
    _file(tmp_path / SINGLE, header, data)
    (problem,) = _problems(tmp_path)
    assert SINGLE in problem and re.search(says, problem), problem


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has 0 bytes"),
        (b"1234567", "has 7 bytes"),
        ((100).to_bytes(8, "little") + b"{}", "states a header of 100 bytes; allowed: 2 "),
        (b"\xff" * 8 + b"{}", "states a header of 18,446,744,073,709,551,615 bytes; allowed: 2 "),
    ],
)
def test_reader_refuses_a_header_longer_than_the_file(tmp_path, content, says):
    (tmp_path / SINGLE).write_bytes(content)
    (problem,) = _problems(tmp_path)
    assert says in problem


def test_reader_refuses_a_header_beyond_the_limit_of_the_format(tmp_path):
    with open(tmp_path / SINGLE, "wb") as file:
        file.write((100_000_001).to_bytes(8, "little") + b"{}")
        file.truncate(200_000_000)
    (problem,) = _problems(tmp_path)
    assert "states a header of 100,000,001 bytes; allowed: 100,000,000" in problem


def test_reader_accepts_what_the_format_allows(tmp_path):
    header = {
        "b": _entry("U8", [4], 24, 28),
        "empty": _entry("F32", [2, 0], 24, 24),
        "a": X,
        "scalar": _entry("F32", [], 28, 32),
        "__metadata__": {"format": "pt"},
    }
    _file(tmp_path / SINGLE, json.dumps(header).encode() + b"   ", bytes(32))
    with CheckpointReader(tmp_path) as reader:
        assert list(reader.tensors) == ["a", "empty", "b", "scalar"]
        assert reader.read("scalar") == 0.0 and reader.read("empty").shape == (2, 0)
    _file(tmp_path / SINGLE, {})
    assert len(CheckpointReader(tmp_path).tensors) == 0


# Damage: folders and indexes


def test_reader_refuses_a_folder_without_a_checkpoint(tmp_path):
    (problem,) = _problems(tmp_path / "absent")
    assert "does not exist" in problem
    (tmp_path / "file").write_text("")
    (problem,) = _problems(tmp_path / "file")
    assert "is not a folder" in problem
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    (problem,) = _problems(tmp_path)
    assert f"neither {SINGLE} nor {INDEX}" in problem and "model-00001-of-00002.safetensors" in problem
    (tmp_path / SINGLE).mkdir()
    assert any("is not a regular file" in problem for problem in _problems(tmp_path))


def test_reader_names_a_shard_that_is_absent(tmp_path):
    _three_shards(tmp_path)
    (tmp_path / "model-00002-of-000003.safetensors").unlink()
    (problem,) = _problems(tmp_path)
    assert problem.startswith("missing file: model-00002-of-000003.safetensors is not there")
    assert "names it for 1 tensors" in problem


def test_reader_names_a_shard_that_is_one_byte_short(tmp_path):
    _three_shards(tmp_path)
    path = tmp_path / "model-00002-of-000003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (problem,) = _problems(tmp_path)
    assert problem.startswith("file size: model-00002-of-000003.safetensors is truncated by 1 bytes")


def test_reader_names_tensors_that_index_and_files_disagree_on(tmp_path):
    _three_shards(tmp_path)
    first, second, third = (f"model-0000{i}-of-000003.safetensors" for i in (1, 2, 3))
    weight_map = {"layer.0.weight": first, "layer.1.weight": third, "layer.9.weight": second}
    _edit_index(tmp_path, weight_map=weight_map)
    assert set(_problems(tmp_path)) == {
        f"index mismatch: 'layer.1.weight' is in {second}; {INDEX} says {third}",
        f"index mismatch: 'layer.9.weight' is not in {second}, where {INDEX} says it is",
        f"index mismatch: 'layer.2.weight' is in {third}; {INDEX} does not have it",
    }


def test_reader_names_a_tensor_that_is_in_two_files(tmp_path):
    _three_shards(tmp_path)
    second, third = (tmp_path / f"model-0000{i}-of-000003.safetensors" for i in (2, 3))
    write_safetensors(third, {"layer.2.weight": np.ones(15, np.float32), "layer.1.weight": np.ones(2)})
    (problem,) = [p for p in _problems(tmp_path) if not p.startswith("total size")]
    assert problem == f"duplicate tensor: 'layer.1.weight' is in {second.name} and in {third.name}"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "/etc/x.safetensors",
            "../x.safetensors",
            "a/../x.safetensors",
            "./x.safetensors",
            "a//x.safetensors",
        ),
        *("..\\x.safetensors", "C:x.safetensors", "x\0.safetensors", "", ".", "pytorch_model.bin"),
    ],
)
def test_reader_refuses_file_names_that_leave_the_folder(tmp_path, name):
    folder = tmp_path / "checkpoint"
    _three_shards(folder)
    write_safetensors(tmp_path / "x.safetensors", {"secret": np.ones(3)})
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    _edit_index(folder, weight_map=weight_map | {"secret": name})
    (problem,) = _problems(folder)
    assert problem.startswith(f"index: {INDEX} names {name!r} for 1 tensors; allowed: the relative path")


def test_reader_accepts_shards_in_a_subfolder_and_links(tmp_path):
    (tmp_path / "blobs").mkdir()
    write_safetensors(tmp_path / "blobs/0a1b", {"a": np.ones(3)})
    folder = tmp_path / "checkpoint"
    (folder / "part").mkdir(parents=True)
    (folder / "part/one.safetensors").symlink_to(tmp_path / "blobs/0a1b")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "part/one.safetensors"}}))
    np.testing.assert_array_equal(CheckpointReader(folder).read("a"), np.ones(3))


@pytest.mark.parametrize("name", [SINGLE, "model-00004-of-000004.safetensors"])
def test_reader_refuses_left_over_files_of_another_checkpoint(tmp_path, name):
    _three_shards(tmp_path)
    write_safetensors(tmp_path / name, {"x": np.ones(3)})
    (problem,) = _problems(tmp_path)
    assert problem == f"unexpected file: {name} is there, but {INDEX} does not name it"


def test_reader_refuses_shards_beside_a_single_file(tmp_path):
    _three_shards(tmp_path)
    (tmp_path / INDEX).unlink()
    write_safetensors(tmp_path / SINGLE, {"x": np.ones(3)})
    problems = _problems(tmp_path)
    assert len(problems) == 3 and all(f"there is no {INDEX}" in problem for problem in problems)


def test_reader_ignores_other_safetensors_files(tmp_path):
    tensors = _three_shards(tmp_path)
    (tmp_path / "adapter.safetensors").write_bytes(b"whatever")
    assert CheckpointReader(tmp_path).tensors.keys() == tensors.keys()


@pytest.mark.parametrize("total_size", [181, 0, "180", None])
def test_reader_compares_total_size(tmp_path, total_size):
    _three_shards(tmp_path)
    assert CheckpointReader(tmp_path).total_bytes == 180
    _edit_index(tmp_path, metadata={} if total_size is None else {"total_size": total_size})
    if total_size is None:
        assert CheckpointReader(tmp_path).total_bytes == 180
        return
    (problem,) = _problems(tmp_path)
    assert problem == f"total size: {INDEX} states total_size {total_size!r}; the tensors have 180 bytes"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "is not JSON of one object"),
        ("{}", "weight_map must map tensor names to files, not None"),
        ('{"weight_map": {}}', "weight_map must map"),
        ('{"weight_map": ["a"]}', "weight_map must map"),
        ('{"weight_map": {"layer.0.weight": 7}}', "'layer.0.weight' must name a file, not 7"),
        ('{"metadata": 3, "weight_map": {}}', "metadata must be an object, not 3"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "key 'a' occurs twice"),
    ],
)
def test_reader_refuses_a_broken_index(tmp_path, text, says):
    (tmp_path / INDEX).write_text(text)
    problems = _problems(tmp_path)
    assert any(problem.startswith("index: ") and says in problem for problem in problems), problems


def test_reader_reports_everything_at_once(tmp_path):
    tensors = {f"t{i}": np.full(4, i, np.float32) for i in range(7)}
    write_checkpoint(tmp_path, tensors, max_shard_bytes=16)
    files = [tmp_path / f"model-0000{i}-of-000007.safetensors" for i in range(1, 8)]
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-3])
    files[2].write_bytes(b"not a header at all")
    _file(files[3], {"t3": _entry("F32", [5], 0, 16), "t3b": _entry("Q4", [2], 16, 17)}, bytes(17))
    _file(files[4], {"t4": _entry("U8", [4], 2, 6)}, bytes(6))
    write_safetensors(files[5], {"t5": np.ones(4), "t6": np.ones(1)})
    write_safetensors(tmp_path / SINGLE, {"x": np.ones(3)})
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    _edit_index(tmp_path, weight_map=weight_map | {"t9": files[5].name, "t10": "../y.safetensors"})
    problems = _problems(tmp_path)
    kinds = [problem.split(":")[0] for problem in problems]
    expected = {"index": 1, "missing file": 1, "unexpected file": 1, "file size": 1, "header": 1}
    expected |= {"tensor entry": 2, "byte layout": 1, "duplicate tensor": 1, "index mismatch": 2}
    assert {kind: kinds.count(kind) for kind in kinds} == expected, problems


def test_error_cuts_long_lists_and_keeps_all_problems(tmp_path):
    header = {f"t{i}": _entry("NO", [1], i, i + 1) for i in range(50)}
    _file(tmp_path / SINGLE, header, bytes(50))
    with pytest.raises(CheckpointError) as raised:
        CheckpointReader(tmp_path)
    message = str(raised.value)
    assert len(raised.value.problems) == 50
    assert "problems: 50" in message and "tensor entry (50)" in message and "and 30 more of this kind" in message
    assert message.count("unknown safetensors dtype") == MAX_SHOWN_PER_KIND == 20
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (str(copy), copy.problems) == (message, raised.value.problems)
