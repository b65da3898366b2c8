"""Saves the weights of a running model as a checkpoint of the same form that `convert` makes."""

import json
import os
from typing import Any

import flax.traverse_util
import jax
from etils import epath

from maxmoe.checkpoint import object_storage
from maxmoe.checkpoint.array_store import save_arrays
from maxmoe.checkpoint.carried import carry_files
from maxmoe.checkpoint.convert import write_index
from maxmoe.checkpoint.hf_names import EXPERTS, FLOAT_EXPERTS, PREFIX, published_pieces
from maxmoe.checkpoint.sources import INDEX_NAME, WEIGHTS_FOLDER, group_folder
from maxmoe.model.transformer import Transformer
from maxmoe.params import PACKED, SCALE
from maxmoe.published_config import to_published


def save_params(
    folder: epath.PathLike, params: dict[str, Any], model: Transformer, carried_from: str | os.PathLike | None = None
) -> None:
    """Writes every weight, a layer at a time; call it in every process of a job.

    Experts may have been turned to floats for training, `gate` instead of `gate_packed` and `gate_scale`; they are
    saved as floats, and `export` can round them.

    Args:
      folder: New or empty, on a disk that all processes see, or in a bucket.
      carried_from: A checkpoint folder whose tokenizer and licence go along; None writes config.json alone.
    Raises: ValueError for a folder that holds something, a weight that the model lacks, or one that is missing.
    """
    folder = object_storage.connect(folder)
    if (folder / INDEX_NAME).exists() or (folder / WEIGHTS_FOLDER).exists():
        raise ValueError(f"{folder} already holds a checkpoint, whole or half; give a new folder or remove it")
    groups = _grouped(params, model)
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if carried_from is not None:
            carry_files(epath.Path(carried_from), folder, lambda text: None)
        (folder / "config.json").write_text(json.dumps(to_published(model.config), indent=2))
    for group, weights in sorted(groups.items()):
        arrays = {name: leaf[index] if index else leaf for name, (leaf, index) in weights.items()}
        split = frozenset(name for name in arrays if name.startswith(EXPERTS))
        save_arrays(group_folder(folder, group), arrays, {"source": "params"}, split)
    if jax.process_index() == 0:
        write_index(folder, groups, {"prefix": PREFIX, "shapes": {}, "absent": [], "source": "params"})


def _grouped(params, model):
    """{group: {weight: (leaf, entry of its leading axes)}} of a parameter tree."""
    leaves = flax.traverse_util.flatten_dict(params)
    groups: dict[str, dict[str, tuple[Any, tuple[int, ...]]]] = {}
    missing, used = set(), set()
    for piece in published_pieces(model):
        path, name = piece.path, piece.weight
        floats = name.removesuffix(PACKED)
        if path not in leaves and floats in FLOAT_EXPERTS and name.endswith(PACKED):
            path, name = (*path[:-1], path[-1].removesuffix(PACKED)), floats
        elif path not in leaves and _scale_of_floats(path, leaves):
            continue
        if path not in leaves:
            missing.add("/".join(path))
            continue
        used.add(path)
        groups.setdefault(piece.group, {})[name] = (leaves[path], piece.stack_index)
    extra = ["/".join(path) for path in leaves.keys() - used]
    if missing or extra:
        raise ValueError(
            f"the parameters are not those of this model: missing {sorted(missing)}, extra {sorted(extra)}"
        )
    return groups


def _scale_of_floats(path, leaves):
    return path[-1].endswith(SCALE) and (*path[:-1], path[-1].removesuffix(SCALE)) in leaves
