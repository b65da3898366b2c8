"""What a compiler is told of devices that are not here."""

from types import SimpleNamespace

import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from maxmoe.planning.targets import with_device_kind


@pytest.mark.parametrize(
    ("kind", "platform", "expected"),
    [("", "gpu", "NVIDIA H200"), ("NVIDIA B200", "gpu", "NVIDIA B200"), ("TPU v5", "tpu", "TPU v5")],
)
def test_with_device_kind_names_only_a_gpu_without_a_name(kind, platform, expected):
    device = AbstractDevice(device_kind=kind, num_cores=132, platform=platform)
    mesh = AbstractMesh((2,), ("tensor",), axis_types=(AxisType.Auto,), abstract_device=device)
    found = with_device_kind(SimpleNamespace(abstract_mesh=mesh))
    assert found.abstract_device.device_kind == expected and found.abstract_device.num_cores == 132
    assert found.shape == mesh.shape
