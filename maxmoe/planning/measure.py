"""Compiles a step and reads what the compiler says of it: memory, costs, collectives, or why it does not fit."""

import dataclasses
import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax

from maxmoe.planning import hlo, traffic
from maxmoe.planning.chips import GIB
from maxmoe.planning.targets import nothing_cached

NUM_LARGEST = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device while a step runs.

    Attributes:
      argument_bytes: Of weights, caches and tokens as they lie in memory.
      shape_bytes: Of the same by their shapes; the rest is padding of tiles.
      peak_bytes: The most that lives at once; None where the compiler gives none.
    """

    argument_bytes: int
    shape_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    peak_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What the compiler said.

    Attributes:
      memory: None for a program that does not fit.
      refusal: The compiler's message for such a program.
      refused_bytes: What that program would need, by the same message.
      flops: Of the whole program with the bodies of its loops once; None where there is no estimate.
      moves: To and from HBM, with loops as often as they run; see `traffic`.
      silent_kernels: Those of which nobody knows what they move.
      cycles: The compiler's own estimate with loops as often as they run; kernels and what it cannot estimate left out.
      collectives: With loops as often as they run.
      unknown_trips: Loops that are counted once because the text does not tell more.
      largest_results: See `hlo.largest_results`.
    """

    memory: Memory | None
    compile_s: float
    refusal: str | None = None
    refused_bytes: int | None = None
    flops: float | None = None
    moves: tuple[traffic.Move, ...] = ()
    silent_kernels: tuple[str, ...] = ()
    cycles: int | None = None
    collectives: tuple[hlo.Collective, ...] = ()
    unknown_trips: int = 0
    largest_results: tuple[tuple[int, str, str], ...] = ()

    @property
    def bytes_accessed(self) -> float | None:
        """What moves to and from HBM in one step; None for a program that does not fit or has silent kernels."""
        return None if self.memory is None or self.silent_kernels else sum(move.bytes for move in self.moves)


def measure(compile_step: Callable[[], jax.stages.Compiled], num_devices: int, node_size: int = 0) -> Measured:
    """Compiles and reads. A program too large for HBM is an answer; other errors of the compiler are raised."""
    start = time.perf_counter()
    try:
        with nothing_cached():
            compiled = compile_step()
    except jax.errors.JaxRuntimeError as error:
        needed = refused_bytes(str(error))
        if needed is None:
            raise
        first = str(error).strip().splitlines()[0]
        return Measured(memory=None, compile_s=time.perf_counter() - start, refusal=first, refused_bytes=needed)
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    program = hlo.parse(text)
    stats = compiled.memory_analysis()
    peak = getattr(stats, "peak_memory_in_bytes", 0)
    memory = Memory(
        argument_bytes=stats.argument_size_in_bytes,
        shape_bytes=hlo.argument_bytes(text)[0],
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
        peak_bytes=peak if peak > 0 else None,
    )
    costs = sane_costs(compiled.cost_analysis())
    return Measured(
        memory=memory,
        compile_s=seconds,
        flops=costs.get("flops"),
        moves=tuple(traffic.moves(program)),
        silent_kernels=tuple(sorted(traffic.silent_kernels(program))),
        cycles=hlo.estimated_cycles(program),
        collectives=tuple(hlo.collectives(program, num_devices, node_size)),
        unknown_trips=program.unknown_trips,
        largest_results=tuple(hlo.largest_results(program, NUM_LARGEST)),
    )


def refused_bytes(message: str) -> int | None:
    """What a program needs by the compiler's message that it does not fit in HBM; None for another message."""
    if "RESOURCE_EXHAUSTED" not in message or not re.search(r"hbm", message, re.IGNORECASE):
        return None
    sizes = re.search(r"\(([\d.]+)([KMG]?)\) exceeds available HBM", message) or re.search(
        r"Used ([\d.]+)([KMG]?) of [\d.]+[KMG]? hbm", message
    )
    return round(float(sizes[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": GIB}[sizes[2]]) if sizes else None


def sane_costs(analysis: Any) -> dict[str, float]:
    """The compiler's costs without those that cannot be: negative, not finite, or a sentinel near 2^62."""
    if isinstance(analysis, (list, tuple)):
        analysis = analysis[0] if analysis else None
    return {k: float(v) for k, v in (analysis or {}).items() if math.isfinite(v) and 0 <= v < 2.0**60}
