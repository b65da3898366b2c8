"""Named arrays in an Orbax checkpoint, with a manifest beside it that can tell whether they are still the same.

Orbax notices neither a flipped bit nor a folder that lacks a file. So `save_arrays` writes, next to the folder
`NAME`, a file `NAME.manifest.json`: a checksum per stored chunk, and every file with its size and checksum. The
manifest is written last, in one step: without it there is no checkpoint, whatever else lies there.

Folder and paths may lie on a disk or in a bucket (`gs://`, `s3://`): see `object_storage`.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import random
import re
import threading
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from jax.experimental import multihost_utils

from maxmoe.checkpoint import chunks, object_storage
from maxmoe.checkpoint.files import (
    absolute_path,
    file_checksum,
    kvstore,
    list_files,
    read_checked_json,
    write_checked_json,
)
from maxmoe.checkpoint.safetensors_header import CheckpointError

MANIFEST = ".manifest.json"
Verify = Literal["full", "sampled", "off"]

_FORMAT = "maxmoe arrays 1"
_SAMPLED = 1 / 16  # of the chunks
_FILE_BYTES = 256 * 2**20  # of a data file, which is written from memory once it is full
_SAVE_GB = 1  # that Orbax may have on its way to the disk at once, unless one shard is more
_SHOWN = 20
_RANDOM = random.Random()  # of its own: a program's seed and draws stay as they are
_FETCH_BYTES = 64 * 2**20  # that are read at once; two such parts are on their way
_NODE_CACHE_BYTES = 16 * 2**20  # for the nodes of a folder's index; array data is not cached
_LEFTOVER = re.compile(r"(|\.orbax-checkpoint-tmp.*|\.part-\d+(\.\w+\.tmp)?|\.manifest\.json\.\w+\.tmp)")


@dataclasses.dataclass(frozen=True)
class StoredInfo:
    """Shape, dtype and chunks of a stored array, and the checksums of its chunks in row-major order."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    checksums: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def checksum(self, place: tuple[int, ...]) -> str:
        """The checksum of the chunk at a place of the grid."""
        number = 0
        for i, count in zip(place, chunks.grid_shape(self.shape, self.chunk), strict=True):
            number = number * count + i
        return self.checksums[number * chunks.HEX_DIGITS : (number + 1) * chunks.HEX_DIGITS]


# ---- Saving ---------------------------------------------------------------------------------------------------------


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
            files = list_files(stage, with_checksums=True, executor=_hashers()) if first else {}
        described = hashing.result()
    parts = [described]
    if jax.process_count() > 1:
        parts = _exchange(folder, described)
    if jax.process_index() == 0:
        manifest = {
            "format": _FORMAT,
            "meta": dict(meta),
            "arrays": _merge(parts),
            "files": files,
        }
        for process in range(jax.process_count()):
            _part_path(folder, process).unlink(missing_ok=True)
        write_checked_json(manifest_path(folder), manifest)
    _barrier(f"{folder} is complete")


def is_complete(folder: epath.PathLike) -> bool:
    """Whether a save ended well here. Damage done since is another matter: see `StoredArrays`."""
    object_storage.connect(folder)
    return manifest_path(folder).exists()


def manifest_path(folder: epath.PathLike) -> epath.Path:
    """Where the manifest of a folder lies: beside it."""
    folder = absolute_path(folder)
    return folder.parent / (folder.name + MANIFEST)


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
        for other in [stored.setdefault(_stored_name(name), name), *above]:
            if other != name:
                raise ValueError(f"arrays {other!r} and {name!r} would lie in the same place; rename one of them")


def _stored_name(name):
    return name.replace("/", ".")


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
            for place, value in chunks.checksums(values, chunk, _hashers()).items():
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


# ---- Reading --------------------------------------------------------------------------------------------------------


class StoredArrays:
    """Arrays that `save_arrays` wrote, read in parts, each chunk checked against its checksum.

    Opening looks at the manifest, at every file's size, and at the checksums of the small files. Reading from
    several threads is safe. Array data is not cached: what is read comes from the files.

    Attributes:
      arrays: What is stored, by name.
      meta: The JSON values that were saved along.
      bytes_read: Bytes read so far, whole chunks.
    """

    def __init__(self, folder: epath.PathLike, verify: Verify = "full", label: str = ""):
        """Opens a save.

        Args:
          verify: Check every chunk that is read, one in sixteen, or none.
          label: Stands before names in messages, such as the layer's.
        Raises: CheckpointError, with everything that is wrong.
        """
        if verify not in ("full", "sampled", "off"):
            raise ValueError(f"verify={verify!r}; allowed: 'full', 'sampled', 'off'")
        self.folder, self.verify = absolute_path(folder), verify
        self.label = label or self.folder.name
        if not is_complete(self.folder):
            raise CheckpointError(
                f"{self.folder} is not a complete save: {manifest_path(self.folder).name} is not there. It was "
                "interrupted, or copied in part; write or copy it again"
            )
        manifest = read_checked_json(manifest_path(self.folder))
        if manifest.get("format") != _FORMAT:
            raise CheckpointError(f"{self.folder}: format {manifest.get('format')!r}, this version reads {_FORMAT!r}")
        self.meta: dict[str, Any] = manifest["meta"]
        self._files: dict[str, list] = manifest["files"]
        self.arrays = {name: _stored_info(entry) for name, entry in manifest["arrays"].items()}
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._check_files(contents="small" if verify == "full" else "none")
        self._stores: dict[str, tensorstore.TensorStore] = {}
        self._context = tensorstore.Context(
            {"cache_pool": {"total_bytes_limit": _NODE_CACHE_BYTES}, "cache_pool#data": {"total_bytes_limit": 0}}
        )

    def read(self, name: str, index: tuple[int | slice, ...] = ()) -> np.ndarray:
        """Reads a part of an array: whole chunks are fetched and checked, and what was asked is cut out.

        Args:
          index: Integers, or slices of step 1, for leading axes; as in NumPy, an integer drops its axis.
        Raises:
          KeyError: No such array.
          CheckpointError: Names the array whose bytes are not those that were saved, or cannot be read.
        """
        info = self._info(name)
        box = chunks.box_of(index, info.shape)
        out = np.empty([part.stop - part.start for part in box], info.dtype)
        self.read_into(out, name, index)
        return out[(*chunks.dropped(index), ...)]

    def read_into(self, out: np.ndarray, name: str, index: tuple[int | slice, ...] = ()) -> None:
        """`read` into a contiguous array of the stored dtype, without other memory than a few chunks at a time."""
        info = self._info(name)
        box = chunks.box_of(index, info.shape)
        shape = [part.stop - part.start for part in box]
        if out.dtype != info.dtype or out.size != math.prod(shape) or not out.flags.c_contiguous:
            raise ValueError(f"{name}: asked are {info.dtype} {shape}; given is {out.dtype} {list(out.shape)}")
        if not out.size:
            return
        out = out.reshape(shape)
        pending: collections.deque = collections.deque()
        for part in chunks.parts_of(box, info.chunk, info.dtype.itemsize, _FETCH_BYTES):
            pending.append(self._start(name, info, part, out[_inside(part, box)]))
            if len(pending) == 2:  # one arrives while the other is checked
                self._finish(name, info, *pending.popleft())
        while pending:
            self._finish(name, info, *pending.popleft())

    def _info(self, name):
        if name not in self.arrays:
            raise KeyError(f"no array {name!r} in {self.folder}; its {len(self.arrays)} names are in `arrays`")
        return self.arrays[name]

    def check_everything(self) -> None:
        """Compares every byte of every file with the manifest. Raises: CheckpointError that names what is damaged."""
        self._check_files(contents="all")

    def _start(self, name, info, box, out):
        """Starts to read a box into `out`, by way of whole chunks where those are to be checked."""
        outer = box if self.verify == "off" else chunks.whole_chunks(box, info.shape, info.chunk)
        values = out if outer == box else np.empty([part.stop - part.start for part in outer], info.dtype)
        with self._lock:
            self.bytes_read += values.nbytes
        with self._naming(name):
            origin = tuple(part.start for part in outer)
            store = self._open(name, info)[outer].translate_to[(0,) * len(origin)] if origin else self._open(name, info)
            return tensorstore.array(values, copy=False).write(store), box, outer, values, out

    def _finish(self, name, info, reading, box, outer, values, out):
        with self._naming(name):
            reading.result()
        self._check(name, info, values, outer)
        if values is not out:
            out[...] = values[_inside(box, outer)]

    @contextlib.contextmanager
    def _naming(self, name):
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # TensorStore's errors have no class of their own
            raise CheckpointError(f"{self.label}: {name} cannot be read; restore it from a copy: {error}") from error

    def _open(self, name, info):
        if name not in self._stores:
            base = kvstore(self.folder)
            spec = {
                "driver": "zarr",
                "kvstore": {"driver": "ocdbt", "base": base, "path": _stored_name(name) + "/"},
                "cache_pool": "cache_pool#data",
                "fill_missing_data_reads": False,
            }
            store = tensorstore.open(spec, read=True, open=True, context=self._context).result()
            found = (tuple(store.shape), np.dtype(store.dtype.numpy_dtype))
            if found != (info.shape, info.dtype):
                raise CheckpointError(
                    f"{self.label}: {name} is {found[1]} {list(found[0])}; saved was {info.dtype} {list(info.shape)}. "
                    "Folder and manifest do not belong together"
                )
            self._stores[name] = store
        return self._stores[name]

    def _check(self, name, info, values, box):
        if self.verify == "off":
            return
        places = list(chunks.places_in(box, info.chunk))
        if self.verify == "sampled":
            places = [place for place in places if _RANDOM.random() < _SAMPLED]
        first = tuple(part.start // step for part, step in zip(box, info.chunk, strict=True))

        def damaged(place):
            inside = tuple(a - b for a, b in zip(place, first, strict=True))
            return chunks.checksum(chunks.chunk_of(values, inside, info.chunk)) != info.checksum(place)

        many = len(places) > 1 and values.nbytes > chunks.CHUNK_BYTES
        wrong = [p for p, bad in zip(places, (_hashers().map if many else map)(damaged, places), strict=True) if bad]
        if wrong:
            raise CheckpointError(
                f"{self.label}: {name} is damaged: {len(wrong)} of {len(places)} chunks read differ from their "
                f"checksums, the first at {list(wrong[0])} in chunks of {list(info.chunk)}. Restore {self.folder} from "
                "a copy, or convert it again",
                tuple(f"{self.label}: {name} is damaged in chunk {list(place)}" for place in wrong),
            )

    def _check_files(self, contents: Literal["none", "small", "all"]) -> None:
        problems = []
        found = list_files(self.folder, with_checksums=False)
        checked = [
            name
            for name, (num_bytes, _) in found.items()
            if self._is_checked(name, contents) and num_bytes == self._files.get(name, [None])[0]
        ]
        sums = dict(zip(checked, _hashers().map(lambda name: file_checksum(self.folder / name), checked), strict=True))
        for name in sorted(found.keys() | self._files.keys()):
            if name not in found:
                problems.append(f"{name} is not there")
            elif name not in self._files:
                problems.append(f"{name} is there and was not saved")
            elif found[name][0] != self._files[name][0]:
                problems.append(f"{name} has {found[name][0]:,} bytes, saved were {self._files[name][0]:,}")
            elif name in sums and sums[name] != self._files[name][1]:
                problems.append(f"{name} is damaged: its bytes differ from those saved")
        if problems:
            shown = problems[:_SHOWN] + ([f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else [])
            raise CheckpointError(
                f"{self.label}: the files of {self.folder} are not those that were saved; restore it from a copy:\n  "
                + "\n  ".join(shown),
                tuple(f"{self.label}: {problem}" for problem in problems),
            )

    @staticmethod
    def _is_checked(name, contents):
        in_data_folder = name.split("/")[-2:-1] == ["d"]
        return contents == "all" or (contents == "small" and not in_data_folder)


def _stored_info(entry):
    return StoredInfo(tuple(entry["shape"]), np.dtype(entry["dtype"]), tuple(entry["chunk"]), entry["checksums"])


def _inside(part, box):
    """Where a part lies in an array that holds a box."""
    return (*(slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, box, strict=True)), ...)


@functools.cache
def _hashers():
    return concurrent.futures.ThreadPoolExecutor(os.cpu_count())
