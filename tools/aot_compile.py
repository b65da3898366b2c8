"""Compiles a function for a chip that this machine does not have, and counts what the compiler made of it.

    python tools/aot_compile.py --chip v6e --spec tests.tools.test_aot_compile:matmul_kernel
    python tools/aot_compile.py --chip v5p --chip v6e --chip tpu7x --spec module:function

A spec names a function without arguments that returns (fn, args), with args a tuple of `jax.ShapeDtypeStruct`s or
trees of them. TPU chips need libtpu, which `jax[tpu]` installs; h200 needs `jax[cuda13]`. Neither needs the chip.

A bundle is one instruction word of a TPU core: what its units do in one cycle unless something stalls. Counts are of
the program as written: the body of a loop is counted once, branches not taken are counted too, and waiting for HBM
does not appear. They rank variants of one kernel at one shape and show spills; they are not times.
"""

import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxmoe.planning import targets
from maxmoe.planning.chips import parse_topology

if TYPE_CHECKING:
    import jax

ROOT = Path(__file__).resolve().parent.parent

# The smallest slice of each chip that the compiler describes; one device of it is compiled for.
TOPOLOGIES = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
CHIPS = (*TOPOLOGIES, "h200")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramCost:
    """One program of a TPU executable: a Pallas kernel, or a fusion that XLA made.

    Attributes:
      bundles: Instruction words, loops counted once.
      units: How often each unit is used: MXU, XLU, VALU, EUP, VLOAD, VSTORE, VLOAD:FILL, VSTORE:SPILL and others.
      capacity: How often each could be used in one bundle.
      vmem_bytes: Vector memory that the program allocates for itself: windows, scratch and spills. Operands that XLA
        placed in vector memory are not in it.
    """

    name: str
    is_kernel: bool
    bundles: int
    units: dict[str, int]
    capacity: dict[str, int]
    vmem_bytes: int

    @property
    def spills(self) -> int:
        """Vector registers written out for want of room, and read back."""
        return self.units.get("VSTORE:SPILL", 0) + self.units.get("VLOAD:FILL", 0)

    def utilisation(self, unit: str) -> float:
        """Share of a unit's slots that are used."""
        return self.units.get(unit, 0) / max(1, self.bundles * self.capacity.get(unit, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuProgramCost:
    """One kernel of a GPU executable, as ptxas reports it.

    Attributes:
      registers: Per thread.
      spill_bytes: Stores and loads of spilled registers, per thread.
      shared_bytes: Per block, what is asked for at launch included.
    """

    name: str
    is_kernel: bool
    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticCost:
    """What the compiler made of a function for one device of a chip.

    Attributes:
      programs: Its programs in the order of compilation, kernels and XLA's own.
      temp_bytes: HBM beside arguments and results. A copy of an argument into another layout shows here.
    """

    chip: str
    programs: tuple[ProgramCost | GpuProgramCost, ...]
    argument_bytes: int
    output_bytes: int
    temp_bytes: int

    @property
    def kernels(self) -> tuple[ProgramCost | GpuProgramCost, ...]:
        """The programs that are Pallas kernels."""
        return tuple(program for program in self.programs if program.is_kernel)

    @property
    def bundles(self) -> int:
        """Bundles of all Pallas kernels of a TPU; 0 for a GPU, which has none."""
        return sum(kernel.bundles for kernel in self.kernels if isinstance(kernel, ProgramCost))


def is_available(chip: str) -> str | None:
    """None if this Python can compile for the chip, else why not and what to install."""
    if chip not in CHIPS:
        return f"chip {chip!r} is not known: choose one of {', '.join(CHIPS)}"
    return targets.missing_compiler(_topology(chip))


def _topology(chip):
    return parse_topology(TOPOLOGIES.get(chip, f"{chip}:1"))


def compile_for(chip: str, fn: Callable, *args: Any) -> "jax.stages.Compiled":
    """Compiles fn(*args) for one device of a chip.

    Args:
      fn: A function, or one that is jitted already, for instance with donated arguments.
      args: Arrays, `jax.ShapeDtypeStruct`s or trees of them; only shapes and dtypes count.
    Raises:
      ValueError: The chip is not known.
      ModuleNotFoundError: The compiler for it is not installed.
    """
    if reason := is_available(chip):
        raise (ValueError if chip not in CHIPS else ModuleNotFoundError)(reason)
    import jax

    device, abstract_mesh = _target(chip)
    placement = jax.sharding.SingleDeviceSharding(device)

    def placed(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement)

    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    # Kernels that ask which chip they are for look at the mesh before they look for a device.
    with jax.sharding.use_abstract_mesh(abstract_mesh), targets.nothing_cached():
        return jitted.lower(*jax.tree.map(placed, args)).compile()


@functools.cache
def _target(chip):
    """A device to place arguments on, and a mesh that tells kernels which chip they are compiled for."""
    for name, value in targets.SETTINGS.items():
        os.environ.setdefault(name, value)
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    device = targets.devices(_topology(chip))[0]
    if chip == "h200":
        facts = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    else:
        facts = AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    return device, AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=facts)


def static_cost(chip: str, spec: str, timeout_s: float = 600) -> StaticCost:
    """Compiles what a spec names in a process of its own, and counts bundles and units of each program.

    A process of its own, because libtpu takes the wish for a dump only when it is loaded.

    Args:
      spec: "module:function" as in the module's docstring; or "module:function:text", which gives the function one
        string argument. Imported with the project's root in the path.
    Raises:
      ModuleNotFoundError, ValueError: As `compile_for`.
      RuntimeError: The compilation failed, or took longer than timeout_s; the message holds the end of what it said.
    """
    if reason := is_available(chip):
        raise (ValueError if chip not in CHIPS else ModuleNotFoundError)(reason)
    with tempfile.TemporaryDirectory(prefix="aot_") as folder:
        dump, facts = Path(folder, "dump"), Path(folder, "facts.json")
        dump.mkdir()
        paths = (str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))
        env = os.environ | targets.SETTINGS
        env |= {"PYTHONPATH": os.pathsep.join(paths), "MOSAIC_GPU_DUMP_TO": str(dump)}
        dump_tpu = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
        env["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {dump_tpu}".strip()
        if chip == "h200":
            env["XLA_FLAGS"] = (
                f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_emitter_re=.*".strip()
            )
        # A result from a cache would leave nothing to count.
        env.pop("JAX_COMPILATION_CACHE_DIR", None)
        command = [sys.executable, __file__, "--chip", chip, "--spec", spec, "--facts", str(facts)]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{spec} does not compile for {chip} within {timeout_s:g} s") from error
        if done.returncode:
            raise RuntimeError(f"{spec} does not compile for {chip}:\n{done.stderr[-4000:]}")
        found = json.loads(facts.read_text())
        kernels = set(found.pop("kernels"))
        programs = _gpu_programs(dump, kernels) if chip == "h200" else _programs(dump, kernels)
        return StaticCost(chip=chip, programs=tuple(programs), **found)


def _write_facts(chip, spec, path):
    """The part of `static_cost` that runs in the child."""
    compiled = compile_for(chip, *_load(spec))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    on_tpu = re.findall(r'%([\w.\-]+) = [^\n]*custom_call_target="tpu_custom_call"', text)
    by_triton = re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton"[^\n]*\bname = \\?"([\w.]+)', text)
    facts = {
        "kernels": on_tpu + by_triton,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }
    Path(path).write_text(json.dumps(facts))


def _load(spec):
    module, _, rest = spec.partition(":")
    name, _, text = rest.partition(":")
    fn, args = getattr(importlib.import_module(module), name)(*([text] if text else []))
    return fn, *args


def _programs(dump, kernels):
    """Reads the dump: one table of unit counts per program, a row per bundle."""
    for table in sorted(dump.glob("*-final_hlo-static-per-bundle-utilization.txt")):
        run, name = re.fullmatch(r"(\d+)-(.+)-\d+-final_hlo.*", table.name).groups()
        lines = table.read_text().splitlines()
        names = [unit.strip() for unit in lines[1].split(",")]
        rows = [[int(count) for count in line.split()] for line in lines[4:] if line.strip()]
        totals = [sum(column) for column in zip(*rows, strict=True)] or [0] * len(names)
        yield ProgramCost(
            name=name,
            is_kernel=name in kernels,
            bundles=len(rows),
            units=dict(zip(names, totals, strict=True)),
            capacity=dict(zip(names, map(int, lines[2].split()), strict=True)),
            vmem_bytes=_vmem_bytes(dump, run, name),
        )


def _vmem_bytes(dump, run, name):
    """Sum of the allocations in vector memory, as they stand when registers have been assigned."""
    allocated = {}
    for listing in dump.glob(f"{run}-{name}-*-pre-finalize-registers-and-allocations.txt"):
        for match in re.finditer(r"#(allocation\d+) \[.*?space=vmem, size = (0x[0-9a-f]+)", listing.read_text()):
            allocated[match[1]] = int(match[2], 16)
    return sum(allocated.values())


def _gpu_programs(dump, kernels):
    """Assembles each kernel of the dump once more for the assembler's report."""
    at_launch = {}  # shared memory by name
    for sequence in dump.glob("*.thunk_sequence.txt"):
        found = re.findall(r"kCustomKernel .*?(\S+) grid: .*?shared_memory: (\d+) bytes", sequence.read_text())
        at_launch |= {name: int(size) for name, size in found}
    for code in sorted(dump.glob("*.ptx")):
        target = re.search(r"^\.target\s+(\w+)", code.read_text(), re.MULTILINE)[1]
        command = [_ptxas(), "--verbose", f"--gpu-name={target}", str(code), "--output-file", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        launch = code.with_suffix(".before_layout_inference.txt")  # only Mosaic GPU writes one
        sizes = re.findall(r"dynamic_shared_memory_size %c(\d+)", launch.read_text()) if launch.exists() else []
        for part in re.split(r"Compiling entry function ", report)[1:]:
            name = re.match(r"'([^']+)'", part)[1]
            spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
            shared = re.search(r"(\d+) bytes smem", part)
            fixed = int(shared[1]) if shared else 0
            yield GpuProgramCost(
                name=name,
                # A second kernel of a name has a number behind it.
                is_kernel=launch.exists() or name in kernels or re.sub(r"_\d+$", "", name) in kernels,
                registers=int(re.search(r"Used (\d+) registers", part)[1]),
                spill_bytes=int(spilled[1]) + int(spilled[2]),
                shared_bytes=fixed + max(map(int, sizes), default=at_launch.get(name, 0)),
            )


def _ptxas():
    """The assembler that came with jax[cuda13]."""
    nvidia = importlib.util.find_spec("nvidia")
    for folder in nvidia.submodule_search_locations if nvidia else ():
        for path in sorted(Path(folder).glob("*/bin/ptxas")):
            return str(path)
    raise FileNotFoundError("ptxas is not installed in this Python: pip install 'jax[cuda13]'")


UNITS = ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE")


def describe(cost: StaticCost) -> str:
    """A few lines on a cost: one per kernel, one for the rest."""
    lines = []
    for kernel in cost.kernels:
        if isinstance(kernel, GpuProgramCost):
            lines.append(
                f"{cost.chip} {kernel.name}: {kernel.registers} registers, {kernel.spill_bytes} bytes spilled, "
                f"{kernel.shared_bytes} bytes shared memory"
            )
            continue
        units = " ".join(f"{unit} {kernel.units.get(unit, 0)} ({kernel.utilisation(unit):.0%})" for unit in UNITS)
        lines.append(
            f"{cost.chip} {kernel.name}: {kernel.bundles} bundles, {units}, spills {kernel.spills}, "
            f"VMEM {kernel.vmem_bytes / 2**20:.2f} MiB"
        )
    rest = [program for program in cost.programs if not program.is_kernel]
    rest_bundles = sum(program.bundles for program in rest if isinstance(program, ProgramCost))
    with_bundles = f" with {rest_bundles} bundles" if rest_bundles else ""
    lines.append(
        f"{cost.chip} in all: temp {cost.temp_bytes} bytes, arguments {cost.argument_bytes}, results "
        f"{cost.output_bytes}; {len(rest)} programs of XLA{with_bundles}"
    )
    return "\n".join(lines)


def main(argv):
    """Prints the cost on each chip."""
    del argv
    if _FACTS.value:
        _write_facts(_CHIP.value[0], _SPEC.value, _FACTS.value)
        return
    for chip in _CHIP.value:
        try:
            print(describe(static_cost(chip, _SPEC.value)), flush=True)
        except (ModuleNotFoundError, RuntimeError) as error:
            sys.exit(str(error))


if __name__ == "__main__":
    from absl import app, flags

    _CHIP = flags.DEFINE_multi_enum("chip", ["v5p", "v6e", "tpu7x"], CHIPS, "Chips to compile for.")
    _SPEC = flags.DEFINE_string("spec", None, "What to compile, as module:function.", required=True)
    _FACTS = flags.DEFINE_string("facts", None, "Where to write facts; used by the tool itself.")
    app.run(main)
