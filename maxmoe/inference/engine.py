"""Answers prompts in static batches: token ids in, token ids out.

A batch is prefilled in chunks and then decoded one token at a time for all rows, until every row has ended. All
shapes come from short lists (`Engine.batch_sizes`, `cache_lens`, `prefill_widths`), so that compilations are
bounded, and decoding compiles nothing after its first step.
"""

import bisect
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from maxmoe.checkpoint.session import Session, grow_cache
from maxmoe.config import ModelConfig
from maxmoe.inference.answer import Answer, Completion, InvalidLogitsError, Step
from maxmoe.inference.budget import ThinkingMarkers
from maxmoe.inference.next_token import lay_out, next_tokens
from maxmoe.inference.run import BatchState, Run, interrupts_wait
from maxmoe.inference.sampling import fresh_seed
from maxmoe.inference.sampling_params import SamplingParams
from maxmoe.inference.steps import decode_step_in_place, init_cache, prefill_in_place
from maxmoe.inference.stop_strings import MakeDetokenizer, StoppableText
from maxmoe.model.cache import Cache
from maxmoe.model.transformer import Transformer

PREFILL_CHUNK = 512  # tokens of a prompt that are prefilled at a time
MIN_PREFILL_WIDTH = 16  # tokens; shorter chunks are padded to it
MIN_CACHE_LEN = 256  # tokens


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
        detokenizer: MakeDetokenizer | None = None,
        thinking: ThinkingMarkers | None = None,
    ):
        """Compiles nothing yet, and allocates nothing.

        Args:
          mesh: That `params` lie on; None for one device. State is split over it as `cache_shardings` says.
          max_batch: Prompts that are answered together; more are answered in several batches.
          max_len: In tokens; the model's trained context where that is shorter.
          cache_dtype: Of what is kept per token; None takes that of the embedding, in which activations are.
          prefill_chunk: In tokens. A smaller chunk needs less memory, a larger one takes fewer steps.
          detokenizer: Makes the text of each answer, such as `lambda: StreamDecoder(tokenizer)`; None makes no text,
            and allows no stop strings.
          thinking: Markers between which the model thinks; None counts no thinking, and allows no budget for it.
        """
        for name, value in (("max_batch", max_batch), ("max_len", max_len), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"Engine: {name}={value} must be at least 1")
        self.model, self.params, self.mesh = model, params, mesh
        self.max_batch, self.max_len = max_batch, min(max_len, model.config.max_len)
        largest = max((*thinking.open_ids, *thinking.close_ids), default=0) if thinking is not None else 0
        if largest >= model.config.vocab_size:
            raise ValueError(f"Engine: marker id {largest} is outside the vocabulary of {model.config.vocab_size} ids")
        self.detokenizer, self.thinking = detokenizer, thinking
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
          InvalidLogitsError: Logits without a distribution; names each such prompt and the position, and holds the
            answers to the others.
        """
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(every) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(every)} SamplingParams: give one each, or one for all")
        answers = [self._start(row, prompt, every[row]) for row, prompt in enumerate(prompts)]
        for first in range(0, len(answers), self.max_batch):
            for _ in self._run(answers[first : first + self.max_batch]):
                pass
        completions = [None if answer.failure else answer.completion() for answer in answers]
        if failures := [answer.failure for answer in answers if answer.failure]:
            raise InvalidLogitsError("; ".join(failures), completions)
        return completions

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Run:
        """Answers one prompt token by token; raises what `generate` does, ValueErrors at once.

        The last step carries the finish reason. If that is "stop", its token is the stop id, not part of the text.
        """
        answer = self._start(0, prompt, params)
        return self._one_run(answer, BatchState(self._new_cache([answer], 1)))

    def resume(self, session: Session, new_ids: Sequence[int], params: SamplingParams) -> Run:
        """Continues a session as `stream` continues a prompt. Its state is taken over: it is used up.

        Only `new_ids` are prefilled. Without any, the next token is the one that the interrupted answer would have
        had, bit for bit if settings and capacity of the cache are the same. What looks back at the answer alone begins
        anew with what was said before as its prompt: presence and frequency penalties, min_tokens, stop strings.

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

    def _one_run(self, answer: Answer, state: BatchState) -> Run:
        return Run(self._run([answer], state), answer, state, self._decode_token)

    def _start(self, row: int, prompt: Sequence[int], params: SamplingParams) -> Answer:
        ids = check_request(prompt, params, self.model.config, self.max_len, row)
        if params.stop and self.detokenizer is None:
            raise ValueError(f"prompt {row}: stop={params.stop} needs text: make the engine with a detokenizer")
        if params.thinking_token_budget is not None and self.thinking is None:
            raise ValueError(
                f"prompt {row}: thinking_token_budget={params.thinking_token_budget} needs the markers of thinking: "
                "make the engine with thinking=ThinkingMarkers(open_ids, close_ids)"
            )
        text = self.detokenizer and StoppableText(self.detokenizer(), params.stop, params.min_tokens)
        return Answer(
            row=row,
            prompt=ids,
            params=params,
            text=text,
            seed=fresh_seed() if params.seed is None else int(params.seed),
            stop_ids=frozenset((self.model.config.eos_id, *params.stop_ids)),
            began=time.perf_counter(),
        )

    def _run(self, answers: list[Answer], state: BatchState | None = None) -> Iterator[list[Step | None]]:
        """Answers one batch; after each token, yields the steps of the answers that it continues, None where one fails.

        Where steps run ahead, each token is on its way to the next one before the host looks at it, so that the
        device does not wait. A finished row goes on with tokens that nobody reads: what exceeds its cache is dropped.

        `state` is kept up to date at every step; None begins with an empty cache.
        """
        rows = _at_least(self.batch_sizes, len(answers))
        padded = answers + [answers[0]] * (rows - len(answers))
        fields = ("params", "prompt", "seed", "stop_ids")
        asked = ([getattr(answer, name) for answer in padded] for name in fields)
        fixed, progress = jax.device_put(lay_out(*asked, self.model.config.vocab_size, self.thinking))
        with_top = any(answer.params.top_logprobs for answer in answers)

        state = BatchState(self._new_cache(answers, rows)) if state is None else state

        def advance(chosen, progress):
            active = np.zeros(rows, bool)
            active[: len(answers)] = [not answer.finished for answer in answers]
            with interrupts_wait():
                state.logits, state.cache = self._decode_token(chosen.tokens, state.cache, active)
            return next_tokens(state.logits, fixed, progress, with_top)

        self._prefill(answers, state)
        chosen, progress = next_tokens(state.logits, fixed, progress, with_top)
        num_steps = max(answer.params.max_tokens for answer in answers)
        for step in range(1, num_steps + 1):
            state.on_way, more = chosen, step < num_steps
            if more and self._runs_ahead:
                chosen, progress = advance(chosen, progress)
            arrived = jax.device_get(state.on_way)
            yield [answer.take(arrived, i) for i, answer in enumerate(answers) if not answer.finished]
            if all(answer.finished for answer in answers):
                return
            if more and not self._runs_ahead:
                chosen, progress = advance(chosen, progress)

    def _new_cache(self, answers: list[Answer], rows: int) -> Cache:
        need = max(answer.prompt.size + answer.params.max_tokens for answer in answers)
        return init_cache(self.model, rows, _at_least(self.cache_lens, need), self.cache_dtype, self.mesh)

    def _prefill(self, answers: list[Answer], state: BatchState) -> None:
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
