"""Reads an optimised program's text: collectives with their bytes, loops with their trip counts, argument layouts.

What a loop's body does counts as often as the loop runs, where its condition compares a counter from 0 with a constant;
otherwise once, and `unknown_trips` says so. Both branches of a condition count.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator

import numpy as np

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

# The compiler marks what it cannot estimate with numbers near the end of an int64.
MAX_SANE_CYCLES = 10**15

_DTYPE_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "f4e2m1fn": 4, "f8e4m3fn": 8, "f8e5m2": 8, "f8e8m0fnu": 8, "f8e4m3": 8, "f8e3m4": 8,
    "f8e4m3b11fnuz": 8, "f8e5m2fnuz": 8, "f8e4m3fnuz": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64,
    "c128": 128,
}  # fmt: skip
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)((?::[^}]*)?)\})?")
_OPERATION = re.compile(r"^\s+(?:ROOT )?(%\S+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_CALLED = re.compile(
    r"\b(calls|condition|body|true_computation|false_computation|to_apply|async_computation)=(%[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """Equal collectives of a program, seen from one device.

    Attributes:
      count: How often they run in one step.
      bytes: Of one of them: the larger of what a device puts in and gets out.
      sent_bytes: Of one of them: what a device has to send at the least.
      group_size: Devices that take part.
      across_nodes: Whether a group spans more than one node.
      source: Name of the JAX operation it comes from.
    """

    kind: str
    count: int
    bytes: int
    sent_bytes: int
    group_size: int
    across_nodes: bool
    source: str


@dataclasses.dataclass(frozen=True)
class Operation:
    """A line of a computation."""

    name: str
    result: str
    opcode: str
    rest: str  # operands and attributes


@dataclasses.dataclass(frozen=True)
class Program:
    """An optimised HLO module: computations by name, and the one that runs first."""

    computations: dict[str, tuple[Operation, ...]]
    entry: str

    @functools.cached_property
    def runs(self) -> dict[str, int]:
        """How often each computation runs in one step. A computation that only a reduction applies is left out."""
        runs = dict.fromkeys(self.computations, 0)
        runs[self.entry] = 1
        # A computation's text stands before that of its callers, so the last comes first here.
        for caller in reversed(self.computations):
            for operation in self.computations[caller]:
                for called, times in self._calls(operation):
                    runs[called] = runs.get(called, 0) + runs[caller] * times
        return runs

    @functools.cached_property
    def unknown_trips(self) -> int:
        """Loops whose trip count the text does not tell; their bodies count once."""
        loops = [op for ops in self.computations.values() for op in ops if op.opcode == "while"]
        return sum(self._trips(loop) is None for loop in loops)

    @functools.cached_property
    def fused(self) -> set[str]:
        """Computations whose operations are parts of one fusion."""
        operations = [op for ops in self.computations.values() for op in ops]
        return {called_computations(op)["calls"] for op in operations if op.opcode in ("fusion", "fusion-start")}

    def _calls(self, operation):
        attributes = called_computations(operation)
        if operation.opcode == "while":
            yield attributes["body"], self._trips(operation) or 1
            yield attributes["condition"], self._trips(operation) or 1
            return
        for role, called in attributes.items():
            if role != "to_apply" or operation.opcode == "call":
                yield called, 1
        if branches := re.search(r"branch_computations=\{([^}]*)\}", operation.rest):
            for called in re.findall(r"%[\w.\-]+", branches[1]):
                yield called, 1

    def _trips(self, loop):
        if known := re.search(r'known_trip_count"?:\{"n":"(\d+)"\}', loop.rest):
            return int(known[1])
        condition = self.computations[called_computations(loop)["condition"]]
        limits = {
            op.name: int(op.rest.split(")")[0]) for op in condition if op.opcode == "constant" and _is_int(op.rest)
        }
        compares = [op for op in condition if op.opcode == "compare" and "direction=LT" in op.rest]
        if len(compares) != 1:
            return None
        found = [limits[name] for name in re.findall(r"%[\w.\-]+", compares[0].rest) if name in limits]
        return found[0] if len(found) == 1 else None

    def operations(self) -> Iterator[tuple[Operation, int]]:
        """Every operation that runs, with how often it does."""
        for name, operations in self.computations.items():
            if times := self.runs.get(name, 0):
                for operation in operations:
                    yield operation, times


def called_computations(operation: Operation) -> dict[str, str]:
    """The computations that an operation names, by their role."""
    return dict(_CALLED.findall(operation.rest))


def operand_names(operation: Operation) -> list[str]:
    """Of the operands, in order."""
    depths = itertools.accumulate(((char == "(") - (char == ")") for char in operation.rest), initial=1)
    end = next((place for place, depth in enumerate(depths) if not depth), None)
    return re.findall(r"%[\w.\-]+", operation.rest[:end])


def arrays(result: str) -> list[tuple[int, bool]]:
    """Bytes of every array of a result, and whether it lies in HBM: a layout with S(n) names another memory."""
    found = [shape for shape in _SHAPE.findall(result) if shape[0] in _DTYPE_BITS]
    return [(_logical_bytes(*shape), "S(" not in shape[3]) for shape in found]


def _is_int(rest: str) -> bool:
    return re.match(r"-?\d+\)", rest) is not None


def parse(text: str) -> Program:
    """Reads `Compiled.as_text()`.

    Raises: ValueError if it has no entry computation.
    """
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        if line.endswith("{") and (head := re.match(r"(ENTRY )?(%[\w.\-]+) \(", line)):
            current = head[2]
            computations[current] = []
            entry = current if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _OPERATION.match(line)):
            computations[current].append(Operation(*found.groups()))
    if entry is None:
        raise ValueError("the compiled program's text has no entry computation")
    return Program({name: tuple(operations) for name, operations in computations.items()}, entry)


def collectives(program: Program, num_devices: int, node_size: int = 0) -> list[Collective]:
    """The collectives of a program, equal ones together, those that move most first.

    Args:
      node_size: Devices of a node, numbered one after another; 0 where there are no nodes.
    """
    merged: dict[tuple, int] = {}
    for operation, times in program.operations():
        kind = operation.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        groups = _groups(operation.rest, num_devices)
        size = groups.shape[1]
        moved, sent = _moved_bytes(kind, operation, size)
        across = bool(node_size) and bool(np.any(groups // node_size != groups[:, :1] // node_size))
        key = (kind, moved, sent, size, across, source(operation.rest))
        merged[key] = merged.get(key, 0) + times
    found = [Collective(key[0], count, *key[1:]) for key, count in merged.items()]
    return sorted(found, key=lambda c: (-c.count * c.sent_bytes, c.kind, c.source))


def _moved_bytes(kind, operation, size):
    """Of the result, or of one side of a pair of operand and result that a started operation gives."""
    shapes = [_logical_bytes(*shape) for shape in _SHAPE.findall(operation.result) if shape[0] in _DTYPE_BITS]
    if operation.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
        moved = max(shapes)
    else:
        moved = sum(shapes)
    others = size - 1
    if kind == "all-reduce":
        return moved, 2 * moved * others // size
    if kind == "reduce-scatter":  # the result is a device's part of what went in
        return moved * size, moved * others
    if kind == "ragged-all-to-all":  # no more than the whole buffer
        return moved, moved * others // size
    if kind == "collective-permute":
        return moved, moved
    return moved, moved * others // size


def _groups(rest: str, num_devices: int) -> np.ndarray:
    """Devices that exchange, a row each group: of a permutation, pairs."""
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", rest):
        found = [tuple(map(int, pair.split(","))) for pair in re.findall(r"\{(\d+,\d+)\}", pairs[1])]
        return np.array(found or [(0, 0)])
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        ids = np.arange(math.prod(map(int, iota[3].split(",")))).reshape([int(n) for n in iota[3].split(",")])
        if iota[4]:
            ids = ids.transpose([int(n) for n in iota[4].split(",")])
        return ids.reshape(int(iota[1]), int(iota[2]))
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?: device_ids=\([^)]*\))? ?\{([^}]*)\}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        inner = re.findall(r"'([^']+)'", mesh[2])
        outer = [i for i, name in enumerate(sizes) if name not in inner]
        order = outer + [list(sizes).index(name) for name in inner]
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())).transpose(order)
        return ids.reshape(-1, math.prod(sizes[name] for name in inner))
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]+\})\}", rest):
        return np.array([[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])])
    return np.arange(num_devices).reshape(1, -1)


def source(rest: str) -> str:
    """The end of the name of the JAX operation that an operation comes from; `rest` are its operands and attributes."""
    found = re.search(r'op_name="([^"]*)"', rest)
    parts = [part for part in found[1].split("/") if part not in ("while", "body", "closed_call")] if found else []
    return "/".join(parts[-3:])


def _logical_bytes(dtype, dims, *_):
    return -(-math.prod(int(n) for n in dims.split(",") if n) * _DTYPE_BITS[dtype] // 8)


_NO_RESULT_OF_ITS_OWN = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "while",
    "conditional",
    "constant",
    "call",
}


def largest_results(program: Program, count: int) -> list[tuple[int, str, str]]:
    """Bytes, kind and source of the largest results of single operations: where temporaries come from.

    An operation that updates an argument in place is among them, though it takes no memory of its own.
    """
    fused = program.fused
    found = set()
    for name, operations in program.computations.items():
        if name in fused or not program.runs.get(name, 0):
            continue
        for operation in operations:
            if operation.opcode not in _NO_RESULT_OF_ITS_OWN:
                sizes = [
                    _logical_bytes(*shape) for shape in _SHAPE.findall(operation.result) if shape[0] in _DTYPE_BITS
                ]
                found.add((max(sizes, default=0), operation.opcode, source(operation.rest)))
    return sorted(found, reverse=True)[:count]


def argument_bytes(text: str) -> tuple[int, int]:
    """Bytes of a program's arguments: as shapes, and as they lie in memory, where tiles are padded."""
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->", text.split("\n", 1)[0])
    if layout is None:
        raise ValueError("the compiled program's text has no entry_computation_layout")
    # Long tuples carry their numbering as comments.
    shapes = _SHAPE.findall(re.sub(r"/\*.*?\*/", "", layout[1]))
    return sum(_logical_bytes(*shape) for shape in shapes), sum(_padded_bytes(*shape) for shape in shapes)


def _padded_bytes(dtype, dims, order, attributes):
    """A tile such as T(8,128) pads the last dimensions, in the layout's order, to its own size."""
    sizes = [int(n) for n in dims.split(",") if n]
    tile = re.search(r"T\(([\d,]+)\)", attributes)
    if tile is None:
        return _logical_bytes(dtype, dims)
    sizes = [sizes[int(n)] for n in reversed(order.split(","))] if order else sizes
    tile_sizes = [int(n) for n in tile[1].split(",")]
    sizes = [1] * (len(tile_sizes) - len(sizes)) + sizes
    for place, size in enumerate(tile_sizes, len(sizes) - len(tile_sizes)):
        sizes[place] = -(-sizes[place] // size) * size
    return -(-math.prod(sizes) * _DTYPE_BITS[dtype] // 8)


def estimated_cycles(program: Program) -> int | None:
    """Cycles by the compiler's own estimate, loops counted as often as they run; None where it gives none.

    Operations with a sentinel, and kernels, which carry no estimate, add nothing: it is too low, never too high.
    """
    total, found = 0, False
    for operation, times in program.operations():
        for cycles in re.findall(r'"estimated_cycles":"?(-?\d+)', operation.rest):
            if 0 <= int(cycles) < MAX_SANE_CYCLES:
                total, found = total + times * int(cycles), True
    return total if found else None
