"""A training step on a mesh equals the step on one device: loss, gradients as the optimizer keeps them, next loss.

8 CPU devices in a process of its own; what differs is the order of float32 sums.
"""

import json
from pathlib import Path

import pytest

from tests.ops.eight_devices import run_on_eight_devices

PROGRAM = Path(__file__).with_name("steps_on_meshes.py")


@pytest.fixture(scope="module")
def report():
    return json.loads(run_on_eight_devices(PROGRAM, timeout_s=1800).splitlines()[-1])


@pytest.mark.slow
@pytest.mark.multidevice
def test_training_steps_on_a_mesh_equal_those_on_one_device(report):
    wanted = report.pop("one device")
    assert report
    for mesh, found in report.items():
        assert found["tokens"] == wanted["tokens"], mesh
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6), mesh
        assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-5), mesh
        # Gradients pass through norms that enlarge a rounding of 1e-7; second moments are their squares.
        assert found["worst"][1] < 1e-4, (mesh, found["worst"])
        # Adam's first step has the size of the learning rate, whatever the gradient's: signs of near-zeros may differ.
        assert found["second_loss"] == pytest.approx(wanted["second_loss"], rel=1e-5), mesh


@pytest.mark.slow
@pytest.mark.multidevice
def test_masters_are_split_over_all_devices_before_and_after_a_step(report):
    for mesh, found in report.items():
        if mesh != "one device":
            # Vectors and convolutions are copies.
            before, after = found["spread"]
            assert before == after < 1.2, (mesh, found["spread"])
