"""What K3.1-Pro at full size needs on whole slices: each step compiled ahead of time, and the README's table of them.

    python tools/plan_table.py --results plan_results.json --readme README.md
    python tools/plan_table.py --results plan_results.json --readme README.md --only 'decode v5p,prefill tpu7x'

Every row is one run of `python -m maxmoe.plan` in a process of its own, whose wall time and peak memory are the row's.
A row that fails or does not fit stands in the table with the reason. Rows that are not asked for again by --only keep
what an earlier run left in the results. H200 needs a Python with jax[cuda13], which --gpu_python names.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from absl import app, flags

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- plan table: begin -->", "<!-- plan table: end -->"
GIB = 2**30
CONTEXT = 1_048_576


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One step on one slice."""

    phase: str
    topology: str
    mesh: str
    batch: int
    context: int = CONTEXT
    implementation: str = "pallas_tpu"

    @property
    def name(self) -> str:
        """What tells the row from the others."""
        return f"{self.phase} {self.topology} {self.mesh} batch={self.batch}"

    def command(self, python: str, json_file: Path) -> list[str]:
        """The run of `maxmoe.plan` that fills the row."""
        values = {
            "config": ROOT / "configs/k3_1_pro.py",
            "topology": self.topology,
            "mesh": self.mesh,
            "phase": self.phase,
            "batch": self.batch,
            "context": self.context,
            "implementation": self.implementation,
            "json": json_file,
        }
        flags_given = [f"--{name}={value}" for name, value in values.items()]
        return [python, "-P", "-m", "maxmoe.plan", "--nocosts", *flags_given]


ROWS = (
    Row(phase="decode", topology="v5p:4x4x4", mesh="expert=2,tensor=32", batch=64),
    Row(phase="decode", topology="v5p:4x4x8", mesh="expert=4,tensor=32", batch=64),
    Row(phase="decode", topology="v6e:16x16", mesh="seq=2,expert=4,tensor=32", batch=64),
    Row(phase="decode", topology="tpu7x:4x4x2", mesh="expert=2,tensor=32", batch=64),
    Row(phase="decode", topology="h200:128", mesh="expert=4,tensor=32", batch=64, implementation="pallas_gpu"),
    Row(phase="prefill", topology="v5p:4x4x8", mesh="seq=8,tensor=16", batch=1),
    Row(phase="prefill", topology="tpu7x:4x4x4", mesh="seq=8,tensor=16", batch=1),
    Row(phase="train", topology="v5p:8x8x16", mesh="data=8,expert=32,tensor=4", batch=256, context=8192),
)


def main(argv: list[str]) -> None:
    """Runs the rows that are asked for, one after another, and writes results and table."""
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    values = flags.FLAGS
    rows = [row for row in ROWS if not values.only or any(row.name.startswith(part) for part in values.only)]
    if not rows:
        names = "\n".join(row.name for row in ROWS)
        raise app.UsageError(f"--only={','.join(values.only)}: no row's name begins so. The rows:\n{names}")
    results_file = Path(values.results)
    results = json.loads(results_file.read_text(encoding="utf-8")) if results_file.exists() else {}
    for row in rows:
        print(f"{row.name} ...", flush=True)
        python = values.gpu_python if row.topology.startswith("h200") else sys.executable
        results[row.name] = run(row, python, values.timeout_s)
        print(f"  {table_line(row, results[row.name])}", flush=True)
        results_file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if values.readme is not None:
        readme = Path(values.readme)
        readme.write_text(with_table(readme.read_text(encoding="utf-8"), table(results)), encoding="utf-8")


def run(row: Row, python: str, timeout_s: int) -> dict[str, Any]:
    """One row's result: what the plan says, `wall_s`, `cpu_s`, `host_peak_bytes`; or `failure` instead of the plan."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "plan.json"), Path(folder, "log")
        began = time.monotonic()
        with log.open("wb") as out:
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(row.command(python, file), stdout=out, stderr=out, env=environment)
            usage = _wait(process, began + timeout_s)
        result = {
            "wall_s": time.monotonic() - began,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "host_peak_bytes": usage.ru_maxrss * 1024,
        }
        if file.exists():
            return json.loads(file.read_text(encoding="utf-8")) | result
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        late = f"stopped after {timeout_s} s: " if result["wall_s"] >= timeout_s else ""
        return {"failure": late + lines[-1].removeprefix("maxmoe.plan: ")} | result


def _wait(process, deadline):
    """The resources that a process used; it is killed at the deadline."""
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return usage
        if time.monotonic() > deadline:
            process.kill()
            deadline = float("inf")
        time.sleep(0.2)


HEADER = (
    "| step | slice, mesh | weights | caches | temporaries | peak of HBM | bytes moved / needed | compile | host |",
    "|---|---|---|---|---|---|---|---|---|",
)


def table(results: dict[str, dict[str, Any]]) -> str:
    """The rows in order, in Markdown, GiB of one device; rows without a result say so."""
    return "\n".join([*HEADER, *(table_line(row, results.get(row.name, {"failure": "not run"})) for row in ROWS)])


def table_line(row: Row, result: dict[str, Any]) -> str:
    """One row in Markdown."""
    where = f"{row.topology}, {row.mesh}"
    step = f"{row.phase}, batch {row.batch}"
    took = " | "
    if "wall_s" in result:
        took = f"{result['wall_s']:.0f} s, CPU {result['cpu_s']:.0f} s | {result['host_peak_bytes'] / GIB:.1f}"
    if "failure" in result:
        return f"| {step} | {where} | {result['failure'].replace('|', '/')} | | | | | {took} |"
    peak = f"{result['peak_bytes'] / GIB:.1f} of {result['hbm_bytes'] / GIB:.1f}" if result["peak_bytes"] else "unknown"
    cells = [_gib(result["weights_bytes"]), _gib(result["cache_bytes"]), _gib(result["temp_bytes"])]
    cells += [peak if result["fits"] else f"{peak}: does not fit", _times(result["bytes_over_unavoidable"])]
    return f"| {step} | {where} | {' | '.join(cells)} | {took} |"


def _gib(size):
    return "" if size is None else f"{size / GIB:.2f}"


def _times(ratio):
    return "" if ratio is None else f"{ratio:.2f}"


def with_table(text: str, rows: str) -> str:
    """A README with the table between its two markers.

    Raises: ValueError if the markers are not there once each, in order.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the README must hold {BEGIN} and, after it, {END}, once each")
    return f"{head}{BEGIN}\n{rows}\n{END}{tail}"


def _define_flags() -> None:
    flags.DEFINE_string("results", "plan_results.json", "File for all that was found; rows not run again keep theirs.")
    flags.DEFINE_string("readme", None, "File whose table is rewritten between its markers.")
    flags.DEFINE_list("only", [], "How the names of the rows begin that are run. Default: all.")
    flags.DEFINE_string("gpu_python", sys.executable, "A Python that has jax[cuda13], for rows of GPUs.")
    flags.DEFINE_integer("timeout_s", 1800, "Seconds after which a row is stopped.", lower_bound=1)


if __name__ == "__main__":
    _define_flags()
    app.run(main)
