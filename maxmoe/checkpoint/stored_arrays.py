"""Arrays that `save_arrays` wrote, read in parts, each chunk compared with its checksum."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import random
import threading
from typing import Any, Literal

import numpy as np
import tensorstore
from etils import epath

from maxmoe.checkpoint import chunks, object_storage
from maxmoe.checkpoint.files import (
    absolute_path,
    file_checksum,
    forget_pages,
    kvstore,
    list_files,
    read_checked_json,
)
from maxmoe.checkpoint.safetensors_header import CheckpointError

FORMAT = "maxmoe arrays 1"
MANIFEST = ".manifest.json"
Verify = Literal["full", "sampled", "off"]

_SAMPLED = 1 / 16  # of the chunks
_SHOWN = 20
_RANDOM = random.Random()  # of its own: a program's seed and draws stay as they are
_FETCH_BYTES = 64 * 2**20  # that are read at once; two such parts are on their way
_NODE_CACHE_BYTES = 16 * 2**20  # for the nodes of a folder's index; array data is not cached


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


def is_complete(folder: epath.PathLike) -> bool:
    """Whether a save ended well here. Damage done since is another matter: see `StoredArrays`."""
    object_storage.connect(folder)
    return manifest_path(folder).exists()


def manifest_path(folder: epath.PathLike) -> epath.Path:
    """Where the manifest of a folder lies: beside it."""
    folder = absolute_path(folder)
    return folder.parent / (folder.name + MANIFEST)


def stored_name(name: str) -> str:
    """What Orbax calls an array."""
    return name.replace("/", ".")


class StoredArrays:
    """Arrays that `save_arrays` wrote, read in parts, each chunk checked against its checksum.

    Opening looks at the manifest, at every file's size, and at the checksums of the small files. Reading from
    several threads is safe. Array data is not cached: what is read comes from the files.

    Attributes:
      arrays: What is stored, by name.
      meta: The JSON values that were saved along.
      bytes_read: Bytes read so far, whole chunks.
      keeps_cached: Whether the system may keep what was read in its cache of files. True at first.
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
        if manifest.get("format") != FORMAT:
            raise CheckpointError(f"{self.folder}: format {manifest.get('format')!r}, this version reads {FORMAT!r}")
        self.meta: dict[str, Any] = manifest["meta"]
        self._files: dict[str, list] = manifest["files"]
        self.arrays = {name: _stored_info(entry) for name, entry in manifest["arrays"].items()}
        self.bytes_read = 0
        self.keeps_cached = True
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
        if not self.keeps_cached and not object_storage.is_remote(self.folder):
            self._forget_pages()

    def _forget_pages(self):
        """Of all files, for which of them hold an array is TensorStore's affair; it takes microseconds a file."""
        for name in self._files:
            with open(self.folder / name, "rb", buffering=0) as file:
                forget_pages(file.fileno())

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
                "kvstore": {"driver": "ocdbt", "base": base, "path": stored_name(name) + "/"},
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
        wrong = [p for p, bad in zip(places, (hashers().map if many else map)(damaged, places), strict=True) if bad]
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
        sums = dict(zip(checked, hashers().map(lambda name: file_checksum(self.folder / name), checked), strict=True))
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
def hashers() -> concurrent.futures.Executor:
    """Threads for checksums, one per core."""
    return concurrent.futures.ThreadPoolExecutor(os.cpu_count())
