"""Where the weights of a model can be read from: a published safetensors folder, or an Orbax checkpoint.

Both are read weight by weight under the same names: a group (`top`, or a layer) and a weight's name in it. The
routed experts of a layer are weights with one entry per expert, `experts/gate_packed` and so on.
"""

import concurrent.futures
import functools
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from maxmoe.checkpoint import chunks, object_storage
from maxmoe.checkpoint.files import file_checksum, read_checked_json
from maxmoe.checkpoint.hf_names import Piece
from maxmoe.checkpoint.safetensors_io import CheckpointError, CheckpointReader, numpy_dtype
from maxmoe.checkpoint.stored_arrays import StoredArrays, Verify, manifest_path

INDEX_NAME = "maxmoe_checkpoint.json"
WEIGHTS_FOLDER = "weights"
FORMAT = "maxmoe checkpoint 1"

_NAN_SCALE = 255
_READERS = 4  # threads
_PART_BYTES = 32 * 2**20  # that one thread reads of a weight


class WeightInfo(NamedTuple):
    """Shape and dtype of a weight as it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole weight."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Key = tuple[str, str]  # group, weight


class SafetensorsSource:
    """The weights of a published folder whose tensors have been matched with a model's.

    Attributes:
      weights: Shape and dtype of every weight, by group and name.
      bytes_read: So far.
    """

    def __init__(self, reader: CheckpointReader, pieces: Iterable[Piece], names: Mapping[str, str]):
        """Takes an open reader, the model's pieces, and the file's names of those that are there."""
        self.folder, self._reader, self._names = reader.folder, reader, names
        self._pieces: dict[Key, list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault((piece.group, piece.weight), []).append(piece)
        self.weights = {key: self._info(group) for key, group in self._pieces.items()}
        self.bytes_read = 0
        self._lock = threading.Lock()

    def _info(self, group: list[Piece]) -> WeightInfo:
        first = group[0]
        stored = self._reader.tensors[self._names[first.name]].dtype if first.name in self._names else first.dtypes[0]
        shape = (len(group), *first.entry_shape) if first.inner else first.entry_shape
        return WeightInfo(shape, numpy_dtype(stored))

    def read(self, group: str, name: str, index: tuple[int | slice, ...] = ()) -> np.ndarray:
        """Reads a weight, or a part of it: integers, or slices of step 1, for leading axes.

        Raises:
          KeyError: No such weight.
          CheckpointError: The file has changed, or holds scales that mean NaN or padding that is not zero.
        """
        info = self.weights[group, name]
        out = np.empty([part.stop - part.start for part in chunks.box_of(index, info.shape)], info.dtype)
        self.read_into(out, group, name, index)
        return out[(*chunks.dropped(index), ...)]

    def read_into(self, out: np.ndarray, group: str, name: str, index: tuple[int | slice, ...] = ()) -> None:
        """`read` into a contiguous array of the weight's dtype; only the bytes that are asked for are read."""
        pieces, info = self._pieces[group, name], self.weights[group, name]
        box = chunks.box_of(index, info.shape)
        out = out.reshape([part.stop - part.start for part in box])
        if pieces[0].padded or pieces[0].name not in self._names:  # a few values
            out[...] = self._load_vector(pieces[0], info)[box]
            return
        tasks = []
        if pieces[0].inner:
            experts = range(box[0].start, box[0].stop)
            tasks = [(pieces[i], out[place], box[1:]) for place, i in enumerate(experts)]
        else:
            cuts = chunks.parts_of(box, [1] * len(box), info.dtype.itemsize, _PART_BYTES) if out.size else []
            for cut in cuts:
                inside = tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(cut, box, strict=True))
                tasks.append((pieces[0], out[inside], cut))
        list((_pool().map if len(tasks) > 1 else map)(lambda task: self._load_box(*task, info), tasks))

    def forget_what_is_read(self) -> None:
        """From now on the system does not keep the bytes that `read_into` has read in its cache of files."""
        self._reader.keeps_cached = False

    def _load_box(self, piece, out, box, info):
        shape = info.shape[1:] if piece.inner else info.shape
        self._load_into(piece, out, chunks.byte_runs(box, shape, info.dtype.itemsize))

    def _load_vector(self, piece, info):
        """One value per head, published with zeros after them, or not at all."""
        if piece.name not in self._names:
            return np.zeros(info.shape, info.dtype)
        name = self._names[piece.name]
        values, length = np.empty(np.prod(self._reader.tensors[name].shape), info.dtype), info.shape[-1]
        self._load_into(piece, values)
        if piece.padded and (values.size < length or np.any(values[length:])):
            text = (
                f"{name}: needs {length} values, one per head, and zeros after them; has {values.size}, "
                f"{np.count_nonzero(values[length:])} of the rest not zero"
            )
            raise CheckpointError(text, (text,))
        return values[:length].reshape(info.shape)

    def _load_into(self, piece, out, runs=None):
        name = self._names[piece.name]
        self._reader.read_into(name, out, runs)
        with self._lock:
            self.bytes_read += out.nbytes
        if piece.is_scale and out.size and out.max() == _NAN_SCALE:
            text = f"{name}: {np.sum(out == _NAN_SCALE)} scale bytes are 255, which is NaN"
            raise CheckpointError(text, (text,))


class OrbaxSource:
    """The weights of a checkpoint that `convert` or `save_params` wrote, each chunk checked as it is read.

    Attributes:
      weights: Shape and dtype of every weight, by group and name.
      published: What is kept of the published folder beyond the weights: see `convert`.
    """

    def __init__(self, folder: epath.PathLike, verify: Verify = "full"):
        """Opens the index and every group's manifest. Raises: CheckpointError that lists what is wrong."""
        self.folder = object_storage.connect(folder)
        index = read_checked_json(self.folder / INDEX_NAME)
        if index.get("format") != FORMAT:
            raise CheckpointError(f"{self.folder}: format {index.get('format')!r}; this version reads {FORMAT!r}")
        self.published: dict[str, Any] = index["published"]
        self.groups: dict[str, StoredArrays] = {}
        problems = []
        for group, checksum in index["groups"].items():
            try:
                self.groups[group] = self._open_group(group, checksum, verify)
            except CheckpointError as error:
                problems.append(f"{group}: {error}")
        if problems:
            raise CheckpointError(f"{self.folder} is damaged:\n" + "\n".join(problems), tuple(problems))
        self.weights = {
            (group, name): WeightInfo(info.shape, info.dtype)
            for group, stored in self.groups.items()
            for name, info in stored.arrays.items()
        }

    def _open_group(self, group, checksum, verify):
        folder = group_folder(self.folder, group)
        if manifest_path(folder).exists() and file_checksum(manifest_path(folder)) != checksum:
            raise CheckpointError(
                f"{manifest_path(folder).name} is not the one that {INDEX_NAME} names: it is damaged, or comes from "
                "another checkpoint"
            )
        return StoredArrays(folder, verify, label=group)

    @property
    def bytes_read(self) -> int:
        """So far, whole chunks."""
        return sum(stored.bytes_read for stored in self.groups.values())

    def read(self, group: str, name: str, index: tuple[int | slice, ...] = ()) -> np.ndarray:
        """Reads a weight, or a part of it: integers, or slices of step 1, for leading axes.

        Raises: KeyError, CheckpointError: as `StoredArrays.read`.
        """
        return self.groups[group].read(name, index)

    def read_into(self, out: np.ndarray, group: str, name: str, index: tuple[int | slice, ...] = ()) -> None:
        """`read` into a contiguous array of the weight's dtype."""
        self.groups[group].read_into(out, name, index)

    def forget_what_is_read(self) -> None:
        """From now on the system does not keep the bytes that were read in its cache of files."""
        for stored in self.groups.values():
            stored.keeps_cached = False


def group_folder(checkpoint: epath.PathLike, group: str) -> epath.Path:
    """Where a checkpoint keeps a group."""
    return epath.Path(checkpoint) / WEIGHTS_FOLDER / group


def is_orbax(folder: epath.PathLike) -> bool:
    """Whether a folder is an Orbax checkpoint of ours. Raises: CheckpointError for one that was never finished."""
    folder = object_storage.connect(folder)
    if (folder / INDEX_NAME).exists():
        return True
    if (folder / WEIGHTS_FOLDER).exists():
        raise CheckpointError(
            f"{folder} is a checkpoint that was not finished: {INDEX_NAME} is not there. Run the conversion again: it "
            "goes on where it was"
        )
    return False


@functools.cache
def _pool():
    return concurrent.futures.ThreadPoolExecutor(_READERS)
