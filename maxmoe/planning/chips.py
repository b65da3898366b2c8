"""The chips that can be planned for: their ratings, each with its source, and the slices that they come in.

A rating is what a publisher says a whole chip can do. JAX sees one device per chip, or two of a tpu7x, which share the
chip's ratings evenly. Rates are per second; a rate of links counts both directions together, over all links of a chip.
"""

import dataclasses
import math
import re
from typing import NamedTuple

GIB = 2**30


class Rating(NamedTuple):
    """One number and who says so."""

    value: float
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Ratings of one chip.

    Attributes:
      name: As a topology begins with.
      platform: "tpu" or "gpu".
      compiler_hbm_bytes: Per device, what the compiler lets a program use; None where it enforces nothing.
      link_bytes_per_s: ICI or NVLink, both directions together.
      node_links_bytes_per_s: Per device, both directions together, between nodes of `node_size` devices; None where
        one network joins the whole slice.
      dims: Numbers in a topology: 3 for a three-dimensional torus, 2 for a two-dimensional one, 1 for a count.
    """

    name: str
    platform: str
    bf16_flops_per_s: Rating
    fp8_flops_per_s: Rating | None
    int8_ops_per_s: Rating | None
    hbm_bytes: Rating
    compiler_hbm_bytes: Rating | None
    hbm_bytes_per_s: Rating
    link_bytes_per_s: Rating
    node_links_bytes_per_s: Rating | None = None
    node_size: int = 0
    devices_per_chip: int = 1
    dims: int = 3

    def ratings(self) -> dict[str, Rating]:
        """All ratings of the chip by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Rating)}

    def per_device(self, rating: str) -> float:
        """A rating's share of one device."""
        return getattr(self, rating).value / self.devices_per_chip

    @property
    def usable_hbm_bytes(self) -> int:
        """Bytes of one device that a program may use: what the compiler allows, else what the chip has."""
        if self.compiler_hbm_bytes is not None:
            return int(self.compiler_hbm_bytes.value)
        return int(self.per_device("hbm_bytes"))

    def send_bytes_per_s(self, across_nodes: bool = False) -> float:
        """What one device can send, in one direction, with all its links at work."""
        if across_nodes and self.node_links_bytes_per_s is not None:
            return self.node_links_bytes_per_s.value / 2
        return self.per_device("link_bytes_per_s") / 2


_V5P = "docs.cloud.google.com/tpu/docs/v5p"
_V6E = "docs.cloud.google.com/tpu/docs/v6e"
_V5E = "docs.cloud.google.com/tpu/docs/v5e"
_TPU7X = "docs.cloud.google.com/tpu/docs/tpu7x"
_V5P_INT8 = "Google's announcement of v5p, December 2023: 918 TOPS"
_H200 = "NVIDIA's data sheet of the H200 SXM; rates without sparsity, half of those printed"
_DGX_H200 = "NVIDIA's data sheet of the DGX H200: one 400 Gb/s ConnectX-7 port per GPU"
_B200 = "NVIDIA's data sheet of the DGX B200, an eighth of it; rates without sparsity"
_DGX_B200 = "NVIDIA's data sheet of the DGX B200: one 400 Gb/s ConnectX-7 port per GPU"
_LIBTPU = "the compiler's own message on a program too large, libtpu 0.0.50.1"

CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5p",
            platform="tpu",
            bf16_flops_per_s=Rating(459e12, _V5P),
            fp8_flops_per_s=Rating(459e12, _V5P),
            int8_ops_per_s=Rating(918e12, _V5P_INT8),
            hbm_bytes=Rating(95 * GIB, _V5P),
            compiler_hbm_bytes=Rating(95.73 * GIB, _LIBTPU),
            hbm_bytes_per_s=Rating(2765e9, _V5P),
            link_bytes_per_s=Rating(1200e9, _V5P),
        ),
        Chip(
            name="v6e",
            platform="tpu",
            bf16_flops_per_s=Rating(918e12, _V6E),
            fp8_flops_per_s=Rating(918e12, _TPU7X),
            int8_ops_per_s=Rating(1836e12, _V6E),
            hbm_bytes=Rating(32 * GIB, _TPU7X),
            compiler_hbm_bytes=Rating(31.24 * GIB, _LIBTPU),
            hbm_bytes_per_s=Rating(1638e9, _V6E),
            link_bytes_per_s=Rating(800e9, _V6E),
            dims=2,
        ),
        Chip(
            name="v5e",
            platform="tpu",
            bf16_flops_per_s=Rating(197e12, _V5E),
            fp8_flops_per_s=None,
            int8_ops_per_s=Rating(393e12, _V5E),
            hbm_bytes=Rating(16 * GIB, _V5E),
            compiler_hbm_bytes=Rating(15.75 * GIB, _LIBTPU),
            hbm_bytes_per_s=Rating(819e9, _V5E),
            link_bytes_per_s=Rating(400e9, _V5E),
            dims=2,
        ),
        Chip(
            name="tpu7x",
            platform="tpu",
            bf16_flops_per_s=Rating(2307e12, _TPU7X),
            fp8_flops_per_s=Rating(4614e12, _TPU7X),
            int8_ops_per_s=None,
            hbm_bytes=Rating(192 * GIB, _TPU7X),
            compiler_hbm_bytes=Rating(94.74 * GIB, _LIBTPU),
            hbm_bytes_per_s=Rating(7380e9, _TPU7X),
            link_bytes_per_s=Rating(1200e9, _TPU7X),
            devices_per_chip=2,
        ),
        Chip(
            name="h200",
            platform="gpu",
            bf16_flops_per_s=Rating(989e12, _H200),
            fp8_flops_per_s=Rating(1979e12, _H200),
            int8_ops_per_s=Rating(1979e12, _H200),
            hbm_bytes=Rating(141e9, _H200),
            compiler_hbm_bytes=None,
            hbm_bytes_per_s=Rating(4800e9, _H200),
            link_bytes_per_s=Rating(900e9, _H200),
            node_links_bytes_per_s=Rating(100e9, _DGX_H200),
            node_size=8,
            dims=1,
        ),
        Chip(
            name="b200",
            platform="gpu",
            bf16_flops_per_s=Rating(2250e12, _B200),
            fp8_flops_per_s=Rating(4500e12, _B200),
            int8_ops_per_s=Rating(4500e12, _B200),
            hbm_bytes=Rating(180e9, _B200),
            compiler_hbm_bytes=None,
            hbm_bytes_per_s=Rating(8000e9, _B200),
            link_bytes_per_s=Rating(1800e9, _B200),
            node_links_bytes_per_s=Rating(100e9, _DGX_B200),
            node_size=8,
            dims=1,
        ),
    )
}

# One collective between neighbours takes at least this long, however little it moves. Measured by others, not a rating:
# it serves to compare meshes, and is in no bound.
COLLECTIVE_FLOOR_S = {
    "tpu": Rating(5e-6, "marin-community/marin #6736: 4.5 to 5.5 us for a ppermute on v5p and v6e"),
    "gpu": Rating(6.5e-6, "5 to 8 us for a small all-reduce over NVLink"),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice: so many chips of a kind, in a torus of a shape or simply a count."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        """Chips in the slice."""
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """Devices that JAX sees."""
        return self.num_chips * self.chip.devices_per_chip

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"


def parse_topology(text: str) -> Topology:
    """Reads a topology such as "v5p:4x4x4", "v6e:16x16" or "h200:128".

    Raises: ValueError, with what is allowed, for another chip or another number of dimensions.
    """
    examples = ", ".join(
        f"{chip.name}:{'x'.join('ABC'[: chip.dims]) if chip.dims > 1 else 'N'}" for chip in CHIPS.values()
    )
    name, _, sizes = text.partition(":")
    if name not in CHIPS:
        raise ValueError(f"topology {text!r}: unknown chip {name!r}; allowed are {examples}")
    chip = CHIPS[name]
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or sizes.count("x") + 1 != chip.dims:
        wanted = "the number of GPUs" if chip.dims == 1 else f"{chip.dims} sizes joined by x"
        raise ValueError(f"topology {text!r}: after {name}: comes {wanted}; allowed are {examples}")
    topology = Topology(chip, tuple(map(int, sizes.split("x"))))
    node = chip.node_size
    if node and topology.num_chips > node and topology.num_chips % node:
        raise ValueError(f"topology {text!r}: more than {node} GPUs come in nodes of {node}; give a multiple of {node}")
    return topology
