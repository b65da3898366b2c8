"""Bytes per device by arithmetic, against the compiler's own count of a program's arguments."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from maxmoe.config import load_config
from maxmoe.model.cache import cache_bytes
from maxmoe.model.transformer import Transformer
from maxmoe.params import abstract_params, count_bytes
from maxmoe.planning import hlo, targets
from maxmoe.planning.capacity import Capacity, capacity, training_capacity
from maxmoe.planning.chips import parse_topology
from maxmoe.planning.placement import (
    abstract_mesh,
    device_bytes,
    placed_cache,
    placed_params,
    placed_rows,
    token_axes,
)
from maxmoe.sharding import make_mesh
from maxmoe.training.step import Trainer

ROOT = Path(__file__).resolve().parents[2]
TINY, FULL = (Transformer(load_config(ROOT / f"configs/{name}.py")) for name in ("tiny", "k3_1_pro"))
MESHES = [{}, {"data": 8}, {"expert": 8}, {"seq": 8}, {"data": 2, "expert": 2, "tensor": 2}, {"seq": 4, "tensor": 2}]


def _held_and_compiled(model, mesh, batch, context):
    """Capacity by arithmetic, and a program compiled that is given weights and cache and does next to nothing."""
    params = placed_params(model, mesh)
    cache = placed_cache(model, mesh, batch, context)
    with targets.nothing_cached():
        jitted = jax.jit(lambda params, cache: cache.lengths + 1, keep_unused=True)
        compiled = jitted.lower(params, cache).compile()
    return capacity(params, cache), compiled


def test_one_device_holds_the_whole_model():
    held = capacity(placed_params(FULL, abstract_mesh({})), placed_cache(FULL, abstract_mesh({}), 2, 65_536))
    assert held.weights_bytes == count_bytes(abstract_params(FULL))
    assert held.expert_bytes == 92 * 896 * 3 * 3072 * 3584 * 17 // 32  # four bits each, and a byte for every 32
    assert held.cache_bytes == cache_bytes(FULL.config, 2, 65_536, jnp.bfloat16)
    assert held.row_bytes == 24 * 2 * 65_536 * 576 * 2 and held.key_bytes == 24 * 2 * 65_536 * 128 * 2


def test_training_keeps_masters_and_optimizer_once_over_all_devices():
    """bfloat16 masters, and four bytes of momentum for each that Muon moves: all experts, for example."""
    state = Trainer(model=FULL).abstract_state(abstract_mesh({"data": 8, "expert": 32, "tensor": 4}))
    held = training_capacity(state)
    experts = 92 * 896 * 3 * 3072 * 3584
    assert held.expert_bytes == 2 * experts // 1024 and held.cache_bytes == 0
    assert 4 * experts // 1024 < held.optimizer_bytes < 2.01 * held.weights_bytes
    assert held.resident_bytes == held.weights_bytes + held.optimizer_bytes


def _print_bytes_on_cpu():
    """Run in a process with eight devices: what arithmetic and compiler say of each mesh."""
    for sizes in MESHES:
        held, compiled = _held_and_compiled(TINY, make_mesh(sizes), 8, 256)
        print(json.dumps([held.resident_bytes, compiled.memory_analysis().argument_size_in_bytes]))


def test_capacity_is_what_the_compiler_counts_on_cpu():
    code = "from tests.planning import test_capacity; test_capacity._print_bytes_on_cpu()"
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(MESHES)
    for sizes, (ours, compiled) in zip(MESHES, rows, strict=True):
        assert ours == compiled, sizes
    assert len({ours for ours, _ in rows}) > 3  # the meshes differ


def _available(*names):
    for name in names:
        reason = targets.missing_compiler(parse_topology(name))
        yield pytest.param(name, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch", "context", "sizes"),
    [
        (TINY, 8, 1000, {"data": 2, "tensor": 2}),
        (FULL, 8, 65_536, {"expert": 4, "tensor": 32}),
        (FULL, 8, 65_536, {"seq": 8, "tensor": 16}),
    ],
    ids=["tiny", "full", "full_by_seq"],
)
@pytest.mark.parametrize("topology", list(_available("v5p:4x4x8", "v6e:8x16", "tpu7x:4x4x4", "h200:128")))
def test_capacity_is_what_the_compiler_counts(topology, model, batch, context, sizes):
    """Exactly by shapes; in memory the padding of tiles is added, which the program's layouts give exactly."""
    targets.set_environment(os.environ)
    mesh = make_mesh(sizes, targets.devices(parse_topology(topology)))
    held, compiled = _held_and_compiled(model, mesh, batch, context)
    in_memory = compiled.memory_analysis().argument_size_in_bytes
    assert hlo.argument_bytes(compiled.as_text()) == (held.resident_bytes, in_memory)
    if topology.startswith("h200"):
        assert held.resident_bytes == in_memory
    elif model is FULL:
        # Nothing but taps of convolutions, four to a tile of 128, and vectors are padded.
        assert in_memory < 1.01 * held.resident_bytes


def test_sequences_that_fit_counts_whole_ones_of_the_whole_mesh():
    held = Capacity(weights_bytes=100, expert_bytes=60, state_bytes=4, key_bytes=2, row_bytes=4)
    assert (held.cache_bytes, held.resident_bytes) == (10, 110)
    # Eight sequences take 10 bytes of each device, so one takes 1.25.
    assert held.sequences_that_fit(13, 8) == 10
    assert held.sequences_that_fit(1, 8) == held.sequences_that_fit(-5, 8) == 0


def test_placement_refuses_weights_that_do_not_divide():
    with pytest.raises(ValueError, match="sizes that divide it"):
        placed_params(FULL, abstract_mesh({"tensor": 64}))


def test_rows_that_do_not_divide_stay_whole():
    mesh = abstract_mesh({"data": 4, "seq": 2, "expert": 3})
    assert token_axes(mesh, 24, 6) == ("data", "expert", "seq") and device_bytes(placed_rows(mesh, 24, 6)) == 2 * 3 * 4
    assert token_axes(mesh, 8, 1) == ("data",) and device_bytes(placed_rows(mesh, 8)) == 2 * 4
    assert token_axes(mesh, 1, 5) == () and device_bytes(placed_rows(mesh, 1, 5)) == 5 * 4


def test_shards_of_a_cache_cover_it():
    mesh = abstract_mesh({"data": 2, "seq": 4, "tensor": 2})
    whole = cache_bytes(TINY.config, 4, 64, jnp.bfloat16)
    held = capacity(placed_params(TINY, mesh), placed_cache(TINY, mesh, 4, 64))
    assert math.ceil(whole / 16) <= held.cache_bytes < whole
