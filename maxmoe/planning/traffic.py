"""Bytes that an optimised program moves to and from HBM, read from its text.

Every operation outside a fusion reads its operands and writes its results, as often as it runs. Three things make of
that what HBM sees: memory that the compiler keeps on the chip costs nothing; of an operand that is only sliced or
gathered from, the slices count, and of a result that takes the place of an operand, what is new in it; and a kernel
counts what its author told the compiler, for the text shows neither its grid nor its copies.
"""

import re
from typing import NamedTuple

from maxmoe.planning import hlo

# These name the results of others, or end what was counted where it began.
_FREE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while", "conditional", "call", "after-all",
    "optimization-barrier", "partition-id", "replica-id", "async-start", "async-update", "async-done", "domain",
    "add-dependency",
}  # fmt: skip
_VIEWS = {"bitcast", "reshape", "transpose", "copy", "convert"}  # inside a fusion, of an operand or a result
_SLICES = {"dynamic-slice", "slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # and which operand is what they write


class Move(NamedTuple):
    """What like operations move in one step, on one device."""

    bytes: float
    count: int
    kind: str
    source: str


def moves(program: hlo.Program) -> list[Move]:
    """What the program moves, most first."""
    found: dict[tuple[str, str], list[float]] = {}
    for name, operations in program.computations.items():
        times = program.runs.get(name, 0)
        if not times or name in program.fused:
            continue
        by_name = {operation.name: operation for operation in operations}
        for operation in operations:
            if moved := _moved(program, by_name, operation):
                total = found.setdefault((_kind(operation), hlo.source(operation.rest)), [0, 0])
                total[0] += moved * times
                total[1] += times
    listed = [Move(total, int(count), *key) for key, (total, count) in found.items()]
    return sorted(listed, key=lambda move: -move.bytes)


def silent_kernels(program: hlo.Program) -> set[str]:
    """Where kernels come from that tell the compiler nothing of what they move: what `moves` gives is then no sum."""
    kernels = [operation for operation, _ in program.operations() if "__gpu$xla.gpu" in operation.rest]
    return {hlo.source(kernel.rest) for kernel in kernels if _told(kernel) is None}


def _kind(operation):
    return "kernel" if _told(operation) is not None else operation.opcode


def _told(operation):
    """What a kernel's author said that it moves; None for other operations, and for kernels that say nothing."""
    if operation.opcode != "custom-call":
        return None
    told = re.search(r'"bytes_accessed":"?(\d+)', operation.rest)
    return None if told is None else int(told[1])


def _hbm_bytes(operation):
    return sum(size for size, in_hbm in hlo.arrays(operation.result) if in_hbm)


def _moved(program, by_name, operation):
    opcode = operation.opcode
    if opcode in _FREE or opcode.endswith("-done"):
        return 0
    if (told := _told(operation)) is not None:
        return told
    operands = [by_name[name] for name in hlo.operand_names(operation) if name in by_name]
    results = hlo.arrays(operation.result)
    if opcode == "fusion":
        return _fusion(program, operation, operands, results)
    if opcode == "fusion-start":  # operands, results, context
        return _fusion(program, operation, operands, results[len(operands) : -1])
    if opcode.removesuffix("-start") in _SLICES and opcode.endswith("-start"):  # operands, result, context
        size, in_hbm = results[len(operands)]
        return size * (in_hbm + (_hbm_bytes(operands[0]) > 0))
    if opcode == "call-update":  # either it or its start is given the operands
        return _hbm_bytes(operation) if len(operands) > 1 else 0
    if opcode.endswith("-start"):  # the result names the operands once more
        return _hbm_bytes(operation)
    if opcode in _SLICES:
        size = sum(size for size, _ in hlo.arrays(operation.result))
        return _hbm_bytes(operation) + (size if _hbm_bytes(operands[0]) else 0)
    if opcode in _UPDATES:
        update = operands[_UPDATES[opcode]]
        return _hbm_bytes(update) + (_size(update) if _hbm_bytes(operation) else 0)
    return _hbm_bytes(operation) + sum(map(_hbm_bytes, operands))


def _size(operation):
    return sum(size for size, _ in hlo.arrays(operation.result))


def _fusion(program, fusion, operands, results):
    inside = program.computations[hlo.called_computations(fusion)["calls"]]
    by_name = {operation.name: operation for operation in inside}
    parameters = _parameters(inside)
    moved = 0
    for number, operand in enumerate(operands):
        if whole := _hbm_bytes(operand):
            moved += min(whole, _read(program, inside, parameters[number].name))
    root = inside[-1]
    roots = [by_name[name] for name in hlo.operand_names(root)] if root.opcode == "tuple" else [root]
    if len(roots) != len(results):  # one operation with several results, such as a sort
        return moved + sum(size for size, in_hbm in results if in_hbm)
    for (size, in_hbm), made in zip(results, roots, strict=True):
        if in_hbm:
            moved += min(size, _written(program, by_name, made))
    return moved


def _parameters(computation):
    """By their numbers."""
    return {int(op.rest.split(")")[0]): op for op in computation if op.opcode == "parameter"}


def _read(program, inside, name):
    """Bytes that a fusion reads of one of its operands."""
    total = 0
    for user in inside:
        operands = hlo.operand_names(user)
        for place, operand in enumerate(operands):
            if operand != name:
                continue
            if _is_view(program, user, place):
                total += _read(program, inside, user.name) if user is not inside[-1] else _size(user)
            elif user.opcode in _SLICES and place == 0:
                total += _size(user)
            elif user.opcode in _UPDATES and place == 0:
                total += 0
            elif user.opcode == "fusion":
                called = program.computations[hlo.called_computations(user)["calls"]]
                total += _read(program, called, _parameters(called)[place].name)
            elif user.opcode != "tuple":
                return _size(next(op for op in inside if op.name == name))
    return total


def _is_view(program, operation, place):
    """Whether an operation only shows an operand, number `place`, in another way; a fusion may do no more either."""
    if operation.opcode != "fusion":
        return operation.opcode in _VIEWS
    called = program.computations[hlo.called_computations(operation)["calls"]]
    return _viewed({inner.name: inner for inner in called}, called[-1]) is _parameters(called)[place]


def _viewed(by_name, made):
    """What an operation is a view of."""
    while made.opcode in _VIEWS:
        made = by_name[hlo.operand_names(made)[0]]
    return made


def _written(program, by_name, made):
    """Bytes that a fusion writes of one of its results."""
    made = _viewed(by_name, made)
    if made.opcode in _UPDATES:
        return _size(by_name[hlo.operand_names(made)[_UPDATES[made.opcode]]])
    if made.opcode == "fusion":
        called = program.computations[hlo.called_computations(made)["calls"]]
        if called[-1].opcode != "tuple":
            return _written(program, {operation.name: operation for operation in called}, called[-1])
    return _size(made)
