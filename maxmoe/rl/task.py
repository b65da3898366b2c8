"""What a domain gives: tasks with tools, an exact verifier, and one way to solve each.

A task is made anew, from the same random numbers, for each trajectory: its tools may change its world, and a task
whose calls are made again in the same order is in the same state again. So nothing of a world is ever saved.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from maxmoe.chat.tools import Tool
from maxmoe.rl.reward import RewardValue

Split = Literal["train", "eval"]
_EVAL_SHARE = 5  # one of five tasks, by a hash of what it asks, is for evaluation
_MAX_ATTEMPTS = 1000


class Call(NamedTuple):
    """A tool call that was run.

    Attributes:
      arguments: As JSON, the way the model's message has them.
      result: Begins with "error:" where the call could not be run.
    """

    name: str
    arguments: str
    result: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a trajectory came to, for verifiers and rewards. Counts are in tokens.

    Attributes:
      content: The answer that ended it; "" where none did.
      reasoning: Of all turns, joined by line ends.
      calls: In the order in which they were run.
      ended_by: "answer"; "budget" when tokens ran out; "turns" when calls went on for too long; "malformed" when the
        last message could not be read.
      num_malformed: Messages and calls that were not as trained.
      num_thinking: Inside thinking.
      num_action: That the policy wrote, thinking and calls included.
      num_observation: That tools wrote.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    ended_by: Literal["answer", "budget", "turns", "malformed"] = "answer"
    num_malformed: int = 0
    num_thinking: int = 0
    num_action: int = 0
    num_observation: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One message of a solution: thinking, then either calls or the answer.

    Attributes:
      lines: Of working, which the tiers high and max write down.
      checks: Lines that look at the result again, which max alone writes down.
      calls: (tool, arguments) each.
      answer: None where there are calls.
    """

    lines: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    answer: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One problem. Its tools may be run by one trajectory alone.

    Attributes:
      question: The user's message.
      check: The verifier. Its value is 1 for right, 0 for wrong, between them where a part of the work is done.
      solution: Messages that solve it, as a good trajectory has them; `check` gives 1 for it.
      tools: That the request declares.
      system: The system message; None for none.
      wrong_answers: Plausible ones that `check` gives 0 for, which noisy demonstrations take.
    """

    question: str
    check: Callable[[Outcome], RewardValue]
    solution: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    system: str | None = None
    wrong_answers: tuple[str, ...] = ()

    @property
    def is_agentic(self) -> bool:
        """Whether it has tools: then all action tokens count as effort, else those of thinking."""
        return bool(self.tools)


class Domain(Protocol):
    """A family of tasks, in a module of its own.

    Attributes:
      name: Unique, lower_case_with_underscores.
      family: What reports group by, such as "reasoning", "tools", "code", "instructions", "worlds".
      description: What is asked, what counts as right, and what difficulty changes.
      num_difficulties: Difficulties are 0 to that less one.
    """

    name: str
    family: str
    description: str
    num_difficulties: int

    def make(self, difficulty: int, rng: np.random.Generator) -> Task:
        """A task, the same one for generators in the same state."""
        ...


def make_task(domain: Domain, difficulty: int, index: int, *, split: Split = "train", seed: int = 0) -> Task:
    """The index-th task of a domain at a difficulty. No question belongs to both splits.

    Raises: ValueError for a difficulty that there is not, or a domain with too few different tasks to split.
    """
    if not 0 <= difficulty < domain.num_difficulties:
        raise ValueError(f"{domain.name}: difficulty={difficulty}; there are 0 to {domain.num_difficulties - 1}")
    for attempt in range(_MAX_ATTEMPTS):
        key = f"{seed}/{domain.name}/{difficulty}/{split}/{index}/{attempt}"
        rng = np.random.Generator(np.random.PCG64(int.from_bytes(_digest(key)[:16], "little")))
        task = domain.make(difficulty, rng)
        if _split_of(task) == split:
            return task
    raise ValueError(
        f"{domain.name}: {_MAX_ATTEMPTS} tasks of difficulty {difficulty} are none of {split!r}: it has too few"
    )


def _split_of(task: Task) -> Split:
    asked = f"{task.system}\n{task.question}\n{task.solution[-1].answer}"
    return "eval" if _digest(asked)[0] % _EVAL_SHARE == 0 else "train"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
