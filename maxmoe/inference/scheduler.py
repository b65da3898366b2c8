"""Who runs: requests wait in a bounded queue and take slots by priority, without starving one another.

Host logic alone; it knows neither arrays nor tokens, and takes the time from its caller, so that the same calls give
the same decisions. One scheduling rule: the most urgent waiting request goes next, and nothing passes it. A request
that does not fit makes room by preemption where less urgent ones run, and else waits at the head of the queue, so that
large requests are not starved by small ones. A request that `max_overtakes` later ones have passed goes before all
others, and is not preempted any more, so that no priority starves either.
"""

import dataclasses
from typing import Generic, NamedTuple, TypeVar

MAX_WAITING = 1024
MAX_OVERTAKES = 64


class QueueFullError(RuntimeError):
    """The queue is full. Nothing is wrong with the request: submit it again later, or elsewhere."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Ticket:
    """What the scheduler knows about a request.

    Attributes:
      num_tokens: That it may come to hold: prompt and longest answer.
      priority: Lower is more urgent.
      expires_at_s: On the caller's clock; None for never.
      number: Place in the order of arrival.
      slot: The one it holds; None while it waits, and at the end.
      num_overtakes: Later requests that went before this one.
      num_preemptions: How often it has lost its slot.
    """

    num_tokens: int
    priority: int = 0
    expires_at_s: float | None = None
    number: int = dataclasses.field(default=-1, init=False)
    slot: int | None = dataclasses.field(default=None, init=False)
    num_overtakes: int = dataclasses.field(default=0, init=False)
    num_preemptions: int = dataclasses.field(default=0, init=False)


T = TypeVar("T", bound=Ticket)


class Decision(NamedTuple, Generic[T]):
    """Who lost a slot, and who got one, in that order."""

    preempted: list[T]
    admitted: list[T]


class Scheduler(Generic[T]):
    """Gives slots to requests.

    Attributes:
      waiting: In the order of arrival; preempted requests keep theirs.
      running: By slot.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_tokens: int | None = None,
        max_waiting: int | None = MAX_WAITING,
        max_overtakes: int = MAX_OVERTAKES,
    ):
        """Starts empty.

        Args:
          max_tokens: That all running requests may come to hold together; None where slots are the only limit.
          max_waiting: Requests that may wait; None for any number. Preempted ones always may.
          max_overtakes: Later requests that may go before one.
        """
        for name, value, least in (
            ("num_slots", num_slots, 1),
            ("max_tokens", max_tokens, 1),
            ("max_waiting", max_waiting, 1),
            ("max_overtakes", max_overtakes, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"Scheduler: {name}={value} must be at least {least}")
        self.num_slots, self.max_tokens = num_slots, max_tokens
        self.max_waiting, self.max_overtakes = max_waiting, max_overtakes
        self.waiting: list[T] = []
        self.running: dict[int, T] = {}
        self._num_arrived = 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    def submit(self, ticket: T) -> None:
        """Puts a request into the queue.

        Raises:
          QueueFullError: `max_waiting` requests wait already.
          ValueError: It holds more tokens than ever fit.
        """
        if self.max_tokens is not None and ticket.num_tokens > self.max_tokens:
            raise ValueError(
                f"a request of {ticket.num_tokens} tokens, prompt and longest answer together, never fits into "
                f"max_tokens={self.max_tokens} of all running requests; shorten it or raise the limit"
            )
        if self.max_waiting is not None and len(self.waiting) >= self.max_waiting:
            raise QueueFullError(
                f"{len(self.waiting)} requests wait already, and max_waiting is {self.max_waiting}; submit again when "
                "some have ended"
            )
        ticket.number = self._num_arrived
        self._num_arrived += 1
        self.waiting.append(ticket)

    def release(self, ticket: T) -> None:
        """Takes a request out, wherever it is; its slot is free at once."""
        if ticket.slot is None:
            self.waiting.remove(ticket)
        else:
            del self.running[ticket.slot]
            ticket.slot = None

    def preempt(self, ticket: T) -> None:
        """Takes the slot of a running request, which waits again, at its old place in the order of arrival."""
        self.release(ticket)
        ticket.num_preemptions += 1
        place = sum(other.number < ticket.number for other in self.waiting)
        self.waiting.insert(place, ticket)

    def expired(self, now_s: float) -> list[T]:
        """Requests whose time is over; they stay until they are released."""
        every = [*self.waiting, *self.running.values()]
        return [ticket for ticket in every if ticket.expires_at_s is not None and ticket.expires_at_s <= now_s]

    def schedule(self) -> Decision[T]:
        """Fills slots. Nobody who is admitted here is preempted here, for candidates come in the order of urgency."""
        decision = Decision[T]([], [])
        while self.waiting:
            candidate = self._most_urgent()
            victims = self._make_room(candidate)
            if victims is None:
                break
            for victim in victims:
                self.preempt(victim)
            decision.preempted.extend(victims)
            self._admit(candidate)
            decision.admitted.append(candidate)
        return decision

    def _is_overdue(self, ticket: T) -> bool:
        return ticket.num_overtakes >= self.max_overtakes

    def _most_urgent(self) -> T:
        def urgency(ticket: T):
            overdue = self._is_overdue(ticket)
            return not overdue, 0 if overdue else ticket.priority, ticket.number

        return min(self.waiting, key=urgency)

    def _make_room(self, candidate: T) -> list[T] | None:
        """Whom to preempt, the least urgent first, so that a request fits; None if nobody's place would do."""
        running = list(self.running.values())
        preemptable = [t for t in running if t.priority > candidate.priority and not self._is_overdue(t)]
        preemptable.sort(key=lambda t: (-t.priority, -t.number))
        victims: list[T] = []
        num_tokens = sum(t.num_tokens for t in running) + candidate.num_tokens
        while len(running) - len(victims) >= self.num_slots or not (
            self.max_tokens is None or num_tokens <= self.max_tokens
        ):
            if len(victims) == len(preemptable):
                return None
            victims.append(preemptable[len(victims)])
            num_tokens -= victims[-1].num_tokens
        return victims

    def _admit(self, ticket: T) -> None:
        self.waiting.remove(ticket)
        for other in self.waiting:
            other.num_overtakes += other.number < ticket.number
        ticket.slot = next(slot for slot in range(self.num_slots) if slot not in self.running)
        self.running[ticket.slot] = ticket
