"""A server on this machine that speaks the S3 protocol: one per process of tests, as clients keep its address."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

BUCKET = "maxmoe-test"
ROOT = f"s3://{BUCKET}"
_START_S = 60


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Address of the server; the environment points to it."""
    for package in ("moto", "flask", "flask_cors", "s3fs", "boto3"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'maxmoe[s3]' 'moto[server]'")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    nowhere = str(tmp_path_factory.mktemp("aws") / "none")
    settings = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "eu-west-3",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": nowhere,
        "AWS_SHARED_CREDENTIALS_FILE": nowhere,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    unset = ("AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_SESSION_TOKEN")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with pytest.MonkeyPatch.context() as patch:
        for name in unset:
            patch.delenv(name, raising=False)
        for name, value in settings.items():
            patch.setenv(name, value)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                _wait_for(url, process)
                yield url
            finally:
                process.kill()


def _wait_for(url, process):
    end = time.monotonic() + _START_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            if process.poll() is not None or time.monotonic() > end:
                raise
            time.sleep(0.1)


@pytest.fixture(scope="session")
def client(server):
    """Another library's client, which sees what lies in the bucket."""
    boto3 = pytest.importorskip("boto3")  # which moto has brought

    client = boto3.client("s3", region_name="eu-west-3")
    client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "eu-west-3"})
    return client
