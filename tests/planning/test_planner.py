"""Plans with the compiler's answers written out here: what fits, what is left, which mesh wins and why others lost."""

import dataclasses
import json
from pathlib import Path

import pytest

from maxmoe.config import load_config
from maxmoe.model.transformer import Transformer
from maxmoe.planning import measure, planner, report, step
from maxmoe.planning.arithmetic import Question
from maxmoe.planning.bound import roofline
from maxmoe.planning.chips import GIB, parse_topology
from maxmoe.planning.hlo import Collective
from maxmoe.planning.mesh_search import rank_meshes, splits
from maxmoe.planning.placement import abstract_mesh
from maxmoe.planning.traffic import Move

ROOT = Path(__file__).resolve().parents[2]
FULL = Transformer(load_config(ROOT / "configs/k3_1_pro.py"))
EXCHANGE = (Collective("all-reduce", 3, 100, 150, 4, False, "psum"),)
MOVES = (Move(2e10, 5, "fusion", "dot"),)


def _question(topology="v5p:4x4x4", batch=8, context=131_072, phase="decode", chunk=1):
    return Question(
        model=FULL,
        topology=parse_topology(topology),
        phase=phase,
        batch=batch,
        context=context,
        chunk=chunk,
        cache_dtype="bfloat16",
    )


def _measured(peak_gib, **changes):
    memory = measure.Memory(
        argument_bytes=40 * GIB,
        shape_bytes=39 * GIB,
        output_bytes=2 * GIB,
        alias_bytes=2 * GIB,
        temp_bytes=3 * GIB,
        code_bytes=0,
        peak_bytes=None if peak_gib is None else int(peak_gib * GIB),
    )
    found = measure.Measured(memory=memory, compile_s=1.5, flops=1e12, moves=MOVES, collectives=EXCHANGE)
    return dataclasses.replace(found, **changes)


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that says, for each mesh in turn, what a test wants; and the meshes that it was asked for."""
    answers, asked = [], []

    def make_mesh(sizes, devices):
        asked.append(dict(sizes))
        return sizes

    def answer(compile_step, num_devices, node_size):
        assert num_devices == 64 and node_size == 0
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(planner, "missing_compiler", lambda topology: None)
    monkeypatch.setattr(planner, "devices", lambda topology: [])
    monkeypatch.setattr(planner, "make_mesh", make_mesh)
    monkeypatch.setattr(planner, "measure", answer)
    return answers, asked


def test_a_plan_that_fits(compiler):
    answers, asked = compiler
    answers += [
        _measured(44.0, moves=(Move(3e9, 2, "fusion", "a"), Move(1e9, 1, "copy", "b"))),
        _measured(20, flops=1.0e11),
        _measured(20, flops=1.4e11),
    ]
    found = planner.plan(_question(), {"expert": 4, "tensor": 16}, may_compile=True, with_costs=True)
    assert found.fits is True and found.peak_bytes == 44 * GIB
    assert found.left_bytes == found.hbm_bytes - 44 * GIB
    assert found.sequences_that_fit == found.left_bytes * 8 // found.arithmetic.capacity.cache_bytes > 0
    assert found.flops == pytest.approx(1.0e11 + 21 * 0.4e11)  # one superblock and 21 differences
    assert found.compiled_bound == roofline(found.question.topology, found.flops, 4e9, EXCHANGE)
    record = report.as_json(found)
    assert record["bytes_accessed"] == 4e9 and record["moves"][0]["bytes"] == 3e9
    assert record["bytes_over_unavoidable"] == 4e9 / record["unavoidable_bytes"]
    assert found.bound.network == 450 / 600e9 and found.compile_s == 4.5
    assert asked == [{"expert": 4, "tensor": 16}]


@pytest.mark.parametrize(
    ("measured", "peak_gib"),
    [
        (_measured(96.0), 96),
        (_measured(None, memory=None, refusal="RESOURCE_EXHAUSTED", refused_bytes=120 * GIB), 120),
    ],
    ids=["judged_here", "refused_by_the_compiler"],
)
def test_a_plan_that_does_not_fit(compiler, measured, peak_gib):
    compiler[0].append(measured)
    found = planner.plan(_question(), {"expert": 4, "tensor": 16}, may_compile=True, with_costs=False)
    assert found.fits is False and found.peak_bytes == peak_gib * GIB
    assert found.left_bytes < 0 and found.sequences_that_fit == 0
    assert "DOES NOT FIT" in report.as_text(found)


def test_without_a_peak_all_that_lives_is_added_up(compiler):
    compiler[0].append(_measured(None))
    found = planner.plan(_question(), {"expert": 4, "tensor": 16}, may_compile=True, with_costs=False)
    assert found.peak_bytes == (40 + 3 + 2 - 2) * GIB


def test_without_a_compiler_the_arithmetic_stands(monkeypatch):
    monkeypatch.setattr(planner, "missing_compiler", lambda topology: "libtpu is not installed")
    found = planner.plan(_question(), {"expert": 4, "tensor": 16}, may_compile=True, with_costs=True)
    assert found.fits is None and found.measured is None
    record, text = report.as_json(found), report.as_text(found)
    assert record["missing"] == "libtpu is not installed" and record["missing"] in text
    assert record["weights_bytes"] > 0 and record["peak_bytes"] is None and record["tokens_per_s_bound"] > 0
    assert not record["collectives_compiled"] and {c["kind"] for c in record["collectives"]} >= {"all-reduce"}
    too_large = planner.plan(_question(context=1_048_576, batch=64), {"data": 64}, may_compile=True, with_costs=True)
    assert too_large.fits is False


def test_splits_are_all_factorisations():
    found = list(splits(12))
    assert len(found) == len({tuple(mesh.items()) for mesh in found}) == 40  # C(5, 3) for 2^2, times 4 for 3
    assert all(mesh["data"] * mesh["seq"] * mesh["expert"] * mesh["tensor"] == 12 for mesh in found)


def test_rank_meshes_puts_the_fastest_first_and_says_why_others_cannot():
    ranked = rank_meshes(_question())
    fitting = [c for c in ranked if c.reason is None]
    assert len(ranked) == 84 and 0 < len(fitting) < 84
    assert ranked[: len(fitting)] == fitting
    times = [c.estimated_s for c in fitting]
    assert times == sorted(times)
    assert all(c.found.capacity.resident_bytes <= 95.73 * GIB for c in fitting)
    reasons = {c.reason for c in ranked if c.mesh["tensor"] == 64}
    assert reasons and all("sizes that divide it" in reason for reason in reasons)  # 96 heads
    alone = next(c for c in ranked if c.mesh["data"] == 64)
    assert "GiB of 95.7 on each device" in alone.reason


def test_a_search_goes_on_until_a_mesh_fits(compiler):
    answers, asked = compiler
    answers += [
        _measured(None, memory=None, refusal="too large", refused_bytes=99 * GIB),
        ValueError("refused"),
        _measured(44),
    ]
    found = planner.plan_best_mesh(_question(), may_compile=True, with_costs=False)
    first, second, third = (c.mesh for c in rank_meshes(_question())[:3])
    assert asked == [first, second, third] and found.mesh == third and found.fits is True
    reasons = {tuple(c.mesh.values()): c.reason for c in found.searched}
    assert reasons[tuple(first.values())] == "too large" and reasons[tuple(second.values())] == "refused"
    assert len(reasons) == 83 and all(reasons.values())
    assert "meshes that lost to" in report.as_text(found)


def test_a_search_without_a_mesh_names_the_nearest():
    with pytest.raises(ValueError, match=r"no mesh of v6e:4x4 holds the step(?s:.)*GiB of 31.2 on each device"):
        planner.plan_best_mesh(_question("v6e:4x4"), may_compile=False, with_costs=False)


def test_json_holds_what_is_promised(compiler, tmp_path):
    compiler[0].append(_measured(44.0))
    found = planner.plan(_question(), {"expert": 4, "tensor": 16}, may_compile=True, with_costs=False)
    found = dataclasses.replace(found, flops=1e12)
    record = json.loads(json.dumps(report.as_json(found)))
    for name in (
        "fits hbm_bytes peak_bytes weights_bytes cache_bytes temp_bytes left_bytes sequences_that_fit collectives "
        "flops bytes_accessed unavoidable_bytes bound tokens_per_s_bound seconds compile_s versions"
    ).split():
        assert record[name] is not None, name
    assert record["temp_bytes"] == 3 * GIB and record["padding_bytes"] == GIB
    assert record["collectives"] == [
        {
            "kind": "all-reduce",
            "count": 3,
            "bytes": 300,
            "sent_bytes": 450,
            "group_size": 4,
            "across_nodes": False,
            "source": "psum",
        }
    ]
    assert record["seconds"][record["bound"]] == max(record["seconds"].values())
    assert record["tokens_per_s_bound"] == pytest.approx(8 / max(record["seconds"].values()))
    assert record["bytes_over_unavoidable"] == pytest.approx(2e10 / record["unavoidable_bytes"])
    assert record["ratings"]["hbm_bytes_per_s"]["source"].startswith("docs.cloud.google.com")
    assert set(record["versions"]) >= {"python", "jax"}


def test_plot_draws_one_picture(compiler, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    compiler[0].append(_measured(44.0))
    found = planner.plan(_question(), {"expert": 4, "tensor": 16}, may_compile=True, with_costs=False)
    report.plot(tmp_path / "plan.png", dataclasses.replace(found, flops=1e12))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_phase_without_a_step_says_which_there_are():
    mesh = abstract_mesh({"tensor": 2})
    with pytest.raises(NotImplementedError, match="'distil'.*decode, prefill and train"):
        step.step_to_compile(FULL, mesh, "distil", 1, 1024)
