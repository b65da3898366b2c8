"""Files of a checkpoint: where they lie, how long they are, and JSON that notices when it is damaged."""

import json
import os
import secrets
import urllib.parse
from concurrent.futures import Executor
from typing import Any

import xxhash
from etils import epath

from maxmoe.checkpoint import object_storage
from maxmoe.checkpoint.safetensors_header import CheckpointError

_BLOCK_BYTES = 8 * 2**20


def absolute_path(path: epath.PathLike) -> epath.Path:
    """A path that does not depend on the working folder. A bucket's address stays as it is."""
    text = os.fspath(path)
    return epath.Path(text if "://" in text else os.path.abspath(text))


def kvstore(folder: epath.PathLike) -> str | dict[str, Any]:
    """A folder, on a disk or in a bucket, as TensorStore opens it. In a URL, characters with a meaning are escaped."""
    if object_storage.is_remote(folder):
        return object_storage.kvstore_spec(folder)
    return f"file://{urllib.parse.quote(os.fspath(absolute_path(folder)))}/"


def list_files(folder: epath.Path, *, with_checksums: bool, executor: Executor | None = None) -> dict[str, list]:
    """[bytes, checksum or None] of every file under a folder, by relative path. The executor's threads hash."""
    files = {}
    if object_storage.is_remote(folder):
        files = {name: [info["size"], None] for name, info in object_storage.list_objects(folder).items()}
        pending = []
    else:
        pending = [(folder, "")]
    while pending:
        current, prefix = pending.pop()
        for path in current.iterdir() if current.exists() else ():
            name = prefix + path.name
            if path.is_dir():
                pending.append((path, name + "/"))
            else:
                files[name] = [path.stat().length, None]
    if with_checksums:
        run = map if executor is None else executor.map
        for name, checksum in zip(files, run(lambda name: file_checksum(folder / name), files), strict=True):
            files[name][1] = checksum
    return dict(sorted(files.items()))


def forget_pages(descriptor: int, start: int = 0, num_bytes: int = 0) -> None:
    """Lets the system reuse the memory in which it keeps what was read of an open file, where it can be told.

    Args:
      num_bytes: From `start` on; 0 for all that follows.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, num_bytes, os.POSIX_FADV_DONTNEED)


def file_checksum(path: epath.Path) -> str:
    """The 64-bit XXH3 of a file, in hexadecimal."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_checked_json(path: epath.Path, value: Any) -> None:
    """Writes JSON with a checksum of its own, whole or not at all."""
    body = json.dumps(value, sort_keys=True, separators=(",", ":"))
    text = json.dumps({"checksum": xxhash.xxh3_64_hexdigest(body.encode()), "body": body})
    if "://" in os.fspath(path):
        path.write_text(text)  # one request: an object appears whole
        return
    temporary = path.parent / f"{path.name}.{secrets.token_hex(4)}.tmp"
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_checked_json(path: epath.Path) -> Any:
    """Reads what `write_checked_json` wrote. Raises: CheckpointError if it is damaged."""
    try:
        outer = json.loads(path.read_text())
        if xxhash.xxh3_64_hexdigest(outer["body"].encode()) == outer["checksum"]:
            return json.loads(outer["body"])
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise CheckpointError(f"{path} is damaged: it does not match its own checksum; restore it from a copy")
