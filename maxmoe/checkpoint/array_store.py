"""Named arrays in an Orbax checkpoint, with a manifest beside it that can tell whether they are still the same.

Orbax notices neither a flipped bit nor a folder that lacks a file. So `save_arrays` writes, next to the folder
`NAME`, a file `NAME.manifest.json`: a checksum per stored chunk, and every file with its size and checksum. The
manifest is written last, in one step: without it there is no checkpoint, whatever else lies there.

Folder and paths may lie on a disk or in a bucket (`gs://`, `s3://`): see `object_storage`.
"""

import concurrent.futures
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from maxmoe.checkpoint import chunks, object_storage
from maxmoe.checkpoint.files import (
    absolute_path,
    list_files,
    read_checked_json,
    write_checked_json,
)
from maxmoe.checkpoint.safetensors_header import CheckpointError
from maxmoe.checkpoint.stored_arrays import FORMAT, hashers, is_complete, manifest_path, stored_name

_FILE_BYTES = 256 * 2**20  # of a data file, which is written from memory once it is full
_SAVE_GB = 1  # that Orbax may have on its way to the disk at once, unless one shard is more
_LEFTOVER = re.compile(r"(|\.orbax-checkpoint-tmp.*|\.part-\d+(\.\w+\.tmp)?|\.manifest\.json\.\w+\.tmp)")


def save_arrays(
    folder: epath.PathLike,
    arrays: Mapping[str, Any],
    meta: Mapping[str, Any],
    split_first: frozenset[str] = frozenset(),
) -> None:
    """Writes arrays and their manifest. What an earlier, interrupted save left in the way is removed first.

    Call it in every process of a job, with the same names; each writes what its devices hold.

    Args:
      arrays: NumPy or JAX arrays, sharded or not, by name; a slash in a name makes a level of the Orbax tree.
      meta: JSON values that are kept in the manifest.
      split_first: Names of arrays whose entries along the first axis will be read one by one.
    Raises: ValueError if there is a complete save at this place already, an array that cannot be saved, or a bucket
      that cannot be used; NotImplementedError for several processes and `s3://`.
    """
    folder = absolute_path(folder)
    arrays = {name: array if isinstance(array, jax.Array) else np.asarray(array) for name, array in arrays.items()}
    _check_savable(arrays)
    if set("*?[") & set(str(folder)):
        raise ValueError(f"{folder}: Orbax takes *, ? and [ in a path for a pattern; give a folder without them")
    if is_complete(folder):
        raise ValueError(f"{folder} already holds saved arrays; give another place, or remove them first")
    if jax.process_index() == 0:
        remove_leftovers(folder)
        if not object_storage.is_remote(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
    _barrier(f"{folder} is free")
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        hashing = executor.submit(_describe_arrays, arrays, split_first)
        with object_storage.staged(folder) as stage:
            _write_orbax(stage, arrays, split_first)
            first = jax.process_index() == 0
            files = list_files(stage, with_checksums=True, executor=hashers()) if first else {}
        described = hashing.result()
    parts = [described]
    if jax.process_count() > 1:
        parts = _exchange(folder, described)
    if jax.process_index() == 0:
        manifest = {
            "format": FORMAT,
            "meta": dict(meta),
            "arrays": _merge(parts),
            "files": files,
        }
        for process in range(jax.process_count()):
            _part_path(folder, process).unlink(missing_ok=True)
        write_checked_json(manifest_path(folder), manifest)
    _barrier(f"{folder} is complete")


def remove_leftovers(folder: epath.PathLike) -> list[epath.Path]:
    """Removes what an interrupted save left for this folder. Returns what was removed; [] if the save is complete."""
    folder = absolute_path(folder)
    if is_complete(folder) or not folder.parent.exists():
        return []
    found = [path for path in folder.parent.iterdir() if _belongs_to(path.name, folder.name)]
    for path in found:
        path.rmtree() if path.is_dir() else path.unlink()
    return found


def _belongs_to(name: str, folder: str) -> bool:
    return name.startswith(folder) and _LEFTOVER.fullmatch(name[len(folder) :]) is not None


def _check_savable(arrays):
    if not arrays:
        raise ValueError("no arrays were given; a save holds at least one")
    stored: dict[str, str] = {}
    for name, array in arrays.items():
        if not all(name.split("/")):
            raise ValueError(f"array name {name!r} has an empty part; allowed: words with single slashes between them")
        if array.size == 0:
            raise ValueError(f"{name}: shape {list(array.shape)} holds no values; Orbax cannot save it, leave it out")
        if not np.dtype(array.dtype).isnative:
            raise ValueError(f"{name}: {array.dtype.str} is not in this machine's byte order; convert it with astype")
        above = [name[:i] for i, letter in enumerate(name) if letter == "/" and name[:i] in arrays]
        for other in [stored.setdefault(stored_name(name), name), *above]:
            if other != name:
                raise ValueError(f"arrays {other!r} and {name!r} would lie in the same place; rename one of them")


def _write_orbax(folder, arrays, split_first):
    # Of copies only the first is written, whatever the platform, or Orbax would cut them into smaller chunks; and NumPy
    # arrays are not copied first, as nobody changes them before the save returns.
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False)),
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_compression=False, save_concurrent_gb=_save_gb(arrays), type_handler_registry=registry
    )
    args = {
        name: ocp.SaveArgs(chunk_byte_size=chunks.CHUNK_BYTES, shard_axes=(0,) if name in split_first else ())
        for name in arrays
    }
    with ocp.Checkpointer(handler) as checkpointer:
        tree, save_args = _nested(arrays), _nested(args)
        checkpointer.save(
            folder, args=ocp.args.PyTreeSave(tree, save_args=save_args, ocdbt_target_data_file_size=_FILE_BYTES)
        )


def _save_gb(arrays):
    """Orbax gives up when one shard alone is more than it may have on its way."""
    largest = max(math.prod(_shard_shape(array)) * array.dtype.itemsize for array in arrays.values())
    return max(_SAVE_GB, math.ceil(largest / 1e9))


def _shard_shape(array):
    return array.sharding.shard_shape(array.shape) if isinstance(array, jax.Array) else array.shape


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        level = tree
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = value
    return tree


def _describe_arrays(arrays, split_first):
    """Shape, dtype, chunks and checksums of what this process writes."""
    described = {}
    for name, array in arrays.items():
        shards = _own_shards(array)
        chunk = chunks.chunk_shape(_shard_shape(array), array.dtype.itemsize, name in split_first, array.shape)
        sums = {}
        for start, values in shards:
            first = [i // step for i, step in zip(start, chunk, strict=True)]
            for place, value in chunks.checksums(values, chunk, hashers()).items():
                sums[",".join(str(a + b) for a, b in zip(first, place, strict=True))] = value
        described[name] = {
            "shape": list(array.shape),
            "dtype": array.dtype.name,
            "chunk": list(chunk),
            "checksums": sums,
        }
    return described


def _own_shards(array):
    """Start and values of the parts of an array that this process writes: of copies, the first one."""
    if not isinstance(array, jax.Array):
        return [([0] * array.ndim, np.asarray(array))] if jax.process_index() == 0 else []
    return [
        ([part.start or 0 for part in shard.index], np.asarray(shard.data))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def _merge(parts):
    merged = {}
    for name, entry in parts[0].items():
        sums = {key: value for part in parts for key, value in part[name]["checksums"].items()}
        ordered = sorted(sums.items(), key=lambda item: tuple(map(int, item[0].split(","))) if item[0] else ())
        merged[name] = entry | {"checksums": "".join(value for _, value in ordered)}
        expected = math.prod(chunks.grid_shape(entry["shape"], entry["chunk"]))
        if len(ordered) != expected:
            raise CheckpointError(f"{name}: {len(ordered)} of {expected} chunks were written; a process is missing")
    return merged


def _exchange(folder, described):
    """What every process has written, on process 0; goes through files, for it may be large."""
    write_checked_json(_part_path(folder, jax.process_index()), described)
    _barrier(f"{folder} is written")
    if jax.process_index() != 0:
        return []
    unseen = [i for i in range(jax.process_count()) if not _part_path(folder, i).exists()]
    if unseen:
        raise ValueError(f"{folder}: what processes {unseen} wrote cannot be seen here; give a folder that all share")
    return [read_checked_json(_part_path(folder, process)) for process in range(jax.process_count())]


def _part_path(folder, process):
    return folder.parent / f"{folder.name}.part-{process}"


def _barrier(name):
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
