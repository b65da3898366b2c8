"""python -m maxmoe.plan: what it prints, its files, its exit codes, and real steps compiled for chips not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from maxmoe.planning import targets
from maxmoe.planning.chips import parse_topology

ROOT = Path(__file__).resolve().parents[1]
FULL = ("--config", str(ROOT / "configs/k3_1_pro.py"))
TINY = ("--config", str(ROOT / "configs/tiny.py"))


def _run(*arguments: str) -> tuple[int, str, str]:
    """Runs the command. Returns its exit code, standard output and standard error."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "maxmoe.plan", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_arithmetic_of_the_full_model_without_a_compiler(tmp_path):
    file = tmp_path / "plan.json"
    code, out, err = _run(
        *FULL, "--topology=v5p:4x4x4", "--mesh=expert=4,tensor=16", "--batch=8", "--nocompile", f"--json={file}"
    )
    assert code == 0, err
    record = json.loads(file.read_text())
    assert record["fits"] is None and record["mesh"] == {"expert": 4, "tensor": 16}
    assert record["context"] == 1_048_576 and record["num_devices"] == 64
    for part in (
        "decode on v5p:4x4x4",
        "8 sequences of 1,048,576 tokens",
        "latent rows",
        "tokens/s, bound by",
        "as asked",
    ):
        assert part in out
    # All caches of eight sequences over 64 devices, if nothing is held twice.
    assert record["latent_row_bytes"] >= 8 * 24 * 1_048_576 * 576 * 2 // 64


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*TINY, "--topology=v4:2x2"), "allowed are v5p:AxBxC"),
        ((*TINY, "--topology=v6e:2x2", "--mesh=expert=3"), "must multiply to 4"),
        ((*TINY, "--topology=v6e:2x2", "--context=9000"), "trained on 8192 tokens at most"),
        ((*TINY, "--topology=v6e:2x2", "--implementation=cuda"), "--help shows every flag"),
        (("--config=/nowhere.py", "--topology=v6e:2x2"), "no model configuration at /nowhere.py"),
        ((*FULL, "--topology=v6e:2x2", "--nocompile"), "no mesh of v6e:2x2 holds the step"),
    ],
)
def test_a_mistake_says_what_is_allowed(arguments, says):
    code, out, err = _run(*arguments)
    assert code == 2 and out == ""
    assert says in err and "Traceback" not in err


def test_help_teaches_the_command():
    code, out, _ = _run("--help")
    assert code == 0
    for flag in ("config", "topology", "mesh", "context", "batch", "phase", "prefill_chunk", "json", "plot"):
        assert f"--{flag}" in out or f"--[no]{flag}" in out


def _available(*names):
    for name in names:
        reason = targets.missing_compiler(parse_topology(name))
        yield pytest.param(name, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))


@pytest.mark.slow
@pytest.mark.parametrize("topology", list(_available("v6e:2x2", "h200:4")))
def test_a_small_model_is_compiled_and_fits(topology, tmp_path):
    file = tmp_path / "plan.json"
    arguments = ("--mesh=data=2,tensor=2", "--batch=4", "--context=256", "--override=num_layers=4")
    arguments += ("--override=full_attention_layers=(3,)", f"--topology={topology}", f"--json={file}")
    code, out, err = _run(*TINY, *arguments)
    assert code == 0, err
    record = json.loads(file.read_text())
    assert record["fits"] is True and "\nfits\n" in out
    assert record["temp_bytes"] > 0 and record["argument_bytes"] <= record["peak_bytes"] < record["hbm_bytes"]
    # Arguments beside weights and caches are four tokens, two on each device.
    held = record["weights_bytes"] + record["cache_bytes"]
    assert record["argument_bytes"] == held + 2 * 4 + record["padding_bytes"]
    assert record["collectives_compiled"] and sum(c["count"] for c in record["collectives"]) > 0
    assert record["unknown_trips"] == 0
    if topology.startswith("v6e"):
        assert record["flops"] > record["needed_flops"] / 4 and record["bytes_accessed"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("topology", list(_available("v6e:2x2")))
def test_a_step_too_large_does_not_fit(topology, tmp_path):
    """Embedding and head of 16 GiB each, which `data` does not split, for 31 GiB of HBM."""
    file = tmp_path / "plan.json"
    arguments = ("--mesh=data=4", "--context=64", "--batch=4", "--override=vocab_size=67108864")
    arguments += ("--override=num_layers=4", "--override=full_attention_layers=(3,)")
    code, out, err = _run(*TINY, *arguments, f"--topology={topology}", f"--json={file}")
    assert code == 1, err
    record = json.loads(file.read_text())
    assert record["fits"] is False and record["weights_bytes"] < record["peak_bytes"]
    assert "exceeds available HBM" in record["refusal"] and record["refusal"] in out
    assert record["left_bytes"] < 0 and record["sequences_that_fit"] == 0
