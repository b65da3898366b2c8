"""Every step on a mesh equals the step on one device: whole sequences, chunks of prompts, tokens, and the state kept.

8 CPU devices, of one process and of several, and three layers, one of each kind: tracing is what takes time here. What
differs is the order of float32 sums.
"""

import json
import sys
from pathlib import Path

import pytest

from tests import jobs

SCRIPT = Path(__file__).with_name("steps_on_meshes.py")
TOLERANCE = 1e-5  # of logits up to 2, after three layers whose norms enlarge a rounding of 1e-7
TIMEOUT_S = 1200


def reports(folder, checkpoint, num_processes, meshes=()):
    """What each process found, by mesh."""
    command = [sys.executable, str(SCRIPT), str(checkpoint), *meshes]
    codes, outputs, _ = jobs.run(folder, [command] * num_processes, timeout_s=TIMEOUT_S)
    assert not any(codes), [output[-4000:] for output in outputs]
    return [json.loads([line for line in output.splitlines() if line.startswith("{")][-1]) for output in outputs]


def too_different(report):
    return {mesh: facts for mesh, facts in report.items() if not max(facts["differences"].values()) <= TOLERANCE}


@pytest.fixture(scope="module")
def report(short_folder, tmp_path_factory):
    return reports(tmp_path_factory.mktemp("meshes"), short_folder, 1)[0]


@pytest.mark.slow
@pytest.mark.multidevice
def test_steps_on_a_mesh_equal_those_on_one_device(report):
    assert len(report) >= 12
    assert not too_different(report)


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize(("num_processes", "mesh"), [(2, "seq=2,expert=2,tensor=2"), (4, "data=2,expert=4")])
def test_steps_in_several_processes_equal_those_on_one_device(tmp_path, short_folder, num_processes, mesh):
    found = reports(tmp_path, short_folder, num_processes, [mesh])
    assert [list(report) for report in found] == [[mesh]] * num_processes
    assert not any(map(too_different, found))


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
