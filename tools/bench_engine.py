"""Speed of serving: throughput, time to first token and time per output token, under open traffic.

    python tools/bench_engine.py                                      the tiny model, three rates, two mixes of lengths
    python tools/bench_engine.py --rate 5 --rate 50 --mix 512:64 --max_batch 1 --max_batch 8 --out engine_bench
    python tools/bench_engine.py --prefix_cache_mib 256 --shared_tokens 64 --num_draft_tokens 7
    python tools/bench_engine.py --save_workload jobs.jsonl --rate 8 --mix 512:64
    python tools/bench_engine.py --workload jobs.jsonl --url http://127.0.0.1:8000 --model maxmoe

Requests come at random times of a given mean rate, whether the engine keeps up or not; `inf` submits all at once.
Weights are random, prompts too, all greedy. Each figure is the median over repeats, which take turns, so that a slow
minute of the machine meets all of them; compare figures only within one table. With --url the same requests go to an
OpenAI-compatible server, this project's or another.
"""

import itertools
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path

# Run as a program, Python looks in tools/ and not in the project's root.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import maxmoe as mm
from maxmoe.inference.drafting import NgramDrafter
from tools import workload

FLAGS = flags.FLAGS
_STEPS = 60  # per repeat of the comparison with a step's programs alone

_COLUMNS = {
    "tokens/s": ("tokens_per_s", 1, ".1f"),
    "first token s": ("first_token_s", 1, ".3f"),
    "(90%)": ("first_token_90_s", 1, ".3f"),
    "per token ms": ("per_token_s", 1000, ".1f"),
    "(90%) ": ("per_token_90_s", 1000, ".1f"),
    "cached": ("cached", 1, ".0%"),
    "host": ("host_share", 1, ".1%"),
}


def _define_flags():
    flags.DEFINE_string("config", "configs/tiny.py", "Model configuration to measure.")
    flags.DEFINE_multi_string("rate", ["4", "16", "inf"], "Requests per second; inf for all at once.")
    flags.DEFINE_multi_string("mix", ["32:32", "8-200:4-60"], "PROMPT:ANSWER tokens; A-B for any number between them.")
    flags.DEFINE_integer("requests", 24, "Per cell of the table and repeat.", lower_bound=2)
    flags.DEFINE_integer("repeats", 3, "Repeats that the median is taken over.", lower_bound=1)
    flags.DEFINE_multi_integer("max_batch", [8], "Slots; several to compare them in one table.", lower_bound=1)
    flags.DEFINE_integer("prefill_chunk", 64, "In tokens.", lower_bound=1)
    flags.DEFINE_integer("prefix_cache_mib", 0, "Size of the prefix cache; 0 for none.", lower_bound=0)
    flags.DEFINE_integer("shared_tokens", 0, "That all prompts begin with, in addition to their own.", lower_bound=0)
    flags.DEFINE_integer("num_draft_tokens", 0, "Of drafts by n-grams; 0 for none.", lower_bound=0)
    flags.DEFINE_string("workload", None, "File of requests to take instead of random ones.")
    flags.DEFINE_string("save_workload", None, "File to write the first cell's requests to, measuring nothing.")
    flags.DEFINE_string("url", None, "Server to measure instead of an engine; its key stands in OPENAI_API_KEY.")
    flags.DEFINE_string("model", "maxmoe", "Name of the server's model.")
    flags.DEFINE_string("out", None, "Folder for results.json and plot.png.")


def main(argv):
    """Measures every rate with every mix, and prints a table."""
    del argv
    mixes = {text: parse_mix(text) for text in FLAGS.mix}
    rates = {text: float(text) for text in FLAGS.rate}
    if min(rates.values()) <= 0:
        raise app.UsageError(f"--rate={FLAGS.rate}: each must be above 0")
    cells = {cell: _Jobs(mixes[cell[0]], rates[cell[1]]) for cell in itertools.product(mixes, rates)}
    if FLAGS.workload is not None:
        cells = {(Path(FLAGS.workload).name, ""): lambda repeat: workload.read_jobs(Path(FLAGS.workload))}
    if FLAGS.save_workload is not None:
        workload.write_jobs(Path(FLAGS.save_workload), next(iter(cells.values()))(0))
        return
    drivers = _drivers([jobs(0) for jobs in cells.values()])
    figures = {(driver, *cell): [] for driver in drivers for cell in cells}
    for repeat in range(FLAGS.repeats):
        for (cell, make), (name, drive) in itertools.product(cells.items(), drivers.items()):
            jobs = make(repeat)
            figures[name, *cell].append(drive(jobs).figures(jobs))
    rows = {
        key: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for key, runs in figures.items()
    }
    _print_table(rows)
    if FLAGS.out is not None:
        _write(Path(FLAGS.out), rows)


class _Jobs:
    """The requests of one cell, others in each repeat."""

    def __init__(self, mix, rate):
        self._mix, self._rate = mix, rate

    def __call__(self, repeat):
        rng = np.random.default_rng(repeat)
        return workload.make_jobs(rng, FLAGS.requests, self._rate, *self._mix, FLAGS.shared_tokens)


def _drivers(cells):
    """What serves a workload, by name: a server, or an engine per number of slots."""
    if FLAGS.url is not None:
        key = os.environ.get("OPENAI_API_KEY", "")
        return {FLAGS.url: lambda jobs: workload.drive_server(FLAGS.url, jobs, FLAGS.model, key)}
    model = mm.Transformer(mm.load_config(FLAGS.config))
    params = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, mm.init_params(model)
    )
    longest = max(max(len(job.prompt) + job.max_tokens for jobs in cells for job in jobs) + 64, _STEPS + 24)
    drivers = {}
    for slots in FLAGS.max_batch:
        engine = mm.Engine(
            model,
            params,
            max_batch=slots,
            max_len=longest,
            prefill_chunk=FLAGS.prefill_chunk,
            max_waiting=max(map(len, cells)),
            prefix_cache_bytes=FLAGS.prefix_cache_mib * 2**20,
            drafter=NgramDrafter if FLAGS.num_draft_tokens else None,
            num_draft_tokens=FLAGS.num_draft_tokens or 7,
        )
        start = time.perf_counter()
        engine.warm_up(lambda program, done, total: print(f"compiling {done + 1} of {total}: {program}", flush=True))
        print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; ready in {time.perf_counter() - start:.1f} s")
        if not FLAGS.num_draft_tokens:
            _print_steps(engine)
        drivers[f"{slots} slots"] = lambda jobs, engine=engine: workload.drive_engine(engine, jobs)
    return drivers


def _print_steps(engine):
    """What the host adds to a step of a full batch, in turns, so that a slow minute meets both."""
    times = [workload.step_times(engine, _STEPS) for _ in range(2 * FLAGS.repeats + 1)]
    served, alone = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    added = statistics.median(served_s / alone_s - 1 for served_s, alone_s in times)
    rows = engine.max_batch
    print(f"a step of {rows} rows: {served:.2f} ms, its programs alone {alone:.2f} ms; the host adds {added:.1%}")


def parse_mix(text):
    """'8-200:32' as ((8, 200), (32, 32))."""
    try:
        prompt, answer = (tuple(int(part) for part in side.split("-")) for side in text.split(":"))
        prompt, answer = ((side[0], side[-1]) for side in (prompt, answer))
    except ValueError as error:
        raise app.UsageError(f"--mix={text}: give PROMPT:ANSWER, such as 512:64 or 8-200:4-60") from error
    if not (1 <= prompt[0] <= prompt[1] and 1 <= answer[0] <= answer[1]):
        raise app.UsageError(f"--mix={text}: lengths must be at least 1, the smaller first")
    return prompt, answer


def _print_table(rows):
    print(f"{FLAGS.requests} requests, median of {FLAGS.repeats}")
    print("".join(f"{name:>15}" for name in ("served by", "prompt:answer", "requests/s", *_COLUMNS)))
    for key, row in rows.items():
        figures = (format(row[name] * factor, form) for name, factor, form in _COLUMNS.values())
        print("".join(f"{text:>15}" for text in (*key, *figures)))


def _write(folder, rows):
    """results.json, and a plot of how long tokens take at each rate."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    records = [
        {"served_by": name, "mix": mix, "rate": rate}
        | {key: None if math.isnan(value) else value for key, value in row.items()}
        for (name, mix, rate), row in rows.items()
    ]
    (folder / "results.json").write_text(json.dumps(records, indent=1) + "\n")
    figure = Figure(figsize=(10, 4), layout="constrained")
    rates = list(dict.fromkeys(rate for _, _, rate in rows))  # side by side, for `inf` has no place on a scale
    for axes, name, title in zip(
        figure.subplots(1, 2),
        ("first_token_s", "per_token_s"),
        ("time to first token, s", "time per token, s"),
        strict=True,
    ):
        for served_by, mix in dict.fromkeys((name, mix) for name, mix, _ in rows):
            points = [(rates.index(r), row[name]) for (by, of, r), row in rows.items() if (by, of) == (served_by, mix)]
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{mix}, {served_by}")
        axes.set(title=title, xlabel="requests per second", ylim=(0, None), xticks=range(len(rates)), xticklabels=rates)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(folder / "plot.png", dpi=120)


if __name__ == "__main__":
    _define_flags()
    app.run(main)
