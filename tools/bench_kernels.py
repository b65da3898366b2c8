"""Speed of every op in each of its implementations, at the shapes that one device of a K3.1 slice sees.

    python tools/bench_kernels.py --out results                             all that can run on this machine
    python tools/bench_kernels.py --ops kda,mla --shapes B8 --repeats 9     some of it
    python tools/bench_kernels.py --shapes cpu_                             plain forms beside what they replace
    python tools/bench_kernels.py --static --chips v6e,tpu7x --ops mxfp4    costs that need no chip

Each run times the plain JAX form too, in alternating order, and compares results with it. Prints a table, and writes
results.md, results.json and a plot, results.png, to --out. What cannot run here is listed with the reason.
A share of the roofline is the time that the chip needs at its published bfloat16 rate and memory bandwidth, whichever
is longer, over the time taken; for a CPU there is no such figure. Times hold for this machine and this minute.
With --static, kernels are compiled for chips that are not there and their bundles counted; see aot_compile.py.
"""

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Run as a program, Python looks in tools/ and not in the project's root.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from tools import aot_compile, kernel_cases, kernel_report
from tools.kernel_case import Case, Implementation, find_cases
from tools.kernel_report import StaticResult, TimedResult

FLAGS = flags.FLAGS

# An accelerator is given several short calls at once, for a sample of about this length: a single one measures how fast
# Python asks. On a CPU a single call is undisturbed more often than a row of them, and there are more samples instead.
_SAMPLE_S = 0.02
_LONG_S = 10  # a first call that takes longer is not followed by one to find out
_MORE_SAMPLES = 5  # times --repeats, where all of a case's samples are shorter than _SAMPLE_S


def main(argv):
    """Measures, or compiles and counts; then reports."""
    del argv
    try:
        cases = find_cases(kernel_cases.all_cases(), FLAGS.ops, FLAGS.shapes)
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    results = []
    for result in static_results(cases, FLAGS.chips) if FLAGS.static else timed_results(cases):
        results.append(result)
        print(kernel_report.line(result), flush=True)
    print("\n" + kernel_report.table(results))
    verdicts = kernel_report.verdicts(cases, results)
    print("\n".join(verdicts))
    if FLAGS.out:
        facts = {"jax": jax.__version__, "command": " ".join(sys.argv), "cpus": os.cpu_count()}
        try:
            for path in kernel_report.write(Path(FLAGS.out), results, verdicts, facts):
                print(f"wrote {path}")
        except ModuleNotFoundError as error:
            logging.warning("no results.png: %s", error)


def timed_results(cases: list[Case]):
    """Yields a result per case and implementation; those of a case together, since they are timed in turn."""
    device = jax.devices()[0]
    for case in cases:
        if case.only and device.platform not in case.only:
            continue
        yield from measure(case, device, FLAGS.repeats, FLAGS.max_seconds, FLAGS.seed)


def measure(case: Case, device: jax.Device, repeats: int, max_seconds: float, seed: int = 0) -> list[TimedResult]:
    """Times a case's implementations in alternating order, and compares the first result of each with the first's."""
    args = jax.block_until_ready(jax.jit(case.make)(jax.random.key(seed)))
    ready, reasons, expected, difference = {}, {}, None, {}
    for one in case.implementations:
        runner = _prepared(one, device, args)
        if isinstance(runner, str):
            reasons[one.name] = runner
            continue
        expected = runner.first if expected is None else expected
        difference[one.name] = _largest_difference(runner.first, expected)
        ready[one.name] = runner
    del args
    short = all(runner.estimate_s < _SAMPLE_S for runner in ready.values())
    for turn in range(repeats * (_MORE_SAMPLES if short else 1)):
        order = list(ready.values())
        for runner in order if turn % 2 == 0 else reversed(order):
            if not runner.samples or sum(runner.samples) * runner.calls < max_seconds:
                runner.sample()
    found = []
    for one in case.implementations:
        common = {"op": case.op, "shape": case.shape, "implementation": one.name, "chip": device.device_kind}
        if one.name in reasons:
            found.append(TimedResult(**common, reason=reasons[one.name]))
            continue
        runner = ready[one.name]
        found.append(
            TimedResult(
                **common,
                seconds=tuple(runner.samples),
                compile_s=runner.compile_s,
                flops=case.flops,
                hbm_bytes=case.hbm_bytes,
                over_plain=statistics.median(next(iter(ready.values())).samples) / statistics.median(runner.samples),
                difference=difference[one.name],
            )
        )
    return found


@dataclasses.dataclass
class _Runner:
    """A compiled implementation with its arguments, the first of its first results, and all of its last ones."""

    fn: Callable
    args: tuple
    feed: Callable
    first: np.ndarray
    last: object
    compile_s: float
    estimate_s: float
    calls: int = 1
    samples: list[float] = dataclasses.field(default_factory=list)

    def sample(self):
        """Adds the seconds of one call, averaged over several where calls are short."""
        began = time.perf_counter()
        for _ in range(self.calls):
            self.args = self.feed(self.args, self.last)
            self.last = None
            self.last = self.fn(*self.args)
        jax.block_until_ready(self.last)
        self.samples.append((time.perf_counter() - began) / self.calls)


def _prepared(one: Implementation, device: jax.Device, args: tuple) -> _Runner | str:
    """Compiles and runs an implementation once; or says why it cannot."""
    if device.platform not in one.platforms:
        return f"needs {' or '.join(one.platforms)}, and this is {device.platform}"
    if reason := one.missing():
        return reason
    try:
        own = one.prepare(*args)
        if one.donate:
            # What the call is going to destroy must not be the copy that the others use.
            own = tuple(jnp.copy(x) if i in one.donate else x for i, x in enumerate(own))
        fn = jax.jit(one.build(), donate_argnums=one.donate)
        began = time.perf_counter()
        last = jax.block_until_ready(fn(*own))
    except (NotImplementedError, ImportError) as error:
        return str(error).splitlines()[0]
    compile_s = time.perf_counter() - began
    # Fetched now, because the next call may destroy what this one returned.
    first = np.asarray(jax.tree.leaves(last)[0]).astype(np.float32)
    runner = _Runner(fn, own, one.feed, first, last, compile_s, estimate_s=compile_s)
    if compile_s < _LONG_S:
        runner.sample()
        runner.estimate_s = runner.samples.pop()
        if device.platform != "cpu":
            runner.calls = max(1, min(1000, int(_SAMPLE_S / max(runner.estimate_s, 1e-6))))
    return runner


def _largest_difference(given: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference, over the largest value; NaN where one has a NaN that the other has not."""
    if given.shape != expected.shape:
        return float("nan")
    scale = max(float(np.nanmax(np.abs(expected), initial=0)), 1e-30)
    return float(np.max(np.abs(given - expected), initial=0)) / scale


def static_results(cases: list[Case], chips: list[str]):
    """Yields a result per chip and kernel of a case. Kernels compile in a process each, one after the other."""
    for case in cases:
        for one in case.implementations:
            for chip in chips:
                platform = "gpu" if chip == "h200" else "tpu"
                if one.platforms != (platform,):
                    continue
                common = {"op": case.op, "shape": case.shape, "implementation": one.name, "chip": chip}
                reason = one.missing() or aot_compile.is_available(chip)
                if reason:
                    yield StaticResult(**common, reason=reason)
                    continue
                try:
                    cost = aot_compile.static_cost(chip, f"tools.kernel_cases:static_spec:{case.name}/{one.name}")
                except RuntimeError as error:
                    yield StaticResult(**common, reason=str(error).strip().splitlines()[-1])
                    continue
                yield StaticResult(**common, cost=cost)


def _define_flags():
    """Only the command has flags: whoever imports this module may have others of the same names."""
    flags.DEFINE_list("ops", [], "Ops to measure, by parts of their names; all if empty.")
    flags.DEFINE_list("shapes", [], "Shapes to measure, by parts of their names; all if empty.")
    flags.DEFINE_integer("repeats", 7, "Samples of each; five times as many where they are short.", lower_bound=1)
    flags.DEFINE_float("max_seconds", 60, "Of one implementation's samples; then no more are taken.", lower_bound=0)
    flags.DEFINE_integer("seed", 0, "Of the random arguments.")
    flags.DEFINE_bool("static", False, "Compile the kernels for --chips and count, instead of measuring.")
    flags.DEFINE_list("chips", ["v5p", "v6e", "tpu7x"], f"Chips of --static, of {', '.join(aot_compile.CHIPS)}.")
    flags.register_validator(
        "chips", lambda chips: set(chips) <= set(aot_compile.CHIPS), f"only {', '.join(aot_compile.CHIPS)} are known"
    )
    flags.DEFINE_string("out", None, "Folder for results.md, results.json and results.png; made if absent.")


if __name__ == "__main__":
    _define_flags()
    app.run(main)
