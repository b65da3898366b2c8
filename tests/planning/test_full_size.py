"""Decoding K3.1-Pro at full size with a million tokens of cache, compiled for whole slices that are not here."""

import os
from pathlib import Path

import pytest

from maxmoe.config import load_config
from maxmoe.model.transformer import Transformer
from maxmoe.planning import targets
from maxmoe.planning.arithmetic import Question
from maxmoe.planning.chips import GIB, parse_topology
from maxmoe.planning.planner import plan
from maxmoe.sharding import parse_mesh

ROOT = Path(__file__).resolve().parents[2]
SLICES = [
    ("v5p:4x4x4", "expert=2,tensor=32"),
    ("v6e:16x16", "seq=2,expert=4,tensor=32"),
    ("tpu7x:4x4x2", "expert=2,tensor=32"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("slice_name", "mesh"), SLICES)
def test_decoding_fits_and_moves_little_more_than_it_must(slice_name, mesh):
    topology = parse_topology(slice_name)
    if missing := targets.missing_compiler(topology):
        pytest.skip(missing)
    targets.set_environment(os.environ)
    config = load_config(ROOT / "configs/k3_1_pro.py")
    model = Transformer(config, implementation="pallas_tpu")
    sizes = {"batch": 64, "context": 2**20, "chunk": 1, "cache_dtype": "bfloat16"}
    question = Question(model=model, topology=topology, phase="decode", **sizes)
    found = plan(question, parse_mesh(mesh, topology.num_devices), may_compile=True, with_costs=False)
    assert found.fits
    # Copies of weights into another layout would be several GiB, a stack moved for every layer as many bytes.
    assert found.measured.memory.temp_bytes < 0.25 * GIB
    assert found.measured.bytes_accessed < 1.5 * found.arithmetic.work.unavoidable_bytes
