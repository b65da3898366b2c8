"""tools/bench_server.py: it prints a figure for requests, for streams at full speed, and for streams that are paced."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_bench_tells_what_the_server_adds():
    command = [sys.executable, str(_ROOT / "tools/bench_server.py"), "--requests=10", "--rounds=1", "--step_ms=5"]
    command += ["--streams=3", "--tokens=10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    requests, at_once, paced = done.stdout.splitlines()
    assert float(re.match(r"per request, ms: median ([\d.]+),", requests)[1]) > 0
    assert at_once.startswith("3 streams, per token of all streams, ms: ")
    assert paced.startswith("3 streams, per step of 5 ms, beyond it, ms: ")
