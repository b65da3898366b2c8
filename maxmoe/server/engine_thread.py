"""One thread owns the engine; the loop of the server hands it prompts and gets tokens, and neither waits for the other.

Commands go over a thread-safe queue, and the thread looks at it between two steps. What a step gave comes back in one
call into the loop, whoever it is for, so that 64 streams wake the loop once per step. A fault in a step ends every
answer with an error, and the thread: an engine whose state is in doubt says nothing more.
"""

import asyncio
import dataclasses
import queue
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from absl import logging

from maxmoe.inference.answer import Step
from maxmoe.server.serving_engine import EngineRequest, ServingEngine
from maxmoe.server.ticket import Ended, EngineGoneError, Event, Job, Ticket

_MAX_RETRY_AFTER_S = 120
_STOP_S = 10.0
_WEIGHT_OF_LAST = 0.1  # in the mean of how long requests take


class BusyError(RuntimeError):
    """No room in the queue. `retry_after_s` is a guess from how long requests took."""

    def __init__(self, message: str, retry_after_s: int):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class _Cancel(NamedTuple):
    ticket: Ticket
    index: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """How much there is to do.

    Attributes:
      num_running, num_waiting: Requests.
      usage: The share of the engine's tokens that running requests have set aside.
      fragmentation: The share of the slots of running requests that none of them has set aside; 0 without any.
      num_queried_tokens, num_hit_tokens: Of prompts that the prefix cache was asked for, and of those found.
      num_preemptions: Since the engine began, as are the tokens.
      device_bytes: In use on this process's devices; None where they do not say, as a CPU does not.
    """

    num_running: int
    num_waiting: int
    usage: float
    fragmentation: float
    num_queried_tokens: int
    num_hit_tokens: int
    num_preemptions: int
    device_bytes: int | None


class EngineThread:
    """The thread. Its methods are for the loop that it was started from.

    Attributes:
      fault: What has ended it; None while all is well.
    """

    def __init__(self, engine: ServingEngine, max_waiting: int = 256, warm_up: bool = True):
        """Starts nothing yet.

        Args:
          max_waiting: Requests that may wait for one of the engine's `max_batch` slots; more are refused.
          warm_up: Whether to compile everything before the first request.
        """
        if max_waiting < 1:
            raise ValueError(f"max_waiting={max_waiting}: must be at least 1")
        self.engine, self.max_waiting = engine, max_waiting
        self.fault: BaseException | None = None
        self._absence: str | None = "the engine is warming up"  # why it takes no requests
        self.loop: asyncio.AbstractEventLoop
        self._warms_up = warm_up
        self._commands: queue.SimpleQueue[Ticket | _Cancel | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._live: dict[Any, tuple[Ticket, int]] = {}  # by the engine's request; the thread's
        self._num_live = 0  # as the loop knows
        self._num_preemptions = 0
        self._mean_request_s = 1.0

    def start(self) -> None:
        """Begins."""
        self.loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends every answer and the thread, which finishes its step first; a compilation is not waited for."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, _STOP_S)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs and nothing has gone wrong in it."""
        return self._thread.is_alive() and self.fault is None

    @property
    def absence(self) -> str | None:
        """Why it takes no requests; None where it does."""
        return self._absence

    @property
    def num_live(self) -> int:
        """Requests that wait or run."""
        return self._num_live

    def load(self) -> Load:
        """How much there is to do, as it looks from here."""
        requests = list(self._live)
        running = [request for request in requests if request.status == "running"]
        held = sum(request.num_tokens for request in running)
        stats = None if self.engine.prefixes is None else self.engine.prefixes.stats
        return Load(
            num_running=len(running),
            num_waiting=len(requests) - len(running),
            usage=held / (self.engine.max_batch * self.engine.max_len),
            fragmentation=1 - held / (len(running) * self.engine.max_len) if running else 0.0,
            num_queried_tokens=0 if stats is None else stats.num_queried_tokens,
            num_hit_tokens=0 if stats is None else stats.num_hit_tokens,
            num_preemptions=self._num_preemptions,
            device_bytes=_device_bytes(),
        )

    def submit(self, jobs: Sequence[Job]) -> Ticket:
        """Hands prompts to the engine, all of them or none.

        Raises:
          BusyError: No room for so many.
          EngineGoneError: It takes no requests; see `absence`.
        """
        if self._absence is not None:
            raise EngineGoneError(self._absence)
        limit = self.engine.max_batch + self.max_waiting
        if self._num_live + len(jobs) > limit:
            raise BusyError(
                f"{self._num_live} requests run or wait, {len(jobs)} more were asked for, and {limit} is the limit",
                self._retry_after_s(),
            )
        self._num_live += len(jobs)
        ticket = Ticket(jobs, self.loop, self._put_cancel)
        self._commands.put(ticket)
        return ticket

    def _put_cancel(self, ticket: Ticket, index: int | None) -> None:
        self._commands.put(_Cancel(ticket, index))

    def _retry_after_s(self) -> int:
        waves = max(self._num_live / self.engine.max_batch, 1.0)
        return min(max(round(self._mean_request_s * waves), 1), _MAX_RETRY_AFTER_S)

    # ---- In the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._warms_up:
                self.engine.warm_up(_tell_progress)
            self._absence = None
            logging.info("ready for requests")
            while self._take_commands():
                if self.engine.has_work:
                    self._hand_over(self.engine.step())
                    self._num_preemptions = self.engine.metrics.num_preemptions
        except BaseException as error:  # whatever it is, nobody shall wait for an engine that is gone
            self.fault = error
            logging.error("the engine has failed, and so do all requests: %r", error)
            self._end_all(f"the engine has failed ({error!r:.200}); the server must be restarted")
            raise

    def _take_commands(self) -> bool:
        """Takes what is there, and waits for something where there is nothing else to do. False to end."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                self._end_all("the server is shutting down")
                return False
            if isinstance(command, Ticket):
                self._submit(command)
            else:
                self._cancel(command)

    def _submit(self, ticket: Ticket) -> None:
        taken: list[EngineRequest] = []
        refusal = None
        for job in ticket.jobs:
            try:
                taken.append(
                    self.engine.submit(
                        job.prompt,
                        job.params,
                        priority=job.priority,
                        deadline=job.deadline,
                        cache_salt=job.cache_salt,
                    )
                )
            except (ValueError, RuntimeError) as error:  # RuntimeError: the engine's own queue is full
                refusal = error
                break
        if refusal is not None:
            for request in taken:
                self.engine.cancel(request)
            self._call(self._refuse, ticket, refusal)
            return
        self._live |= {request: (ticket, index) for index, request in enumerate(taken)}
        self._call(ticket.set_accepted, None)

    def _cancel(self, command: _Cancel) -> None:
        for request, (ticket, index) in list(self._live.items()):
            if ticket is command.ticket and command.index in (None, index):
                self.engine.cancel(request)
        self._hand_over([])

    def _hand_over(self, steps: list[tuple[EngineRequest, Step]]) -> None:
        """Sends the loop what a step gave, and who has ended."""
        news: dict[Ticket, list[Event]] = {}
        for request, step in steps:
            if request in self._live:
                ticket, index = self._live[request]
                news.setdefault(ticket, []).append(Event(index, step, None))
        for request in [request for request in self._live if request.status not in ("waiting", "running")]:
            ticket, index = self._live.pop(request)
            news.setdefault(ticket, []).append(Event(index, None, _ended(request)))
        if news:
            self._call(self._deliver, news)

    def _end_all(self, why: str) -> None:
        self._absence = why
        tickets = {ticket for ticket, _ in self._live.values()}
        self._live.clear()
        self._call(self._fail, tickets, why)

    def _call(self, function: Any, *arguments: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody listens any more
            logging.info("the server has ended before its engine")

    # ---- In the loop ------------------------------------------------------------------------------------------------

    def _deliver(self, news: dict[Ticket, list[Event]]) -> None:
        for ticket, events in news.items():
            num_ended = sum(event.ended is not None for event in events)
            ticket.num_live -= num_ended
            self._num_live -= num_ended
            ticket.add(events)

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        self._num_live -= ticket.num_live
        ticket.num_live = 0
        ticket.set_accepted(error)

    def _fail(self, tickets: set[Ticket], why: str) -> None:
        while not self._commands.empty():  # handed over too late
            command = self._commands.get_nowait()
            tickets |= {command} if isinstance(command, Ticket) else set()
        for ticket in tickets:
            self._num_live -= ticket.num_live
            ticket.num_live = 0
            ticket.fail(EngineGoneError(why))

    def note_duration(self, seconds: float) -> None:
        """Tells how long a request took, from its submission, for guesses at when there will be room."""
        self._mean_request_s += _WEIGHT_OF_LAST * (seconds - self._mean_request_s)


def _tell_progress(program: Any, num_ready: int, num_programs: int) -> None:
    logging.info("compiling %d of %d: %s", num_ready + 1, num_programs, program)


def _device_bytes() -> int | None:
    told = [device.memory_stats() for device in jax.local_devices()]
    return sum(stats["bytes_in_use"] for stats in told) if all(told) else None


def _ended(request: EngineRequest) -> Ended:
    def since(moment: float | None) -> float | None:
        return None if moment is None else moment - request.submitted_s

    return Ended(
        status=request.status,
        failure=request.failure,
        num_cached=request.num_cached,
        budget_forced=request.budget_forced,
        queue_s=since(request.admitted_s),
        first_token_s=since(request.first_token_s),
    )
