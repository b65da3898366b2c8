"""Checkpoints in a bucket, against a server that speaks the S3 protocol on this machine.

Of `gs://` only the address that TensorStore is given is tested: there is no such server to test against.
"""

import io
import os
import urllib.error
import urllib.request

import jax
import ml_dtypes
import numpy as np
import pytest

from maxmoe.checkpoint import object_storage
from maxmoe.checkpoint.array_store import remove_leftovers, save_arrays
from maxmoe.checkpoint.bucket_reader import BucketReader, open_reader
from maxmoe.checkpoint.safetensors_io import CheckpointError, CheckpointReader
from maxmoe.checkpoint.safetensors_writer import write_checkpoint
from maxmoe.checkpoint.stored_arrays import StoredArrays, is_complete, manifest_path
from tests.checkpoint.s3_server import BUCKET, ROOT


def keys(client, prefix):
    found = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
    return {entry["Key"]: entry["Size"] for entry in found}


def arrays():
    rng = np.random.default_rng(7)
    return {
        "top/w": rng.integers(0, 2**16, (300, 77), np.uint16).view(ml_dtypes.bfloat16),  # every bit pattern, NaNs too
        "experts": rng.integers(0, 256, (5, 64, 33), np.uint8),
        "on_device": jax.numpy.arange(35, dtype=jax.numpy.float32).reshape(5, 7),
        "scalar": np.float32(2.5),
    }


SPLIT = frozenset({"experts"})


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture
def saved(client, request):
    """A save of its own for each test."""
    folder = f"{ROOT}/{request.node.name.partition('[')[0]}/a save"
    save_arrays(folder, arrays(), {"step": 3}, SPLIT)
    return folder


def change(client, folder, name_of, change_bytes):
    """Replaces the bytes of a save's object."""
    prefix = folder.removeprefix(ROOT + "/") + "/"
    key = name_of(keys(client, prefix))
    raw = bytearray(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    client.put_object(Bucket=BUCKET, Key=key, Body=bytes(change_bytes(raw)))
    return key.removeprefix(prefix)


def largest(sizes):
    return max(sizes, key=sizes.get)


def flipped(raw):
    raw[len(raw) // 2] ^= 1
    return raw


# Saves


def test_save_arrays_comes_back_bit_for_bit(saved, client):
    stored = StoredArrays(saved)
    assert stored.meta == {"step": 3} and stored.arrays.keys() == arrays().keys()
    for name, array in arrays().items():
        assert same_bits(stored.read(name), np.asarray(array)), name
    stored.check_everything()
    assert is_complete(saved) and remove_leftovers(saved) == []
    prefix = saved.removeprefix(ROOT + "/")
    assert f"{prefix}.manifest.json" in keys(client, prefix)


def test_read_of_a_part_fetches_that_part(saved):
    stored, expected = StoredArrays(saved), arrays()["experts"]
    assert same_bits(stored.read("experts", (3,)), expected[3])
    assert stored.bytes_read == expected[3].nbytes
    assert same_bits(stored.read("experts", (slice(1, 3), slice(5, 9))), expected[1:3, 5:9])


def test_save_arrays_refuses_a_place_that_is_taken(saved):
    with pytest.raises(ValueError, match="already holds saved arrays"):
        save_arrays(saved, arrays(), {})


def test_read_finds_a_flipped_bit(saved, client):
    change(client, saved, largest, flipped)
    stored = StoredArrays(saved)
    problems = []
    for name in stored.arrays:
        try:
            stored.read(name)
        except CheckpointError as error:
            problems.append(str(error))
    assert problems
    with pytest.raises(CheckpointError, match="is damaged: its bytes differ"):
        stored.check_everything()


def test_open_finds_a_truncated_object(saved, client):
    name = change(client, saved, largest, lambda raw: raw[:-1])
    with pytest.raises(CheckpointError, match=f"{name} has"):
        StoredArrays(saved)


def test_open_finds_a_deleted_object_and_a_foreign_one(saved, client):
    key = largest(keys(client, saved.removeprefix(ROOT + "/") + "/"))
    client.delete_object(Bucket=BUCKET, Key=key)
    client.put_object(Bucket=BUCKET, Key=saved.removeprefix(ROOT + "/") + "/d/foreign", Body=b"x")
    with pytest.raises(
        CheckpointError, match=r"is not there[\s\S]*d/foreign is there and was not saved|foreign[\s\S]*not there"
    ):
        StoredArrays(saved)


def test_object_that_vanishes_after_opening_is_an_error(saved, client):
    stored = StoredArrays(saved)
    for key in keys(client, saved.removeprefix(ROOT + "/") + "/"):
        client.delete_object(Bucket=BUCKET, Key=key)
    with pytest.raises(CheckpointError, match="top/w cannot be read"):
        stored.read("top/w")


def test_open_finds_a_damaged_manifest(saved, client):
    key = os.fspath(manifest_path(saved)).removeprefix(ROOT + "/")
    raw = bytearray(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    client.put_object(Bucket=BUCKET, Key=key, Body=bytes(flipped(raw)))
    with pytest.raises(CheckpointError, match="does not match its own checksum"):
        StoredArrays(saved)


def test_interrupted_upload_is_no_checkpoint_and_is_cleaned_by_the_next_save(client, monkeypatch):
    folder = f"{ROOT}/interrupted/x"
    files = object_storage.file_system(folder)
    put = files.put

    def put_some(sources, targets, **options):
        put(sources[:2], [targets[0], f"{folder}/d/of an earlier save"], **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files, "put", put_some)
        save_arrays(folder, arrays(), {}, SPLIT)
    client.put_object(Bucket=BUCKET, Key="interrupted/xy/neighbour", Body=b"stays")
    assert keys(client, "interrupted/x/") and not is_complete(folder)
    with pytest.raises(CheckpointError, match="is not a complete save"):
        StoredArrays(folder)
    save_arrays(folder, arrays(), {}, SPLIT)
    assert same_bits(StoredArrays(folder).read("top/w"), arrays()["top/w"])
    assert "interrupted/x/d/of an earlier save" not in keys(client, "interrupted/")
    assert "interrupted/xy/neighbour" in keys(client, "interrupted/")


def test_upload_folder_notices_what_did_not_arrive(client, tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"abc")
    target = object_storage.connect(f"{ROOT}/short")
    files = object_storage.file_system(target)
    monkeypatch.setattr(files, "put", lambda sources, targets, **options: files.pipe_file(targets[0], b"ab"))
    with pytest.raises(CheckpointError, match="1 files did not arrive whole, such as a"):
        object_storage.upload_folder(tmp_path, target)


def test_save_arrays_of_several_processes_to_s3_is_not_supported(client, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    place = object_storage.staged(object_storage.connect(f"{ROOT}/several"))
    with pytest.raises(NotImplementedError, match="2 processes cannot save to s3:// together"), place:
        pass


# Buckets that cannot be used


@pytest.mark.parametrize("use", [StoredArrays, is_complete, lambda folder: save_arrays(folder, arrays(), {})])
def test_missing_bucket_is_a_clear_error_and_is_not_created(client, use):
    with pytest.raises(ValueError, match=r"bucket 'no-such-bucket' at http://127.* does not exist; create it first"):
        use("s3://no-such-bucket/x")
    assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == [BUCKET]


def test_wrong_credentials_are_a_clear_error(server, client):
    def check_credentials_after(requests):
        headers = {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(f"{server}/moto-api/reset-auth", data=requests, headers=headers)
        urllib.request.urlopen(request, timeout=5).close()

    check_credentials_after(b"0")
    try:
        with pytest.raises(ValueError, match="refuses these credentials; check them and their rights"):
            StoredArrays("s3://somebody-elses/x")
    finally:
        check_credentials_after(b"inf")


def test_missing_package_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for scheme, extra in (("s3", "s3"), ("gs", "gcs")):
        with pytest.raises(ValueError, match=rf"pip install 'maxmoe\[{extra}\]'"):
            object_storage._configure.__wrapped__(scheme)


@pytest.mark.parametrize("address", ["http://bucket/x", "s3://", "az://bucket/x"])
def test_connect_refuses_other_addresses(address):
    with pytest.raises(ValueError, match="is no place for a checkpoint; give a path, gs://BUCKET/PATH or s3://"):
        object_storage.connect(address)


def test_connect_leaves_local_paths_alone(tmp_path):
    assert os.fspath(object_storage.connect(tmp_path)) == str(tmp_path)


# What TensorStore is given


def without_retries(spec):
    return {key: value for key, value in spec.items() if not key.endswith("_request_retries")}


def test_kvstore_spec_of_gs():
    spec = object_storage.kvstore_spec("gs://bucket/a b/c/")
    assert without_retries(spec) == {"driver": "gcs", "bucket": "bucket", "path": "a b/c/"}
    import tensorstore

    assert tensorstore.KvStore.Spec(spec).to_json()["bucket"] == "bucket"  # the driver knows every member


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        ({"AWS_DEFAULT_REGION": "r1"}, {"aws_region": "r1"}),
        ({"AWS_DEFAULT_REGION": "r1", "AWS_REGION": "r2"}, {"aws_region": "r2"}),
        ({"AWS_ENDPOINT_URL": "http://a:1"}, {"endpoint": "http://a:1", "aws_region": "us-east-1"}),
        (
            {"AWS_ENDPOINT_URL": "http://a:1", "AWS_ENDPOINT_URL_S3": "http://b:2", "AWS_REGION": "r"},
            {"endpoint": "http://b:2", "aws_region": "r"},
        ),
    ],
)
def test_kvstore_spec_of_s3_takes_endpoint_and_region_from_the_environment(monkeypatch, environment, expected):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    spec = without_retries(object_storage.kvstore_spec("s3://bucket/x"))
    assert spec == {"driver": "s3", "bucket": "bucket", "path": "x/"} | expected


# Published folders


def published(folder):
    tensors = arrays() | {"flags": np.array([True, False, True]), "none": np.empty((0, 3), np.float32)}
    tensors = {name: np.asarray(array) for name, array in tensors.items()}
    write_checkpoint(folder, tensors, max_shard_bytes=20_000)
    (folder / "config.json").write_text("{}")
    (folder / "LICENSE").write_text("terms")
    return tensors


@pytest.fixture(scope="module")
def published_folder(client, tmp_path_factory):
    """A published folder on disk, the same in the bucket, and its tensors."""
    local = tmp_path_factory.mktemp("published")
    tensors = published(local)
    remote = object_storage.connect(f"{ROOT}/published")
    object_storage.upload_folder(local, remote)
    return local, os.fspath(remote), tensors


def test_bucket_reader_reads_what_the_local_reader_reads(published_folder):
    local, remote, tensors = published_folder
    with open_reader(local) as ours, open_reader(remote) as reader:
        assert type(ours) is CheckpointReader and isinstance(reader, BucketReader)
        assert list(reader.tensors) == list(ours.tensors) and reader.total_bytes == ours.total_bytes
        headers = reader._local
        sizes = {path.name: path.stat().st_size for path in local.glob("*.safetensors")}
        assert {path.name: path.stat().st_size for path in headers.glob("*.safetensors")} == sizes
        for name, array in tensors.items():
            assert same_bits(reader.read(name), array), name
            out = np.empty(array.shape, array.dtype)
            reader.read_into(name, out)
            assert same_bits(out, array), name
        with pytest.raises(KeyError, match="no tensor 'x' in s3://"):
            reader.read("x")
    assert not headers.exists()
    with pytest.raises(ValueError, match="is closed"):
        reader.read("top/w")


def test_bucket_reader_names_the_bucket_in_problems(published_folder, client):
    local, _, _ = published_folder
    remote = object_storage.connect(f"{ROOT}/incomplete")
    object_storage.upload_folder(local, remote)
    gone, short, *_ = sorted(key for key in keys(client, "incomplete/") if key.endswith(".safetensors"))
    client.delete_object(Bucket=BUCKET, Key=gone)
    raw = client.get_object(Bucket=BUCKET, Key=short)["Body"].read()
    client.upload_fileobj(io.BytesIO(raw[:-1]), BUCKET, short)
    with pytest.raises(CheckpointError, match=f"{ROOT}/incomplete") as caught:
        BucketReader(os.fspath(remote))
    text = str(caught.value)
    assert gone.rpartition("/")[2] in text and short.rpartition("/")[2] in text and "/tmp/" not in text


def test_bucket_reader_notices_files_that_change_after_opening(published_folder, client):
    local, _, _ = published_folder
    remote = object_storage.connect(f"{ROOT}/changing")
    object_storage.upload_folder(local, remote)
    with BucketReader(os.fspath(remote)) as reader:
        last = max(reader.tensors.values(), key=lambda info: (info.file.name, info.end))
        key = f"changing/{last.file.name}"
        client.put_object(Bucket=BUCKET, Key=key, Body=b"short")
        with pytest.raises(CheckpointError, match="cannot be read|ended inside"):
            reader.read(last.name)
        client.delete_object(Bucket=BUCKET, Key=key)
        with pytest.raises(CheckpointError, match="is gone"):
            reader.read(last.name)


def test_local_files_fetches_all_but_weights(published_folder, tmp_path):
    _, remote, _ = published_folder
    fetched = object_storage.local_files(remote)
    assert {path.name for path in fetched.iterdir()} == {"config.json", "LICENSE", "model.safetensors.index.json"}
    assert (fetched / "LICENSE").read_text() == "terms"
    assert object_storage.local_files(remote) == fetched and object_storage.local_files(tmp_path) == tmp_path
    with pytest.raises(ValueError, match="does not exist, or is empty"):
        object_storage.local_files(f"{ROOT}/nothing here")
