"""Large checkpoints do not stay in the system's cache of files: what was read would be in memory twice."""

import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import maxmoe as mm
from maxmoe.checkpoint import store
from maxmoe.checkpoint.convert import convert
from maxmoe.checkpoint.safetensors_io import CheckpointReader

GOLDEN = Path(__file__).resolve().parents[1] / "golden/tiny_k31"


@pytest.fixture
def dropped(monkeypatch):
    """File, start and length of everything the system was told to forget."""
    calls = []

    def record(descriptor, start, num_bytes, advice):
        assert advice == os.POSIX_FADV_DONTNEED
        calls.append((os.readlink(f"/proc/self/fd/{descriptor}"), start, num_bytes))

    monkeypatch.setattr(os, "posix_fadvise", record)
    return calls


@pytest.fixture
def everything_is_large(monkeypatch):
    monkeypatch.setattr(store, "_CACHED_SHARE", 0)


@pytest.fixture(params=["published", "converted"])
def folder(request, tmp_path):
    if request.param == "published":
        return shutil.copytree(GOLDEN, tmp_path / "published")
    convert(GOLDEN, tmp_path / "converted")
    return tmp_path / "converted"


def _load(folder):
    return mm.load_params(folder, mm.Transformer(mm.load_config(folder)))


def test_a_small_checkpoint_stays_cached(folder, dropped):
    _load(folder)
    assert dropped == []


def test_a_large_checkpoint_is_loaded_alike(folder, monkeypatch):
    wanted = _load(folder)
    monkeypatch.setattr(store, "_CACHED_SHARE", 0)
    found = _load(folder)
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True))


@pytest.mark.usefixtures("everything_is_large")
def test_every_byte_of_a_large_checkpoint_is_dropped_once(dropped):
    with CheckpointReader(GOLDEN) as reader:
        wanted = {(os.path.realpath(t.file), t.begin + i) for t in reader.tensors.values() for i in range(t.num_bytes)}
    _load(GOLDEN)
    found = [(path, start + i) for path, start, num_bytes in dropped for i in range(num_bytes)]
    assert len(found) == len(wanted) and set(found) == wanted


@pytest.mark.usefixtures("everything_is_large")
def test_every_array_file_of_a_large_converted_checkpoint_is_dropped(tmp_path, dropped):
    convert(GOLDEN, tmp_path / "converted")
    dropped.clear()
    _load(tmp_path / "converted")
    data = {os.path.realpath(path) for path in (tmp_path / "converted").rglob("d/*") if path.is_file()}
    assert data and data <= {path for path, _, _ in dropped}


@pytest.mark.usefixtures("everything_is_large")
def test_where_the_system_cannot_be_told_loading_goes_on(folder, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise")
    assert _load(folder)
