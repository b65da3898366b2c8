"""Cells: what balance is kept between, a domain at a difficulty and an effort tier."""

from typing import NamedTuple

TIERS = ("low", "high", "max")  # as requests name them, from the fewest tokens to the most


class Cell(NamedTuple):
    """One domain at one difficulty and one effort tier.

    Attributes:
      domain: Name of the domain.
      difficulty: From 0, the easiest.
      tier: One of `TIERS`.
    """

    domain: str
    difficulty: int
    tier: str

    def __str__(self) -> str:
        return f"{self.domain}/{self.difficulty}/{self.tier}"

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """The inverse of `str`. ValueError for anything else."""
        domain, _, rest = text.partition("/")
        difficulty, _, tier = rest.partition("/")
        if not (domain and difficulty.isdecimal() and tier in TIERS):
            raise ValueError(f"{text!r} is no cell: write DOMAIN/DIFFICULTY/TIER, with a tier of {', '.join(TIERS)}")
        return cls(domain, int(difficulty), tier)
