"""Converts a published safetensors folder to an Orbax checkpoint, a layer at a time.

    python -m maxmoe.checkpoint.convert --source DIR --target DIR
    python -m maxmoe.checkpoint.convert --source DIR --target DIR --verify

Values stay as published: MXFP4 packed, BF16, FP32. Beside the weights go config.json, the tokenizer's files, the
licence, and whatever else is no weight. The target holds one Orbax checkpoint per layer under `weights/`, each with
a manifest of checksums, and `maxmoe_checkpoint.json`, which is written last: a folder without it is unfinished.

Killed at any moment and started again, the command goes on with the first layer that is not complete. Memory is that
of one layer, however large the checkpoint is.

Exit code 0 for success, 2 for something that is wrong in the command or the files, 130 after Ctrl-C.
"""

import contextlib
import ctypes
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import xxhash
from absl import app, flags, logging
from etils import epath

from maxmoe.checkpoint import object_storage, sources
from maxmoe.checkpoint.array_store import remove_leftovers, save_arrays
from maxmoe.checkpoint.bucket_reader import open_reader
from maxmoe.checkpoint.carried import carry_files
from maxmoe.checkpoint.files import file_checksum, read_checked_json, write_checked_json
from maxmoe.checkpoint.hf_names import EXPERTS, PREFIX, VISION_GROUP, VISION_PREFIXES, published_pieces
from maxmoe.checkpoint.safetensors_io import CheckpointError, CheckpointReader, numpy_dtype
from maxmoe.checkpoint.store import match
from maxmoe.checkpoint.stored_arrays import StoredArrays, is_complete, manifest_path
from maxmoe.command_line import flags_parser
from maxmoe.config import load_config
from maxmoe.model.transformer import Transformer

_NAME = "maxmoe.checkpoint.convert"
_STATE = "conversion.json"
_LOCK = ".conversion.lock"
_MALLOC_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h

Progress = Callable[[str], None]


def convert(
    source: epath.PathLike, target: epath.PathLike, *, verify: bool = False, say: Progress = lambda text: None
) -> None:
    """Converts a published folder, or goes on with a conversion that was interrupted.

    Args:
      verify: Read the target back afterwards and compare every value with the source.
      say: Is told what happens, line by line.
    Raises: CheckpointError for a damaged or unfit source, or a target that differs from it; ValueError if the target
      belongs to another source, or another process is writing it.
    """
    source, target = object_storage.connect(source), object_storage.connect(target)
    config = load_config(source)
    with open_reader(source) as reader:
        pieces = list(published_pieces(Transformer(config)))
        names = match(pieces, reader.tensors, config, source)
        weights = sources.SafetensorsSource(reader, pieces, names)
        vision = [name for name in reader.tensors if name.startswith(VISION_PREFIXES)]
        fingerprint = _fingerprint(reader)
        with _only_writer(target):
            _check_target(target, fingerprint, source)
            _remove_half_written(target)
            carry_files(source, target, say)
            groups = _group_names(weights, vision)
            _convert_groups(target, groups, weights, reader, fingerprint, say)
            published = {
                "prefix": PREFIX if any(name.startswith(PREFIX) for name in reader.tensors) else "",
                "shapes": {
                    piece.name: list(reader.tensors[names[piece.name]].shape)
                    for piece in pieces
                    if piece.name in names and reader.tensors[names[piece.name]].shape != piece.shape
                },
                "absent": [piece.name for piece in pieces if piece.name not in names],
                "source": fingerprint,
            }
            write_index(target, groups, published)
            (target / _STATE).unlink(missing_ok=True)
        if verify:
            _compare(target, groups, weights, reader, say)


def write_index(target: epath.Path, groups: Mapping[str, Any], published: Mapping[str, Any]) -> None:
    """Writes the file that makes a folder of complete groups a checkpoint."""
    checksums = {group: file_checksum(manifest_path(sources.group_folder(target, group))) for group in groups}
    index = {"format": sources.FORMAT, "groups": checksums, "published": dict(published)}
    write_checked_json(target / sources.INDEX_NAME, index)


def _group_names(weights, vision) -> dict[str, list[str]]:
    """The weights of every group, in the order in which groups are written."""
    groups: dict[str, list[str]] = {}
    for group, name in weights.weights:
        groups.setdefault(group, []).append(name)
    groups = {group: groups[group] for group in sorted(groups)}
    return groups | ({VISION_GROUP: vision} if vision else {})


def _convert_groups(target, groups, weights, reader, fingerprint, say):
    sizes = {group: sum(_num_bytes(weights, reader, group, name) for name in names) for group, names in groups.items()}
    total, done, written, began = sum(sizes.values()), 0, 0, time.perf_counter()
    for group, names in groups.items():
        folder = sources.group_folder(target, group)
        removed = remove_leftovers(folder)
        if removed:
            say(f"{group}: removed {len(removed)} leftovers of an interrupted save")
        if _is_kept(folder, fingerprint):
            done += sizes[group]
            say(f"{group}: complete, kept")
            continue
        arrays = {name: _values(weights, reader, group, name) for name in names}
        split = frozenset(name for name in names if name.startswith(EXPERTS))
        save_arrays(folder, arrays, {"source": fingerprint}, split)
        del arrays
        done, written = done + sizes[group], written + sizes[group]
        rate = written / (time.perf_counter() - began)
        say(
            f"{group}: {done / 1e9:,.2f} of {total / 1e9:,.2f} GB, {100 * done / total:.0f} %, {rate / 1e9:.2f} GB/s, "
            f"{_duration((total - done) / rate)} left"
        )


def _is_kept(folder, fingerprint):
    """Whether a group was completed by an earlier run. One that was damaged since is an error, not written anew."""
    return is_complete(folder) and StoredArrays(folder).meta["source"] == fingerprint


def _values(weights, reader, group, name):
    if group != VISION_GROUP:
        return weights.read(group, name)
    info = reader.tensors[name]
    values = np.empty(info.shape, numpy_dtype(info.dtype))
    reader.read_into(name, values)
    return values


def _num_bytes(weights, reader, group, name):
    return reader.tensors[name].num_bytes if group == VISION_GROUP else weights.weights[group, name].num_bytes


def _compare(target, groups, weights, reader, say):
    """Reads everything back. Raises: CheckpointError that names what differs from the source."""
    for group, names in groups.items():
        stored = StoredArrays(sources.group_folder(target, group), label=group)
        stored.check_everything()
        for name in names:
            expected = _values(weights, reader, group, name)
            if stored.read(name).tobytes() != expected.tobytes():
                raise CheckpointError(
                    f"{target}: {group}: {name} differs from the source; remove the target and convert"
                )
        say(f"{group}: verified")


def _fingerprint(reader: CheckpointReader) -> str:
    """Tells one source from another: names, dtypes, shapes and places of tensors, and each file's size and time."""
    digest = xxhash.xxh3_64()
    for name, info in sorted(reader.tensors.items()):
        digest.update(f"{name} {info.dtype} {info.shape} {info.file.name} {info.begin}\n".encode())
    for path in sorted({info.file for info in reader.tensors.values()}):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _remove_half_written(target):
    """Removes what a killed run has left of this command's own two files; in a bucket objects appear whole."""
    if object_storage.is_remote(target):
        return
    for name in (sources.INDEX_NAME, _STATE):
        for path in target.glob(f"{name}.*.tmp"):
            path.unlink()


def _check_target(target, fingerprint, source):
    """Refuses a target that belongs to something else, and notes whose it is."""
    if (target / sources.INDEX_NAME).exists():
        owner = read_checked_json(target / sources.INDEX_NAME)["published"].get("source")
    elif (target / _STATE).exists():
        owner = read_checked_json(target / _STATE)["source"]
    else:
        present = target.iterdir() if target.exists() else ()  # a bucket has no empty folders
        strangers = [path.name for path in present if path.name != _LOCK and not path.name.endswith(".tmp")]
        if strangers:
            raise ValueError(f"{target} is not empty ({', '.join(sorted(strangers)[:5])}); give an empty or new folder")
        write_checked_json(target / _STATE, {"source": fingerprint})
        return
    if owner != fingerprint:
        raise ValueError(
            f"{target} was converted from another source than {source}, or the source has changed since; give another "
            "target, or remove this one"
        )


@contextlib.contextmanager
def _only_writer(target: epath.Path) -> Iterator[None]:
    """Keeps two processes on one machine from writing one target; creates the folder."""
    target.mkdir(parents=True, exist_ok=True)
    if object_storage.is_remote(target):
        yield
        return
    with open(target / _LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{target}: another process is writing it; wait for it, or stop it") from error
        yield
    (target / _LOCK).unlink(missing_ok=True)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def return_freed_memory() -> None:
    """Has glibc give large blocks back to the system at once. Kept for later, they would add up to a layer or two."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_MALLOC_MMAP_THRESHOLD, 2**20)


def _define_flags() -> None:
    """Only the command has flags: whoever imports this module may have others of the same names."""
    flags.DEFINE_string(
        "source", None, "Published folder with config.json and safetensors files: a path, gs:// or s3://."
    )
    flags.DEFINE_string("target", None, "Folder of the new checkpoint: a path, gs:// or s3://.")
    flags.DEFINE_boolean(
        "verify", False, "Afterwards, or for a target that is complete: read everything back and compare."
    )


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    given = flags.FLAGS
    return_freed_memory()
    if not given["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax reports every step
    try:
        if argv[1:]:
            raise ValueError(f"unexpected arguments {argv[1:]}")
        for name, value in (("--source", given.source), ("--target", given.target)):
            if not value:
                raise ValueError(f"{name} is missing: give --source DIR --target DIR")
        convert(given.source, given.target, verify=given.verify, say=lambda text: print(text, flush=True))
    except (ValueError, OSError) as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{_NAME}: interrupted; the same command goes on where it was", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed; an accelerator need not wake up
    _define_flags()
    app.run(main, flags_parser=flags_parser(_NAME))
