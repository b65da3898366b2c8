"""Answers prompts in static batches: token ids in, token ids out.

A batch is prefilled in chunks and then decoded one token at a time for all rows, until every row has ended. All
shapes come from short lists (`Engine.batch_sizes`, `cache_lens`, `prefill_widths`), so that compilations are
bounded, and decoding compiles nothing after its first step.
"""

import bisect
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from maxmoe.checkpoint.session import Session, grow_cache
from maxmoe.config import ModelConfig
from maxmoe.inference.run import BatchState, Run, interrupts_wait
from maxmoe.inference.sampling import (
    INVALID_TOKEN,
    RowSettings,
    SamplingParams,
    fresh_seed,
    row_keys,
    sample,
    seed_words,
    stack_settings,
)
from maxmoe.inference.steps import decode_step_in_place, init_cache, prefill_in_place
from maxmoe.model.cache import Cache
from maxmoe.model.transformer import Transformer

PREFILL_CHUNK = 512  # tokens of a prompt that are prefilled at a time
MIN_PREFILL_WIDTH = 16  # tokens; shorter chunks are padded to it
MIN_CACHE_LEN = 256  # tokens

FinishReason = Literal["stop", "length"]


class Step(NamedTuple):
    """One generated token. Only the last of an answer has a finish reason; with "stop" it is the stop id itself."""

    token_id: int
    logprob: float
    finish_reason: FinishReason | None


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


@dataclasses.dataclass
class _Answer:
    """A prompt on its way: what was asked, and what has come so far, the stop id included."""

    row: int  # among the prompts of the call
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    began: float
    num_cached: int = 0  # tokens of the prompt whose state is there already
    first_token_s: float | None = None
    steps: list[Step] = dataclasses.field(default_factory=list)

    @property
    def finished(self) -> bool:
        return bool(self.steps) and self.steps[-1].finish_reason is not None

    def take(self, token_id: int, logprob: float) -> Step:
        if token_id == INVALID_TOKEN:
            raise FloatingPointError(
                f"prompt {self.row}: the logits for position {self.prompt.size + len(self.steps)} hold a NaN or "
                "nothing but -inf. The weights, or the numbers computed from them, are broken"
            )
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.began
        reason = None
        if token_id in self.stop_ids:
            reason = "stop"
        elif len(self.steps) + 1 == self.params.max_tokens:
            reason = "length"
        self.steps.append(Step(token_id, logprob, reason))
        return self.steps[-1]

    def completion(self) -> Completion:
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
            first_token_s=self.first_token_s,
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


class Engine:
    """Generates with one model.

    What a row says does not depend on the other rows of its batch: padding reaches no state, and noise comes from
    the row's own seed. Sums may be rounded differently for another batch size, which can only tip a tie.

    Attributes:
      max_len: Tokens that a prompt and its answer may have together, at most the model's trained context.
      batch_sizes: Rows that a batch is padded to.
      cache_lens: Tokens per row that a batch's cache may have room for; the smallest that suffices is taken.
      prefill_widths: Tokens per row that a chunk is padded to; the last one is the longest chunk.
    """

    _runs_ahead = True  # a token is on its way to the next step before the host looks at it

    def __init__(
        self,
        model: Transformer,
        params: dict[str, Any],
        mesh: jax.sharding.Mesh | None = None,
        max_batch: int = 8,
        max_len: int = 32_768,
        cache_dtype: Any = None,
        *,
        prefill_chunk: int = PREFILL_CHUNK,
    ):
        """Compiles nothing yet, and allocates nothing.

        Args:
          mesh: That `params` lie on; None for one device. State is split over it as `cache_shardings` says.
          max_batch: Prompts that are answered together; more are answered in several batches.
          max_len: In tokens; the model's trained context where that is shorter.
          cache_dtype: Of what is kept per token; None takes that of the embedding, in which activations are.
          prefill_chunk: In tokens. A smaller chunk needs less memory, a larger one takes fewer steps.
        """
        for name, value in (("max_batch", max_batch), ("max_len", max_len), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"Engine: {name}={value} must be at least 1")
        self.model, self.params, self.mesh = model, params, mesh
        self.max_batch, self.max_len = max_batch, min(max_len, model.config.max_len)
        self.cache_dtype = jnp.dtype(params["embedding"].dtype if cache_dtype is None else cache_dtype)
        self.batch_sizes = _doubling(1, max_batch)
        self.cache_lens = _doubling(MIN_CACHE_LEN, self.max_len)
        self.prefill_widths = _doubling(MIN_PREFILL_WIDTH, prefill_chunk)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Answers prompts, in their order.

        Args:
          prompts: Token ids. More than `max_batch` prompts are answered batch after batch, in the order given.
          params: For all prompts, or one per prompt.
        Raises:
          ValueError: An empty prompt, an id outside the vocabulary, or a prompt that leaves no room for max_tokens;
            before anything runs.
          FloatingPointError: Logits without a distribution; names the prompt and the position.
        """
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(every) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(every)} SamplingParams: give one each, or one for all")
        answers = [self._start(row, prompt, every[row]) for row, prompt in enumerate(prompts)]
        for first in range(0, len(answers), self.max_batch):
            for _ in self._run(answers[first : first + self.max_batch]):
                pass
        return [answer.completion() for answer in answers]

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Run:
        """Answers one prompt token by token; raises what `generate` does, ValueErrors at once.

        The last step carries the finish reason. If that is "stop", its token is the stop id, not part of the text.
        """
        answer = self._start(0, prompt, params)
        return self._one_run(answer, BatchState(self._new_cache([answer], 1)))

    def resume(self, session: Session, new_ids: Sequence[int], params: SamplingParams) -> Run:
        """Continues a session as `stream` continues a prompt. Its state is taken over: it is used up.

        Only `new_ids` are prefilled. Without any, the next token is the one that the interrupted answer would have
        had, bit for bit if settings and capacity of the cache are the same.

        Args:
          new_ids: What comes after the session's tokens; may be empty.
          params: Without a seed, that of the session goes on.
        Raises: ValueError at once, session untouched: no room, several rows, another cache_dtype, or used up.
        """
        session.check_usable()
        if len(session.token_ids) != 1:
            raise ValueError(f"resume: the session has {len(session.token_ids)} rows; only one can be continued")
        if (dtype := session.cache_dtype) not in (None, self.cache_dtype):
            raise ValueError(f"resume: make the engine with the session's cache_dtype={dtype}, not {self.cache_dtype}")
        past = session.token_ids[0]
        if params.seed is None:
            params = dataclasses.replace(params, seed=session.seeds[0])
        answer = self._start(0, np.concatenate([past, new_ids]) if len(new_ids) else past, params)
        answer.num_cached = past.size
        cache, need = session.cache, answer.prompt.size + params.max_tokens
        if cache.max_len is not None and cache.max_len < need:
            cache = grow_cache(cache, _at_least(self.cache_lens, need))
        return self._one_run(answer, BatchState(cache, None if len(new_ids) else session.logits))

    def _one_run(self, answer: _Answer, state: BatchState) -> Run:
        return Run(self._run([answer], state), answer, state, self._decode_token)

    def _start(self, row: int, prompt: Sequence[int], params: SamplingParams) -> _Answer:
        return _Answer(
            row=row,
            prompt=check_request(prompt, params, self.model.config, self.max_len, row),
            params=params,
            seed=fresh_seed() if params.seed is None else int(params.seed),
            stop_ids=frozenset((self.model.config.eos_id, *params.stop_ids)),
            began=time.perf_counter(),
        )

    def _run(self, answers: list[_Answer], state: BatchState | None = None) -> Iterator[list[Step]]:
        """Answers one batch; after each token, yields the steps of the answers that it continues.

        Where steps run ahead, each token is on its way to the next one before the host looks at it, so that the
        device does not wait. A finished row goes on with tokens that nobody reads: what exceeds its cache is dropped.

        `state` is kept up to date at every step; None begins with an empty cache.
        """
        rows = _at_least(self.batch_sizes, len(answers))
        padded = answers + [answers[0]] * (rows - len(answers))
        settings = stack_settings([answer.params for answer in padded])
        words = seed_words([answer.seed for answer in padded])
        positions = np.array([answer.prompt.size for answer in padded], np.int32)
        settings, words, positions = jax.device_put((settings, words, positions))

        state = BatchState(self._new_cache(answers, rows)) if state is None else state

        def advance(chosen, positions):
            active = np.zeros(rows, bool)
            active[: len(answers)] = [not answer.finished for answer in answers]
            with interrupts_wait():
                state.logits, state.cache = self._decode_token(chosen[0], state.cache, active)
            return _next_tokens(state.logits, settings, words, positions)

        self._prefill(answers, state)
        chosen, positions = _next_tokens(state.logits, settings, words, positions)
        num_steps = max(answer.params.max_tokens for answer in answers)
        for step in range(1, num_steps + 1):
            state.on_way, more = chosen, step < num_steps
            if more and self._runs_ahead:
                chosen, positions = advance(chosen, positions)
            tokens, logprobs = (array.tolist() for array in jax.device_get(state.on_way))
            yield [answer.take(tokens[i], logprobs[i]) for i, answer in enumerate(answers) if not answer.finished]
            if all(answer.finished for answer in answers):
                return
            if more and not self._runs_ahead:
                chosen, positions = advance(chosen, positions)

    def _new_cache(self, answers: list[_Answer], rows: int) -> Cache:
        need = max(answer.prompt.size + answer.params.max_tokens for answer in answers)
        return init_cache(self.model, rows, _at_least(self.cache_lens, need), self.cache_dtype, self.mesh)

    def _prefill(self, answers: list[_Answer], state: BatchState) -> None:
        """Prefills what the state does not hold of a batch yet, chunk by chunk, up to logits after each last token."""
        rows = state.cache.batch_size
        lengths = np.zeros(rows, np.int32)  # rows that only fill the batch have no tokens
        lengths[: len(answers)] = [answer.prompt.size - answer.num_cached for answer in answers]
        chunk, logits = self.prefill_widths[-1], state.logits
        for start in range(0, int(lengths.max()), chunk):
            real = np.clip(lengths - start, 0, chunk)
            ids = np.zeros((rows, _at_least(self.prefill_widths, int(real.max()))), np.int32)
            for answer, row, count in zip(answers, ids, real, strict=False):
                row[:count] = answer.prompt[answer.num_cached + start :][:count]
            new, state.cache = self._prefill_chunk(ids, state.cache, real)
            logits = new if logits is None else jnp.where((real > 0)[:, None], new, logits)
        state.logits = logits

    def _prefill_chunk(
        self, ids: Int[np.ndarray, "rows T"], cache: Cache, lengths: Int[np.ndarray, "rows"]
    ) -> tuple[Float[Array, "rows V"], Cache]:
        """Appends `lengths[b]` tokens to each row. Returns logits after the last; `cache` is used up."""
        return prefill_in_place(self.model, self.params, ids, cache, lengths)

    def _decode_token(
        self, token: Int[Array, "rows"], cache: Cache, active: Bool[np.ndarray, "rows"]
    ) -> tuple[Float[Array, "rows V"], Cache]:
        """Appends one token to each row. Returns the logits after it; `cache` is used up.

        `active` tells the rows whose logits anyone will look at, as far as the host knows.
        """
        return decode_step_in_place(self.model, self.params, token, cache)


@jax.jit
def _next_tokens(logits, settings: RowSettings, words, positions):
    """The tokens at `positions` with their log-probabilities, and the positions after them."""
    return sample(logits, settings, row_keys(words, positions)), positions + 1


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """first, 2 first, 4 first, ... as far as they are below last, then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def _at_least(sizes: tuple[int, ...], need: int) -> int:
    """The smallest size that is not below need."""
    return sizes[bisect.bisect_left(sizes, need)]
