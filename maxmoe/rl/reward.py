"""The value of one part of a reward, and whether it is one at all."""

import dataclasses
import math
from typing import Literal

Status = Literal["ok", "invalid_action", "infra_error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardValue:
    """What a part of a reward says of one trajectory.

    Attributes:
      value: In [-1, 1]; None for an infrastructure error, which says nothing about the trajectory.
      status: "invalid_action" is the policy's own fault, and has a value; "infra_error" is nobody's.
      evidence: Why, for people who look into a run.
    """

    value: float | None
    status: Status = "ok"
    evidence: str = ""

    def __post_init__(self):
        if (self.value is None) != (self.status == "infra_error"):
            raise ValueError(f"value={self.value} with status={self.status!r}: an infra_error, and only it, has none")
        if self.value is not None and not -1 <= self.value <= 1:  # NaN included
            raise ValueError(f"value={self.value}: must be a number in [-1, 1]; use RewardValue.measured for a raw one")

    @classmethod
    def measured(cls, raw: float, evidence: str = "") -> "RewardValue":
        """Of a number that something else computed: clipped to [-1, 1]; an infra_error if it is not finite."""
        if not math.isfinite(raw):
            return cls.failed(f"the reward is {raw}: {evidence}")
        return cls(value=min(1.0, max(-1.0, float(raw))), evidence=evidence)

    @classmethod
    def passed(cls, is_right: bool, evidence: str = "") -> "RewardValue":
        """1 for right, 0 for wrong."""
        return cls(value=float(is_right), evidence=evidence)

    @classmethod
    def invalid(cls, evidence: str, value: float = 0.0) -> "RewardValue":
        """What the policy wrote cannot be judged, by its own fault."""
        return cls(value=value, status="invalid_action", evidence=evidence)

    @classmethod
    def failed(cls, evidence: str) -> "RewardValue":
        """Something broke that is not the policy's."""
        return cls(value=None, status="infra_error", evidence=evidence)
