"""Saves that are killed leave nothing that looks whole; several processes save one checkpoint together."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

from maxmoe.checkpoint import array_store, files
from maxmoe.checkpoint.array_store import save_arrays
from maxmoe.checkpoint.safetensors_header import CheckpointError
from maxmoe.checkpoint.stored_arrays import StoredArrays, is_complete, manifest_path
from tests.checkpoint import save_in_process

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/checkpoint/save_in_process.py"
TIMEOUT_S = 120


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def _run(action: str, folder: Path, num_processes: int) -> list[str]:
    """Runs the action in several processes at once; returns what each printed. If one fails, the others end too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = folder.parent.with_name(f"{action}_logs")
    logs.mkdir()
    processes = []
    for i in range(num_processes):
        command = [sys.executable, str(SCRIPT), action, str(folder), str(num_processes), str(i), str(port)]
        with open(logs / f"{i}.out", "w") as out, open(logs / f"{i}.err", "w") as errors:
            processes.append(subprocess.Popen(command, stdout=out, stderr=errors, env=_environment()))
    deadline = time.monotonic() + TIMEOUT_S
    while not all(process.poll() == 0 for process in processes):
        if time.monotonic() > deadline or any(process.poll() for process in processes):
            break
        time.sleep(0.05)
    for process in processes:
        process.kill()
    codes = [process.wait() for process in processes]
    assert not any(codes), (codes, [(logs / f"{i}.err").read_text()[-2000:] for i in range(num_processes)])
    return [(logs / f"{i}.out").read_text() for i in range(num_processes)]


# Killed


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    root = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "killed", str(root), "0"],
        capture_output=True,
        text=True,
        env=_environment(),
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return root, json.loads(done.stdout.splitlines()[-1])["killed"]


def test_killed_save_is_whole_or_is_not_there(killed):
    root, folders = killed
    expected = save_in_process.big_arrays()
    complete = [name for name in folders if is_complete(root / name)]
    for name in folders:
        if name in complete:
            stored = StoredArrays(root / name)
            stored.check_everything()
            assert all(np.array_equal(stored.read(key), value) for key, value in expected.items()), name
        else:
            with pytest.raises(CheckpointError, match="is not a complete save"):
                StoredArrays(root / name)
    assert sum(folders.values()) >= save_in_process.NUM_KILLS // 3, "most saves were over before they were killed"
    # The window after Orbax is done and before the manifest is there was hit, both before it and within.
    for name in ("before_manifest", "before_rename"):
        assert (root / name).is_dir() and name not in complete
    assert list(root.glob("before_rename.manifest.json.*.tmp"))


def test_killed_save_is_followed_by_one_that_succeeds(killed):
    root, folders = killed
    before = {path.name for path in root.iterdir()}
    small = {"a": np.arange(60, dtype=np.int32).reshape(5, 12)}
    redone = [name for name in folders if not is_complete(root / name)]
    for name in redone:
        save_arrays(root / name, small, {})
        stored = StoredArrays(root / name)
        stored.check_everything()
        assert np.array_equal(stored.read("a"), small["a"])
    after = {path.name for path in root.iterdir()}
    complete = {"first", "whole", *folders}
    assert after == complete | {manifest_path(root / name).name for name in complete}
    assert before - after <= {path for path in before if any(path.startswith(name + ".") for name in redone)}
    StoredArrays(root / "whole").check_everything()


# Several processes


@pytest.mark.multidevice
@pytest.mark.parametrize(("num_saving", "num_restoring"), [(2, 4), (4, 1), (1, 2)])
def test_processes_save_what_others_restore(tmp_path, num_saving, num_restoring):
    folder = tmp_path / "saves" / "x"
    _run("save", folder, num_saving)
    assert _run("restore", folder, num_restoring) == [f"same {i}\n" for i in range(num_restoring)]
    # This process has one device, and reads everything.
    stored = StoredArrays(folder)
    stored.check_everything()
    assert stored.meta == {"processes": num_saving}
    assert {path.name for path in folder.parent.iterdir()} == {"x", "x.manifest.json"}
    expected = save_in_process.all_values()
    assert set(stored.arrays) == set(expected)
    for name, value in expected.items():
        got = stored.read(name)
        assert got.dtype == value.dtype and got.tobytes() == value.tobytes(), name
    _check_chunks(folder, stored)
    _check_sizes(folder, num_saving, expected)
    _check_orbax(folder, expected)


def test_exchange_says_when_a_process_cannot_be_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(array_store, "_barrier", lambda name: None)
    array_store._part_path(Path(tmp_path / "x"), 1).write_text("{}")
    with pytest.raises(ValueError, match=r"what processes \[2\] wrote cannot be seen here"):
        array_store._exchange(tmp_path / "x", {})


def test_merge_says_when_a_process_is_missing():
    sums = {"0,0": "a" * 16, "1,0": "b" * 16}
    entry = {"shape": [4, 3], "dtype": "uint8", "chunk": [2, 3]}
    parts = [{"w": entry | {"checksums": {key: value}}} for key, value in reversed(sums.items())]
    assert array_store._merge(parts)["w"]["checksums"] == "a" * 16 + "b" * 16
    with pytest.raises(CheckpointError, match="w: 1 of 2 chunks were written"):
        array_store._merge(parts[:1])


def _check_chunks(folder, stored):
    """A chunk with a checksum is a stored one, however the array was sharded."""
    for name, info in stored.arrays.items():
        kvstore = {"driver": "ocdbt", "base": files.kvstore(folder), "path": name.replace("/", ".") + "/"}
        store = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, read=True, open=True).result()
        assert info.chunk == tuple(store.chunk_layout.read_chunk.shape or ()), name
    assert stored.arrays["columns"].chunk[0] == 64 and stored.arrays["columns"].chunk[1] < 20
    assert stored.arrays["copies"].chunk == (40, 8)  # of copies, one is written, and not in pieces
    assert stored.arrays["experts"].chunk[0] == 1


def _check_sizes(folder, num_processes, expected):
    """Every value is on the disk once: also what several processes have, or all of them."""
    on_disk = [
        sum(path.stat().st_size for path in (folder / f"ocdbt.process_{i}/d").glob("*")) for i in range(num_processes)
    ]
    num_bytes = sum(value.nbytes for value in expected.values())
    # Beside the values there is an index: a few hundred bytes per array, some tens per chunk.
    assert num_bytes <= sum(on_disk) < 1.3 * num_bytes, (num_bytes, on_disk)
    if num_processes > 1:
        assert on_disk[0] > on_disk[-1] > 0


def _check_orbax(folder, expected):
    """Orbax alone restores it, here to one device."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target: dict = {}
    for name, value in expected.items():
        *parents, last = name.split("/")
        level = target
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=here)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder, target)
    for name, value in expected.items():
        got = restored
        for part in name.split("/"):
            got = got[part]
        assert np.asarray(got).tobytes() == value.tobytes(), name
