"""Checkpoints in a bucket, `gs://bucket/path` or `s3://bucket/path`.

Files go through fsspec (packages s3fs, gcsfs), chunks of arrays through TensorStore's own drivers. Credentials are
found where each provider's tools look for them. For S3-compatible servers, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL
gives the address, and AWS_REGION or AWS_DEFAULT_REGION the region.

Orbax 0.12 cannot write to S3. So one process writes a save to a local temporary folder first (TMPDIR says where; it
needs the space of one save, which is a layer in a conversion) and uploads it; the manifest comes last. Several
processes can save to `gs://`, which Orbax writes itself, and not to `s3://`.

A large upload that was killed may leave parts that no listing shows: let a lifecycle rule of the bucket remove
incomplete multipart uploads.
"""

import contextlib
import functools
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import jax
from etils import epath

from maxmoe.checkpoint.safetensors_header import CheckpointError

_UPLOADS = 4  # files at once
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")
# TensorStore's default is 32 tries, many minutes in which a wrong address looks like a slow one.
_RETRIES = {"max_retries": 6, "initial_delay": "500ms", "max_delay": "8s"}


class _Scheme(NamedTuple):
    package: str
    extra: str
    driver: str


_reached: set[tuple[str, str]] = set()  # buckets that have answered

_SCHEMES = {"s3": _Scheme("s3fs", "s3", "s3"), "gs": _Scheme("gcsfs", "gcs", "gcs")}


def is_remote(path: epath.PathLike) -> bool:
    """Whether a path is a bucket's address."""
    return "://" in os.fspath(path)


def connect(folder: epath.PathLike) -> epath.Path:
    """Makes sure that a folder's bucket can be used: the package is there, the bucket exists, we may look into it.

    A local path needs nothing. The bucket is asked once per process.

    Raises: ValueError that says what to do.
    """
    if is_remote(folder):
        scheme, bucket, _ = _split(folder)
        if (scheme, bucket) not in _reached:
            _check_bucket(bucket, os.fspath(folder))
            _reached.add((scheme, bucket))
    return epath.Path(folder)


def file_system(folder: epath.PathLike) -> fsspec.AbstractFileSystem:
    """The fsspec file system of a bucket. Raises: ValueError if its package is missing."""
    scheme, _, _ = _split(folder)
    _configure(scheme)
    return fsspec.filesystem(scheme)


def kvstore_spec(folder: epath.PathLike) -> dict[str, Any]:
    """A bucket's folder as TensorStore opens it."""
    scheme, bucket, path = _split(folder)
    driver = _SCHEMES[scheme].driver
    spec = {"driver": driver, "bucket": bucket, "path": path + "/", f"{driver}_request_retries": _RETRIES}
    if scheme == "s3":
        endpoint, region = _endpoint(), _region()
        if endpoint:
            spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
        elif region:
            spec["aws_region"] = region
    return spec


def list_objects(folder: epath.PathLike) -> dict[str, dict[str, Any]]:
    """What fsspec knows of every object under a folder, by relative path."""
    scheme, bucket, path = _split(folder)
    prefix = f"{bucket}/{path}/"
    found = file_system(folder).find(f"{scheme}://{prefix}", detail=True)
    return {name.removeprefix(prefix): info for name, info in found.items() if info["type"] == "file"}


@contextlib.contextmanager
def staged(folder: epath.Path) -> Iterator[epath.Path]:
    """Where to write a folder with tools that need a disk. What was written is uploaded when the block ends well.

    A local folder, and `gs://` in a job of several processes, are written in place.

    Raises: NotImplementedError for several processes and `s3://`.
    """
    if not is_remote(folder) or (jax.process_count() > 1 and _split(folder)[0] == "gs"):
        yield folder
        return
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"{folder}: {jax.process_count()} processes cannot save to s3:// together; save to a disk that all share, "
            "or to gs://"
        )
    with tempfile.TemporaryDirectory(prefix="maxmoe-") as temporary:
        stage = epath.Path(temporary) / folder.name
        yield stage
        upload_folder(stage, folder)


def upload_folder(source: epath.Path, folder: epath.Path) -> None:
    """Uploads every file under a local folder. Raises: CheckpointError if the bucket does not hold them afterwards."""
    files = {path.relative_to(source).as_posix(): path for path in Path(source).rglob("*") if path.is_file()}
    targets = [f"{os.fspath(folder)}/{name}" for name in files]
    file_system(folder).put([str(path) for path in files.values()], targets, batch_size=_UPLOADS)
    sizes = {name: info["size"] for name, info in list_objects(folder).items()}
    wrong = [name for name, path in files.items() if sizes.get(name) != path.stat().st_size]
    if wrong:
        raise CheckpointError(f"{folder}: {len(wrong)} files did not arrive whole, such as {wrong[0]}; save it again")


def local_files(folder: str | os.PathLike) -> Path:
    """A local folder with all files at the top of a checkpoint that hold no weights, such as the configuration.

    A local folder is returned as it is. Files of a bucket are fetched once per process into a temporary folder, which
    goes away with the process.
    """
    if not is_remote(folder):
        return Path(folder)
    connect(folder)
    return Path(_fetched(os.fspath(folder)).name)


@functools.cache
def _fetched(folder: str) -> tempfile.TemporaryDirectory:
    scheme, bucket, path = _split(folder)
    target = tempfile.TemporaryDirectory(prefix="maxmoe-")
    files = file_system(folder)
    try:
        entries = files.ls(f"{scheme}://{bucket}/{path}", detail=True)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} does not exist, or is empty; give a folder that holds a checkpoint") from error
    for entry in entries:
        name = entry["name"].rstrip("/").rpartition("/")[2]
        if entry["type"] == "file" and name not in ("", ".", "..") and not name.endswith(_WEIGHT_FILES):
            files.get_file(entry["name"], str(Path(target.name) / name))
    return target


def _split(folder: epath.PathLike) -> tuple[str, str, str]:
    """Scheme, bucket and path of an address, the path without slashes at its ends."""
    scheme, _, rest = os.fspath(folder).partition("://")
    bucket, _, path = rest.partition("/")
    if scheme not in _SCHEMES or not bucket:
        raise ValueError(
            f"{os.fspath(folder)!r} is no place for a checkpoint; give a path, gs://BUCKET/PATH or s3://..."
        )
    return scheme, bucket, path.strip("/")


def _endpoint() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def _region() -> str | None:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or None


@functools.cache
def _configure(scheme: str) -> None:
    """Sets fsspec's defaults, before its first connection."""
    package, extra, _ = _SCHEMES[scheme]
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"{scheme}:// needs the package {package}, which is not installed: pip install 'maxmoe[{extra}]'"
        )
    options = fsspec.config.conf.setdefault(scheme, {})
    options.setdefault("use_listings_cache", False)  # or files that others write and remove are not noticed
    if scheme == "s3" and _region():
        options.setdefault("client_kwargs", {}).setdefault("region_name", _region())


def _check_bucket(bucket: str, folder: str) -> None:
    server = f" at {_endpoint()}" if folder.startswith("s3:") and _endpoint() else ""
    try:
        file_system(folder).ls(folder)
    except FileNotFoundError as error:
        if error.__cause__ is not None:  # of a folder that is merely not there yet, it has none
            raise ValueError(f"{folder}: bucket {bucket!r}{server} does not exist; create it first: {error}") from error
    except PermissionError as error:
        raise ValueError(
            f"{folder}: bucket {bucket!r}{server} refuses these credentials; check them and their rights: {error}"
        ) from error
    except ValueError:
        raise
    except Exception as error:  # what lies below has many classes: no credentials, no such host, no answer
        raise ValueError(f"{folder}: bucket {bucket!r}{server} cannot be reached: {error}") from error
