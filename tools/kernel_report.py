"""Results of `bench_kernels.py`: a line each while it runs, and then a table, a JSON file and a plot."""

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.aot_compile import GpuProgramCost, StaticCost
from tools.kernel_case import Case


class Chip(NamedTuple):
    """Published peaks of one JAX device: of one of the two cores of a tpu7x, of a whole chip elsewhere."""

    bf16_flops_per_s: float
    hbm_bytes_per_s: float


# By JAX's name of the device. Sources: docs.cloud.google.com/tpu/docs/{v5p,v6e,tpu7x}, NVIDIA's data sheet of the H200.
CHIPS = {
    "TPU v5": Chip(459e12, 2765e9),
    "TPU v5p": Chip(459e12, 2765e9),
    "TPU v6 lite": Chip(918e12, 1640e9),
    "TPU7x": Chip(2307e12 / 2, 7380e9 / 2),
    "NVIDIA H200": Chip(989e12, 4800e9),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedResult:
    """Times of one implementation of a case, or the reason why there are none.

    Attributes:
      seconds: Samples, in the order taken.
      compile_s: Of the first call, which also ran once.
      over_plain: Time of the plain form over this one's.
      difference: From the plain form's result, over that result's largest value.
    """

    op: str
    shape: str
    implementation: str
    chip: str
    reason: str | None = None
    seconds: tuple[float, ...] = ()
    compile_s: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    over_plain: float = 0.0
    difference: float = 0.0

    @property
    def median_s(self) -> float:
        """Median of the samples."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance between the quartiles of the samples, over the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median_s

    @property
    def roofline_share(self) -> float | None:
        """What the chip's peaks allow over what was achieved; None where the chip's peaks are not known."""
        chip = next((peaks for name, peaks in CHIPS.items() if self.chip == name), None)
        if chip is None and self.chip.startswith("NVIDIA H200"):
            chip = CHIPS["NVIDIA H200"]
        if chip is None:
            return None
        bound_s = max(self.flops / chip.bf16_flops_per_s, self.hbm_bytes / chip.hbm_bytes_per_s)
        return bound_s / self.median_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticResult:
    """What a chip's compiler made of one implementation of a case, or the reason why there is nothing."""

    op: str
    shape: str
    implementation: str
    chip: str
    reason: str | None = None
    cost: StaticCost | None = None


Result = TimedResult | StaticResult

_TIMED_COLUMNS = ("median", "spread", "GB/s", "GFLOP/s", "roofline", "x plain", "difference")
_STATIC_COLUMNS = (
    *("kernel", "bundles", "MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE", "spills", "VMEM KiB"),
    *("registers", "shared KiB", "temp B", "XLA"),
)


def line(result: Result) -> str:
    """One line on a result."""
    place = f"{result.chip}: {result.op}/{result.shape} {result.implementation}"
    if result.reason:
        return f"{place}: not run: {result.reason}"
    columns, rows = (
        (_TIMED_COLUMNS, [_timed_cells(result)])
        if isinstance(result, TimedResult)
        else (_STATIC_COLUMNS, list(_static_cells(result)))
    )
    return "\n".join(
        f"{place}: " + ", ".join(f"{name} {cell}" for name, cell in zip(columns, cells, strict=True) if cell)
        for cells in rows
    )


def table(results: list[Result]) -> str:
    """A Markdown table of those that ran, and below it the reasons of the others."""
    parts = []
    timed = [result for result in results if isinstance(result, TimedResult) and not result.reason]
    static = [result for result in results if isinstance(result, StaticResult) and not result.reason]
    for columns, rows in (
        (_TIMED_COLUMNS, [(result, _timed_cells(result)) for result in timed]),
        (_STATIC_COLUMNS, [(result, cells) for result in static for cells in _static_cells(result)]),
    ):
        if rows:
            used = [i for i in range(len(columns)) if any(cells[i] for _, cells in rows)]
            parts.append(_aligned([columns[i] for i in used], [(r, [cells[i] for i in used]) for r, cells in rows]))
    reasons = [line(result) for result in results if result.reason]
    return "\n\n".join(parts + (["\n".join(f"- {reason}" for reason in reasons)] if reasons else []))


def _aligned(columns, rows):
    head = ("op", "shape", "implementation", "chip", *columns)
    body = [(r.op, r.shape, r.implementation, r.chip, *cells) for r, cells in rows]
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    rule = tuple("-" * width if i < 4 else "-" * (width - 1) + ":" for i, width in enumerate(widths))

    def written(row):
        cells = (cell.ljust(w) if i < 4 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        return "| " + " | ".join(cells) + " |"

    return "\n".join(map(written, (head, rule, *body)))


def _timed_cells(result: TimedResult) -> tuple[str, ...]:
    share = result.roofline_share
    return (
        _seconds(result.median_s),
        f"{result.spread:.0%}" if len(result.seconds) > 1 else "one",
        f"{result.hbm_bytes / result.median_s / 1e9:.3g}",
        f"{result.flops / result.median_s / 1e9:.3g}",
        f"{share:.1%}" if share is not None else "",
        f"{result.over_plain:.2f}",
        f"{result.difference:.1e}",
    )


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if value * scale >= 1 or unit == "us":
            return f"{value * scale:.3g} {unit}"
    raise AssertionError("the last unit takes any value")


def _static_cells(result: StaticResult) -> Iterator[tuple[str, ...]]:
    """A row per kernel; HBM beside arguments and results, and the bundles of XLA's own programs, in the first."""
    cost = result.cost
    own = [program for program in cost.programs if not program.is_kernel]
    bundles = sum(program.bundles for program in own if not isinstance(program, GpuProgramCost))
    for i, kernel in enumerate(cost.kernels):
        whole = (str(cost.temp_bytes), str(bundles or len(own))) if i == 0 else ("", "")
        name = re.sub(r"\.\d+$", "", kernel.name)
        if isinstance(kernel, GpuProgramCost):
            yield (
                name,
                *[""] * 7,
                f"{kernel.spill_bytes} B",
                "",
                str(kernel.registers),
                _kib(kernel.shared_bytes),
                *whole,
            )
            continue
        shares = (f"{kernel.utilisation(unit):.0%}" for unit in ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE"))
        yield name, str(kernel.bundles), *shares, str(kernel.spills), _kib(kernel.vmem_bytes), "", "", *whole


def _kib(size: int) -> str:
    return f"{size / 1024:.0f}"


def verdicts(cases: list[Case], results: list[Result]) -> list[str]:
    """For every case with a target whose two sides were timed: how far apart they are, and whether that is enough."""
    found = []
    for case in cases:
        own = {
            result.implementation: result
            for result in results
            if isinstance(result, TimedResult)
            and not result.reason
            and (result.op, result.shape) == (case.op, case.shape)
        }
        if case.target is None or not {case.target.faster, case.target.slower} <= own.keys():
            continue
        slower, faster = own[case.target.slower], own[case.target.faster]
        ratio, best = slower.median_s / faster.median_s, min(slower.seconds) / min(faster.seconds)
        holds = "holds" if ratio >= case.target.ratio else "DOES NOT HOLD"
        found.append(
            f"{case.name}: {case.target.faster} is {ratio:.2f}x as fast as {case.target.slower} ({best:.2f}x by the "
            f"best samples), wanted {case.target.ratio:g}x: {holds}"
        )
    return found


def write(folder: Path, results: list[Result], said: list[str], facts: dict) -> Iterator[Path]:
    """Writes results.json, results.md and results.png into a folder, and yields their paths.

    Raises: ModuleNotFoundError, after the first two, if matplotlib is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    records = [_record(result) for result in results]
    (folder / "results.json").write_text(json.dumps(facts | {"results": records, "targets": said}, indent=1) + "\n")
    yield folder / "results.json"
    (folder / "results.md").write_text("\n\n".join(filter(None, [table(results), "\n".join(said)])) + "\n")
    yield folder / "results.md"
    if any(not result.reason for result in results):
        plot(folder / "results.png", results)
        yield folder / "results.png"


def _record(result: Result) -> dict:
    record = dataclasses.asdict(result)
    if isinstance(result, TimedResult) and not result.reason:
        record |= {"median_s": result.median_s, "spread": result.spread, "roofline_share": result.roofline_share}
        # JSON has no NaN.
        record["difference"] = result.difference if math.isfinite(result.difference) else None
    return record


def plot(path: Path, results: list[Result]):
    """Bars of every result that ran: median times on a logarithmic axis, or bundles on a linear one.

    Raises: ModuleNotFoundError if matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the plot needs matplotlib, which is not a dependency: pip install matplotlib"
        ) from error

    timed = [r for r in results if isinstance(r, TimedResult) and not r.reason]
    bars = [(r, r.median_s, r.implementation) for r in timed] or [
        (r, r.cost.bundles or sum(k.registers for k in r.cost.kernels), f"{r.implementation} {r.chip}")
        for r in results
        if isinstance(r, StaticResult) and not r.reason
    ]
    series = list(dict.fromkeys(name for _, _, name in bars))
    groups = list(dict.fromkeys(f"{r.op}\n{r.shape}" for r, _, _ in bars))
    figure = Figure(figsize=(9, 1.5 + 0.22 * len(bars) + 0.3 * len(groups)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    place, middles = 0.0, []
    for group in groups:
        own = [bar for bar in bars if f"{bar[0].op}\n{bar[0].shape}" == group]
        middles.append(place + (len(own) - 1) / 2)
        for result, value, name in own:
            drawn = axes.barh(place, value, color=f"C{series.index(name) % 10}")
            share = result.roofline_share if isinstance(result, TimedResult) else None
            label = _seconds(value) if isinstance(result, TimedResult) else f"{value}"
            axes.bar_label(drawn, [f" {label}" + (f", {share:.0%} of roofline" if share else "")], fontsize=7)
            place += 1
        place += 0.7
    axes.set_yticks(middles, groups, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    if timed:
        axes.set_xscale("log")
        axes.set_xlabel(f"median seconds on {timed[0].chip}, less is better")
    else:
        axes.set_xlabel("instruction bundles of the kernels, loops counted once (GPU: registers)")
    handles = [axes.barh([math.nan], [math.nan], color=f"C{i % 10}") for i in range(len(series))]
    axes.legend(handles, series, fontsize=7)
    figure.savefig(path, dpi=130)
