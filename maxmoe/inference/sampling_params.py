"""What a request may ask of sampling: the fields, their ranges, and errors that name them."""

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence

import numpy as np

MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 100.0
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_STOP_IDS = 255
MAX_BIAS = 100.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is answered.

    Penalties and biases change logits before the temperature divides them: first the bias, then the repetition
    penalty, then frequency and presence. They, `min_tokens` and the budget decide what is drawn; the log-probabilities
    that are told stay those of the model at this temperature.

    Attributes:
      temperature: 0..100; logits are divided by it. 0 is greedy: the likeliest token, the lower id of a tie.
      top_p: In (0, 1]; keeps the likeliest tokens whose mass first reaches it. 1 keeps all.
      top_k: Keeps that many likeliest tokens, the lower ids of a tie first; 0 keeps all.
      min_p: 0..1; keeps tokens at least this fraction as likely as the likeliest. 0 keeps all.
      repetition_penalty: In (0, 10]; logits of tokens in prompt or answer are divided by it where they are positive,
        else multiplied. 1 changes nothing, more than 1 discourages.
      presence_penalty: -2..2; subtracted once from the logit of each token that the answer holds already.
      frequency_penalty: -2..2; subtracted as often as the answer holds the token.
      logit_bias: Token id to what is added to its logit, -100..100; at most 1,024 ids.
      seed: 0..2**63-1; None draws one from the operating system for each request.
      max_tokens: The longest answer, in tokens, the stop id included.
      min_tokens: So many tokens come before the answer may end by a stop id or a stop string.
      stop_ids: Ids that end the answer, besides the model's own end of turn; at most 255.
      stop: Strings that end the answer as soon as its text holds one. For engines that were given a detokenizer.
      top_logprobs: 0..20; so many likeliest tokens are told beside each token of the answer.
      thinking_token_budget: The most tokens that the answer may spend on thinking, markers not counted; thinking is
        then ended. None sets no limit. For engines that were given the markers of thinking.
      grammar: That the answer must match once thinking is over, as llguidance's Lark; "" allows anything. For engines
        that were given grammars.
    Raises: ValueError naming the field, its value and what is allowed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0
    thinking_token_budget: int | None = None
    grammar: str = ""

    def __post_init__(self) -> None:
        ranges = (
            ("temperature", 0.0, MAX_TEMPERATURE, f"a number in 0..{MAX_TEMPERATURE:g}, where 0 is greedy"),
            ("top_p", 0.0, 1.0, "a number above 0 and up to 1"),
            ("min_p", 0.0, 1.0, "a number in 0..1"),
            ("repetition_penalty", 0.0, 10.0, "a number above 0 and up to 10, where 1 changes nothing"),
            ("presence_penalty", -2.0, 2.0, "a number in -2..2"),
            ("frequency_penalty", -2.0, 2.0, "a number in -2..2"),
        )
        for name, low, high, text in ranges:
            self._require(name, _is_number(getattr(self, name), low, high), text)
        self._require("top_p", self.top_p > 0, "a number above 0 and up to 1")
        self._require("repetition_penalty", self.repetition_penalty > 0, "a number above 0 and up to 10")
        self._require("top_k", _is_int(self.top_k) and self.top_k >= 0, "an integer >= 0, where 0 keeps all")
        self._require("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 1, "an integer >= 1")
        fits = _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens
        self._require("min_tokens", fits, f"an integer in 0..max_tokens, which is {self.max_tokens}")
        seeded = _is_int(self.seed) and 0 <= self.seed <= MAX_SEED
        self._require("seed", self.seed is None or seeded, "an integer in 0..2**63-1, or None for a fresh one")
        told = _is_int(self.top_logprobs) and 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS
        self._require("top_logprobs", told, f"an integer in 0..{MAX_TOP_LOGPROBS}")
        budget = self.thinking_token_budget
        limited = budget is None or (_is_int(budget) and budget >= 0)
        self._require("thinking_token_budget", limited, "an integer >= 0, or None for no limit")
        self._require("grammar", isinstance(self.grammar, str), "a grammar as text")
        is_sequence = isinstance(self.stop_ids, Sequence | set | frozenset) and not isinstance(self.stop_ids, str)
        valid = is_sequence and all(_is_int(stop_id) and stop_id >= 0 for stop_id in self.stop_ids)
        self._require("stop_ids", valid, "a sequence of token ids >= 0")
        self._require("stop_ids", len(self.stop_ids) <= MAX_STOP_IDS, f"at most {MAX_STOP_IDS} ids")
        object.__setattr__(self, "stop_ids", tuple(operator.index(stop_id) for stop_id in self.stop_ids))
        valid = isinstance(self.stop, Sequence) and not isinstance(self.stop, str)
        valid = valid and all(isinstance(text, str) and text for text in self.stop)
        self._require("stop", valid, "a sequence of strings, none of them empty")
        object.__setattr__(self, "stop", tuple(self.stop))
        self._settle_logit_bias()

    def _settle_logit_bias(self) -> None:
        """Makes pairs of the biases, in the order of ids, so that equal settings are equal and can be hashed."""
        text = f"a mapping of token ids >= 0 to numbers in -{MAX_BIAS:g}..{MAX_BIAS:g}"
        given = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        try:
            pairs = dict(given)
        except (TypeError, ValueError):
            pairs = None
        valid = pairs is not None and all(
            _is_int(token_id) and token_id >= 0 and _is_number(bias, -MAX_BIAS, MAX_BIAS)
            for token_id, bias in pairs.items()
        )
        self._require("logit_bias", valid, text)
        self._require("logit_bias", len(pairs) <= MAX_LOGIT_BIASES, f"of at most {MAX_LOGIT_BIASES} ids")
        settled = tuple(sorted((operator.index(token_id), float(bias)) for token_id, bias in pairs.items()))
        object.__setattr__(self, "logit_bias", settled)

    def _require(self, name: str, allowed: bool, text: str) -> None:
        if not allowed:
            raise ValueError(f"{name}={getattr(self, name)!r:.200}: must be {text}")


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: object, low: float, high: float) -> bool:
    """Whether value is a finite number in low..high."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and low <= value <= high
