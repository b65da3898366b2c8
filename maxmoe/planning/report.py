"""A plan as JSON, as a table, and as a picture."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from maxmoe.planning.bound import Bound
from maxmoe.planning.chips import COLLECTIVE_FLOOR_S, GIB
from maxmoe.planning.network import floor_seconds
from maxmoe.planning.planner import Plan, named

NUM_MOVES = 20  # of those that move most
_PACKAGES = ("maxmoe", "jax", "jaxlib", "flax", "libtpu", "jax-cuda13-plugin")


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything that a plan says, in bytes, seconds and FLOPs of one device unless a name says otherwise."""
    question, held, work = plan.question, plan.arithmetic.capacity, plan.arithmetic.work
    memory = plan.measured.memory if plan.measured else None
    moved = plan.measured.bytes_accessed if plan.measured else None
    exchanged = _collectives(plan)
    record = {
        "topology": str(question.topology),
        "num_devices": question.topology.num_devices,
        "mesh": plan.mesh,
        "phase": question.phase,
        "batch": question.batch,
        "context": question.context,
        "tokens_per_step": question.tokens,
        "cache_dtype": str(question.cache_dtype),
        "fits": plan.fits,
        "missing": plan.missing,
        "refusal": plan.measured.refusal if plan.measured else None,
        "hbm_bytes": plan.hbm_bytes,
        "peak_bytes": plan.peak_bytes,
        "weights_bytes": held.weights_bytes,
        "expert_bytes": held.expert_bytes,
        "optimizer_bytes": held.optimizer_bytes,
        "cache_bytes": held.cache_bytes,
        "state_bytes": held.state_bytes,
        "index_key_bytes": held.key_bytes,
        "latent_row_bytes": held.row_bytes,
        "temp_bytes": memory.temp_bytes if memory else None,
        "argument_bytes": memory.argument_bytes if memory else None,
        "padding_bytes": memory.argument_bytes - memory.shape_bytes if memory else None,
        "output_bytes": memory.output_bytes if memory else None,
        "alias_bytes": memory.alias_bytes if memory else None,
        "left_bytes": plan.left_bytes,
        "sequences_that_fit": plan.sequences_that_fit,
        "collectives": [_collective(c) for c in exchanged],
        "collectives_compiled": memory is not None,
        "sent_bytes": sum(c.count * c.sent_bytes for c in exchanged),
        "collective_floor_s": floor_seconds(question.topology, exchanged),
        "flops": plan.flops,
        "needed_flops": work.flops,
        "bytes_accessed": moved,
        "unavoidable_bytes": work.unavoidable_bytes,
        "bytes_over_unavoidable": _ratio(moved, work.unavoidable_bytes),
        "moves": [move._asdict() for move in (plan.measured.moves if plan.measured else ())[:NUM_MOVES]],
        "silent_kernels": plan.measured.silent_kernels if plan.measured else (),
        "touched_experts": work.touched_experts,
        "estimated_cycles": plan.measured.cycles if plan.measured else None,
        "largest_results": [
            {"bytes": size, "kind": kind, "source": source}
            for size, kind, source in (plan.measured.largest_results if plan.measured else ())
        ],
        "unknown_trips": plan.measured.unknown_trips if plan.measured else None,
        **_bounds("", plan.bound, question.tokens),
        "compile_s": plan.compile_s if memory else None,
        "versions": versions(),
        "ratings": {name: rating._asdict() for name, rating in question.topology.chip.ratings().items()},
        "searched": [_candidate(c) for c in plan.searched],
    }
    if plan.compiled_bound is not None:
        record |= _bounds("compiled_", plan.compiled_bound, question.tokens)
    return record


def _collectives(plan):
    compiled = plan.measured is not None and plan.measured.memory is not None
    return plan.measured.collectives if compiled else plan.arithmetic.collectives


def _collective(c):
    return {
        "kind": c.kind,
        "count": c.count,
        "bytes": c.count * c.bytes,
        "sent_bytes": c.count * c.sent_bytes,
        "group_size": c.group_size,
        "across_nodes": c.across_nodes,
        "source": c.source,
    }


def _candidate(c):
    resident = c.found.capacity.resident_bytes if c.found else None
    return {"mesh": c.mesh, "reason": c.reason, "estimated_s": c.estimated_s, "resident_bytes": resident}


def _bounds(prefix: str, bound: Bound, tokens: int) -> dict[str, Any]:
    seconds = {"memory": bound.memory, "compute": bound.compute, "network": bound.network}
    return {
        f"{prefix}bound": bound.name,
        f"{prefix}seconds": seconds,
        f"{prefix}tokens_per_s_bound": bound.tokens_per_s(tokens),
    }


def _ratio(value, base):
    return None if value is None else value / base


def versions() -> dict[str, str]:
    """Of the packages that decide what was compiled, and of Python."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def as_text(plan: Plan) -> str:
    """A plan as a table to read."""
    question, work = plan.question, plan.arithmetic.work
    moved = plan.measured.bytes_accessed if plan.measured else None
    verdict = {True: "fits", False: "DOES NOT FIT", None: "not compiled: whether the step fits is not known"}
    lines = [
        f"{question.phase} on {question.topology}: {question.topology.num_devices} devices, mesh {named(plan.mesh)}, "
        f"{question.batch} sequences of {question.context:,} tokens, {question.tokens:,} tokens per step",
        f"{verdict[plan.fits]}" + (f": {plan.measured.refusal}" if plan.measured and plan.measured.refusal else ""),
    ]
    if plan.missing:
        lines.append(f"arithmetic only: {plan.missing}")
    lines += ["", "memory of each device"]
    lines += [_row(name, size, plan.hbm_bytes) for name, size in memory_parts(plan) if size is not None]
    lines += [
        f"  {'further sequences of this context':36}{plan.sequences_that_fit:>10,}",
        "",
        f"collectives of each device, {'as compiled' if plan.measured and plan.measured.memory else 'by arithmetic'}",
    ]
    lines += _collective_rows(_collectives(plan))
    floor = floor_seconds(question.topology, _collectives(plan))
    once_us = 1e6 * COLLECTIVE_FLOOR_S[question.topology.chip.platform].value
    lines += [
        f"  one after another they take at least {1e3 * floor:.2f} ms, at {once_us:g} us each; in no bound below",
        "",
        "work of each device and step",
        f"  {'experts that some token chooses':36}{work.touched_experts:>10.1%}",
        f"  {'bytes that must move':36}{work.unavoidable_bytes:>10.3e}" + _over(moved, work.unavoidable_bytes),
        f"  {'FLOPs that are needed':36}{work.flops:>10.3e}" + _over(plan.flops, work.flops),
        "",
        *_bound_rows("what the chip's ratings allow", plan.bound, question.tokens),
    ]
    if plan.compiled_bound:
        lines += _bound_rows("as compiled, by the compiler's estimates", plan.compiled_bound, question.tokens)
    if plan.searched:
        lines += ["", *_search_rows(plan)]
    lines += ["", f"compiled in {plan.compile_s:.0f} s" if plan.measured else "nothing compiled"]
    lines[-1] += "; " + ", ".join(f"{name} {version}" for name, version in versions().items())
    return "\n".join(lines)


def memory_parts(plan: Plan) -> list[tuple[str, int | None]]:
    """What one device's HBM goes to, in order; None where it is not known."""
    held = plan.arithmetic.capacity
    memory = plan.measured.memory if plan.measured else None
    return [
        ("weights: routed experts", held.expert_bytes),
        ("weights: the rest", held.weights_bytes - held.expert_bytes),
        ("optimizer", held.optimizer_bytes or None),
        ("cache: state that does not grow", held.state_bytes),
        ("cache: index keys", held.key_bytes),
        ("cache: latent rows", held.row_bytes),
        ("padding of tiles", memory.argument_bytes - memory.shape_bytes if memory else None),
        ("temporaries", memory.temp_bytes if memory else None),
        ("peak", plan.peak_bytes),
        ("HBM that a program may use", plan.hbm_bytes),
        ("left", plan.left_bytes),
    ]


def _row(name, size, whole):
    return f"  {name:36}{_size(size):>12}  {size / whole:>6.1%}"


def _size(count):
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:.0f} B"


def _over(compiled, needed):
    return "" if compiled is None else f"   compiled {compiled:.3e}, {compiled / needed:.2f} times as much"


def _collective_rows(found):
    if not found:
        return ["  none"]
    kinds: dict[tuple, list[float]] = {}
    for c in found:
        total = kinds.setdefault((c.kind, c.group_size, c.across_nodes), [0, 0])
        total[0] += c.count
        total[1] += c.count * c.sent_bytes
    rows = [f"  {'kind':20}{'devices':>8}{'count':>8}{'sent':>12}"]
    for (kind, size, across), (count, sent) in sorted(kinds.items(), key=lambda item: -item[1][1]):
        rows.append(f"  {kind:20}{size:>8}{count:>8}{_size(sent):>12}{'  across nodes' if across else ''}")
    return rows


def _bound_rows(title, bound, tokens):
    parts = {"memory": bound.memory, "compute": bound.compute, "network": bound.network}
    shown = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in parts.items())
    return [f"{title}: {bound.tokens_per_s(tokens):,.0f} tokens/s, bound by {bound.name}", f"  {shown}"]


def _search_rows(plan):
    rows = [f"meshes that lost to {named(plan.mesh)}"]
    shown = [c for c in plan.searched if c.estimated_s is not None][:8]
    for c in shown:
        rows.append(f"  {named(c.mesh):40}{1e3 * c.estimated_s:>10.2f} ms  {c.reason.splitlines()[0][:90]}")
    rows.append(f"  and {len(plan.searched) - len(shown)} more; --json lists them all")
    return rows


def plot(path: Path, plan: Plan) -> None:
    """One picture: what each device's HBM goes to, and the seconds of each bound.

    Raises: ModuleNotFoundError if matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the plot needs matplotlib, which is an extra: pip install matplotlib") from error
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    memory, time = figure.subplots(2, 1, height_ratios=(1, 1.3))
    start = 0.0
    for name, size in memory_parts(plan)[:8]:
        if size:
            memory.barh(0, size / GIB, left=start, label=f"{name} {size / GIB:.2f}")
            start += size / GIB
    memory.axvline(plan.hbm_bytes / GIB, color="black", label=f"HBM {plan.hbm_bytes / GIB:.2f}")
    if plan.peak_bytes:
        memory.axvline(plan.peak_bytes / GIB, color="red", linestyle="--", label=f"peak {plan.peak_bytes / GIB:.2f}")
    memory.set_yticks([])
    memory.set_xlabel("GiB of each device")
    memory.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1.05))
    memory.set_title(f"{plan.question.phase}, {plan.question.topology}, mesh {named(plan.mesh)}", fontsize=9)
    bounds = [("allowed", plan.bound)] + ([("as compiled", plan.compiled_bound)] if plan.compiled_bound else [])
    for place, (title, bound) in enumerate(bounds):
        for i, part in enumerate(("memory", "compute", "network")):
            value = 1e3 * getattr(bound, part)
            drawn = time.barh(i + 0.38 * place, value, height=0.36, color=f"C{place}", label=title if i == 0 else None)
            time.bar_label(drawn, [f" {value:.3f}"], fontsize=7)
    time.set_yticks([0, 1, 2], ["memory", "compute", "network"])
    time.set_xlabel(f"ms per step; the longest allows {plan.bound.tokens_per_s(plan.question.tokens):,.0f} tokens/s")
    time.margins(x=0.15)
    time.legend(fontsize=7)
    figure.savefig(path, dpi=130)
