"""From a planned request to its answers, in the engine's time: submission, news as they come, and what is counted."""

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

from maxmoe.inference.answer import FinishReason, Step
from maxmoe.inference.sampling_params import SamplingParams
from maxmoe.server.engine_thread import BusyError
from maxmoe.server.errors import ApiError
from maxmoe.server.fields import refused_by_engine
from maxmoe.server.readers import Finished, Piece, Reader
from maxmoe.server.service import Service
from maxmoe.server.ticket import Ended, EngineGoneError, Event, Job, Ticket


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A request that has been checked and encoded.

    Attributes:
      endpoint: Its path.
      prompts: Token ids, one list for each answer.
      params: One for each answer.
      readers: One for each answer.
      warnings: For the client: what of the history the model does not see, and what is not enforced.
      tier: The thinking effort, for metrics.
      cache_salt: Of whoever asks, and of the request.
    """

    endpoint: str
    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    readers: Sequence[Reader]
    warnings: tuple[str, ...] = ()
    tier: str = "none"
    priority: int = 0
    cache_salt: str = ""


class Update(NamedTuple):
    """News of one answer; `finished` comes last."""

    index: int
    pieces: list[Piece]
    finished: Finished | None


class Generation:
    """The answers to one request. A context manager: leaving it ends what is still going on, and counts it.

    Attributes:
      results: The answers that have ended, by index.
    """

    def __init__(self, service: Service, plan: Plan):
        """Begins nothing yet."""
        self.plan = plan
        self.results: dict[int, Finished] = {}
        self._service = service
        self._readers = plan.readers
        self._ended: dict[int, Ended] = {}
        self._last_token_s: dict[int, float] = {}
        self._reasons: dict[int, FinishReason | None] = {}
        self._ticket: Ticket | None = None
        self._began_s = 0.0
        self._failed = False
        self._is_accepted = False

    def __enter__(self) -> "Generation":
        self._began_s = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._ticket is not None:
            self._ticket.__exit__(kind, *rest)
        if self._is_accepted:
            self._count()

    def _count(self) -> None:
        seconds = time.perf_counter() - self._began_s
        complete = len(self.results) == len(self._readers)
        status = self.results[0].finish_reason if complete else "error" if self._failed else "abort"
        if complete:
            self._service.engine_thread.note_duration(seconds)
        first = min(self._ended.values(), key=lambda ended: ended.first_token_s or 0.0, default=None)
        num_thinking = sum(reader.num_reasoning_tokens for reader in self._readers)
        self._service.metrics.request_ended(
            endpoint=self.plan.endpoint,
            status=status,
            queue_s=first and first.queue_s,
            ttft_s=first and first.first_token_s,
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            thinking_tokens=num_thinking,
            answer_tokens=sum(len(reader.ids) for reader in self._readers) - num_thinking,
            e2e_s=seconds,
        )

    async def start(self) -> None:
        """Hands the prompts to the engine, and waits until it has taken them. Raises: ApiError."""
        await self._start()
        self._service.metrics.request_started(self.plan.endpoint)
        self._is_accepted = True

    async def _start(self) -> None:
        plan, deadline = self.plan, self._service.options.max_request_s
        jobs = [
            Job(prompt, params, plan.priority, deadline, plan.cache_salt)
            for prompt, params in zip(plan.prompts, plan.params, strict=True)
        ]
        try:
            self._ticket = self._service.engine_thread.submit(jobs)
            await self._ticket.accepted()
        except ValueError as error:
            raise refused_by_engine(error) from error
        except BusyError as error:
            self._service.metrics.admission_rejection("queue_full")
            raise ApiError(429, str(error), code="queue_full", retry_after_s=error.retry_after_s) from error
        except EngineGoneError as error:
            raise ApiError(503, str(error), code="engine_unavailable", retry_after_s=10) from error
        except RuntimeError as error:
            raise ApiError(429, str(error), code="queue_full", retry_after_s=1) from error

    async def updates(self) -> AsyncIterator[list[Update]]:
        """News until all answers have ended; an empty list where there is none for a while. Raises: ApiError."""
        while len(self.results) < len(self._readers):
            with self._failures():
                updates = self._updates(await self._events())
            yield updates

    async def _events(self) -> list[Event]:
        try:
            return await self._ticket.next(self._service.options.ping_s)
        except EngineGoneError as error:
            raise ApiError(503, str(error), code="engine_unavailable") from error

    def _updates(self, events: list[Event]) -> list[Update]:
        steps: dict[int, list[Step]] = {}
        ended: dict[int, Ended] = {}
        for event in events:
            if event.ended is not None:
                ended[event.index] = event.ended
            if event.step is not None:
                steps.setdefault(event.index, []).append(event.step)
        indices = sorted(steps.keys() | ended.keys())
        return [self._update(index, steps.get(index, []), ended.get(index)) for index in indices]

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except ApiError:
            self._failed = True
            raise

    def in_order(self) -> list[Finished]:
        """The answers, once all have ended."""
        return [self.results[index] for index in range(len(self._readers))]

    def _update(self, index: int, steps: list[Step], ended: Ended | None) -> Update:
        if ended is not None:
            self._ended[index] = ended
        reader = self._readers[index]
        self._time(index, len(steps))
        was_done = reader.done
        pieces = reader.feed(steps)
        if steps:
            self._reasons[index] = steps[-1].finish_reason
        if ended is None:
            if reader.done and not was_done:
                self._ticket.cancel(index)
            return Update(index, pieces, None)
        if ended.status != "finished" and not reader.done:
            raise self._failure(ended)
        rest, finished = reader.finish("length" if self._reasons.get(index) == "length" else "stop")
        self.results[index] = finished
        if finished.warnings:
            self._service.metrics.tool_call_parse_failure()
        if ended is not None and ended.budget_forced:
            self._service.metrics.budget_hit(self.plan.tier)
        return Update(index, pieces + rest, finished)

    def _time(self, index: int, count: int) -> None:
        if not count:
            return
        now_s, last_s = time.perf_counter(), self._last_token_s.get(index)
        if last_s is not None:
            for _ in range(count):
                self._service.metrics.token_time((now_s - last_s) / count)
        self._last_token_s[index] = now_s

    def _failure(self, ended: Ended) -> ApiError:
        if ended.status == "expired":
            limit = self._service.options.max_request_s
            return ApiError(504, f"the answer was not complete after {limit:g} s, this server's limit", code="timeout")
        if ended.status == "cancelled":
            return ApiError(503, "the answer was cancelled by the server", code="cancelled")
        return ApiError(500, f"the answer failed: {ended.failure}", code="generation_failed")

    # ---- Usage ------------------------------------------------------------------------------------------------------

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts; a prompt that several answers share counts once."""
        return sum(len(prompt) for prompt in {id(prompt): prompt for prompt in self.plan.prompts}.values())

    @property
    def num_cached_tokens(self) -> int:
        """Of those, how many were found in the prefix cache, as far as is known."""
        cached: dict[int, int] = {}
        for index, ended in self._ended.items():
            prompt = id(self.plan.prompts[index])
            cached[prompt] = max(cached.get(prompt, 0), ended.num_cached)
        return sum(cached.values())

    def usage(self, index: int | None = None) -> dict[str, Any]:
        """Tokens that were used so far, of one answer or of all."""
        readers = self._readers if index is None else [self._readers[index]]
        num_prompt = self.num_prompt_tokens if index is None else len(self.plan.prompts[index])
        num_generated = sum(len(reader.ids) for reader in readers)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": sum(r.num_reasoning_tokens for r in readers)},
        }
