"""Jobs that were handed to the engine's thread together, and the news of their answers, for one task of the loop."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from maxmoe.inference.answer import Step
from maxmoe.inference.sampling_params import SamplingParams


class Job(NamedTuple):
    """One prompt to answer; `deadline` in seconds from now."""

    prompt: Sequence[int]
    params: SamplingParams
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""


class Ended(NamedTuple):
    """How an answer ended, times in seconds from its submission; see `EngineRequest`."""

    status: str
    failure: str | None
    num_cached: int
    budget_forced: bool
    queue_s: float | None
    first_token_s: float | None


class Event(NamedTuple):
    """News of one answer: its index among the jobs of the ticket, and a step, or how it ended."""

    index: int
    step: Step | None
    ended: Ended | None


class EngineGoneError(RuntimeError):
    """The thread does not take requests: not yet, or not any more."""


class Ticket:
    """The answers to jobs that were submitted together. A context manager: leaving it ends what is still going on."""

    def __init__(
        self,
        jobs: Sequence[Job],
        loop: asyncio.AbstractEventLoop,
        on_cancel: Callable[["Ticket", int | None], None],
    ):
        """Made by `EngineThread.submit`, which is told by `on_cancel` what `cancel` is asked for."""
        self.jobs = jobs
        self.num_live = len(jobs)
        self._loop, self._on_cancel = loop, on_cancel
        self._events: list[Event] = []
        self._accepted = loop.create_future()
        self._waiter: asyncio.Future | None = None
        self._failure: Exception | None = None

    async def accepted(self) -> None:
        """Waits until the engine has taken all jobs. Raises what the engine raised: ValueError for what is wrong."""
        await asyncio.shield(self._accepted)

    async def next(self, timeout_s: float) -> list[Event]:
        """What is new since the last call, at least one event; none after `timeout_s`. Raises: EngineGoneError."""
        if not self._events and self._failure is None:
            self._waiter = self._loop.create_future()
            await asyncio.wait((self._waiter,), timeout=timeout_s)
            self._waiter = None
        if self._failure is not None:
            raise self._failure
        events, self._events = self._events, []
        return events

    def cancel(self, index: int | None = None) -> None:
        """Ends one answer, or all; what has ended stays as it is."""
        if self.num_live:
            self._on_cancel(self, index)

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()
        if self._accepted.done() and not self._accepted.cancelled():
            self._accepted.exception()  # seen
        else:
            self._accepted.cancel()

    # Called in the loop, by the thread's calls into it.

    def set_accepted(self, error: Exception | None) -> None:
        """The engine has taken the jobs, or none of them."""
        if self._accepted.done():
            return
        if error is None:
            self._accepted.set_result(None)
        else:
            self._accepted.set_exception(error)

    def add(self, events: list[Event]) -> None:
        """New events."""
        self._events += events
        self._wake()

    def fail(self, error: Exception) -> None:
        """There will be no more."""
        self._failure = error
        self.set_accepted(error)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
