"""Saves and reads arrays in processes of their own, for tests that kill them, run several, or look at their memory.

save_in_process.py killed FOLDER SEED
save_in_process.py save|restore FOLDER NUM_PROCESSES PROCESS PORT
save_in_process.py memory save|read FOLDER BYTES numpy|jax
"""

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxmoe.checkpoint import array_store, chunks
from maxmoe.checkpoint.array_store import save_arrays
from maxmoe.checkpoint.stored_arrays import StoredArrays

NUM_DEVICES = 8
CHUNK_BYTES = 2048
SPLIT_FIRST = frozenset({"experts"})
NUM_KILLS = 20
# name: shape, dtype, axes of the mesh
SHARDED = {
    "both": ((64, 96), "float32", ("x", "y")),
    "rows.16/w": ((48, 40), "bfloat16", ("x", None)),
    "columns": ((64, 80), "float32", (None, "y")),  # a shard is larger than a chunk, and longest along the other axis
    "experts": ((16, 24, 20), "uint8", ("y", None, None)),
    "copies": ((40, 8), "int32", ()),
    "scalar": ((), "float32", ()),
}
NUMPY = {"numpy": ((24, 50), "uint8")}


def values(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random bytes, the same in every process."""
    target = np.dtype(dtype)
    raw = np.random.default_rng(list(name.encode())).integers(0, 256, [*shape, target.itemsize], np.uint8)
    return raw.view(target)[..., 0]


def all_values() -> dict[str, np.ndarray]:
    """What `save` saves."""
    sharded = {name: values(name, shape, dtype) for name, (shape, dtype, _) in SHARDED.items()}
    return sharded | {name: values(name, shape, dtype) for name, (shape, dtype) in NUMPY.items()}


def big_arrays() -> dict[str, np.ndarray]:
    """40 MB that take a moment to write."""
    return {f"part/{i}": values(str(i), (8, 1000, 1000), "uint8") for i in range(5)}


# ---- Killed ---------------------------------------------------------------------------------------------------------


def killed(root: Path, seed: int) -> None:
    """Kills saves at many moments, each in a process forked for it. Prints how the moments were chosen, as JSON.

    This process starts no threads: it is forked before JAX and TensorStore start theirs.
    """
    arrays, draw = big_arrays(), random.Random(seed)
    times_s = []
    for name in ("first", "whole"):
        started = time.monotonic()
        pid = _fork(lambda name=name: save_arrays(root / name, arrays, {}))
        assert os.waitpid(pid, 0)[1] == 0
        times_s.append(time.monotonic() - started)
    whole_s = min(times_s)
    folders = {}
    for i in range(NUM_KILLS):
        # Spread over the whole save; every fifth falls on the time after Orbax is done.
        folder = root / f"kill_{i}"
        pid = _fork(lambda folder=folder: save_arrays(folder, arrays, {}))
        if i % 5 == 4:
            while not folder.exists() and os.waitpid(pid, os.WNOHANG) == (0, 0):
                time.sleep(0.0005)
            time.sleep(draw.uniform(0, 0.02))
        else:
            time.sleep(whole_s * (i + draw.random()) / NUM_KILLS)
        folders[folder.name] = _kill(pid)
    for name in ("before_manifest", "before_rename"):
        _kill(_fork(lambda name=name: _save_that_dies(root / name, arrays, name)), wait=True)
        folders[name] = True
    print(json.dumps({"whole_s": whole_s, "killed": folders}))


def _fork(work) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def _kill(pid: int, wait: bool = False) -> bool:
    """Whether the process was still at work."""
    if not wait:
        os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def _save_that_dies(folder, arrays, where):
    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    write = array_store.write_checked_json

    def write_and_die(*args):
        os.replace = die
        write(*args)

    array_store.write_checked_json = die if where == "before_manifest" else write_and_die
    save_arrays(folder, arrays, {})


# ---- Several processes ----------------------------------------------------------------------------------------------


def _start(num_processes: int, process: int, port: int) -> None:
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES // num_processes)
    if num_processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, process, initialization_timeout=60)
    assert (jax.process_count(), jax.device_count()) == (num_processes, NUM_DEVICES)
    chunks.CHUNK_BYTES = CHUNK_BYTES


def _placed(name: str, value: np.ndarray, mesh: Mesh) -> jax.Array:
    sharding = NamedSharding(mesh, P(*SHARDED[name][2]))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def save(folder: Path) -> None:
    """Saves the sharded arrays, and beside them one that every process has whole."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    every = all_values()
    arrays = {name: _placed(name, value, mesh) if name in SHARDED else value for name, value in every.items()}
    save_arrays(folder, arrays, {"processes": jax.process_count()}, SPLIT_FIRST)


def restore(folder: Path) -> None:
    """Restores every array onto another mesh, each process what its devices hold, and compares."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    stored = StoredArrays(folder)
    for name, expected in all_values().items():
        if name not in SHARDED:
            assert stored.read(name).tobytes() == expected.tobytes(), name
            continue
        sharding = NamedSharding(mesh, P(*SHARDED[name][2]))
        array = jax.make_array_from_callback(
            expected.shape, sharding, lambda index, name=name: stored.read(name, tuple(index))
        )
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes(), (name, shard.index)
    print("same", jax.process_index())


# ---- Memory ---------------------------------------------------------------------------------------------------------


def memory(action: str, folder: Path, num_bytes: int, kind: str) -> None:
    """Prints by how many bytes the most memory that the process ever had grew while it saved or read."""
    save_arrays(folder.with_name(f"small_{action}"), {"x": np.zeros(3)}, {})  # what starts once is started
    if action == "save":
        words = num_bytes // 8
        array = np.random.default_rng(0).integers(0, 2**64, words, np.uint64).view(np.uint32)
        if kind == "jax":
            # Made in place: a copy, though dropped, would count in the peak.
            del array
            array = jax.jit(lambda: jax.lax.iota(np.uint32, 2 * words) * np.uint32(2_654_435_761))()
        array = array.reshape(-1, 500, 500)
        before = _peak()
        save_arrays(folder, {"x": array}, {})
    else:
        before = _peak()
        stored = StoredArrays(folder)
        assert stored.read("x").nbytes == num_bytes
    print(_peak() - before)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(argv: list[str]) -> None:
    """Runs one of the actions above."""
    action, *rest = argv
    if action == "killed":
        killed(Path(rest[0]), int(rest[1]))
    elif action == "memory":
        memory(rest[0], Path(rest[1]), int(rest[2]), rest[3])
    else:
        _start(*map(int, rest[1:]))
        {"save": save, "restore": restore}[action](Path(rest[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
