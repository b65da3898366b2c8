"""Trajectories: one attempt at a task, token by token as the policy read and wrote it.

Token ids are what was sampled and what is trained on; text is made from them for tools, verifiers and people, and
never back. Every array is by token: `logprobs[t]` is that of `tokens[t]` given the tokens before it.
"""

import dataclasses
import enum
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from maxmoe.rl.cells import Cell
from maxmoe.rl.reward import RewardValue
from maxmoe.rl.task import Outcome


class Role(enum.IntEnum):
    """Who wrote a token. Only those of the policy's own, ACTION, are ever trained."""

    PADDING = 0
    SYSTEM = 1
    USER = 2
    ACTION = 3
    OBSERVATION = 4


class TrajectoryId(NamedTuple):
    """What all of a trajectory's chance is drawn from, beside the run's seed.

    Attributes:
      cell: Whose task it is.
      index: Of the task in its cell.
      sample: Among the trajectories of the group.
      attempt: Retries after infrastructure errors count up.
    """

    cell: Cell
    index: int
    sample: int
    attempt: int = 0

    @property
    def group(self) -> tuple[Cell, int]:
        """What trajectories are compared within: one task in one tier."""
        return self.cell, self.index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One attempt, whole.

    Attributes:
      tokens: Prompt, actions and observations in the order of reading.
      roles: A `Role` for each.
      logprobs: When sampled, under the distribution sampled from; 0 for tokens that were not.
      versions: Of the weights that sampled a token; -1 for tokens that were not.
      reward: The whole reward; its status tells whether the trajectory can be trained on.
      parts: Every node of the reward's tree, by path.
    """

    id: TrajectoryId
    tokens: Int[np.ndarray, "T"]
    roles: Int[np.ndarray, "T"]
    logprobs: Float[np.ndarray, "T"]
    versions: Int[np.ndarray, "T"]
    outcome: Outcome
    reward: RewardValue
    parts: dict[str, RewardValue] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        sizes = {name: getattr(self, name).size for name in ("tokens", "roles", "logprobs", "versions")}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"trajectory {self.id}: every token has each of these, and there are {sizes}")

    @property
    def is_action(self) -> Bool[np.ndarray, "T"]:
        """Which tokens the policy wrote."""
        return self.roles == Role.ACTION
