"""A request from its submission to its answer, as the host sees it."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int

from maxmoe.config import ModelConfig
from maxmoe.inference.answer import Answer, Completion
from maxmoe.inference.answer_error import AnswerError
from maxmoe.inference.next_token import Said
from maxmoe.inference.sampling_params import SamplingParams
from maxmoe.inference.scheduler import Ticket

Status = Literal["waiting", "running", "finished", "cancelled", "expired", "failed"]


@dataclasses.dataclass(eq=False, kw_only=True)
class Request(Ticket, Answer):
    """What was asked, where it stands, and what has come so far.

    Attributes:
      admitted_s, ended_s: When it first got a slot, and when it ended, on the clock of `time.perf_counter`.
      status: "failed" comes with a `failure`.
      num_cached: Tokens whose state was there when it last got its slot, so that they were not computed.
      cache_salt: Prefixes are shared among requests of one salt alone.
    """

    admitted_s: float | None = None
    ended_s: float | None = None
    status: Status = "waiting"
    num_cached: int = 0
    cache_salt: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.ended_s is not None

    def said(self) -> Said:
        """What there is of the answer, for `lay_out`."""
        return Said(self.answered(), self.thinking)

    def end(self, status: Status, now_s: float) -> None:
        """Nothing more will come."""
        self.status, self.ended_s = status, now_s

    def completion(self) -> Completion:
        """The answer.

        Raises: AnswerError where the request failed; RuntimeError if it has not finished.
        """
        if self.failure is not None:
            raise AnswerError(self.failure, [None])
        if self.status != "finished":
            raise RuntimeError(f"this request is {self.status}: only a finished one has a completion; see its steps")
        return super().completion()


def check_request(
    prompt: Sequence[int], params: SamplingParams, config: ModelConfig, max_len: int, row: int = 0
) -> Int[np.ndarray, "T"]:
    """Checks what an engine of `max_len` tokens is asked, without an engine. Returns the prompt as int32.

    Raises: ValueError, naming the prompt by its row, with what is wrong and what to do.
    """
    ids = np.asarray(prompt)
    if ids.ndim == 1 and ids.size == 0:
        raise ValueError(f"prompt {row} is empty: give at least one token, such as bos_id={config.bos_id}")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"prompt {row} must be a sequence of token ids; got {prompt!r:.80}")
    given = np.concatenate([ids, np.array((*params.stop_ids, *dict(params.logit_bias)), np.int64)])
    wrong = given[(given < 0) | (given >= config.vocab_size)]
    if wrong.size:
        raise ValueError(
            f"prompt {row}: token, stop or bias id {wrong[0]} is outside the vocabulary: ids run from 0 to "
            f"{config.vocab_size - 1}"
        )
    if ids.size + params.max_tokens > max_len:
        raise ValueError(
            f"prompt {row} has {ids.size} tokens, and max_tokens={params.max_tokens} more make "
            f"{ids.size + params.max_tokens}; max_len is {max_len}. Shorten the prompt, lower max_tokens, or raise "
            f"max_len (this model was trained up to {config.max_len})"
        )
    return ids.astype(np.int32)
