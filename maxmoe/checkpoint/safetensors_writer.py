"""Writes safetensors files and Hugging Face folders of them: the same bytes for the same input, whole or not at all."""

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from maxmoe.checkpoint.safetensors_header import (
    DTYPE_NAMES,
    FLOAT4,
    INDEX_FILE,
    MAX_HEADER_BYTES,
    METADATA_KEY,
    SINGLE_FILE,
    stored_bytes,
)


@dataclasses.dataclass(frozen=True)
class TensorOnDemand:
    """Stands for an array that is made when its values are needed."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """Makes the array, for `np.asarray`."""
        array = self.make()
        if (array.shape, array.dtype) != (self.shape, self.dtype):
            raise ValueError(f"made {array.dtype} {list(array.shape)}, promised {self.dtype} {list(self.shape)}")
        return array if dtype is None else array.astype(dtype)


def _dtype_and_bytes(name: str, array: np.ndarray | TensorOnDemand) -> tuple[str, int]:
    """The file's dtype for an array and the bytes that it takes there."""
    dtype = DTYPE_NAMES.get(array.dtype.newbyteorder("=") if array.dtype.kind in "iufc" else array.dtype)
    if dtype is None:
        raise ValueError(
            f"{name!r} has dtype {array.dtype}, which the format lacks; allowed: {', '.join(map(str, DTYPE_NAMES))}"
        )
    try:
        return dtype, stored_bytes(dtype, array.shape)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from error


def _raw_bytes(array: np.ndarray) -> np.ndarray:
    """An array's bytes in a file: row-major, little-endian, 4-bit floats in pairs, low nibble first."""
    array = np.asarray(array, order="C")
    if array.dtype == FLOAT4:
        codes = array.view(np.uint8) & 0xF
        return (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(-1)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8)


@contextlib.contextmanager
def _replace_whole(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file that takes the place of `path` when the block ends well, and vanishes otherwise."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)  # The rename itself is on disk only when the folder is.
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_safetensors(
    path: str | os.PathLike, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes one file: tensors in the order given, the same bytes for the same input; whole or not at all.

    Each tensor is taken from `tensors` twice, for the header and for its bytes, and let go at once. A value may be
    anything with a shape and a dtype that NumPy can make an array of when its bytes are due (`TensorOnDemand`), so
    that memory for one suffices. `ml_dtypes.float4_e2m1fn` is packed to F4.

    Raises:
      ValueError: A dtype that the format lacks, a name that it cannot hold, or a header beyond its limit.
    """
    header: dict[str, object] = {}
    if metadata is not None:
        if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
            raise ValueError(f"metadata must map strings to strings, got {metadata!r:.80}")
        header[METADATA_KEY] = dict(metadata)
    offset = 0
    for name in tensors:
        if not isinstance(name, str) or name == METADATA_KEY:
            raise ValueError(f"a tensor cannot be named {name!r}; allowed: any string but {METADATA_KEY!r}")
        array = tensors[name]
        dtype, num_bytes = _dtype_and_bytes(name, array)
        offsets = [offset, offset + num_bytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        offset += num_bytes
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(raw):,} bytes; allowed: {MAX_HEADER_BYTES:,}; use several files")
    with _replace_whole(Path(path)) as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name in tensors:
            file.write(_raw_bytes(np.asarray(tensors[name])).data)
        if file.tell() != 8 + len(raw) + offset:
            raise ValueError(f"tensors changed while {path} was written; pass a mapping that gives the same each time")


def write_checkpoint(
    folder: str | os.PathLike, tensors: Mapping[str, np.ndarray], max_shard_bytes: int | None = None
) -> None:
    """Writes a folder for `CheckpointReader`: one file, or an index and shards of up to `max_shard_bytes`.

    A larger tensor gets a shard of its own. The index is written last, so that a broken write is noticed.

    Raises:
      ValueError: The folder already holds a checkpoint, or `max_shard_bytes` is not positive.
    """
    folder = Path(folder)
    if max_shard_bytes is not None and max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; allowed: a number of bytes > 0, or None for one file")
    folder.mkdir(parents=True, exist_ok=True)
    present = sorted(path.name for path in folder.glob("model*.safetensors*"))
    if present:
        raise ValueError(f"{folder} already holds {', '.join(present[:5])}; give an empty folder or remove them first")
    shards: list[list[str]] = [[]]
    total_bytes = shard_bytes = 0
    for name in tensors:
        _, num_bytes = _dtype_and_bytes(name, tensors[name])
        if shards[-1] and max_shard_bytes is not None and shard_bytes + num_bytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += num_bytes
        total_bytes += num_bytes
    metadata = {"format": "pt"}  # Some loaders of the format refuse files without it.
    if len(shards) == 1:
        write_safetensors(folder / SINGLE_FILE, tensors, metadata)
        return
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        write_safetensors(folder / file_name, _Subset(tensors, names), metadata)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    with _replace_whole(folder / INDEX_FILE) as file:
        file.write(json.dumps(index, indent=2).encode("utf-8"))


class _Subset(Mapping[str, np.ndarray]):
    """Some of a mapping's tensors, taken from it when asked for."""

    def __init__(self, tensors: Mapping[str, np.ndarray], names: list[str]):
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
