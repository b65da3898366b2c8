"""Which splits of a slice could hold a step, best first by arithmetic, and why the others cannot."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from maxmoe.planning.arithmetic import Arithmetic, Question, arithmetic
from maxmoe.planning.chips import GIB
from maxmoe.planning.network import floor_seconds
from maxmoe.sharding import MESH_AXES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One split.

    Attributes:
      reason: Why it lost; None while it may win.
      estimated_s: Of one step: the roofline and the least time of its collectives, one after another.
    """

    mesh: dict[str, int]
    found: Arithmetic | None = None
    estimated_s: float | None = None
    reason: str | None = None


def splits(num_devices: int) -> Iterator[dict[str, int]]:
    """All ways to share devices out among the mesh axes."""
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for sizes in itertools.product(divisors, repeat=len(MESH_AXES) - 1):
        product = math.prod(sizes)
        if num_devices % product == 0:
            yield dict(zip(MESH_AXES, (*sizes, num_devices // product), strict=True))


def rank_meshes(question: Question) -> list[Candidate]:
    """Every split: first those that arithmetic lets fit, fastest first, then the others, nearest first."""
    fitting, lost = [], []
    for mesh in splits(question.topology.num_devices):
        try:
            found = arithmetic(question, mesh)
        except ValueError as error:
            lost.append(Candidate(mesh=mesh, reason=str(error)))
            continue
        seconds = found.bound.seconds + floor_seconds(question.topology, found.collectives)
        candidate = Candidate(mesh=mesh, found=found, estimated_s=seconds)
        hbm, resident = question.topology.chip.usable_hbm_bytes, found.capacity.resident_bytes
        if resident > hbm:
            reason = f"weights and caches take {resident / GIB:.1f} GiB of {hbm / GIB:.1f} on each device"
            lost.append(dataclasses.replace(candidate, reason=reason))
        else:
            fitting.append(candidate)
    fitting.sort(key=lambda c: (c.estimated_s, c.found.capacity.resident_bytes))
    lost.sort(key=lambda c: c.found.capacity.resident_bytes if c.found else math.inf)
    return fitting + lost
