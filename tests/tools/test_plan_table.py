"""The table of full-size steps: its rows, what stands in them, and where the README keeps it."""

import stat

import pytest

from tools import plan_table
from tools.plan_table import BEGIN, END, Row

ROW = Row(phase="decode", topology="v5p:4x4x4", mesh="tensor=64", batch=64)
GIB = 2**30
RESULT = {
    "fits": True,
    "weights_bytes": 34 * GIB,
    "cache_bytes": 33 * GIB,
    "temp_bytes": GIB // 8,
    "peak_bytes": 68 * GIB,
    "hbm_bytes": 95 * GIB,
    "bytes_over_unavoidable": 1.2749,
    "wall_s": 181.2,
    "cpu_s": 95.6,
    "host_peak_bytes": 1.4 * GIB,
}


def test_rows_have_names_of_their_own_and_cover_every_kind_of_slice():
    assert len({row.name for row in plan_table.ROWS}) == len(plan_table.ROWS)
    kinds = {(row.phase, row.topology.partition(":")[0]) for row in plan_table.ROWS}
    assert kinds >= {
        *(("decode", chip) for chip in ("v5p", "v6e", "tpu7x", "h200")),
        *(("prefill", chip) for chip in ("v5p", "tpu7x")),
        ("train", "v5p"),
    }


def test_table_shows_what_fits_what_does_not_and_what_failed(monkeypatch):
    others = [
        Row(phase=phase, topology="v6e:4x4", mesh="expert=16", batch=1) for phase in ("decode", "prefill", "train")
    ]
    monkeypatch.setattr(plan_table, "ROWS", (ROW, *others))
    too_large = RESULT | {"fits": False, "peak_bytes": 120 * GIB, "temp_bytes": None, "bytes_over_unavoidable": None}
    failed = {"failure": "no such | step", "wall_s": 3.0, "cpu_s": 2.0, "host_peak_bytes": GIB}
    found = plan_table.table({ROW.name: RESULT, others[0].name: too_large, others[1].name: failed})
    took = "181 s, CPU 96 s | 1.4"
    assert found.splitlines()[2:] == [
        f"| decode, batch 64 | v5p:4x4x4, tensor=64 | 34.00 | 33.00 | 0.12 | 68.0 of 95.0 | 1.27 | {took} |",
        f"| decode, batch 1 | v6e:4x4, expert=16 | 34.00 | 33.00 |  | 120.0 of 95.0: does not fit |  | {took} |",
        "| prefill, batch 1 | v6e:4x4, expert=16 | no such / step | | | | | 3 s, CPU 2 s | 1.0 |",
        "| train, batch 1 | v6e:4x4, expert=16 | not run | | | | |  |  |",
    ]
    assert {line.count("|") for line in found.splitlines()} == {10}


def test_with_table_replaces_what_stands_between_the_markers():
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert plan_table.with_table(text, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    for broken in ("no markers", f"{END}{BEGIN}", text + text):
        with pytest.raises(ValueError, match="once each"):
            plan_table.with_table(broken, "new")


def _python(path, body):
    """A stand-in for a Python that runs `maxmoe.plan`."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_run_keeps_what_the_plan_wrote_with_time_and_memory(tmp_path):
    body = 'for last; do :; done; printf \'{"fits": true}\' > "${last#--json=}"'
    found = plan_table.run(ROW, _python(tmp_path / "python", body), timeout_s=60)
    assert found["fits"] is True and 0 < found["wall_s"] < 60 and found["host_peak_bytes"] > 2**16


def test_run_keeps_the_reason_of_a_failure(tmp_path):
    failing = _python(tmp_path / "failing", "echo 'maxmoe.plan: no such step' >&2; exit 2")
    assert plan_table.run(ROW, failing, timeout_s=60)["failure"] == "no such step"
    slow = _python(tmp_path / "slow", "exec sleep 60")
    assert plan_table.run(ROW, slow, timeout_s=0.5)["failure"] == "stopped after 0.5 s: no output"
