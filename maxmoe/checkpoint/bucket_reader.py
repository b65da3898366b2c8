"""Reads a published safetensors folder in a bucket, tensor by tensor, without a local copy of the weights."""

import datetime
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from maxmoe.checkpoint import object_storage
from maxmoe.checkpoint.safetensors_header import INDEX_FILE, MAX_HEADER_BYTES
from maxmoe.checkpoint.safetensors_io import CheckpointError, CheckpointReader, check_runs, numpy_dtype

_FIRST_BYTES = 2**20  # of a file, read at once: most headers fit


def open_reader(folder: str | os.PathLike) -> CheckpointReader:
    """Opens a published folder, on a disk or in a bucket. Raises: CheckpointError, ValueError."""
    return BucketReader(folder) if object_storage.is_remote(folder) else CheckpointReader(folder)


class BucketReader(CheckpointReader):
    """A `CheckpointReader` of a bucket's folder.

    Opening fetches the headers, into files of the published length that hold nothing else and take no space; so all
    checks are those of the local reader. Values come by one request per tensor. A file that is replaced by one of the
    same length while the reader is open is not noticed.
    """

    def __init__(self, folder: str | os.PathLike):
        """Opens the folder. Raises: CheckpointError; ValueError for a bucket that cannot be used."""
        remote = object_storage.connect(folder)
        self._remote, self._files = remote, object_storage.file_system(remote)
        # ignore_cleanup_errors: the interpreter may be going down.
        self._headers = tempfile.TemporaryDirectory(prefix="maxmoe-", ignore_cleanup_errors=True)
        self._local = Path(self._headers.name)
        found = object_storage.list_objects(remote)
        if not found:
            raise CheckpointError(f"{remote} does not exist, or is empty")
        for name, info in found.items():
            inside = not {"", ".", ".."} & set(name.split("/"))  # a name in a bucket may be anything
            if inside and (name == INDEX_FILE or name.endswith(".safetensors")):
                self._fetch_header(name, info)
        try:
            super().__init__(self._local)
        except CheckpointError as error:
            text = str(error).replace(str(self._local), str(remote))
            raise CheckpointError(text, error.problems) from error
        self.folder = remote

    def _fetch_header(self, name, info):
        path, size = self._local / name, info["size"]
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == INDEX_FILE:
            path.write_bytes(self._files.cat_file(info["name"]))
            return
        start = self._files.cat_file(info["name"], start=0, end=min(size, _FIRST_BYTES)) if size else b""
        length = 8 + min(int.from_bytes(start[:8], "little"), MAX_HEADER_BYTES)
        if min(size, length) > len(start):
            start += self._files.cat_file(info["name"], start=len(start), end=min(size, length))
        with open(path, "wb") as file:
            file.write(start[:length])
            file.truncate(size)
        changed = info.get("LastModified") or info.get("mtime")
        if isinstance(changed, datetime.datetime):  # the same in every run: it tells one source from another
            os.utime(path, ns=(0, int(changed.timestamp()) * 10**9))

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor: see `CheckpointReader.read`; it is a copy."""
        if name not in self.tensors:
            raise KeyError(f"no tensor {name!r} in {self.folder}; its {len(self.tensors):,} names are in `tensors`")
        info = self.tensors[name]
        array = np.empty(info.array_shape, numpy_dtype(info.dtype))
        self.read_into(name, array)
        if info.dtype == "BOOL" and array.size and array.view(np.uint8).max() > 1:
            raise CheckpointError(f"{name!r} in {self.folder} is BOOL but has bytes other than 0 and 1; fetch it again")
        array.flags.writeable = False
        return array

    def read_into(self, name: str, out: np.ndarray, runs: Iterable[tuple[int, int]] | None = None) -> None:
        """Reads a tensor's bytes, or runs of them, into a contiguous array of as many bytes, by one request.

        What lies between two runs is fetched as well.

        Raises: KeyError, CheckpointError, ValueError: as `CheckpointReader.read_into`.
        """
        info = self.tensors[name]
        runs = [(0, info.num_bytes)] if runs is None else list(runs)
        check_runs(info, name, out, runs)
        if self._maps is None:
            raise ValueError(f"the reader of {self.folder} is closed; open a new one")
        if not out.nbytes:
            return
        path = self._remote / info.file.relative_to(self._local).as_posix()
        first, last = runs[0][0], runs[-1][0] + runs[-1][1]
        try:
            raw = self._files.cat_file(os.fspath(path), start=info.begin + first, end=info.begin + last)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} was there and is gone; open the checkpoint again") from error
        except OSError as error:
            raise CheckpointError(f"{path}: {name!r} cannot be read: {error}") from error
        if len(raw) != last - first:
            raise CheckpointError(f"{path} ended inside {name!r}; it was replaced or cut short while it was read")
        fetched, target, done = np.frombuffer(raw, np.uint8), out.reshape(-1).view(np.uint8), 0
        for offset, length in runs:
            target[done : done + length] = fetched[offset - first :][:length]
            done += length

    def close(self) -> None:
        """Lets go of the bucket. Arrays that were read stay valid."""
        super().close()
        self._headers.cleanup()
