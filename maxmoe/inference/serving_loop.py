"""Continuous batching: requests come and go row by row while the other rows of the batch go on.

One iteration admits what the scheduler says, prefills at most two chunks of tokens, then takes one token of every row
that has read its prompt. Each request owns one slot, a row of the batched cache; a request that ends leaves it at once.

What a request gets does not depend on its neighbours:
- A row's chunks end at multiples of the chunk's length, and each runs alone, in a program that no other row is part of:
  the same chunk gives the same bits, whoever else is there, and also after a prefix that was found at such a multiple.
- Decoding runs all rows in one program of one shape. Rows that do not take part, because they are free or still read
  their prompt, keep their state, are routed to no expert and write nowhere. Every op works row by row, except that
  the experts' products gather the tokens of all rows; each token's product is its own there, too. So the same bits
  come out wherever a backend's products round a row independently of its place among others, as XLA's do on the CPU
  for one shape; elsewhere, and between batches of different shapes, sums may be rounded differently, which can only
  tip a tie.
- A slot's new tenant starts from zero KDA and conv state and length 0; what lies beyond a row's length is never read.

The host stays one step behind: a token is on its way to the next step before the host looks at it, and what it needs
for sampling stays on the device. So a stop id is noticed while the step after it runs, whose result is dropped.

With drafts the host is in step, since it looks up in what has been said what may come next. Each iteration then takes
the last token of every row and a draft behind it through the model at once. Answers stay the same; whether a token is
read alone or in a window depends on the drafts of all rows, and rounds differently, which can only tip a tie.
"""

import dataclasses
import time
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxmoe.inference.answer import Step
from maxmoe.inference.answer_error import AnswerError
from maxmoe.inference.drafting import Drafts
from maxmoe.inference.interrupts import interrupts_wait
from maxmoe.inference.next_token import NOTHING_SAID, Chosen, Progress, Rows, lay_out, next_tokens
from maxmoe.inference.prefix_cache import PrefixCache
from maxmoe.inference.request import Request, Status
from maxmoe.inference.sampling_params import SamplingParams
from maxmoe.inference.scheduler import Scheduler
from maxmoe.inference.steps import clear_row_in_place, on_mesh_of
from maxmoe.inference.verification import Verdict, verify_in_place
from maxmoe.model.cache import Cache

if TYPE_CHECKING:
    from maxmoe.inference.engine import Engine

_UNUSED = SamplingParams(temperature=0.0)  # of slots without a request
_NO_PROMPT = np.zeros(0, np.int32)


@dataclasses.dataclass
class ServingMetrics:
    """Counts since the loop was made.

    Attributes:
      num_prompt_tokens: Prefilled; again for each preemption.
      num_generated_tokens: Stop ids included.
      num_preemptions: Requests that lost their slot.
      num_ended: By status.
      waited_s: Seconds that the host waited for tokens from the device; the rest of a step is its own work.
    """

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_ended: dict[Status, int] = dataclasses.field(default_factory=dict)
    waited_s: float = 0.0


@dataclasses.dataclass
class _Unread:
    """What a request still has to prefill: `ids` from `num_read` on."""

    ids: Int[np.ndarray, "T"]
    num_read: int

    @property
    def num_left(self) -> int:
        """Tokens."""
        return self.ids.size - self.num_read

    def next_count(self, chunk: int) -> int:
        """Tokens up to the next multiple of a chunk."""
        return min(self.num_left, chunk - self.num_read % chunk)

    def next_ids(self, chunk: int) -> Int[np.ndarray, "t"]:
        """The tokens up to there."""
        return self.ids[self.num_read :][: self.next_count(chunk)]


class ServingLoop:
    """A batch whose rows are slots.

    Attributes:
      cache: State of all rows, of tokens that the host has seen or that are on their way to it.
      logits: After the last token of each row that has read its prompt; None until one of them has.
      on_way: The tokens that the host is fetching or has fetched last, and what is told about them.
    """

    def __init__(
        self,
        engine: "Engine",
        cache: Cache,
        scheduler: Scheduler[Request],
        logits: Float[Array, "rows V"] | None = None,
        prefixes: PrefixCache | None = None,
        drafts: Drafts | None = None,
    ):
        """Takes over the cache, which has a row per slot of the scheduler.

        Args:
          logits: After the last token of a single row, where the cache holds one already.
          prefixes: Where prompts are looked up, and kept; None to read every prompt whole.
          drafts: Proposes what rows may say next; None to take one token at a time.
        """
        self._engine, self.cache, self.scheduler, self.logits = engine, cache, scheduler, logits
        self.prefixes, self.drafts, self.metrics = prefixes, drafts, ServingMetrics()
        self.on_way: Chosen | Verdict | None = None
        self._awaited: list[Request] = []  # whose next tokens are on the way
        self._unread: dict[int, _Unread] = {}  # by slot
        self._unkept: set[int] = set()  # slots whose last token is not in the cache; for drafts
        self._layout: tuple[Rows, Progress] | None = None  # on the device; None where it is out of date
        if self.num_slots > 1 and not engine.prefills_together:
            self.logits = np.zeros((self.num_slots, engine.model.config.vocab_size), np.float32)

    @property
    def num_slots(self) -> int:
        """Rows."""
        return self.cache.batch_size

    @property
    def is_reading(self) -> bool:
        """Whether some request that has a slot has not read its whole prompt."""
        return bool(self._unread)

    def submit(self, request: Request) -> None:
        """Queues a request; raises what `Scheduler.submit` does."""
        self.scheduler.submit(request)

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it is. One that has ended already stays as it is."""
        if not request.ended:
            self._end(request, "cancelled")

    def preempt(self, request: Request) -> None:
        """Takes a running request's slot. It waits again, and what it has said is computed anew, not said again."""
        self.scheduler.preempt(request)
        self._vacate(request)

    def step(self) -> list[tuple[Request, Step]]:
        """One iteration. Returns new tokens, each with its request; the last of an answer carries the finish reason."""
        if self._awaited:  # an interrupt came before the host had them
            return self._collect()
        for request in self.scheduler.expired(time.perf_counter()):
            self._end(request, "expired")
        preempted, admitted = self.scheduler.schedule()
        for request in preempted:
            self._vacate(request)
        for request in admitted:
            self._claim(request)
        self._prefill()
        if self._unread and self._engine.prefills_together:
            return []
        return self._decode()

    def catch_up(self, request: Request) -> None:
        """Brings the host and the state of a loop's only request to the same token, wherever an interrupt came.

        Raises: AnswerError for a token that is none.
        """
        if self._awaited:
            self._collect()
        if request.failure is not None:
            raise AnswerError(request.failure, [None])
        if int(self.cache.lengths[0]) < request.prompt.size + len(request.steps):
            with interrupts_wait():
                self._advance(np.ones(1, bool), np.array([request.steps[-1].token_id], np.int32))

    # ---- Slots ------------------------------------------------------------------------------------------------------

    def _claim(self, request: Request) -> None:
        request.status = "running"
        if request.admitted_s is None:
            request.admitted_s = time.perf_counter()
        slot, history = request.slot, request.history()
        if request.num_cached == 0:
            with interrupts_wait():
                self.cache = clear_row_in_place(self._engine.params, self.cache, slot)
                if self.prefixes is not None:
                    match = self.prefixes.match(request.cache_salt, history)
                    if match.num_tokens:
                        self.cache = self.prefixes.restore(match, self.cache, slot)
                        request.num_cached = match.num_tokens
        self._unread.pop(slot, None)
        self._unkept.discard(slot)
        if history.size > request.num_cached:
            self._unread[slot] = _Unread(history, request.num_cached)
        self._layout = None

    def _vacate(self, request: Request) -> None:
        """After the scheduler has taken a slot away."""
        request.status, request.num_cached = "waiting", 0
        self.metrics.num_preemptions += 1
        self._forget_unread()

    def _end(self, request: Request, status: Status) -> None:
        self.scheduler.release(request)
        self._forget_unread()
        self._layout = None  # a row that nobody looks at shall not make the others' sampling slower
        request.end(status, time.perf_counter())
        self.metrics.num_ended[status] = self.metrics.num_ended.get(status, 0) + 1

    def _forget_unread(self) -> None:
        """Drops what requests that have lost their slots have not read."""
        self._unread = {slot: ids for slot, ids in self._unread.items() if slot in self.scheduler.running}

    # ---- Steps ------------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Reads on: a chunk of the earliest request, and about one chunk's tokens of those that have the least to read.

        So an iteration is bounded, a prompt of any length goes on at each, and a short one does not wait for its end.
        """
        if not self._unread:
            return
        engine = self._engine
        chunk = engine.prefill_widths[-1]
        if engine.prefills_together:
            self._prefill_rows(chunk)
            return
        earliest, *others = sorted(self._unread, key=lambda slot: self.scheduler.running[slot].number)
        self._prefill_slot(earliest, engine.padded_chunk(self._unread[earliest].next_ids(chunk)))
        room = chunk
        for slot in sorted(others, key=lambda slot: self._unread[slot].num_left):
            ids = engine.padded_chunk(self._unread[slot].next_ids(chunk))
            if ids.size > room:
                return
            room -= ids.size
            self._prefill_slot(slot, ids)

    def _prefill_slot(self, slot: int, ids: np.ndarray) -> None:
        count = self._unread[slot].next_count(self._engine.prefill_widths[-1])
        with interrupts_wait():
            logits, self.cache = self._engine.prefill_slot(ids[None], self.cache, count, slot)
            if self._read(slot, count):
                self.logits = logits if self.num_slots == 1 else self._put_logits(logits, slot)

    def _prefill_rows(self, chunk: int) -> None:
        """A chunk of every row that has not read its prompt, in one call."""
        counts = np.zeros(self.num_slots, np.int32)
        for slot, unread in self._unread.items():
            counts[slot] = unread.next_count(chunk)
        width = self._engine.padded_chunk(np.zeros(counts.max(), np.int32)).size
        ids = np.zeros((self.num_slots, width), np.int32)
        for slot, unread in self._unread.items():
            ids[slot, : counts[slot]] = unread.next_ids(chunk)
        with interrupts_wait():
            logits, self.cache = self._engine.prefill_chunk(ids, self.cache, counts)
            for slot in list(self._unread):
                self._read(slot, counts[slot])
            self.logits = logits if self.logits is None else jnp.where((counts > 0)[:, None], logits, self.logits)

    def _read(self, slot: int, count: int) -> bool:
        """Notes that tokens have been prefilled. Returns whether they were the slot's last ones."""
        self.metrics.num_prompt_tokens += int(count)
        unread = self._unread[slot]
        unread.num_read += int(count)
        if self.prefixes is not None:
            salt = self.scheduler.running[slot].cache_salt
            self.prefixes.insert(salt, unread.ids[: unread.num_read], self.cache, slot)
        if unread.num_read < unread.ids.size:
            return False
        del self._unread[slot]
        return True

    def _put_logits(self, logits, slot):
        with on_mesh_of(self._engine.params):
            return _put_logits(self.logits, logits, np.int32(slot))

    def _decode(self) -> list[tuple[Request, Step]]:
        ready = [request for slot, request in self.scheduler.running.items() if slot not in self._unread]
        if not ready:
            return []
        if self.drafts is not None:
            return self._decode_with_drafts(ready)
        with interrupts_wait():
            self._choose(ready)
            if self._engine.runs_ahead:
                going = [r for r in ready if len(r.steps) + 1 < r.params.max_tokens]
                self._advance(self._mask(going), self.on_way.tokens)
        return self._collect()

    def _decode_with_drafts(self, ready: list[Request]) -> list[tuple[Request, Step]]:
        """The first token of rows that have just read their prompt, then of every row as many as its draft allows."""
        new = []
        if first := [request for request in ready if request.slot not in self._unkept]:
            with interrupts_wait():
                self._choose(first)
            new = self._collect()
        going = [request for request in ready if not request.ended]
        if not going:
            return new
        window, num_drafted = self.drafts.windows([(r.slot, r) for r in going], self.num_slots)
        with interrupts_wait():
            if num_drafted.any():
                self._verify(going, window, num_drafted)
            else:
                self._advance(self._mask(going), window[:, 0])
                self._choose(going)
        return new + self._collect()

    def _collect(self) -> list[tuple[Request, Step]]:
        """Hands over the tokens that are on the way, to those who still have their slots."""
        begin_s = time.perf_counter()
        arrived = jax.device_get(self.on_way)
        awaited, self._awaited = self._awaited, []
        now_s, new = time.perf_counter(), []
        self.metrics.waited_s += now_s - begin_s
        for request in awaited:
            slot = request.slot
            if self.scheduler.running.get(slot) is not request:
                continue
            self._unkept.add(slot)
            if isinstance(arrived, Verdict):
                self.drafts.stats.num_accepted += int(arrived.num_taken[slot]) - 1
            for place in _places(arrived, slot):
                step = request.take(arrived.chosen if isinstance(arrived, Verdict) else arrived, place, now_s)
                if step is not None:
                    new.append((request, step))
                if step is None or step.finish_reason is not None:
                    self._end(request, "failed" if step is None else "finished")
                    break
        self.metrics.num_generated_tokens += len(new)
        if self.drafts is None and not self._engine.runs_ahead:
            going = [request for request in awaited if self.scheduler.running.get(request.slot) is request]
            self._advance(self._mask(going), self.on_way.tokens)
        return new

    def _choose(self, requests: list[Request]) -> None:
        """Sends the next token of these requests on its way."""
        rows, progress = self._laid_out()
        self.on_way, progress = next_tokens(self.logits, self._constrain(rows), progress, active=self._mask(requests))
        self._layout, self._awaited = (rows, progress), requests

    def _verify(self, requests: list[Request], window: np.ndarray, num_drafted: np.ndarray) -> None:
        """Sends the next tokens of these requests on their way, and appends all but the last of each to its row."""
        (rows, progress), engine = self._laid_out(), self._engine
        active = self._mask(requests)
        self.drafts.stats.num_drafted += int(num_drafted.sum())
        args = window, num_drafted, self.cache, self._constrain(rows), progress, active
        self.on_way, self.cache, progress = verify_in_place(engine.model, engine.params, *args)
        self._layout, self._awaited = (rows, progress), requests

    def _laid_out(self) -> tuple[Rows, Progress]:
        if self._layout is None:
            self._layout = jax.device_put(self._lay_out())
        return self._layout

    def _constrain(self, rows: Rows) -> Rows:
        """Rows with what the grammars of requests allow next."""
        constrained = [request for request in self.scheduler.running.values() if request.is_constrained]
        if not constrained:
            return rows
        allowed = np.full(rows.extras.allowed.shape, 0xFFFFFFFF, np.uint32)
        for request in constrained:
            allowed[request.slot] = request.matcher.words
        return rows._replace(extras=rows.extras._replace(allowed=allowed))

    def _lay_out(self) -> tuple[Rows, Progress]:
        """What each slot's request asks for, and where its answer stands; the host has seen every token by now."""
        requests = [self.scheduler.running.get(slot) for slot in range(self.num_slots)]
        return lay_out(
            params=[_UNUSED if r is None else r.params for r in requests],
            prompts=[_NO_PROMPT if r is None else r.prompt for r in requests],
            seeds=[0 if r is None else r.seed for r in requests],
            stop_ids=[frozenset() if r is None else r.stop_ids for r in requests],
            vocab_size=self._engine.model.config.vocab_size,
            markers=self._engine.thinking,
            said=[NOTHING_SAID if r is None else r.said() for r in requests],
        )

    def _mask(self, requests: list[Request]) -> np.ndarray:
        """True in the slots of these requests."""
        mask = np.zeros(self.num_slots, bool)
        mask[[request.slot for request in requests]] = True
        return mask

    def _advance(self, active: np.ndarray, tokens: Int[Array, "rows"]) -> None:
        """Appends a token to each active row."""
        if not active.any():
            return
        with interrupts_wait():
            self.logits, self.cache = self._engine.decode_token(tokens, self.cache, active)


def _places(arrived: Chosen | Verdict, slot: int) -> list[tuple[int, ...]]:
    """Where the tokens of a slot stand among those that arrived."""
    if isinstance(arrived, Verdict):
        return [(slot, place) for place in range(arrived.num_taken[slot])]
    return [(slot,)]


@jax.jit
def _put_logits(logits, new, slot):
    return jax.lax.dynamic_update_slice_in_dim(logits, new, slot, 0)
