"""Answers prompts with one model: token ids in, token ids out.

`submit` and `step` serve requests as they come, in one batch that lives as long as the engine. `generate`, `stream` and
`resume` run the same loop over a batch of their own, of the smallest shape that suffices, to its end. All shapes come
from short lists (`Engine.batch_sizes`, `cache_lens`, `prefill_widths`), so that compilations are bounded.
"""

import bisect
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from maxmoe.checkpoint.session import Session, grow_cache
from maxmoe.inference.answer import Completion, Step
from maxmoe.inference.answer_error import AnswerError
from maxmoe.inference.budget import ThinkingMarkers, ends_thinking
from maxmoe.inference.drafting import Drafts, DraftStats, MakeDrafter
from maxmoe.inference.grammar import Grammars
from maxmoe.inference.prefix_cache import PrefixCache
from maxmoe.inference.request import Request, check_request
from maxmoe.inference.run import Run
from maxmoe.inference.sampling import fresh_seed
from maxmoe.inference.sampling_params import SamplingParams
from maxmoe.inference.scheduler import MAX_WAITING, Scheduler
from maxmoe.inference.serving_loop import ServingLoop, ServingMetrics
from maxmoe.inference.steps import decode_step_in_place, init_cache, prefill_in_place, prefill_row_in_place
from maxmoe.inference.stop_strings import MakeDetokenizer, StoppableText
from maxmoe.inference.warm_up import Program, Progress, list_programs, warm_up
from maxmoe.model.cache import Cache
from maxmoe.model.transformer import Transformer
from maxmoe.ops.latent_cache import GROUP_ROWS

PREFILL_CHUNK = 512  # tokens of a prompt that are prefilled at a time
MIN_PREFILL_WIDTH = 16  # tokens; shorter chunks are padded to it
MIN_CACHE_LEN = 256  # tokens


class Engine:
    """Generates with one model.

    What a row says does not depend on the other rows of its batch; see `serving_loop` for why, and for where not even
    rounding differs. One thread may use an engine.

    Attributes:
      max_len: Tokens that a prompt and its answer may have together, at most the model's trained context.
      batch_sizes: Rows that a batch of `generate` may have.
      cache_lens: Tokens per row that a batch's cache may have room for; the smallest that suffices is taken.
      prefill_widths: Tokens per row that a chunk is padded to; the last one is the longest chunk.
      runs_ahead: Whether a token is on its way to the next step before the host looks at it.
      prefixes: The prefix cache, with its `stats`; None without one.
      prefills_together: Whether chunks of several rows are prefilled in one call, and nobody decodes meanwhile.
    """

    runs_ahead = True

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
        max_waiting: int = MAX_WAITING,
        max_running_tokens: int | None = None,
        prefix_cache_bytes: int = 0,
        host_prefix_cache_bytes: int = 0,
        detokenizer: MakeDetokenizer | None = None,
        thinking: ThinkingMarkers | None = None,
        grammars: Grammars | None = None,
        drafter: MakeDrafter | None = None,
        num_draft_tokens: int = 7,
    ):
        """Compiles nothing yet, and allocates nothing.

        Args:
          mesh: That `params` lie on; None for one device. State is split over it as `cache_shardings` says.
          max_batch: Requests that are answered together; the others wait for one of them to end.
          max_len: In tokens; the model's trained context where that is shorter.
          cache_dtype: Of what is kept per token; None takes that of the embedding, in which activations are.
          prefill_chunk: In tokens. A smaller chunk needs less memory, a larger one takes fewer steps.
          max_waiting: Submitted requests that may wait.
          max_running_tokens: That the running ones of them may come to hold together; None for as many as fit.
          prefix_cache_bytes: Of device memory, beside the cache of the slots, that states of submitted prompts are
            kept in, so that a prompt that begins like an earlier one is read from there on; 0 keeps none.
          host_prefix_cache_bytes: Of the host's memory, for what must leave those.
          detokenizer: Makes the text of each answer, such as `lambda: StreamDecoder(tokenizer)`; None makes no text,
            and allows no stop strings.
          thinking: Markers between which the model thinks; None counts no thinking, and allows no budget for it.
          grammars: Of the model's vocabulary, for requests that have one; None allows no grammar.
          drafter: Makes what guesses the next tokens of one request, such as `NgramDrafter`, so that one step may take
            several; answers stay the same. None takes a token at a time, which a busy accelerator does as fast.
          num_draft_tokens: Of the longest guess.
        """
        sizes = {"max_batch": max_batch, "max_len": max_len, "prefill_chunk": prefill_chunk}
        sizes |= {"max_waiting": max_waiting, "max_running_tokens": max_running_tokens}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ValueError(f"Engine: {name}={value} must be at least 1")
        self.model, self.params, self.mesh = model, params, mesh
        self.max_batch, self.max_len = max_batch, min(max_len, model.config.max_len)
        largest = max((*thinking.open_ids, *thinking.close_ids), default=0) if thinking is not None else 0
        if largest >= model.config.vocab_size:
            raise ValueError(f"Engine: marker id {largest} is outside the vocabulary of {model.config.vocab_size} ids")
        self.detokenizer, self.thinking, self.grammars = detokenizer, thinking, grammars
        # Rows that lie on different devices are read at the same time; one row alone would leave the others idle.
        self.prefills_together = mesh is not None and mesh.shape.get("data", 1) > 1
        self.cache_dtype = jnp.dtype(params["embedding"].dtype if cache_dtype is None else cache_dtype)
        self.batch_sizes = _growing(1, max_batch, 2)
        self.cache_lens = _growing(MIN_CACHE_LEN, self.max_len, 2)
        self.prefill_widths = _growing(MIN_PREFILL_WIDTH, prefill_chunk, 4)  # each takes long to compile
        if host_prefix_cache_bytes < 0 or (host_prefix_cache_bytes and not prefix_cache_bytes):
            raise ValueError(
                f"Engine: host_prefix_cache_bytes={host_prefix_cache_bytes} must be at least 0, and needs "
                f"prefix_cache_bytes, which is {prefix_cache_bytes}"
            )
        if prefix_cache_bytes < 0 or (prefix_cache_bytes and prefill_chunk % GROUP_ROWS):
            raise ValueError(
                f"Engine: prefix_cache_bytes={prefix_cache_bytes} must be at least 0; above 0, "
                f"prefill_chunk={prefill_chunk} must be a multiple of {GROUP_ROWS}"
            )
        seq = mesh.shape.get("seq", 1) if mesh is not None else 1
        if num_draft_tokens < 1 or (drafter is not None and (num_draft_tokens + 1) % seq):
            raise ValueError(
                f"Engine: num_draft_tokens={num_draft_tokens} must be at least 1, and one more than it a multiple of "
                f"the mesh's seq={seq}"
            )
        self.drafter, self.num_draft_tokens = drafter, num_draft_tokens
        self.max_waiting, self.max_running_tokens = max_waiting, max_running_tokens
        self.prefixes = (
            PrefixCache(prefill_chunk, prefix_cache_bytes, host_prefix_cache_bytes) if prefix_cache_bytes else None
        )

    # ---- Requests as they come --------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str = "",
    ) -> Request:
        """Queues a prompt; `step` gives its tokens. The first call allocates a cache of max_batch x max_len tokens.

        Args:
          priority: Lower is more urgent, and takes the slot of a less urgent request where none is free.
          deadline: Seconds from now after which the request is given up, with status "expired"; None for never.
          cache_salt: Keeps prefixes apart: state is taken from requests of the same salt alone.
        Returns: The request, whose `steps` and `status` follow what happens.
        Raises:
          ValueError: What `generate` refuses, or a deadline that is not positive.
          QueueFullError: `max_waiting` requests wait already.
        """
        if deadline is not None and not deadline > 0:
            raise ValueError(f"deadline={deadline}: must be a positive number of seconds from now, or None for never")
        request = self._request(0, prompt, params, priority=priority, cache_salt=cache_salt)
        if deadline is not None:
            request.expires_at_s = request.submitted_s + deadline
        self._serving.submit(request)
        return request

    def step(self) -> list[tuple[Request, Step]]:
        """One iteration over what is submitted. Returns the new tokens, each with its request.

        With drafts a request may have several, in their order.

        Requests that end without one, because they expired or failed, show it in their `status`. An iteration may
        have no token for anybody, because prompts are still read.
        """
        return self._serving.step()

    def cancel(self, request: Request) -> None:
        """Ends a submitted request and frees its slot; what it has said stays in its `steps`."""
        self._serving.cancel(request)

    @property
    def has_work(self) -> bool:
        """Whether a submitted request waits or runs."""
        return "_serving" in self.__dict__ and self._serving.scheduler.has_work

    @property
    def metrics(self) -> ServingMetrics:
        """Counts over all submitted requests."""
        return self._serving.metrics

    @property
    def draft_stats(self) -> DraftStats | None:
        """How many drafted tokens of submitted requests held; None without a drafter."""
        return None if self.drafter is None else self._serving.drafts.stats

    def compilations(self) -> list[Program]:
        """Every program of the model that serving submitted requests ever compiles, whatever comes."""
        return list_programs(self)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles all of `compilations`, and what goes with them, so that no request waits for the compiler.

        Args:
          progress: Called before each program with it, the number of programs that are ready, and that of all.
        Raises: RuntimeError while requests wait or run.
        """
        if self.has_work:
            raise RuntimeError("warm_up: requests wait or run already; call it before the first submit")
        warm_up(self, self._serving, progress)

    @functools.cached_property
    def _serving(self) -> ServingLoop:
        scheduler = Scheduler[Request](self.max_batch, max_tokens=self.max_running_tokens, max_waiting=self.max_waiting)
        cache = self._new_cache(self.max_batch, self.max_len)
        return ServingLoop(self, cache, scheduler, prefixes=self.prefixes, drafts=self._new_drafts())

    def _new_drafts(self) -> Drafts | None:
        return None if self.drafter is None else Drafts(self.drafter, self.num_draft_tokens)

    # ---- Prompts that are there at once -----------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Answers prompts, in their order.

        Args:
          prompts: Token ids. Of more than `max_batch` prompts, each later one begins when an earlier one has ended.
          params: For all prompts, or one per prompt.
        Raises:
          ValueError: An empty prompt, an id outside the vocabulary, or a prompt that leaves no room for max_tokens;
            before anything runs.
          AnswerError: Logits without a distribution, or a grammar that cannot be followed; names each such prompt and
            the position, and holds the answers to the others.
        """
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(every) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(every)} SamplingParams: give one each, or one for all")
        requests = [self._request(row, prompt, every[row]) for row, prompt in enumerate(prompts)]
        if not requests:
            return []
        loop = self._loop(requests, drafts=self._new_drafts())
        while loop.scheduler.has_work:
            loop.step()
        completions = [None if request.failure else request.completion() for request in requests]
        if failures := [request.failure for request in requests if request.failure]:
            raise AnswerError("; ".join(failures), completions)
        return completions

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Run:
        """Answers one prompt token by token; raises what `generate` does, ValueErrors at once.

        The last step carries the finish reason. If that is "stop", its token is the stop id, not part of the text.
        """
        request = self._request(0, prompt, params)
        return self._run(request)

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
        request = self._request(0, np.concatenate([past, new_ids]) if len(new_ids) else past, params)
        request.num_cached = past.size
        cache, need = session.cache, request.num_tokens
        if cache.max_len is not None and cache.max_len < need:
            cache = grow_cache(cache, _at_least(self.cache_lens, need))
        return self._run(request, cache, None if len(new_ids) else session.logits)

    def _request(self, row: int, prompt: Sequence[int], params: SamplingParams, **queueing: Any) -> Request:
        ids, now_s = check_request(prompt, params, self.model.config, self.max_len, row), time.perf_counter()
        if params.stop and self.detokenizer is None:
            raise ValueError(f"prompt {row}: stop={params.stop} needs text: make the engine with a detokenizer")
        if params.thinking_token_budget is not None and self.thinking is None:
            raise ValueError(
                f"prompt {row}: thinking_token_budget={params.thinking_token_budget} needs the markers of thinking: "
                "make the engine with thinking=ThinkingMarkers(open_ids, close_ids)"
            )
        if params.grammar and self.grammars is None:
            raise ValueError(f"prompt {row}: grammar={params.grammar!r:.80} needs an engine that was given grammars")
        return Request(
            row=row,
            prompt=ids,
            params=params,
            text=self.detokenizer and StoppableText(self.detokenizer(), params.stop, params.min_tokens),
            matcher=self.grammars.matcher(params.grammar) if params.grammar else None,
            begins_thinking=self.thinking is not None and ends_thinking(self.thinking, ids),
            seed=fresh_seed() if params.seed is None else int(params.seed),
            stop_ids=frozenset((self.model.config.eos_id, *params.stop_ids)),
            num_tokens=ids.size + params.max_tokens,
            submitted_s=now_s,
            **queueing,
        )

    def _run(self, request: Request, *state) -> Run:
        # A session must hold what was said and no more. Where a stop string ends a draft shows only after it is read.
        drafts = None if request.params.stop else self._new_drafts()
        return Run(request, self._loop([request], *state, drafts=drafts))

    def _loop(
        self,
        requests: list[Request],
        cache: Cache | None = None,
        logits: Float[Array, "1 V"] | None = None,
        *,
        drafts: Drafts | None,
    ) -> ServingLoop:
        """A loop over a batch of its own, of the smallest shape that suffices; or over a single row that is given."""
        if cache is None:
            rows = _at_least(self.batch_sizes, min(len(requests), self.max_batch))
            cache = self._new_cache(rows, _at_least(self.cache_lens, max(r.num_tokens for r in requests)))
        loop = ServingLoop(self, cache, Scheduler[Request](cache.batch_size, max_waiting=None), logits, drafts=drafts)
        for request in requests:
            loop.submit(request)
        return loop

    def _new_cache(self, rows: int, max_len: int) -> Cache:
        return init_cache(self.model, rows, max_len, self.cache_dtype, self.mesh)

    # ---- What a loop asks for ---------------------------------------------------------------------------------------

    def padded_chunk(self, ids: Int[np.ndarray, "n"]) -> Int[np.ndarray, "T"]:
        """A chunk filled up to one of `prefill_widths`."""
        return np.pad(ids, (0, _at_least(self.prefill_widths, ids.size) - ids.size)).astype(np.int32)

    def prefill_slot(
        self, ids: Int[np.ndarray, "1 T"], cache: Cache, length: int, slot: int
    ) -> tuple[Float[Array, "1 V"], Cache]:
        """Appends `length` tokens to one row. Returns logits after the last; `cache` is used up."""
        if cache.batch_size == 1:
            return prefill_in_place(self.model, self.params, ids, cache, np.array([length], np.int32))
        return prefill_row_in_place(self.model, self.params, ids, cache, length, slot)

    def prefill_chunk(
        self, ids: Int[np.ndarray, "rows T"], cache: Cache, lengths: Int[np.ndarray, "rows"]
    ) -> tuple[Float[Array, "rows V"], Cache]:
        """Appends `lengths[b]` tokens to each row. Returns logits after the last; `cache` is used up."""
        return prefill_in_place(self.model, self.params, ids, cache, lengths)

    def decode_token(
        self, token: Int[Array, "rows"], cache: Cache, active: Bool[np.ndarray, "rows"]
    ) -> tuple[Float[Array, "rows V"], Cache]:
        """Appends one token to each active row. Returns the logits after it; `cache` is used up."""
        return decode_step_in_place(self.model, self.params, token, cache, active)


def _growing(first: int, last: int, factor: int) -> tuple[int, ...]:
    """first, factor times that, and so on as far as they are below last, then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


def _at_least(sizes: tuple[int, ...], need: int) -> int:
    """The smallest size that is not below need."""
    return sizes[bisect.bisect_left(sizes, need)]
