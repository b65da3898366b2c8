"""Damage of every kind is noticed, and the message says where: Orbax itself restores most of it without a word."""

import random
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from maxmoe.checkpoint import chunks, files, stored_arrays
from maxmoe.checkpoint.array_store import save_arrays
from maxmoe.checkpoint.safetensors_header import CheckpointError
from maxmoe.checkpoint.stored_arrays import StoredArrays, manifest_path

LABEL = "layer 3"
NUM_FLIPS = 100


def _arrays(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "experts/gate.up": draw.integers(0, 256, (6, 40, 50), np.uint8),
        "kernel": draw.standard_normal((64, 33)).astype(ml_dtypes.bfloat16),
        "norm": draw.standard_normal((128, 64)).astype(np.float32),
        "step": np.asarray(7 + seed, np.int32),
    }


def _save(folder: Path, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", 2048)
        save_arrays(folder, _arrays(seed), {"step": seed}, frozenset({"experts/gate.up"}))


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    root = tmp_path_factory.mktemp("originals")
    for seed in range(2):
        _save(root / f"{seed}", seed)
    return root


@pytest.fixture
def folder(originals, tmp_path):
    """A copy of the first save, to be damaged; the second one lies beside it."""
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    return tmp_path / "0"


def _files(folder: Path) -> list[Path]:
    return [*sorted(path for path in folder.rglob("*") if path.is_file()), Path(manifest_path(folder))]


def _largest(folder: Path) -> Path:
    return max(folder.glob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)


def _overwrite(path: Path, offset: int, new: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(new)] = new
    path.write_bytes(raw)


def _flip(path: Path, offset: int, bit: int = 0) -> None:
    _overwrite(path, offset, bytes([path.read_bytes()[offset] ^ (1 << bit)]))


def _check_everything(folder: Path) -> None:
    StoredArrays(folder, label=LABEL).check_everything()


def _names(error: CheckpointError, path: Path, folder: Path) -> bool:
    """Whether the message says where: the layer and the file, or the manifest."""
    if path == Path(manifest_path(folder)):
        return path.name in str(error)
    return LABEL in str(error) and path.relative_to(folder).as_posix() in str(error)


# A flipped bit, anywhere


def _places(folder: Path) -> list[tuple[Path, int, int]]:
    """Half of the bits are drawn from all bytes, half from all files, so that small files are hit too."""
    draw = random.Random(0)
    paths = _files(folder)
    sizes = [path.stat().st_size for path in paths]
    drawn = draw.choices(paths, sizes, k=NUM_FLIPS // 2) + draw.choices(paths, k=NUM_FLIPS // 2)
    return [(path, draw.randrange(path.stat().st_size), draw.randrange(8)) for path in drawn]


def test_check_everything_notices_a_flipped_bit_in_any_place(folder):
    places = _places(folder)
    assert {path for path, _, _ in places} == set(_files(folder))
    for path, offset, bit in places:
        _flip(path, offset, bit)
        with pytest.raises(CheckpointError) as caught:
            _check_everything(folder)
        assert _names(caught.value, path, folder), (path, offset, bit, str(caught.value))
        with pytest.raises(CheckpointError):
            StoredArrays(folder, verify="off").check_everything()
        _flip(path, offset, bit)
    _check_everything(folder)


def test_read_after_a_flipped_bit_raises_or_returns_what_was_saved(folder):
    expected = _arrays(0)
    raised = 0
    for path, offset, bit in _places(folder):
        _flip(path, offset, bit)
        try:
            stored = StoredArrays(folder, label=LABEL)
        except CheckpointError:
            raised += 1
        else:
            for name, value in expected.items():
                try:
                    got = stored.read(name)
                except CheckpointError as error:
                    assert LABEL in str(error) and name in str(error)
                    raised += 1
                else:
                    assert got.tobytes() == value.tobytes(), (path, offset, bit, name)
        _flip(path, offset, bit)
    # Some bytes in data files belong to nothing that is read; how many differs from save to save.
    assert raised > 0.7 * NUM_FLIPS, raised


@pytest.mark.parametrize("verify", ["off", "sampled"])
def test_read_without_full_checks_may_return_damaged_values(folder, verify, monkeypatch):
    """What these modes do not catch: the price of reading without a look at every byte."""
    path, offset = _find(folder, _arrays(0)["experts/gate.up"][2].tobytes())
    _flip(path, offset + 77)
    monkeypatch.setattr(stored_arrays._RANDOM, "random", lambda: 0.5)  # the chunk is not in the sample
    got = StoredArrays(folder, verify=verify).read("experts/gate.up", (2,))
    different = np.flatnonzero(got.ravel() != _arrays(0)["experts/gate.up"][2].ravel())
    assert list(different) == [77]


def _find(folder: Path, raw: bytes) -> tuple[Path, int]:
    for path in _files(folder):
        if (offset := path.read_bytes().find(raw)) >= 0:
            return path, offset
    raise AssertionError("the chunk is not stored as it is in memory")


def test_read_names_the_chunk_that_is_damaged_and_reads_the_others(folder):
    experts = _arrays(0)["experts/gate.up"]
    path, offset = _find(folder, experts[2].tobytes())
    _flip(path, offset + 1999, bit=7)
    stored = StoredArrays(folder, label=LABEL)
    with pytest.raises(CheckpointError, match=r"layer 3: experts/gate\.up is damaged: 1 of 6 chunks") as caught:
        stored.read("experts/gate.up")
    assert caught.value.problems == (f"{LABEL}: experts/gate.up is damaged in chunk [2, 0, 0]",)
    with pytest.raises(CheckpointError, match="1 of 1 chunks"):
        stored.read("experts/gate.up", (2, slice(0, 1)))
    for i in (0, 1, 3, 4, 5):
        np.testing.assert_array_equal(stored.read("experts/gate.up", (i,)), experts[i])


def test_read_notices_damage_done_after_an_earlier_read(folder):
    """Array data is not kept in a cache, so a second read looks at the disk again."""
    experts = _arrays(0)["experts/gate.up"]
    stored = StoredArrays(folder, label=LABEL)
    stored.read("experts/gate.up")
    path, offset = _find(folder, experts[4].tobytes())
    _flip(path, offset)
    with pytest.raises(CheckpointError, match="experts/gate.up is damaged"):
        stored.read("experts/gate.up", (4,))


# Other kinds


def _flip_64_bytes(path: Path) -> None:
    raw = path.read_bytes()
    for offset in random.Random(1).sample(range(len(raw)), min(64, len(raw))):
        _flip(path, offset, 3)


def _zero_4_kib(path: Path) -> None:
    middle = path.stat().st_size // 2
    _overwrite(path, max(0, middle - 2048), bytes(min(4096, path.stat().st_size)))


def _truncate_by_1000(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _truncate_by_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


DAMAGES = [_flip_64_bytes, _zero_4_kib, _truncate_by_1000, _truncate_by_half, _append, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_check_everything_notices_damage_to_any_file(folder, damage):
    for path in _files(folder):
        intact = path.read_bytes()
        damage(path)
        with pytest.raises(CheckpointError) as caught:
            _check_everything(folder)
        assert _names(caught.value, path, folder), str(caught.value)
        path.write_bytes(intact)
    _check_everything(folder)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_read_after_damage_to_a_data_file_raises(folder, damage):
    damage(_largest(folder))
    with pytest.raises(CheckpointError, match=LABEL):
        stored = StoredArrays(folder, label=LABEL)
        for name in stored.arrays:
            stored.read(name)


def test_opening_notices_a_file_too_many(folder):
    (folder / "d/more").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="d/more is there and was not saved"):
        StoredArrays(folder)


def test_check_everything_lists_all_that_is_wrong(folder):
    data, index = _largest(folder), folder / "_METADATA"
    _flip(data, 5000)
    _flip(index, 5)
    (folder / "manifest.ocdbt").unlink()
    # Opening sees what is small; everything else is seen when it is looked at.
    with pytest.raises(CheckpointError) as caught:
        StoredArrays(folder, label=LABEL)
    assert caught.value.problems == (
        f"{LABEL}: _METADATA is damaged: its bytes differ from those saved",
        f"{LABEL}: manifest.ocdbt is not there",
    )
    assert data.name not in str(caught.value)


def test_read_raises_when_the_folder_is_gone(folder):
    stored = StoredArrays(folder, label=LABEL)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="layer 3: kernel cannot be read; restore it from a copy"):
        stored.read("kernel")


# Files in the wrong place


def test_check_everything_notices_files_that_changed_places(folder):
    first, second, *_ = sorted(folder.glob("ocdbt.process_0/d/*"), key=lambda path: -path.stat().st_size)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    with pytest.raises(CheckpointError) as caught:
        _check_everything(folder)
    assert _names(caught.value, first, folder) and _names(caught.value, second, folder)


def test_check_everything_notices_entries_that_changed_places(folder):
    """Two experts swapped within a file: sizes and sums of bytes are those of before."""
    experts = _arrays(0)["experts/gate.up"]
    (path, first), (same, second) = (_find(folder, experts[i].tobytes()) for i in (1, 5))
    assert path == same
    _overwrite(path, first, experts[5].tobytes())
    _overwrite(path, second, experts[1].tobytes())
    with pytest.raises(CheckpointError, match=path.name):
        _check_everything(folder)
    with pytest.raises(CheckpointError) as caught:
        StoredArrays(folder, label=LABEL).read("experts/gate.up")
    assert [problem.split("chunk ")[1] for problem in caught.value.problems] == ["[1, 0, 0]", "[5, 0, 0]"]


@pytest.mark.parametrize("verify", ["full", "sampled", "off"])
def test_opening_notices_the_manifest_of_another_save(folder, verify):
    shutil.copy(manifest_path(folder.parent / "1"), manifest_path(folder))
    with pytest.raises(CheckpointError, match="is there and was not saved"):
        StoredArrays(folder, verify=verify, label=LABEL)


@pytest.mark.parametrize("verify", ["full", "sampled", "off"])
def test_opening_notices_the_folder_of_another_save(folder, verify):
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "1", folder)
    with pytest.raises(CheckpointError, match="are not those that were saved"):
        StoredArrays(folder, verify=verify, label=LABEL)


def test_check_everything_notices_a_data_file_of_another_save(folder):
    """Same name and same size, another save's bytes."""
    path, other = _largest(folder), _largest(folder.parent / "1")
    size = path.stat().st_size
    path.write_bytes(other.read_bytes()[:size].ljust(size, b"\0"))
    with pytest.raises(CheckpointError, match=path.name):
        _check_everything(folder)
    with pytest.raises(CheckpointError, match=LABEL):
        stored = StoredArrays(folder, label=LABEL)
        for name in stored.arrays:
            stored.read(name)


def test_read_notices_an_array_that_is_not_the_manifests(folder):
    """A manifest that was written anew, with the other save's files but these arrays."""
    manifest = files.read_checked_json(manifest_path(folder))
    manifest["arrays"]["kernel"]["shape"] = [33, 64]
    files.write_checked_json(manifest_path(folder), manifest)
    with pytest.raises(CheckpointError, match=r"layer 3: kernel is bfloat16 \[64, 33\]; saved was bfloat16 \[33, 64\]"):
        StoredArrays(folder, label=LABEL).read("kernel")


# The manifest itself


def test_opening_without_a_manifest_says_that_it_is_not_there(folder):
    manifest_path(folder).unlink()
    with pytest.raises(CheckpointError, match=r"is not a complete save: 0\.manifest\.json is not there"):
        StoredArrays(folder)


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"checksum": 1, "body": 2}', b"null"])
def test_opening_with_a_broken_manifest_says_that_it_is_damaged(folder, raw):
    manifest_path(folder).write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"0\.manifest\.json is damaged"):
        StoredArrays(folder)


def test_opening_a_manifest_of_another_format_says_which(folder):
    manifest = files.read_checked_json(manifest_path(folder))
    files.write_checked_json(manifest_path(folder), manifest | {"format": "maxmoe arrays 9"})
    with pytest.raises(CheckpointError, match="format 'maxmoe arrays 9', this version reads 'maxmoe arrays 1'"):
        StoredArrays(folder)


# How much is looked at


@pytest.mark.parametrize(("verify", "least", "most"), [("full", 1024, 1024), ("sampled", 30, 110), ("off", 0, 0)])
def test_read_checks_all_chunks_or_one_in_sixteen_or_none(tmp_path, monkeypatch, verify, least, most):
    array = np.random.default_rng(0).integers(0, 256, (1024, 16), np.uint8)
    save_arrays(tmp_path / "x", {"a": array}, {}, frozenset({"a"}))
    looked_at, checksum = [], chunks.checksum
    monkeypatch.setattr(chunks, "checksum", lambda chunk: looked_at.append(1) or checksum(chunk))
    np.testing.assert_array_equal(StoredArrays(tmp_path / "x", verify=verify).read("a"), array)
    # Of 1024 chunks 64 on average, with a deviation of 8.
    assert least <= len(looked_at) <= most
