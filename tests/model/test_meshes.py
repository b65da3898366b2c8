"""Every step on a mesh equals the step on one device: whole sequences, chunks of prompts, tokens, and the state kept.

8 CPU devices in a process of its own, and three layers, one of each kind: tracing is what takes time here. What differs
is the order of float32 sums.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from maxmoe.published_config import to_published

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-5  # of logits up to 2, after three layers whose norms enlarge a rounding of 1e-7


@pytest.fixture(scope="module")
def report(rearranged):
    config, folder = rearranged([0, 1, 3], full_attention_layers=(2,), attn_res_block_size=2)
    (folder / "config.json").write_text(json.dumps(to_published(config)))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/model/steps_on_meshes.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.multidevice
def test_steps_on_a_mesh_equal_those_on_one_device(report):
    assert len(report) >= 12
    wrong = {mesh: facts for mesh, facts in report.items() if not max(facts["differences"].values()) <= TOLERANCE}
    assert not wrong


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize(
    ("mesh", "rows", "state"),
    [
        ("expert=4,tensor=2", [1, 1, 64, 1, 32], [1, 1, 2, 16, 16]),
        ("seq=8", [1, 4, 16, 1, 32], [1, 4, 4, 16, 16]),
        ("data=2,seq=2,tensor=2", [1, 2, 32, 1, 32], [1, 2, 2, 16, 16]),
    ],
)
def test_state_stays_split_after_the_steps(report, mesh, rows, state):
    """A device's part of the latent rows and of the KDA state of one layer: 4 sequences, 128 slots, 4 heads."""
    assert report[mesh]["parts"] == {"rows": rows, "state": state}
