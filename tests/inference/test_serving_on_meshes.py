"""Continuous batching on meshes: the answers of one device, row by row or rows together, with drafts and without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("serve_on_meshes.py")
ROOT = SCRIPT.parents[2]


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize("mesh", ["data=2,expert=4", "seq=2,expert=2,tensor=2"])
def test_serving_on_a_mesh_equals_serving_on_one_device(mesh):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(ROOT / "tests/golden/tiny_k31"), mesh],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    wanted = found.pop("one device")
    assert len(found) == 2 and all(len(answer) == 8 for answer in wanted)
    assert found == dict.fromkeys(found, wanted)
