"""What a command tells of an answer: its text and ids as they come, how fast, and why it ended."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass
class AnswerReport:
    """What has been generated so far.

    Attributes:
      message: Of a chat, once it has ended.
      turn: The messages of a chat that came between the question and this answer: tool calls and their results.
      times: When each token came, in seconds since the engine was asked.
    """

    num_prompt_tokens: int
    seed: int
    text: str = ""
    message: dict[str, Any] | None = None
    turn: Sequence[dict[str, Any]] = ()
    ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str = "interrupted"
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token; None for fewer than two."""
        return (len(self.times) - 1) / (self.times[-1] - self.times[0]) if len(self.times) > 1 else None

    def summary(self) -> str:
        """One line for a person."""
        first = f"first after {self.times[0]:.2f} s, " if self.times else ""
        rate = f"{self.tokens_per_s:.1f} tokens/s, " if self.tokens_per_s else ""
        return (
            f"[{self.num_prompt_tokens} prompt tokens, {len(self.ids)} new tokens, {first}{rate}"
            f"ended by {self.finish_reason}, seed {self.seed}]"
        )

    def as_json(self) -> str:
        """One line for a program."""
        chat = {} if self.message is None else {"message": self.message}
        if self.turn:
            chat["messages"] = [*self.turn, self.message]
        return json.dumps(
            chat
            | {
                "text": self.text,
                "ids": self.ids,
                "finish_reason": self.finish_reason,
                "num_prompt_tokens": self.num_prompt_tokens,
                "num_new_tokens": len(self.ids),
                "first_token_s": self.times[0] if self.times else None,
                "tokens_per_s": self.tokens_per_s,
                "seed": self.seed,
            }
        )


def collect(run: Any, answer: AnswerReport, write: Callable[[str], None]) -> None:
    """Adds the steps of a run to the answer and writes their text as it comes, until the end or Ctrl-C."""
    began = time.perf_counter()

    def add(text: str) -> None:
        answer.text += text
        write(text)

    try:
        for step in run:
            answer.times.append(time.perf_counter() - began)
            if not step.is_stop_id:
                answer.ids.append(step.token_id)
            add(step.text)
            if step.finish_reason is not None:
                answer.finish_reason = step.finish_reason
    except KeyboardInterrupt:
        pass
    add(run.finish_text())
