"""What safetensors headers and indexes state: dtypes, where each tensor lies, and what can be wrong there.

A file is an 8-byte little-endian length N, a JSON header of N bytes that maps each tensor's name to its
dtype, shape and byte range, and then the bytes of the tensors, back to back.

Packed 4-bit floats (F4) count elements in the header's shape and put two of them in a byte, the earlier one
in the low nibble. They are handed out as they lie in the file: uint8 with the last dimension halved.

Format: https://huggingface.co/docs/safetensors
"""

import collections
import dataclasses
import json
import math
import operator
import stat
import sys
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
MAX_SHOWN_PER_KIND = 20
METADATA_KEY = "__metadata__"

_MAX_DIMS = 32
_MAX_ARRAY_BYTES = 2**63 - 1
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}

_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F4": np.dtype(np.uint8),
}
_BITS = {name: 4 if name == "F4" else 8 * dtype.itemsize for name, dtype in _DTYPES.items()}
FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items() if name != "F4"} | {FLOAT4: "F4"}

# What a reader of the error can do, by kind of problem; also the order in which kinds are shown.
_ADVICE = {
    "folder": f"give a folder with {SINGLE_FILE}, or with {INDEX_FILE} and the shards that it names",
    "index": f"fetch {INDEX_FILE} again, or write it anew from the shards",
    "missing file": "fetch these files; the download or copy was not complete",
    "unexpected file": "two checkpoints seem to lie in one folder: move away the files of the other one",
    "file size": "fetch these files again; the download or copy was not complete, or something was appended",
    "header": "fetch these files again; they are damaged, or are not safetensors files",
    "tensor entry": "fetch these files again, or ask whoever wrote them: their headers break the format",
    "byte layout": "fetch these files again, or ask whoever wrote them: tensors must lie back to back",
    "duplicate tensor": "keep one of the files; which of the two values is meant cannot be known",
    "index mismatch": "index and shards come from different versions: fetch both again from one version",
    "total size": "index and shards come from different versions: fetch both again from one version",
}


class CheckpointError(ValueError):
    """A checkpoint on disk cannot be used. `problems` has every reason; the message cuts long lists short."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()):
        super().__init__(message)
        self.problems = tuple(problems)


class Problems:
    """Collects what is wrong, by kind, until the whole folder has been looked at."""

    def __init__(self) -> None:
        self._by_kind: dict[str, list[str]] = {kind: [] for kind in _ADVICE}

    def add(self, kind: str, text: str) -> None:
        """Notes one problem of a kind that `_ADVICE` has."""
        self._by_kind[kind].append(text)

    def raise_if_any(self, folder: Path) -> None:
        """Raises one CheckpointError with everything noted so far, if there is anything."""
        found = {kind: texts for kind, texts in self._by_kind.items() if texts}
        if not found:
            return
        problems = tuple(f"{kind}: {text}" for kind, texts in found.items() for text in texts)
        lines = [f"{folder} is not a usable checkpoint; problems: {len(problems)}"]
        for kind, texts in found.items():
            lines.append(f"{kind} ({len(texts)}): {_ADVICE[kind]}")
            lines += [f"  - {text}" for text in texts[:MAX_SHOWN_PER_KIND]]
            if len(texts) > MAX_SHOWN_PER_KIND:
                lines.append(f"  - and {len(texts) - MAX_SHOWN_PER_KIND:,} more of this kind")
        raise CheckpointError("\n".join(lines), problems)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: the file's own dtype and shape, and `begin` and `end` in bytes from its start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return self.end - self.begin

    @property
    def array_shape(self) -> tuple[int, ...]:
        """Shape of the array that a read returns: `shape`, but with the last dimension halved for F4."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.dtype == "F4" else self.shape


def numpy_dtype(name: str) -> np.dtype:
    """Returns the numpy dtype for a safetensors dtype name; F4 gives uint8, two values per byte.

    Raises:
      NotImplementedError: A 6-bit float (F6_E2M3, F6_E3M2).
      ValueError: Any other name that the format does not have.
    """
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is not None:
        return dtype
    if isinstance(name, str) and name.startswith("F6"):
        raise NotImplementedError(
            f"dtype {name!r}, 6-bit floats, is not supported; allowed: {', '.join(_DTYPES)}; convert it"
        )
    raise ValueError(f"unknown safetensors dtype {name!r}; allowed: {', '.join(_DTYPES)}")


def stored_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes that a tensor takes in a file; raises ValueError where 4-bit values do not fill whole bytes."""
    if dtype == "F4" and (not shape or shape[-1] % 2):
        raise ValueError(f"shape {list(shape)} of F4 needs an even last dimension: two values share a byte")
    return math.prod(shape) * _BITS[dtype] // 8


def _is_int_list(value: object) -> bool:
    return isinstance(value, list) and not set(map(type, value)) - {int}  # A bool is no int here.


def _parse_entry(entry: object) -> tuple[str, tuple[int, ...], int, int]:
    """Checks one header entry by itself; returns dtype, shape, and begin and end relative to the data."""
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        given = f"keys {sorted(entry)}" if isinstance(entry, dict) else f"{entry!r:.80}"
        raise ValueError(f"has {given}; needs exactly dtype, shape and data_offsets")
    dtype, dims, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    numpy_dtype(dtype)
    if not _is_int_list(dims) or len(dims) > _MAX_DIMS or min(dims, default=0) < 0:
        raise ValueError(f"has shape {dims!r:.80}; needs a list of at most {_MAX_DIMS} integers >= 0")
    if not _is_int_list(offsets) or len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        raise ValueError(f"has data_offsets {offsets!r:.80}; needs two integers [begin, end], 0 <= begin <= end")
    begin, end = offsets
    shape = tuple(dims)
    num_bytes = stored_bytes(dtype, shape)
    if num_bytes != end - begin:
        raise ValueError(
            f"has shape {dims!r:.80} of {dtype}, which takes {num_bytes} bytes, "
            f"but data_offsets {offsets} hold {end - begin}"
        )
    if not num_bytes and math.prod(max(dim, 1) for dim in shape) * 16 > _MAX_ARRAY_BYTES:
        raise ValueError(f"has shape {dims!r:.80}: it is empty, but its dimensions are beyond any array's")
    return dtype, shape, begin, end


def _load_json(raw: bytes) -> tuple[dict, list[str]]:
    """Parses UTF-8 bytes as one JSON object; returns it and the keys that occur twice in one object of it."""
    repeated: list[str] = []

    def build(pairs: list[tuple[str, object]]) -> dict:
        built = dict(pairs)
        if len(built) != len(pairs):
            counts = collections.Counter(key for key, _ in pairs)
            repeated.extend(key for key, count in counts.items() if count > 1)
        return built

    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start}") from error
    if not text.startswith("{"):
        raise ValueError(f"is not JSON of one object: it starts with {text[:12]!r}, not with '{{'")
    try:
        return json.loads(text, object_pairs_hook=build), repeated
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error


class Shard:
    """One file's tensors in order of offset, and how the file looked when its header was read."""

    def __init__(self, path: Path, label: str):
        self.path, self.label = path, label
        self.tensors: dict[str, TensorInfo | None] = {}  # None where the entry is broken
        self.stamp = (0, 0)

    def scan(self, problems: Problems) -> bool:
        """Reads and checks the header. Returns whether the names that the file holds are known."""
        try:
            status = self.path.stat()
            if not stat.S_ISREG(status.st_mode):
                problems.add("header", f"{self.label} is not a regular file")
                return False
            self.stamp = (status.st_size, status.st_mtime_ns)
            with open(self.path, "rb") as file:
                raw = self._read_header(file, status.st_size, problems)
        except OSError as error:
            problems.add("header", f"{self.label} cannot be read: {error.strerror or error}")
            return False
        if raw is None:
            return False
        try:
            header, repeated = _load_json(raw)
        except ValueError as error:
            problems.add("header", f"{self.label}: the header of {len(raw):,} bytes {error}")
            return False
        for key in repeated:
            problems.add("header", f"{self.label}: key {key!r} occurs twice in one object")
        metadata = header.pop(METADATA_KEY, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            wrong = f"{METADATA_KEY} must map strings to strings, not {metadata!r:.80}"
            problems.add("header", f"{self.label}: {wrong}")
        self._check_entries(header, 8 + len(raw), problems)
        return True

    def _read_header(self, file: BinaryIO, file_bytes: int, problems: Problems) -> bytes | None:
        if file_bytes < 8:
            problems.add("header", f"{self.label} has {file_bytes} bytes; a file has 8 and a header at least")
            return None
        header_bytes = int.from_bytes(file.read(8), "little")
        allowed = min(MAX_HEADER_BYTES, file_bytes - 8)
        if header_bytes > allowed:
            problems.add(
                "header",
                f"{self.label} states a header of {header_bytes:,} bytes; allowed: {allowed:,} "
                f"(the file has {file_bytes:,} bytes, the format's limit is {MAX_HEADER_BYTES:,})",
            )
            return None
        return file.read(header_bytes)

    def _check_entries(self, header: dict, data_begin: int, problems: Problems) -> None:
        good = []
        shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # One object per shape: a file has few of them.
        for name, entry in header.items():
            try:
                dtype, shape, begin, end = _parse_entry(entry)
            except (ValueError, NotImplementedError) as error:
                problems.add("tensor entry", f"{self.label}: {name!r} {error}")
                self.tensors[name] = None
            else:
                shape = shapes.setdefault(shape, shape)
                info = (name, sys.intern(dtype), shape, self.path, data_begin + begin, data_begin + end)
                good.append(TensorInfo(*info))
        good.sort(key=operator.attrgetter("begin", "end"))
        whole = not self.tensors
        self.tensors.update((info.name, info) for info in good)
        reached, previous = data_begin, "the header"
        for info in good:
            if info.begin != reached and whole:  # A broken entry leaves a hole: that is no second problem.
                what = f"{'a hole' if info.begin > reached else 'an overlap'} of {abs(info.begin - reached):,}"
                problems.add("byte layout", f"{self.label}: {what} bytes between {previous} and {info.name!r}")
            if info.end >= reached:
                reached, previous = info.end, repr(info.name)
        excess = self.stamp[0] - reached
        if excess < 0:
            sizes = f"it has {self.stamp[0]:,} bytes, its header needs {reached:,}"
            problems.add("file size", f"{self.label} is truncated by {-excess:,} bytes: {sizes}")
        elif excess and whole:
            problems.add("file size", f"{self.label} has {excess:,} trailing bytes after its last tensor")


def read_index(path: Path, problems: Problems) -> tuple[dict[str, str], object]:
    """Returns the index's weight_map, tensor name to file name, and its total_size or None."""
    try:
        index, repeated = _load_json(path.read_bytes())
    except (OSError, ValueError) as error:
        problems.add("index", f"{path.name} {error}")
        return {}, None
    for key in repeated:
        problems.add("index", f"{path.name}: key {key!r} occurs twice in one object")
    weight_map, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(metadata, dict):
        problems.add("index", f"{path.name}: metadata must be an object, not {metadata!r:.80}")
        metadata = {}
    if not isinstance(weight_map, dict) or not weight_map:
        problems.add("index", f"{path.name}: weight_map must map tensor names to files, not {weight_map!r:.80}")
        return {}, None
    for name in [name for name, file in weight_map.items() if not isinstance(file, str)]:
        problems.add("index", f"{path.name}: {name!r} must name a file, not {weight_map.pop(name)!r:.80}")
    return weight_map, metadata.get("total_size")
