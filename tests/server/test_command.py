"""python -m maxmoe.server: what it refuses, that it listens on this machine alone, and how it ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

_ROOT = Path(__file__).resolve().parents[2]

# The command over a stand-in for the engine, so that nothing is compiled.
_STAND_IN = """
import sys
from absl import flags
from maxmoe.server import __main__ as command
from maxmoe.server.engine_thread import EngineThread
from maxmoe.server.keys import Keys
from maxmoe.server.metrics import Metrics
from maxmoe.server.service import Options, Service
from tests.server.stub_engine import TOKENIZER, StubEngine
command._define_flags()
flags.FLAGS(["server", *sys.argv[1:]])
engine = StubEngine(step_s=0.01)
service = Service(tokenizer=TOKENIZER, engine_thread=EngineThread(engine), metrics=Metrics("t"),
                  options=Options(model_name="t"))
sys.exit(command.run(service, Keys()))
"""


def _environment(**variables: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(_ROOT)} | variables


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-P", "-m", "maxmoe.server", *arguments]
    return subprocess.run(command, env=_environment(**variables), capture_output=True, text=True, check=False)


@pytest.fixture
def stand_in():
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    command = [sys.executable, "-c", _STAND_IN, f"--port={port}", "--drain_s=1"]
    process = subprocess.Popen(command, env=_environment(), stderr=subprocess.PIPE, text=True)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20)
    until = time.monotonic() + 60
    while True:
        try:
            if client.get("/ready").status_code == 200:
                break
        except httpx.ConnectError:
            assert process.poll() is None and time.monotonic() < until, process.stderr.read()
        time.sleep(0.05)
    yield client, process
    client.close()
    process.kill()
    process.communicate()


def _stream_until_signal(client, process, max_tokens: int) -> str:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": max_tokens}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        pieces = response.iter_text()
        text = next(pieces) + next(pieces)
        process.send_signal(signal.SIGTERM)
        return text + "".join(pieces)


def test_page_of_another_site_is_kept_out(stand_in):
    client, _ = stand_in
    assert client.get("/v1/models").status_code == 200
    assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403


def test_sigterm_lets_answers_end(stand_in):
    client, process = stand_in
    text = _stream_until_signal(client, process, max_tokens=40)
    assert text.endswith("data: [DONE]\n\n")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and '"status": 200' in errors and "Traceback" not in errors
    with pytest.raises(httpx.ConnectError):
        client.get("/health")


def test_answers_that_do_not_end_in_time_are_cut_off(stand_in):
    client, process = stand_in
    with pytest.raises(httpx.RemoteProtocolError):
        _stream_until_signal(client, process, max_tokens=3000)
        raise AssertionError("the stream ended by itself")
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_what_is_wrong_is_told_at_once(tmp_path):
    (tmp_path / "keys").write_text("short\n")
    for arguments, says in (
        (["x"], "unexpected arguments"),
        ([f"--api_keys_file={tmp_path / 'keys'}"], "at least 16"),
    ):
        done = _run(*arguments)
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr
