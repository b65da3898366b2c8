"""An answer while it grows, on the host: its tokens and text so far, when it ends, what has become of it."""

import dataclasses
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from maxmoe.inference.budget import ThinkingState
from maxmoe.inference.grammar import Matcher
from maxmoe.inference.next_token import Chosen
from maxmoe.inference.sampling import INVALID_TOKEN
from maxmoe.inference.sampling_params import SamplingParams
from maxmoe.inference.stop_strings import StoppableText

FinishReason = Literal["stop", "length"]


class Step(NamedTuple):
    """One generated token. Only the last of an answer has a finish reason.

    Attributes:
      token_id: With "stop" the stop id itself, or the token that completed a stop string.
      logprob: See `Completion.logprobs`.
      text: What the token lets pass of the answer's text; "" where an engine makes no text.
      stop_string: That ended the answer.
      top_logprobs: The likeliest tokens and their log-probabilities, as many as were asked for, best first.
    """

    token_id: int
    logprob: float
    finish_reason: FinishReason | None
    text: str = ""
    stop_string: str | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()

    @property
    def is_stop_id(self) -> bool:
        """Whether the token only ends the answer, and is no part of it."""
        return self.finish_reason == "stop" and self.stop_string is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """The answer to one prompt.

    Attributes:
      ids: Generated tokens, without the stop id that ended them; with those of a stop string.
      logprobs: Of `ids`, in nats, under the model's distribution at the request's temperature: before filters,
        penalties and biases, and of forced tokens too; see `token_logprobs`.
      top_logprobs: For each of `ids`, the likeliest tokens under the same distribution.
      text: Of the answer, up to the stop string; None where the engine makes no text.
      finish_reason: "stop" for a stop id or stop string, "length" for max_tokens.
      stop_id, stop_logprob: The stop id and its log-probability; else None.
      stop_string: The one that was found; else None.
      num_prompt_tokens: Length of the prompt.
      num_thinking_tokens, num_answer_tokens: Of `ids`, how many lie inside thinking and how many outside, markers
        counted as neither; None where the engine knows no markers.
      budget_forced: Whether thinking_token_budget put a token where the model would have said another.
      seed: With this seed in its SamplingParams, the request gives the same answer again.
      first_token_s: Seconds from the call to the first token, waiting and compiling included.
    """

    ids: list[int]
    logprobs: list[float]
    top_logprobs: list[tuple[tuple[int, float], ...]]
    text: str | None
    finish_reason: FinishReason
    stop_id: int | None
    stop_logprob: float | None
    stop_string: str | None
    num_prompt_tokens: int
    num_thinking_tokens: int | None
    num_answer_tokens: int | None
    budget_forced: bool
    seed: int
    first_token_s: float


@dataclasses.dataclass(eq=False, kw_only=True)
class Answer:
    """A prompt and what has come of its answer so far, the stop id included.

    Attributes:
      row: Of the prompt, among those of the call; for messages.
      stop_ids: All ids that end it, the model's own included.
      submitted_s, first_token_s: On the clock of `time.perf_counter`; None until it comes.
      text: None where the engine makes none.
      matcher: Of its grammar; None where any token may come.
      begins_thinking: Whether the prompt ends within thinking.
      steps: One per token.
      thinking: Where the last token left it between the markers; None before the first, and without markers.
      thought: Tokens inside and outside thinking so far, markers and the stop id counted as neither.
      budget_forced: Whether a budget has put a token where the model would have said another.
      failure: Why there will be no more.
    """

    row: int
    prompt: Int[np.ndarray, "T"]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    submitted_s: float
    first_token_s: float | None = None
    text: StoppableText | None = None
    matcher: Matcher | None = None
    begins_thinking: bool = False
    steps: list[Step] = dataclasses.field(default_factory=list)
    thinking: ThinkingState | None = None
    thought: tuple[int, int] | None = None
    budget_forced: bool = False
    failure: str | None = None

    def answered(self) -> Int[np.ndarray, "N"]:
        """The tokens of the answer so far."""
        return np.array([step.token_id for step in self.steps], np.int32)

    def history(self) -> Int[np.ndarray, "T+N"]:
        """Every token so far, prompt and answer."""
        return np.concatenate([self.prompt, self.answered()])

    @property
    def is_constrained(self) -> bool:
        """Whether the next token must fit a grammar: there is one, and thinking is over."""
        is_thinking = self.begins_thinking if self.thinking is None else self.thinking.thinking
        return self.matcher is not None and not is_thinking

    def take(self, chosen: Chosen, index: tuple[int, ...], now_s: float) -> Step | None:
        """Adds the token that stands at an index of what was chosen, on the host by now; None if there was none."""
        token_id = int(chosen.tokens[index])
        if token_id == INVALID_TOKEN:
            self.failure = (
                f"prompt {self.row}: the logits for position {self.prompt.size + len(self.steps)} hold a NaN or "
                "nothing but -inf. The weights, or the numbers computed from them, are broken"
            )
            return None
        if self.is_constrained:
            try:
                self.matcher.accept(token_id)
            except ValueError as error:
                self.failure = f"prompt {self.row}, token {len(self.steps) + 1} of its answer: {error}"
                return None
        if self.first_token_s is None:
            self.first_token_s = now_s
        is_stop_id = token_id in self.stop_ids
        if chosen.thought is not None:
            self.thinking = ThinkingState(*(column[index] for column in chosen.thought.state))
            if not is_stop_id:
                self.thought = tuple(map(int, self.thinking.counts()))
            self.thought = self.thought or (0, 0)
            self.budget_forced |= bool(chosen.thought.forced[index])
        self.steps.append(self._step(token_id, float(chosen.logprobs[index]), is_stop_id, self._top(chosen, index)))
        return self.steps[-1]

    def _step(self, token_id: int, logprob: float, is_stop_id: bool, top: tuple[tuple[int, float], ...]) -> Step:
        text = "" if self.text is None or is_stop_id else self.text.feed(token_id)
        stop_string = None if self.text is None else self.text.stop_string
        reason = None
        if is_stop_id or stop_string is not None:
            reason = "stop"
        elif len(self.steps) + 1 == self.params.max_tokens:
            reason = "length"
        if reason is not None and self.text is not None:
            text += self.text.finish()
        return Step(token_id, logprob, reason, text, stop_string, top)

    def _top(self, chosen: Chosen, index: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
        if not self.params.top_logprobs:
            return ()
        ids, logprobs = (array[index][: self.params.top_logprobs].tolist() for array in chosen.top)
        return tuple(zip(ids, logprobs, strict=True))

    def completion(self) -> Completion:
        """Of an answer that is whole, without a failure."""
        last = self.steps[-1]
        kept = self.steps[:-1] if last.is_stop_id else self.steps
        num_thinking, num_answer = self.thought or (None, None)
        return Completion(
            ids=[step.token_id for step in kept],
            logprobs=[step.logprob for step in kept],
            top_logprobs=[step.top_logprobs for step in kept],
            text=None if self.text is None else "".join(step.text for step in self.steps),
            finish_reason=last.finish_reason,
            stop_id=last.token_id if last.is_stop_id else None,
            stop_logprob=last.logprob if last.is_stop_id else None,
            stop_string=last.stop_string,
            num_prompt_tokens=self.prompt.size,
            num_thinking_tokens=num_thinking,
            num_answer_tokens=num_answer,
            budget_forced=self.budget_forced,
            seed=self.seed,
            first_token_s=self.first_token_s - self.submitted_s,
        )
