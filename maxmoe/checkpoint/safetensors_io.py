"""Safetensors on disk: a checked, memory-mapped reader of Hugging Face folders.

A folder holds one `model.safetensors`, or shards and a `model.safetensors.index.json` that says which shard
holds which tensor. The reader looks at every header before it hands out one value, so that an interrupted
download is an error at once and not garbage later; it reports all that is wrong in one `CheckpointError`.
Values stay in the file until they are used.
"""

import collections
import contextlib
import gc
import mmap
import os
import re
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np

from maxmoe.checkpoint.files import forget_pages
from maxmoe.checkpoint.safetensors_header import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointError,
    Problems,
    Shard,
    TensorInfo,
    numpy_dtype,
    read_index,
)

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "TensorInfo",
    "numpy_dtype",
]

# Pages that were read count as resident while their map exists: keep the maps of a few shards only.
MAX_CACHED_MAPS = 4

_SHARD_NAME = re.compile(r"model-\d+-of-\d+\.safetensors")


def _is_plain_path(name: str) -> bool:
    """Whether a name from an index stays in the folder, has one spelling and is a safetensors file."""
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts and not any(char in name for char in "\\:\0")
    return inside and str(path) == name and path.suffix == ".safetensors"


def _choose_shards(folder: Path, weight_map: dict[str, str] | None, problems: Problems) -> list[Shard]:
    """The files to read: what the index names, or the single one. Reports absent and left-over files."""
    counts = collections.Counter([SINGLE_FILE] if weight_map is None else weight_map.values())
    shards = []
    for name, count in sorted(counts.items()):
        if not _is_plain_path(name):
            problems.add(
                "index",
                f"{INDEX_FILE} names {name!r} for {count:,} tensors; allowed: the relative path of a "
                ".safetensors file inside the folder, without '.', '..', backslash or colon",
            )
        elif not os.path.exists(folder / name):
            problems.add("missing file", f"{name} is not there; {INDEX_FILE} names it for {count:,} tensors")
        else:
            shards.append(Shard(folder / name, name))
    for name in sorted(entry.name for entry in folder.iterdir()):
        if name not in counts and (name == SINGLE_FILE or _SHARD_NAME.fullmatch(name)):
            reason = f"there is no {INDEX_FILE}" if weight_map is None else f"{INDEX_FILE} does not name it"
            problems.add("unexpected file", f"{name} is there, but {reason}")
    return shards


def _check_index(
    weight_map: dict[str, str],
    holders: dict[str, str],
    read: set[str],
    repeated: set[str],
    problems: Problems,
) -> None:
    """Compares the index with `holders`, which maps a tensor to its file; `read` are the files read."""
    for name, file in weight_map.items():
        holder = holders.get(name)
        if holder == file or name in repeated:
            continue
        if holder is not None:
            problems.add("index mismatch", f"{name!r} is in {holder}; {INDEX_FILE} says {file}")
        elif file in read:
            problems.add("index mismatch", f"{name!r} is not in {file}, where {INDEX_FILE} says it is")
    for name in sorted(holders.keys() - weight_map.keys()):
        problems.add("index mismatch", f"{name!r} is in {holders[name]}; {INDEX_FILE} does not have it")


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Keeps the cycle collector from visiting half a million header entries again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CheckpointReader:
    """A Hugging Face folder of safetensors, checked when opened, read tensor by tensor.

    Opening reads headers only. A folder with an index must hold just the files that the index names: a
    left-over `model.safetensors` or `model-N-of-M.safetensors` is refused, files of other names are ignored.
    `tensors` is in order of file, then of offset. Reading from several threads is safe. Use the reader as a
    context manager, or `close` it.

    Attributes:
      keeps_cached: Whether the system may keep what `read_into` has read in its cache of files. True at first.

    Raises:
      CheckpointError: Lists everything that is wrong with the folder.
    """

    keeps_cached = True

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        problems = Problems()
        self._stamps: dict[Path, tuple[int, int]] = {}
        with _collector_paused():
            tensors = self._scan(problems)
        problems.raise_if_any(self.folder)
        self.tensors: Mapping[str, TensorInfo] = types.MappingProxyType(tensors)
        self.total_bytes = sum(info.num_bytes for info in tensors.values())
        self._maps: collections.OrderedDict[Path, mmap.mmap] | None = collections.OrderedDict()
        self._lock = threading.Lock()

    def _scan(self, problems: Problems) -> dict[str, TensorInfo]:
        if not self.folder.is_dir():
            what = "is not a folder" if self.folder.exists() else "does not exist"
            problems.add("folder", f"{self.folder} {what}")
            return {}
        weight_map, total_size = None, None
        if (self.folder / INDEX_FILE).exists():
            weight_map, total_size = read_index(self.folder / INDEX_FILE, problems)
        elif not (self.folder / SINGLE_FILE).exists():
            others = sorted(path.name for path in self.folder.glob("*.safetensors"))
            found = f"other .safetensors files: {len(others)} {', '.join(others[:3])}".rstrip()
            problems.add("folder", f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; {found}")
            return {}
        if weight_map == {}:  # Nothing to compare the files with; the index's own problem has been noted.
            return {}
        return self._scan_shards(weight_map, total_size, problems)

    def _scan_shards(
        self, weight_map: dict[str, str] | None, total_size: object, problems: Problems
    ) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        holders: dict[str, str] = {}
        read, repeated = set(), set()
        shards = _choose_shards(self.folder, weight_map, problems)
        for shard in shards:
            if not shard.scan(problems):
                continue
            read.add(shard.label)
            self._stamps[shard.path] = shard.stamp
            for name in sorted(shard.tensors.keys() & holders.keys()):
                repeated.add(name)
                problems.add("duplicate tensor", f"{name!r} is in {holders[name]} and in {shard.label}")
            holders.update(dict.fromkeys(shard.tensors, shard.label))
            tensors.update(shard.tensors)
            shard.tensors = {}
        if weight_map is not None:
            _check_index(weight_map, holders, read, repeated, problems)
            total_bytes = sum(info.num_bytes for info in tensors.values() if info is not None)
            complete = len(read) == len(set(weight_map.values())) and None not in tensors.values()
            if complete and total_size is not None and total_size != total_bytes:
                problems.add(
                    "total size",
                    f"{INDEX_FILE} states total_size {total_size!r}; the tensors have {total_bytes} bytes",
                )
        return tensors

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as a read-only view on the file, valid after `close` as long as it is referenced.

        A tensor whose offset does not suit its dtype is copied. F4 comes packed (`TensorInfo.array_shape`).

        Raises:
          KeyError: The checkpoint has no such tensor.
          CheckpointError: The file has changed since it was checked, or a BOOL has bytes other than 0 and 1.
          ValueError: The reader is closed.
        """
        info = self.tensors.get(name)
        if info is None:
            raise KeyError(f"no tensor {name!r} in {self.folder}; its {len(self.tensors):,} names are in `tensors`")
        dtype = numpy_dtype(info.dtype)
        if not info.num_bytes:
            array = np.empty(info.array_shape, dtype)
        else:
            raw = np.frombuffer(self._map(info.file), np.uint8, info.num_bytes, info.begin)
            if info.dtype == "BOOL" and raw.max() > 1:
                raise CheckpointError(
                    f"{name!r} in {info.file} is BOOL but has bytes other than 0 and 1; fetch it again"
                )
            array = raw.view(dtype).reshape(info.array_shape)
            if not array.flags.aligned:
                array = array.copy()
        array.flags.writeable = False
        return array

    def read_into(self, name: str, out: np.ndarray, runs: Iterable[tuple[int, int]] | None = None) -> None:
        """Reads a tensor's bytes into a contiguous array of as many bytes, without mapping the file.

        Unlike views on a map, which stay resident as long as the system likes, this needs no memory but `out`.

        Args:
          runs: Offset and length, in bytes, of the parts of the tensor to read, one after the other; None for all.
        Raises: KeyError, CheckpointError, ValueError: as `read`, and for an array that does not suit.
        """
        info = self.tensors[name]
        runs = [(0, info.num_bytes)] if runs is None else list(runs)
        check_runs(info, name, out, runs)
        target, done = memoryview(out.reshape(-1).view(np.uint8)), 0
        with open(info.file, "rb", buffering=0) as file:
            self._check_unchanged(info.file, file)
            for offset, length in runs:
                end, position = done + length, info.begin + offset
                while done < end:
                    count = os.preadv(file.fileno(), [target[done:end]], position)
                    if not count:
                        raise CheckpointError(f"{info.file} ended inside {name!r}; it was cut short while it was read")
                    done, position = done + count, position + count
                if length and not self.keeps_cached:
                    forget_pages(file.fileno(), info.begin + offset, length)

    def _check_unchanged(self, path: Path, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != self._stamps[path]:
            raise CheckpointError(f"{path} has changed since the checkpoint was opened; open it again")

    def _map(self, path: Path) -> mmap.mmap:
        """Maps a file, or takes one of the few maps kept. A map dropped here lives on while views need it."""
        with self._lock:
            if self._maps is None:
                raise ValueError(f"the reader of {self.folder} is closed; open a new one")
            if path not in self._maps:
                self._maps[path] = self._new_map(path)
                if len(self._maps) > MAX_CACHED_MAPS:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(path)
            return self._maps[path]

    def _new_map(self, path: Path) -> mmap.mmap:
        # Before Python 3.13 a map keeps a descriptor of its own, so few maps also means few open files.
        options = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        with open(path, "rb") as file:
            self._check_unchanged(path, file)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **options)

    def close(self) -> None:
        """Lets go of the files. Arrays that were read stay valid."""
        with self._lock:
            self._maps = None

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_runs(info: TensorInfo, name: str, out: np.ndarray, runs: Iterable[tuple[int, int]]) -> None:
    """Raises: ValueError if the runs leave the tensor, or `out` cannot take them."""
    wanted = sum(length for _, length in runs)
    if any(offset < 0 or offset + length > info.num_bytes for offset, length in runs):
        raise ValueError(f"{name!r} has {info.num_bytes:,} bytes; asked were bytes beyond its end")
    if out.nbytes != wanted or not out.flags.c_contiguous:
        raise ValueError(f"{name!r} has {wanted:,} bytes; given are {out.nbytes:,}, to be contiguous")
