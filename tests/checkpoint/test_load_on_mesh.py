"""Weights on a mesh of eight devices: the same bits as on one, from either form, and no byte read twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# One process for all checks: it takes seconds to start one with eight devices.
PROGRAM = """
import json, sys
import jax, numpy as np
import maxmoe as mm
from maxmoe.checkpoint.convert import convert
from maxmoe.checkpoint.store import open_source

published, orbax = sys.argv[1:]
convert(published, orbax)
facts = {"devices": jax.device_count(), "same": [], "read": []}
config = mm.load_config(orbax)
for scan in (False, True):
    model = mm.Transformer(config, scan)
    whole = mm.load_params(published, model, dtype="float32")
    for sizes in ({"expert": 4, "tensor": 2}, {"expert": 2, "data": 2}, {"tensor": 2}):
        mesh = mm.make_mesh(sizes)
        for folder in (published, orbax):
            params = mm.load_params(folder, model, mesh, "float32")
            same = jax.tree.map(lambda a, b: bool(np.array_equal(np.asarray(a), np.asarray(b))), whole, params)
            facts["same"].append(jax.tree.all(same))
experts = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params) if "gate_packed" in str(path[-1])]
facts["split"] = all(len({str(s.index) for s in leaf.addressable_shards}) == 2 for leaf in experts)
facts["bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(mm.load_params(published, model)))
with open_source(published, model) as source:
    from maxmoe.checkpoint.store import _Loader
    _Loader(source, model, mm.make_mesh({"data": 8}), None).load()
    facts["read"] = source.bytes_read
try:
    mm.load_params(orbax, model, mm.make_mesh({"tensor": 7}))
except ValueError as error:
    facts["refused"] = str(error)
ids = np.arange(24)[None] % 100
on_mesh = np.asarray(mm.forward(model, mm.load_params(orbax, model, mm.make_mesh({"expert": 8}), "float32"), ids))
facts["difference"] = float(np.abs(on_mesh - np.asarray(mm.forward(model, whole, ids))).max())
print(json.dumps(facts))
"""


@pytest.mark.multidevice
@pytest.mark.slow
def test_eight_devices(tmp_path):
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
        "PATH": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT / "maxmoe/data/tiny"), str(tmp_path / "orbax")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["devices"] == 8
    assert len(facts["same"]) == 12 and all(facts["same"])
    assert facts["split"]
    # Eight devices hold copies of every weight, and each byte was read once. The decay gate's published vectors
    # are padded beyond the heads, hence a little more.
    assert facts["bytes"] <= facts["read"] < 1.01 * facts["bytes"]
    assert "which 7 devices on mesh axes tensor cannot share evenly" in facts["refused"]
    # Sums are split over devices: float32 rounding of logits of order 1.
    assert facts["difference"] < 1e-4
