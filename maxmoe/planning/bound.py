"""The roofline: how long a step takes at the least by a chip's ratings, and what holds it back."""

import dataclasses
from collections.abc import Sequence

from maxmoe.planning.chips import Topology
from maxmoe.planning.hlo import Collective
from maxmoe.planning.network import network_seconds


@dataclasses.dataclass(frozen=True)
class Bound:
    """Seconds of one step if only one thing took time: reading memory, multiplying, or sending."""

    memory: float
    compute: float
    network: float

    @property
    def seconds(self) -> float:
        """The largest of the three: they may overlap."""
        return max(self.memory, self.compute, self.network)

    @property
    def name(self) -> str:
        """Which of the three it is."""
        return max(dataclasses.asdict(self), key=lambda part: getattr(self, part))

    def tokens_per_s(self, tokens: int) -> float:
        """The rate that it allows a step of so many tokens."""
        return tokens / self.seconds


def roofline(topology: Topology, flops: float, moved_bytes: float, collectives: Sequence[Collective]) -> Bound:
    """Bounds of one device's work by the ratings of its chip; multiplications at the rate of bfloat16."""
    chip = topology.chip
    return Bound(
        memory=moved_bytes / chip.per_device("hbm_bytes_per_s"),
        compute=flops / chip.per_device("bf16_flops_per_s"),
        network=network_seconds(topology, collectives),
    )
