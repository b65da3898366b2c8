"""Loads the weights of a checkpoint folder into a parameter tree: all of them, checked, or none."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath

from maxmoe.checkpoint.bucket_reader import open_reader
from maxmoe.checkpoint.hf_names import (
    PREFIX,
    VISION_GROUP,
    VISION_PREFIXES,
    Piece,
    published_pieces,
    vision_tensors,
)
from maxmoe.checkpoint.safetensors_io import CheckpointError, TensorInfo, numpy_dtype
from maxmoe.checkpoint.sources import OrbaxSource, SafetensorsSource, is_orbax
from maxmoe.checkpoint.stored_arrays import Verify
from maxmoe.config import ModelConfig, load_config
from maxmoe.model.transformer import Transformer
from maxmoe.params import abstract_params
from maxmoe.sharding import ShardingRules

_LOADERS = 2  # weights that are read at once
_ALIGNMENT = 64  # bytes: what XLA asks of memory that it is to use in place
_CACHED_SHARE = 1 / 4  # of the machine's memory: larger checkpoints do not stay in the system's cache of files
_SHOWN = 20  # problems of one kind that a message lists


def load_params(
    folder: epath.PathLike,
    model: Transformer,
    mesh: jax.sharding.Mesh | None = None,
    dtype: Any = None,
    *,
    verify: Verify = "full",
) -> dict[str, Any]:
    """Loads every weight of the text model from a checkpoint folder, published or converted, told apart by content.

    On a mesh, each process reads only the bytes that its devices hold, whatever mesh the checkpoint was saved from.

    Args:
      folder: A published folder of safetensors, one `model.safetensors` or shards with their index; or an Orbax
        checkpoint that `maxmoe.checkpoint.convert` or `save_params` wrote. On a disk or in a bucket.
      mesh: From `make_mesh`; None loads onto the default device.
      dtype: What the file's BF16 weights become, e.g. `jnp.float32`; it also decides the dtype of activations.
        None keeps BF16. MXFP4 experts stay packed, and F32 weights stay F32, whatever is asked.
      verify: Of an Orbax checkpoint: compare every chunk that is read with its checksum, one in sixteen, or none.
        Published folders have no checksums.
    Returns: The parameter tree, `model.apply({"params": ...})`.
    Raises: CheckpointError, a ValueError, that lists everything wrong: a tensor that is missing, unknown, of
      another shape or dtype, an expert without its scale, a scale that means NaN, a file that is damaged or not
      there. Nothing is filled in; the one tensor that may be absent is the offset of an indexer's key norm.
    """
    dtype = None if dtype is None else jnp.dtype(dtype)
    if dtype not in (None, jnp.float32, jnp.bfloat16):
        raise ValueError(f"load_params: dtype={dtype} is not a weight type; use float32, bfloat16 or None")
    began = time.perf_counter()
    with open_source(folder, model, verify) as source:
        params = _Loader(source, model, mesh, dtype).load()
        seconds = time.perf_counter() - began
        read = source.bytes_read
    logging.info("%s: read %.2f GB in %.1f s, %.2f GB/s", folder, read / 1e9, seconds, read / 1e9 / seconds)
    return params


@contextlib.contextmanager
def open_source(
    folder: epath.PathLike, model: Transformer, verify: Verify = "full"
) -> Iterator[SafetensorsSource | OrbaxSource]:
    """Opens a checkpoint folder whose weights have been compared with what a model needs.

    Raises: CheckpointError that lists every disagreement.
    """
    _warn_if_config_differs(folder, model.config)
    pieces = list(published_pieces(model))
    if is_orbax(folder):
        source = OrbaxSource(folder, verify)
        match_stored(pieces, source)
        yield source
        return
    with open_reader(folder) as reader:
        yield SafetensorsSource(reader, pieces, match(pieces, reader.tensors, model.config, folder))


def match_stored(pieces: list[Piece], source: OrbaxSource) -> None:
    """Compares an Orbax checkpoint with a model; raises a CheckpointError with every disagreement."""
    wanted = {(piece.group, piece.weight): piece for piece in pieces}
    experts = collections.Counter((piece.group, piece.weight) for piece in pieces if piece.inner)
    missing, unfit = [], []
    for key, piece in wanted.items():
        name, info = "/".join(key), source.weights.get(key)
        shape = (experts[key], *piece.entry_shape) if piece.inner else piece.entry_shape
        allowed = [numpy_dtype(dtype) for dtype in piece.dtypes]
        if info is None:
            missing.append(f"{name}: {allowed[0]} {list(shape)}")
        elif info.shape != shape:
            unfit.append(f"{name}: shape {list(info.shape)}, expected {list(shape)}")
        elif info.dtype not in allowed:
            unfit.append(f"{name}: dtype {info.dtype}, expected {' or '.join(map(str, allowed))}")
    extra = sorted("/".join(key) for key in source.weights.keys() - wanted.keys() if key[0] != VISION_GROUP)
    problems = {"missing": missing, "not part of this model": extra, "do not fit": unfit}
    _raise_problems(source.folder, problems, len(wanted))


def match(
    pieces: list[Piece], tensors: Mapping[str, TensorInfo], config: ModelConfig, folder: epath.PathLike
) -> dict[str, str]:
    """Maps each piece's name to the file's, or raises a CheckpointError with every disagreement."""
    prefix = PREFIX if any(name.startswith(PREFIX) for name in tensors) else ""
    wanted = {prefix + piece.name: piece for piece in pieces}
    missing, unfit = [], []
    for name, piece in wanted.items():
        info = tensors.get(name)
        if info is None:
            if not piece.optional:
                missing.append(_describe_missing(name, piece, tensors))
            continue
        if info.dtype not in piece.dtypes:
            unfit.append(f"{name}: dtype {info.dtype}, expected {' or '.join(piece.dtypes)}")
        longer = piece.padded and len(info.shape) == 1
        if info.shape != piece.shape and not longer:
            unfit.append(f"{name}: shape {list(info.shape)}, expected {list(piece.shape)}")
    vision = {} if config.vision is None else vision_tensors(config.vision, config.model_dim)
    extra, aside = [], 0
    for name in tensors.keys() - wanted.keys():
        if name.startswith(VISION_PREFIXES) and (not vision or name in vision):
            aside += 1
        else:
            extra.append(name)
    counts = {"missing": missing, "not part of this model": sorted(extra), "do not fit": unfit}
    _raise_problems(folder, counts, len(wanted))
    if aside:
        logging.info("%s: left aside %d vision tensors; images are not supported yet", folder, aside)
    return {piece.name: name for name, piece in wanted.items() if name in tensors}


def _describe_missing(name: str, piece: Piece, tensors: Mapping[str, TensorInfo]) -> str:
    if piece.is_scale and name.removesuffix("scale") + "packed" in tensors:
        return f"{name}: the expert's packed weight is there, its scale is not"
    return f"{name}: {piece.dtypes[0]} {list(piece.shape)}"


class _Loader:
    """Makes the arrays of a parameter tree from a source, a few weights at a time."""

    def __init__(self, source, model, mesh, dtype):
        self._source, self._dtype = source, dtype
        self._rules = None if mesh is None else ShardingRules(mesh, model.config)
        self._boxed = flax.traverse_util.flatten_dict(abstract_params(model))
        # What was read is in memory twice, in the cache of files and in the array; a large checkpoint needs the room.
        num_bytes = sum(info.num_bytes for info in source.weights.values())
        if num_bytes > _CACHED_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            source.forget_what_is_read()
        self._parts: dict[tuple[str, ...], dict[tuple[int, ...], tuple[str, str]]] = {}
        for piece in published_pieces(model):
            self._parts.setdefault(piece.path, {})[piece.stack_index] = (piece.group, piece.weight)

    def load(self) -> dict[str, Any]:
        shardings = {path: self._sharding(path, box) for path, box in self._boxed.items()}  # before anything is read
        with concurrent.futures.ThreadPoolExecutor(_LOADERS) as executor:
            futures = {path: executor.submit(self._leaf, path, sharding) for path, sharding in shardings.items()}
            problems, loaded = [], {}
            for path, future in futures.items():
                try:
                    loaded[path] = future.result()
                except CheckpointError as error:
                    problems += error.problems or (str(error),)
        _raise_problems(self._source.folder, {"hold unusable values": problems}, len(self._source.weights))
        return flax.traverse_util.unflatten_dict(loaded)

    def _sharding(self, path, box):
        return None if self._rules is None else self._rules.sharding(box.names, box.value.shape, "/".join(path))

    def _leaf(self, path, sharding):
        shape, parts = self._boxed[path].value.shape, self._parts[path]
        dtypes = {self._source.weights[key].dtype for key in parts.values()}
        # Indexer tensors may differ from layer to layer; the wider dtype then holds both exactly.
        dtype = max(dtypes, key=lambda dtype: dtype.itemsize)
        if dtype == jnp.bfloat16 and self._dtype is not None:
            dtype = self._dtype
        if sharding is None:
            return jax.device_put(self._region(parts, tuple(slice(0, size) for size in shape), dtype))
        # A region that several devices hold is read once.
        devices: dict[tuple, list[jax.Device]] = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            box = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
            devices.setdefault(box, []).append(device)
        shards = []
        for box, holders in devices.items():
            values = self._region(parts, tuple(slice(*part) for part in box), dtype)
            shards += [jax.device_put(values, device) for device in holders]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    def _region(self, parts, box, dtype):
        out = _aligned([part.stop - part.start for part in box], dtype)
        if () in parts:  # not stacked
            self._fill(out, parts[()], box)
        else:
            for values, layer in zip(out, range(box[0].start, box[0].stop), strict=True):
                self._fill(values, parts[layer,], box[1:])
        return out

    def _fill(self, out, key, box):
        if self._source.weights[key].dtype == out.dtype:
            self._source.read_into(out, *key, box)
        else:
            out[...] = self._source.read(*key, box)


def _aligned(shape, dtype) -> np.ndarray:
    """An uninitialised array that a CPU device takes over as it is, without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _raise_problems(folder: epath.PathLike, problems: Mapping[str, list[str]], num_expected: int) -> None:
    """Raises one CheckpointError for all problems, by kind."""
    if not any(problems.values()):
        return
    lines = []
    for kind, found in problems.items():
        if found:
            lines.append(f"{len(found)} tensors {kind}:")
            lines += [f"  {text}" for text in found[:_SHOWN]]
            lines += [f"  ... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    heading = (
        f"{folder} does not hold this model ({num_expected} tensors). Check that config.json and files belong "
        "together and that the download is complete:"
    )
    everything = tuple(f"{kind}: {text}" for kind, found in problems.items() for text in found)
    raise CheckpointError("\n  ".join([heading, *lines]), everything)


def _warn_if_config_differs(folder: epath.PathLike, config: ModelConfig) -> None:
    folder = epath.Path(folder)
    if not (folder / "config.json").is_file():
        return
    given, stored = dataclasses.asdict(config), dataclasses.asdict(load_config(folder))
    differing = [name for name in given if given[name] != stored[name]]
    if differing:
        logging.warning("%s/config.json and the model differ in: %s", folder, ", ".join(differing))
