"""Loads the weights of a checkpoint folder into a parameter tree: all of them, checked, or none."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from maxmoe.checkpoint.hf_names import PREFIX, VISION_PREFIXES, Piece, published_pieces, vision_tensors
from maxmoe.checkpoint.safetensors_io import CheckpointError, CheckpointReader, TensorInfo, numpy_dtype
from maxmoe.config import ModelConfig, load_config
from maxmoe.model.transformer import Transformer
from maxmoe.params import abstract_params

_NAN_SCALE = 255
_SHOWN = 20  # problems of one kind that a message lists


def load_params(
    folder: str | os.PathLike, model: Transformer, mesh: jax.sharding.Mesh | None = None, dtype: Any = None
) -> dict[str, Any]:
    """Loads every weight of the text model from a Hugging Face folder of safetensors files.

    Args:
      folder: One `model.safetensors`, or shards with their index.
      mesh: Not supported yet; must be None.
      dtype: What the file's BF16 weights become, e.g. `jnp.float32`; it also decides the dtype of activations.
        None keeps BF16. MXFP4 experts stay packed, and F32 weights stay F32, whatever is asked.
    Returns: The parameter tree, `model.apply({"params": ...})`, on the default device.
    Raises: CheckpointError, a ValueError, that lists everything wrong: a tensor that is missing, unknown, of
      another shape or dtype, an expert without its scale, a scale that means NaN, a file that is damaged or not
      there. Nothing is filled in; the one tensor that may be absent is the offset of an indexer's key norm.
    """
    if mesh is not None:
        raise NotImplementedError("load_params: loading onto a mesh is not supported yet; pass mesh=None")
    dtype = None if dtype is None else jnp.dtype(dtype)
    if dtype not in (None, jnp.float32, jnp.bfloat16):
        raise ValueError(f"load_params: dtype={dtype} is not a weight type; use float32, bfloat16 or None")
    folder = Path(folder)
    _warn_if_config_differs(folder, model.config)
    with CheckpointReader(folder) as reader:
        pieces = list(published_pieces(model))
        names = _match(pieces, reader.tensors, model.config, folder)
        return _read(pieces, names, reader, model, dtype)


def _match(pieces: list[Piece], tensors: Mapping[str, TensorInfo], config: ModelConfig, folder: Path) -> dict[str, str]:
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


def _read(
    pieces: list[Piece], names: Mapping[str, str], reader: CheckpointReader, model: Transformer, dtype: Any
) -> dict[str, Any]:
    flat = flax.traverse_util.flatten_dict(nn.unbox(abstract_params(model)))
    groups: dict[tuple[str, ...], list[Piece]] = {path: [] for path in flat}
    for piece in pieces:
        groups[piece.path].append(piece)
    problems: list[str] = []
    loaded = {}
    for path, group in groups.items():
        loaded[path] = jnp.asarray(_assemble(flat[path].shape, group, names, reader, dtype, problems))
    _raise_problems(Path(reader.folder), {"hold unusable values": problems}, len(pieces))
    return flax.traverse_util.unflatten_dict(loaded)


def _assemble(shape, group, names, reader, dtype, problems):
    """Joins the pieces of one weight, casting BF16."""
    stored = {reader.tensors[names[piece.name]].dtype for piece in group if piece.name in names} or {"BF16"}
    # Indexer tensors may differ from layer to layer; the wider dtype then holds both exactly.
    target = numpy_dtype("F32" if "F32" in stored else stored.pop())
    if target == jnp.bfloat16 and dtype is not None:
        target = np.dtype(dtype)
    leaf = np.zeros(shape, target)
    for piece in group:
        if piece.name not in names:
            logging.info("%s is not in the file: taken as zero", piece.name)
            continue
        values = reader.read(names[piece.name])
        if piece.is_scale and values.size and values.max() == _NAN_SCALE:
            problems.append(f"{names[piece.name]}: {np.sum(values == _NAN_SCALE)} scale bytes are 255, which is NaN")
        if piece.padded:
            length = shape[-1]
            if values.size < length or np.any(values[length:]):
                problems.append(
                    f"{names[piece.name]}: needs {length} values, one per head, and zeros after them; "
                    f"has {values.size}, {np.count_nonzero(values[length:])} of the rest not zero"
                )
                continue
            values = values[:length]
        leaf[piece.index] = values.reshape(leaf[piece.index].shape)
    return leaf


def _raise_problems(folder: Path, problems: Mapping[str, list[str]], num_expected: int) -> None:
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


def _warn_if_config_differs(folder: Path, config: ModelConfig) -> None:
    if not (folder / "config.json").is_file():
        return
    given, stored = dataclasses.asdict(config), dataclasses.asdict(load_config(folder))
    differing = [name for name in given if given[name] != stored[name]]
    if differing:
        logging.warning("%s/config.json and the model differ in: %s", folder, ", ".join(differing))
