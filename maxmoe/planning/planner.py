"""Answers a question for one mesh, or for the best mesh that a search finds."""

import dataclasses
from collections.abc import Mapping

from absl import logging

from maxmoe.config import ModelConfig
from maxmoe.model.transformer import MAX_UNROLLED_LAYERS, Transformer
from maxmoe.planning import step
from maxmoe.planning.arithmetic import Arithmetic, Question, arithmetic
from maxmoe.planning.bound import Bound, roofline
from maxmoe.planning.chips import GIB
from maxmoe.planning.depth import flops_at_depth
from maxmoe.planning.measure import Measured, measure
from maxmoe.planning.mesh_search import Candidate, rank_meshes
from maxmoe.planning.targets import devices, missing_compiler
from maxmoe.sharding import make_mesh

MAX_COMPILED_MESHES = 3  # by a search


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer.

    Attributes:
      measured: What the compiler said of the whole step; None where nothing was compiled.
      flops: Of the whole step by the compiler's estimate; None where nobody asked, or it gives none.
      missing: Why nothing was compiled, and what to do.
      searched: Other meshes of a search, with the reasons why they lost.
    """

    question: Question
    mesh: dict[str, int]
    arithmetic: Arithmetic
    measured: Measured | None = None
    flops: float | None = None
    compile_s: float = 0.0
    missing: str | None = None
    searched: tuple[Candidate, ...] = ()

    @property
    def hbm_bytes(self) -> int:
        """What a program may use of one device."""
        return self.question.topology.chip.usable_hbm_bytes

    @property
    def peak_bytes(self) -> int | None:
        """The most that lives at once on one device, by the compiler."""
        if self.measured is None:
            return None
        if self.measured.memory is None:
            return self.measured.refused_bytes
        memory = self.measured.memory
        whole = memory.argument_bytes + memory.temp_bytes + memory.output_bytes - memory.alias_bytes
        return whole if memory.peak_bytes is None else max(memory.peak_bytes, memory.argument_bytes)

    @property
    def fits(self) -> bool | None:
        """None where only the compiler could tell."""
        if self.measured is None:
            return False if self.arithmetic.capacity.resident_bytes > self.hbm_bytes else None
        return self.measured.memory is not None and self.peak_bytes <= self.hbm_bytes

    @property
    def left_bytes(self) -> int:
        """Of one device, beside the peak, or beside weights and caches where no peak is known; may be negative."""
        used = self.arithmetic.capacity.resident_bytes if self.peak_bytes is None else self.peak_bytes
        return self.hbm_bytes - used

    @property
    def sequences_that_fit(self) -> int:
        """Further sequences of the same context whose caches fit in what is left, over the whole mesh."""
        return self.arithmetic.capacity.sequences_that_fit(self.left_bytes, self.question.batch)

    @property
    def bound(self) -> Bound:
        """Of the needed work, with the collectives of the compiled program where there is one."""
        if self.measured is None or self.measured.memory is None:
            return self.arithmetic.bound
        work = self.arithmetic.work
        return roofline(self.question.topology, work.flops, work.unavoidable_bytes, self.measured.collectives)

    @property
    def compiled_bound(self) -> Bound | None:
        """Of the program as compiled: the bytes that it moves, and its FLOPs by the compiler's estimate."""
        moved = None if self.measured is None else self.measured.bytes_accessed
        if moved is None or self.flops is None:
            return None
        return roofline(self.question.topology, self.flops, moved, self.measured.collectives)


def plan(question: Question, mesh_sizes: Mapping[str, int], may_compile: bool, with_costs: bool) -> Plan:
    """Plans for one mesh.

    Args:
      with_costs: Compile two shallow models as well, for FLOPs; see `depth`.
    Raises: ValueError if something does not divide over the mesh.
    """
    mesh_sizes = dict(mesh_sizes)
    found = Plan(question=question, mesh=mesh_sizes, arithmetic=arithmetic(question, mesh_sizes))
    if not may_compile:
        return dataclasses.replace(found, missing="nothing was compiled, as asked")
    if reason := missing_compiler(question.topology):
        return dataclasses.replace(found, missing=reason)
    mesh = make_mesh(mesh_sizes, devices(question.topology))

    def compiled(model: Transformer) -> Measured:
        def compile_step():
            wanted = step.step_to_compile(
                model, mesh, question.phase, question.batch, question.context, question.chunk, question.cache_dtype
            )
            return step.compile_on(mesh, wanted)

        return measure(compile_step, question.topology.num_devices, question.topology.chip.node_size)

    logging.info("compiling the %s step for %s on mesh %s", question.phase, question.topology, named(mesh_sizes))
    measured = compiled(question.model)
    _log_measured(measured)
    found = dataclasses.replace(found, measured=measured, compile_s=measured.compile_s)
    if not with_costs or measured.memory is None or question.topology.chip.platform == "gpu":
        return found
    return _with_costs(found, compiled)


def _with_costs(found, compiled):
    """Adds FLOPs from shallow models; the compiler for GPUs estimates none."""
    question, seconds = found.question, [found.compile_s]

    def flops_of(config: ModelConfig) -> float | None:
        if config == question.model.config and not _scans(question.model):
            return found.measured.flops
        logging.info("compiling an unrolled model of %d layers for its FLOPs", config.num_layers)
        shallow = compiled(dataclasses.replace(question.model, config=config, scan_layers=False))
        _log_measured(shallow)
        seconds.append(shallow.compile_s)
        return shallow.flops

    flops = flops_at_depth(question.model.config, flops_of)
    return dataclasses.replace(found, flops=flops, compile_s=sum(seconds))


def _scans(model):
    deep = model.config.num_layers > MAX_UNROLLED_LAYERS
    return deep if model.scan_layers is None else model.scan_layers


def _log_measured(measured):
    if measured.memory is None:
        logging.info("does not fit, after %.0f s: %s", measured.compile_s, measured.refusal)
    else:
        temp = measured.memory.temp_bytes / GIB
        logging.info("compiled in %.0f s: %.2f GiB of temporaries per device", measured.compile_s, temp)


def plan_best_mesh(question: Question, may_compile: bool, with_costs: bool) -> Plan:
    """Plans for the mesh that arithmetic finds fastest among those that fit; where it can, compiles to be sure.

    Raises: ValueError if no mesh holds weights and caches.
    """
    ranked = rank_meshes(question)
    open_ones = [candidate for candidate in ranked if candidate.reason is None]
    logging.info("%d meshes of %d divide and hold weights and caches", len(open_ones), len(ranked))
    if not open_ones:
        raise ValueError(
            f"no mesh of {question.topology} holds the step; give a larger slice, a smaller batch or a shorter "
            "context. The nearest:\n  " + "\n  ".join(f"{named(c.mesh)}: {c.reason}" for c in ranked[:5])
        )
    last, lost = None, {}
    for candidate in open_ones[:MAX_COMPILED_MESHES]:
        try:
            last = plan(question, candidate.mesh, may_compile, with_costs)
        except (ValueError, NotImplementedError) as error:  # the model refuses it when traced
            lost[named(candidate.mesh)] = str(error)
            continue
        if last.fits is not False:
            break
        lost[named(candidate.mesh)] = last.measured.refusal or "the compiled step needs more HBM than there is"
    if last is None:
        raise ValueError("no mesh could be compiled:\n  " + "\n  ".join(f"{m}: {why}" for m, why in lost.items()))
    return dataclasses.replace(last, searched=tuple(_with_reasons(ranked, last, lost)))


def _with_reasons(ranked, chosen, lost):
    for candidate in ranked:
        if candidate.mesh == chosen.mesh:
            continue
        slower = f"slower by arithmetic than {named(chosen.mesh)}"
        reason = lost.get(named(candidate.mesh)) or candidate.reason or slower
        yield dataclasses.replace(candidate, reason=reason)


def named(mesh_sizes: Mapping[str, int]) -> str:
    """A mesh as the command takes it."""
    return ",".join(f"{name}={size}" for name, size in mesh_sizes.items() if size > 1) or "data=1"
