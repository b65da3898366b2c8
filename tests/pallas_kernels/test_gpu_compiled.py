"""The kernels for NVIDIA GPUs, compiled for an H200 at real shapes of a shard, without a GPU.

Needs the CUDA plugin of JAX, which brings ptxas. Run as a program, this file compiles in a process of its own - the
plugin must be told at import to do without a driver - and prints one line of JSON per kernel.
"""

import glob
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What the compiler must know of an H200: its limits and rates, from the vendor's data sheet and programming guide.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
  thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation" name: "NVIDIA H200" device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200"
"""
KERNELS = {  # by case: the kernels of a call, and whether they use the matrix unit
    "kda_chunk, 96 heads": {"kda_prepare": True, "kda_walk": True},
    "kda_chunk, 12 heads, 8 sequences": {"kda_prepare": True, "kda_walk": True},
    "kda_decode": {"kda_decode": False},
    "moe_experts, decode": {"moe_hidden": True, "moe_output": True},
    "moe_experts, prefill": {"moe_hidden": True, "moe_output": True},
    "mla_sparse, decode": {"mla_sparse": True},
    "mla_sparse, prefill, 12 heads": {"mla_sparse": True},
}


def _has_plugin():
    return any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13))


@pytest.mark.slow
@pytest.mark.skipif(not _has_plugin(), reason="needs the CUDA plugin of JAX: pip install 'jax[cuda13]'")
def test_gpu_kernels_compile_for_h200_without_spills_and_copies():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)  # what comes from a cache leaves no code to look at
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=env, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    cases = {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert cases.keys() == KERNELS.keys()
    for name, kernels in KERNELS.items():
        found = cases[name]
        for kernel, on_matrix_unit in kernels.items():
            report = found["kernels"][kernel]
            assert report["spill_bytes"] == 0, f"{name}: {kernel} {report}"
            assert report["registers"] <= 255
            assert (report["wgmma"] > 0) == on_matrix_unit, f"{name}: {kernel} {report}"
        # Nothing the size of a cache or of a stack of experts may be copied into another layout.
        assert found["temp_bytes"] <= found["temp_bytes_allowed"], f"{name}: {found}"


def _cases(shape):
    import jax.numpy as jnp

    from pallas_kernels.kda_chunk_gpu import kda_chunk_gpu
    from pallas_kernels.kda_decode_gpu import kda_decode_gpu
    from pallas_kernels.mla_sparse_gpu import mla_sparse_gpu
    from pallas_kernels.moe_experts_gpu import moe_experts_gpu

    bf16, f32, i32, u8 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.uint8

    def kda(tokens, heads, sequences):
        x, g = shape(1, tokens, heads, 128, dtype=bf16), shape(1, tokens, heads, 128, dtype=f32)
        arguments = [x, x, x, g, shape(1, tokens, heads, dtype=f32), shape(sequences, heads, 128, 128, dtype=f32)]

        def run(q, k, v, g, beta, state, cu):
            return kda_chunk_gpu(q, k, v, g, beta, state, cu_seqlens=cu)

        # Five tiles of 64 rows in bfloat16 per chunk and head, and 9 rows of float32.
        chunks = tokens // 64 + sequences + 1
        allowed = 1.05 * chunks * heads * (64 * (4 * 128 + 64) * 2 + 9 * 128 * 4) + 2**20
        return run, [*arguments, shape(sequences + 1, dtype=i32)], allowed

    def decode(batch, heads):
        x, width = shape(batch, heads * 128, dtype=bf16), heads * 128
        weights = [shape(3, width, 4, dtype=f32), shape(width, dtype=f32), shape(heads, dtype=f32)]
        caches = [shape(128, heads, 128, 128, dtype=f32), shape(128, 3, 3, heads, 128, dtype=bf16)]

        def run(*arguments):
            return kda_decode_gpu(*arguments, lower_bound=-5.0, norm_eps=1e-5)

        beta, slots = shape(batch, heads, dtype=bf16), shape(batch, dtype=i32)
        return run, [*[x] * 5, beta, *weights, shape(128, dtype=f32), *caches, slots], 0

    def experts(rows, num_experts):
        wide = [shape(92, num_experts, 3072, width, dtype=u8) for width in (1792, 112)]
        tall = [shape(92, num_experts, 3584, width, dtype=u8) for width in (1536, 96)]

        def run(x, sizes, layer, *leaves):
            return moe_experts_gpu(x, sizes, leaves, layer, 4.0, 25.0)

        scalars = [shape(num_experts, dtype=i32), shape(dtype=i32)]
        # The hidden rows, and x in another order of columns, with some tables of the plan.
        return run, [shape(rows, 3584, dtype=bf16), *scalars, *wide, *wide, *tall], rows * (3072 + 3584) * 2 + 2**20

    def mla(batch, queries, heads, pages):
        caches = [shape(pages, 64, 4, 128, dtype=bf16), shape(pages, 16, 2, 128, dtype=bf16)]
        q = [shape(batch, queries, heads, width, dtype=bf16) for width in (512, 64)]
        rows = [shape(batch, pages // batch, dtype=i32), shape(batch, queries, 2048, dtype=i32)]

        def run(*arguments):
            return mla_sparse_gpu(*arguments, 192**-0.5)

        partial = 4 * batch * queries * heads * 513 * 4 if queries == 1 else 0
        return run, [*q, *caches, *rows], partial + 3 * batch * queries * 2048 * 4

    return {
        "kda_chunk, 96 heads": kda(8192, 96, 1),
        "kda_chunk, 12 heads, 8 sequences": kda(8192, 12, 8),
        "kda_decode": decode(64, 96),
        "moe_experts, decode": experts(16, 7),
        "moe_experts, prefill": experts(16384, 7),
        "mla_sparse, decode": mla(64, 1, 96, 2**16),
        "mla_sparse, prefill, 12 heads": mla(1, 4096, 12, 2**14),
    }


def _compile_all(dump):
    import jax
    import jax._src.pallas.triton.pallas_call_registration  # for a platform that is not there
    import numpy as np
    from jax._src.mesh import AbstractDevice
    from jax.experimental import topologies
    from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

    auto = (AxisType.Auto,)
    devices = topologies.get_topology_desc(
        topology_name="h200", platform="cuda", topology="1x1x1", target_config=TARGET
    ).devices
    where = NamedSharding(Mesh(np.array(devices), ("x",), axis_types=auto), PartitionSpec())
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=auto, abstract_device=device)
    [ptxas] = glob.glob(str(Path(jax.__file__).parents[1] / "nvidia" / "*" / "bin" / "ptxas"))

    def shape(*sizes, dtype):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)

    for case, (run, arguments, allowed) in _cases(shape).items():
        with jax.sharding.use_abstract_mesh(mesh):
            memory = jax.jit(run).lower(*arguments).compile().memory_analysis()
        kernels = {}
        for path in Path(dump).glob("*.ptx"):
            kernels |= _resources(ptxas, path)
            path.unlink()
        line = {"case": case, "temp_bytes": memory.temp_size_in_bytes, "temp_bytes_allowed": int(allowed)}
        print(json.dumps({**line, "kernels": kernels}), flush=True)


def _resources(ptxas, path):
    """Registers, spills and matrix instructions of each kernel of a file."""
    command = [ptxas, "-v", "-arch=sm_90a", "-o", os.devnull, str(path)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    matrix_instructions = path.read_text().count("wgmma.mma_async")
    kernels = {}
    for name, body in re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry|\Z)", report, re.DOTALL):
        stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", body).groups()
        registers = int(re.search(r"Used (\d+) registers", body)[1])
        kernels[name] = {"registers": registers, "spill_bytes": int(stores) + int(loads), "wgmma": matrix_instructions}
    return kernels


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as dump:
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_emitter_re=ptx"  # read when jax is imported
        _compile_all(dump)
