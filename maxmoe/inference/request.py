"""A request from its submission to its answer, as the host sees it."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from maxmoe.config import ModelConfig
from maxmoe.inference.sampling import INVALID_TOKEN, SamplingParams
from maxmoe.inference.scheduler import Ticket

FinishReason = Literal["stop", "length"]


class Step(NamedTuple):
    """One generated token. Only the last of an answer has a finish reason; with "stop" it is the stop id itself."""

    token_id: int
    logprob: float
    finish_reason: FinishReason | None


Status = Literal["waiting", "running", "finished", "cancelled", "expired", "failed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """The answer to one prompt.

    Attributes:
      ids: Generated tokens, without the stop id that ended them.
      logprobs: Of `ids`, in nats, under the distribution they were drawn from before its filters; see `sample`.
      finish_reason: "stop" for a stop id, "length" for max_tokens.
      stop_id, stop_logprob: The stop id and its log-probability; None with "length".
      num_prompt_tokens: Length of the prompt.
      seed: With this seed in its SamplingParams, the request gives the same answer again.
      first_token_s: Seconds from the call to the first token, waiting and compiling included.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    stop_id: int | None
    stop_logprob: float | None
    num_prompt_tokens: int
    seed: int
    first_token_s: float


@dataclasses.dataclass(eq=False, kw_only=True)
class Request(Ticket):
    """What was asked, and what has come so far.

    Attributes:
      row: Among the prompts of its call; for messages.
      stop_ids: All ids that end it, the model's own included.
      submitted_s: On the clock of `time.perf_counter`, like the times below, which are None until they come.
      admitted_s, first_token_s, ended_s: When it first got a slot, had its first token, and ended.
      steps: One per token, the stop id included; they stay when a request does not finish.
      status: "failed" comes with an `error`.
      num_cached: Tokens whose state was there when it last got its slot, so that they were not computed.
      cache_salt: Prefixes are shared among requests of one salt alone.
    """

    row: int
    prompt: Int[np.ndarray, "T"]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    submitted_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    steps: list[Step] = dataclasses.field(default_factory=list)
    status: Status = "waiting"
    error: FloatingPointError | None = None
    num_cached: int = 0
    cache_salt: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.ended_s is not None

    def history(self) -> Int[np.ndarray, "T"]:
        """Every token so far, prompt and answer."""
        return np.concatenate([self.prompt, np.array([step.token_id for step in self.steps], np.int32)])

    def take(self, token_id: int, logprob: float, now_s: float) -> Step:
        """Adds a token.

        Raises: FloatingPointError if there is none, because its logits were broken.
        """
        if token_id == INVALID_TOKEN:
            raise FloatingPointError(
                f"prompt {self.row}: the logits for position {self.prompt.size + len(self.steps)} hold a NaN or "
                "nothing but -inf. The weights, or the numbers computed from them, are broken"
            )
        if self.first_token_s is None:
            self.first_token_s = now_s
        reason = None
        if token_id in self.stop_ids:
            reason = "stop"
        elif len(self.steps) + 1 == self.params.max_tokens:
            reason = "length"
        self.steps.append(Step(token_id, logprob, reason))
        return self.steps[-1]

    def end(self, status: Status, now_s: float, error: FloatingPointError | None = None) -> None:
        """Nothing more will come."""
        self.status, self.ended_s, self.error = status, now_s, error

    def completion(self) -> Completion:
        """The answer.

        Raises: the request's error; RuntimeError if it has not finished.
        """
        if self.error is not None:
            raise self.error
        if self.status != "finished":
            raise RuntimeError(f"this request is {self.status}: only a finished one has a completion; see its steps")
        last = self.steps[-1]
        stopped = last.finish_reason == "stop"
        kept = self.steps[:-1] if stopped else self.steps
        return Completion(
            ids=[step.token_id for step in kept],
            logprobs=[step.logprob for step in kept],
            finish_reason=last.finish_reason,
            stop_id=last.token_id if stopped else None,
            stop_logprob=last.logprob if stopped else None,
            num_prompt_tokens=self.prompt.size,
            seed=self.seed,
            first_token_s=self.first_token_s - self.submitted_s,
        )


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
    given = np.append(ids, np.array(params.stop_ids, np.int64))
    wrong = given[(given < 0) | (given >= config.vocab_size)]
    if wrong.size:
        raise ValueError(
            f"prompt {row}: token or stop id {wrong[0]} is outside the vocabulary: ids run from 0 to "
            f"{config.vocab_size - 1}"
        )
    if ids.size + params.max_tokens > max_len:
        raise ValueError(
            f"prompt {row} has {ids.size} tokens, and max_tokens={params.max_tokens} more make "
            f"{ids.size + params.max_tokens}; max_len is {max_len}. Shorten the prompt, lower max_tokens, or raise "
            f"max_len (this model was trained up to {config.max_len})"
        )
    return ids.astype(np.int32)
