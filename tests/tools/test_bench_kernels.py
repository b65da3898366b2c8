"""The benchmark of kernels: what it times, counts, compares and writes, and that its cases are what they say."""

import functools
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from maxmoe.ops import experts, kda, latent_cache, mxfp4, sparse_mla
from tests.ops.closeness import assert_close
from tests.ops.kda_reference import random_inputs
from tools import aot_compile, bench_kernels, kernel_baselines, kernel_cases, kernel_report
from tools.kernel_case import Case, Implementation, Target, find_cases, kernel, packed_weight, plain
from tools.kernel_report import StaticResult, TimedResult

ROOT = Path(__file__).resolve().parents[2]
CASES = kernel_cases.all_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_implementations_of_a_case_give_one_shape(case):
    args = jax.eval_shape(case.make, jax.random.key(0))
    given = {}
    for one in case.implementations:
        if one.missing() is None:
            traced = jax.eval_shape(lambda *args, one=one: one.build()(*one.prepare(*args)), *args)
            given[one.name] = jax.tree.leaves(traced)[0].shape
            assert len(one.feed(args, traced)) == len(args)
    assert len(set(given.values())) == 1, given
    # Bytes are those of arguments and results: a factor of two between both counts is a mistake somewhere.
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(args))
    if case.op in ("kda_chunk", "mxfp4_matmul", "moe_experts", "indexer_topk", "rms_norm"):
        assert 0.5 < case.hbm_bytes / whole < 2.5
    assert case.flops > 0


def test_names_of_cases_are_unique_and_found_by_their_parts():
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.op for case in find_cases(CASES, ["kda"], [])} == {"kda_chunk", "kda_chunk_grad", "kda_decode"}
    assert [case.name for case in find_cases(CASES, ["select"], ["cpu"])] == ["select_topk/cpu_S1048576"]
    with pytest.raises(ValueError, match="there are kda_chunk/T8192_H12"):
        find_cases(CASES, ["conv"], [])


@pytest.mark.parametrize("decayed", [kernel_baselines.pairwise_decay, kernel_baselines.middle_decay])
def test_the_straightforward_chunk_scans_compute_kda(decayed):
    # Weak decays, with which both forms are safe.
    inputs = random_inputs(0, 128, "weak")
    given = jax.jit(functools.partial(kernel_baselines.kda_chunk_scan, decayed=decayed))(*inputs)
    for x, y, label in zip(given, jax.jit(kda.kda_chunked)(*inputs), ("output", "state"), strict=True):
        # Two orders of the same float32 sums over 64 tokens; values are of order 1.
        assert_close(x, y, atol=2e-5, label=label)


def test_only_the_pairwise_chunk_scan_holds_at_the_bound():
    q, k, v, g, beta, state = random_inputs(1, 64, "weak")
    inputs = q, k, v, jnp.full_like(g, kernel_cases.GATE_BOUND), beta, state
    expected, _ = jax.jit(kda.kda_chunked)(*inputs)
    given, _ = jax.jit(kernel_baselines.kda_chunk_scan)(*inputs)
    assert_close(given, expected, atol=2e-5, label="output")
    unsafe_scan = functools.partial(kernel_baselines.kda_chunk_scan, decayed=kernel_baselines.middle_decay)
    unsafe, _ = jax.jit(unsafe_scan)(*inputs)
    assert not np.isfinite(unsafe).all()


def test_ragged_dot_over_all_experts_computes_routed_experts():
    num_experts, width, hidden, num_tokens, top_k = 5, 64, 96, 7, 3
    keys = jax.random.split(jax.random.key(0), 4)
    wide, tall = (1, num_experts, hidden, width), (1, num_experts, width, hidden)
    stack = experts.ExpertWeights(
        *packed_weight(keys[0], 0, *wide), *packed_weight(keys[0], 1, *wide), *packed_weight(keys[0], 2, *tall)
    )
    ids = jax.lax.top_k(jax.random.uniform(keys[1], (num_tokens, num_experts)), top_k)[1]
    args = (jax.random.normal(keys[2], (num_tokens, width)), ids, jax.random.uniform(keys[3], ids.shape), stack)
    given, expected = (
        jax.jit(functools.partial(fn, layer=0, gate_beta=2.0, linear_beta=3.0))(*args)
        for fn in (kernel_baselines.dequantize_then_ragged_dot, experts.routed_experts)
    )
    # Float32 sums of 96 products in another order; values are below 1.
    assert_close(given, expected, atol=1e-5, rtol=1e-5)


def test_paged_sparse_attention_is_the_core_of_sparse_attention():
    batch, num_queries, heads, rank, shared, num_keys, page = 2, 3, 2, 32, 8, 64, 16
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((batch, num_keys, rank + shared)).astype(np.float32)
    q = rng.standard_normal((batch, num_queries, heads, rank + shared)).astype(np.float32)
    indices = np.stack([rng.permutation(num_keys)[:9] for _ in range(batch * num_queries)])
    indices = indices.reshape(batch, num_queries, -1).astype(np.int32)
    indices[..., -2:] = -1
    # With identities for key and value matrices the absorbed form is the core alone.
    w_kv = np.tile(np.concatenate([np.eye(rank), np.eye(rank)]), (heads, 1)).astype(np.float32)
    slots = jnp.broadcast_to(jnp.arange(num_keys), (batch, num_keys))
    cache = latent_cache.empty_rows(1, batch, num_keys, rank, shared, jnp.float32)
    cache = latent_cache.write_rows(cache, 0, slots, jnp.asarray(rows))
    expected = sparse_mla.sparse_attention(q, cache, 0, w_kv, indices)
    table = rng.permutation(batch * num_keys // page).astype(np.int32).reshape(batch, -1)
    pages = np.empty((table.size, page, rank + shared), np.float32)
    pages[table.reshape(-1)] = rows.reshape(-1, page, rank + shared)
    scale = (rank + shared) ** -0.5
    given = kernel_baselines.paged_sparse_attention(q, pages, table, indices, scale, rank)
    # Float32, a softmax over seven keys of values of order 1.
    assert_close(given, expected, atol=1e-5)


def test_bf16_matmul_tpu_multiplies():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((48, 384), (384, 256)))
    interpret = pltpu.InterpretParams(uninitialized_memory="nan")
    given = kernel_baselines.bf16_matmul_tpu(x, w, block=(16, 128, 128), interpret=interpret)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    # Products are exact in float32; the result is rounded to 8 bits.
    assert_close(given, expected, atol=1e-4, rtol=2**-8)


def test_packed_weights_are_finite_and_near_one():
    packed, scale = packed_weight(jax.random.key(0), 1, 2, 64, 256)
    weights = mxfp4.dequantize(packed, scale)
    assert packed.shape == (2, 64, 128) and scale.shape == (2, 64, 8)
    assert np.isfinite(weights).all() and 0.001 < np.std(weights) < 1


def _sleeper(seconds, value=0.0):
    """A function that takes a known time."""

    def fn(x):
        def wait(x):
            time.sleep(seconds)
            return np.asarray(x + value, np.float32)

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, jnp.float32), x)

    return fn


def _raising(x):
    raise NotImplementedError("x has 4 rows: this kernel takes 8\nand more of the message")


def small_case(*others, target=None):
    return Case(
        op="wait",
        shape="N4",
        make=lambda key: (jnp.ones(4),),
        implementations=(plain(_sleeper(0.03)), *others),
        flops=4e9,
        hbm_bytes=8e9,
        target=target,
    )


def test_measure_times_compares_and_says_why_not():
    case = small_case(
        plain(_sleeper(0.09, value=0.5), "slow"),
        plain(_raising, "refusing"),
        kernel("cpu", "no_such_kernel"),
        Implementation(name="elsewhere", platforms=("tpu", "gpu"), build=lambda: _raising),
        target=Target(faster="xla", slower="slow", ratio=1.5),
    )
    xla, slow, *others = results = bench_kernels.measure(case, jax.devices()[0], repeats=4, max_seconds=60)
    assert len(xla.seconds) == len(slow.seconds) == 4
    # Lower bounds are exact; a busy machine adds to both.
    assert min(xla.seconds) >= 0.03 and min(slow.seconds) >= 0.09
    assert slow.over_plain < 1 and xla.over_plain == 1
    assert xla.difference == 0 and slow.difference == 0.5
    assert [other.reason for other in others] == [
        "x has 4 rows: this kernel takes 8",
        "there is no pallas_kernels/no_such_kernel.py",
        "needs tpu or gpu, and this is cpu",
    ]
    table = kernel_report.table(results)
    assert "| wait | N4    | slow           | cpu  |" in table and "refusing: not run: x has 4 rows" in table
    (verdict,) = kernel_report.verdicts([case], results)
    assert "wanted 1.5x" in verdict


def test_measure_stops_when_time_is_up():
    (result,) = bench_kernels.measure(small_case(), jax.devices()[0], repeats=50, max_seconds=0.05)
    assert 1 <= len(result.seconds) <= 3


def test_measure_feeds_donated_arguments():
    def add(x, state):
        return state + x, state + x

    in_place = {"donate": (1,), "feed": lambda args, results: (args[0], results[1])}
    case = Case(
        op="add",
        shape="N4",
        make=lambda key: (jnp.ones(4), jnp.zeros(4)),
        implementations=(plain(add, **in_place), plain(lambda x, state: (state + 2 * x - x, state), "same")),
        flops=4,
        hbm_bytes=32,
    )
    donating, other = bench_kernels.measure(case, jax.devices()[0], repeats=3, max_seconds=60)
    # Both are compared on the first call, although one has moved on since.
    assert donating.difference == other.difference == 0
    assert len(donating.seconds) == 3 * bench_kernels._MORE_SAMPLES


def timed(**changes):
    facts = {"op": "mxfp4_matmul", "shape": "M1", "implementation": "pallas_tpu", "chip": "TPU v6 lite"}
    work = {"seconds": (0.9e-3, 1e-3, 1.3e-3), "flops": 459e9, "hbm_bytes": 0.41e9, "over_plain": 3.0}
    return TimedResult(**facts | work | changes)


def test_the_roofline_is_that_of_the_chip():
    # 459 GFLOP take 0.5 ms at 918 TFLOP/s; 0.41 GB take 0.25 ms at 1640 GB/s.
    assert timed().roofline_share == pytest.approx(0.5)
    assert timed(flops=1.0).roofline_share == pytest.approx(0.25)
    # A device of tpu7x is one of the two cores of a chip.
    assert timed(chip="TPU7x").roofline_share == pytest.approx(459e9 / (2307e12 / 2) / 1e-3)
    assert timed(chip="cpu").roofline_share is None
    assert timed().spread == pytest.approx(0.2)
    assert "roofline 50.0%" in kernel_report.line(timed())


def test_write_gives_json_table_and_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    results = [
        timed(difference=float("nan")),
        timed(implementation="xla"),
        timed(chip="cpu", reason="not here", seconds=()),
    ]
    paths = list(kernel_report.write(tmp_path / "new", results, ["said"], {"jax": "1"}))
    assert [path.name for path in paths] == ["results.json", "results.md", "results.png"]
    read = json.loads(paths[0].read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read["jax"] == "1" and read["targets"] == ["said"]
    assert read["results"][0]["roofline_share"] == pytest.approx(0.5) and read["results"][2]["reason"] == "not here"
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_plot_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    written = kernel_report.write(tmp_path, [timed()], [], {})
    assert [next(written).name, next(written).name] == ["results.json", "results.md"]
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        next(written)


def test_static_results_become_a_row_per_kernel(tmp_path):
    programs = [
        aot_compile.ProgramCost(
            name=name,
            is_kernel=is_kernel,
            bundles=bundles,
            units={"MXU": 30, "VSTORE:SPILL": 2},
            capacity={"MXU": 2, "VSTORE:SPILL": 1},
            vmem_bytes=2048,
        )
        for name, is_kernel, bundles in (("first", True, 60), ("fusion", False, 7), ("second", True, 15))
    ]
    cost = aot_compile.StaticCost(
        chip="v6e", programs=tuple(programs), argument_bytes=1, output_bytes=1, temp_bytes=128
    )
    gpu = aot_compile.GpuProgramCost(name="k", is_kernel=True, registers=90, spill_bytes=0, shared_bytes=512)
    gpu_cost = aot_compile.StaticCost(chip="h200", programs=(gpu,), argument_bytes=1, output_bytes=1, temp_bytes=0)
    place = {"op": "op", "shape": "S", "implementation": "pallas"}
    results = [StaticResult(**place, chip="v6e", cost=cost), StaticResult(**place, chip="h200", cost=gpu_cost)]
    first, second, on_gpu = kernel_report.table(results).splitlines()[2:]
    cells = [cell.strip() for cell in first.split("|")[1:-1]]
    assert cells[4:7] == ["first", "60", "25%"] and cells[-6:] == ["2", "2", "", "", "128", "7"]
    assert [cell.strip() for cell in second.split("|")[5:8]] == ["second", "15", "100%"]
    assert [cell.strip() for cell in on_gpu.split("|")[-6:-1]] == ["", "90", "0", "0", "0"]
    assert json.dumps(kernel_report._record(results[0]))
    if aot_compile.importlib.util.find_spec("matplotlib"):
        kernel_report.plot(tmp_path / "plot.png", results)


@pytest.mark.skipif(aot_compile.is_available("v6e") is not None, reason=str(aot_compile.is_available("v6e")))
def test_static_mode_counts_the_kernels_of_a_case():
    case = next(case for case in CASES if case.name == "mxfp4_matmul/M256_K3584_N3072")
    kept = [one for one in case.implementations if one.name in ("xla", "bf16_tpu")]
    case = Case(**vars(case) | {"implementations": (*kept, kernel("tpu", "no_such_kernel"))})
    bf16, missing = bench_kernels.static_results([case], ["v6e"])
    # 682 bundles when written; this one is the measure of the others, so a jump must be seen.
    assert 600 < bf16.cost.bundles < 800 and bf16.cost.temp_bytes == 0
    assert missing.reason == "there is no pallas_kernels/no_such_kernel.py"


def test_the_command_measures_and_writes(tmp_path):
    flags = ["--ops", "rms_norm", "--shapes", "M64_", "--repeats", "2", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "bench_kernels.py", *flags], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "| rms_norm | M64_D7168 | xla" in done.stdout
    assert json.loads((tmp_path / "results.json").read_text())["results"][0]["median_s"] > 0


def test_the_command_names_the_cases_when_none_fits():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "bench_kernels.py", "--ops", "conv"], capture_output=True, text=True
    )
    assert done.returncode != 0 and "there are kda_chunk/T8192_H12" in done.stdout + done.stderr
