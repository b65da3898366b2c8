"""An engine that says what it is told to: for tests of everything around it, and for measuring the server alone."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from maxmoe.chat.tokenizer import ByteTokenizer
from maxmoe.inference.answer import Step
from maxmoe.inference.request import check_request
from maxmoe.inference.sampling_params import SamplingParams
from maxmoe.inference.scheduler import QueueFullError

VOCAB_SIZE = 512
TOKENIZER = ByteTokenizer(VOCAB_SIZE)
END_ID = TOKENIZER.end_of_msg_id


def ids_of(text: str) -> list[int]:
    """Ids of text in which markers are markers."""
    return TOKENIZER.encode(text, allow_special=True)


def message(content: str, thinking: str = "", calls: str = "") -> list[int]:
    """What a model says after a prompt that has opened its thinking."""
    tools = f"<|open|>tools<|sep|>{calls}<|close|>tools<|sep|>" if calls else ""
    return ids_of(
        f"{thinking}<|close|>think<|sep|><|open|>response<|sep|>{content}<|close|>response<|sep|>{tools}"
        "<|close|>message<|sep|><|end_of_msg|>"
    )


def call(name: str, index: int, **arguments: str) -> str:
    """A tool call in the family's markup, with arguments that are strings."""
    body = "".join(
        f'<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>'
        for key, value in arguments.items()
    )
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{body}<|close|>call<|sep|>'


def varied(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """An answer that depends on prompt and seed, and ends by itself."""
    number = sum(i * token_id for i, token_id in enumerate(prompt)) + (params.seed or 0)
    words = " ".join(f"{number * (i + 3) % 9973:x}" for i in range(12 + number % 7))
    return message(f"answer {words} é🚀", thinking=f"thinking about {number}")


@dataclasses.dataclass(eq=False)
class StubRequest:
    """A request of the stub."""

    prompt: Sequence[int]
    params: SamplingParams
    script: list[int]
    num_tokens: int
    submitted_s: float
    expires_at_s: float | None
    cache_salt: str
    priority: int
    status: str = "waiting"
    failure: str | None = None
    num_cached: int = 0
    budget_forced: bool = False
    admitted_s: float | None = None
    first_token_s: float | None = None
    num_said: int = 0


class StubEngine:
    """Says `script(prompt, params)`, one token a step to each of `max_batch` requests.

    Attributes:
      requests: All that were submitted.
      fault: Raised by the next step.
    """

    def __init__(
        self,
        script: Callable[[Sequence[int], SamplingParams], list[int]] = varied,
        *,
        max_batch: int = 8,
        max_len: int = 4096,
        step_s: float = 0.0,
        max_waiting: int = 1024,
    ):
        self.script, self.max_batch, self.max_len, self.step_s = script, max_batch, max_len, step_s
        self.max_waiting = max_waiting
        self.requests: list[StubRequest] = []
        self.running: list[StubRequest] = []
        self.waiting: list[StubRequest] = []
        self.fault: Exception | None = None
        self.prefixes: Any = None
        self.grammars: Any = None
        self.metrics = SimpleNamespace(num_preemptions=0)
        self.warmed_up = False

    def warm_up(self, progress) -> None:
        progress("nothing", 0, 1)
        self.warmed_up = True

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def submit(self, prompt, params, *, priority=0, deadline=None, cache_salt="") -> StubRequest:
        config = SimpleNamespace(vocab_size=VOCAB_SIZE, max_len=self.max_len, bos_id=0)
        check_request(prompt, params, config, self.max_len)
        if len(self.waiting) >= self.max_waiting:
            raise QueueFullError("full")
        now_s = time.perf_counter()
        request = StubRequest(
            prompt=prompt,
            params=params,
            script=self.script(prompt, params),
            num_tokens=len(prompt) + params.max_tokens,
            submitted_s=now_s,
            expires_at_s=None if deadline is None else now_s + deadline,
            cache_salt=cache_salt,
            priority=priority,
        )
        self.requests.append(request)
        self.waiting.append(request)
        return request

    def cancel(self, request: StubRequest) -> None:
        if request.status in ("waiting", "running"):
            self._end(request, "cancelled")

    def step(self) -> list[tuple[StubRequest, Step]]:
        if self.fault is not None:
            raise self.fault
        if self.step_s:
            time.sleep(self.step_s)
        now_s = time.perf_counter()
        for request in [*self.waiting, *self.running]:
            if request.expires_at_s is not None and request.expires_at_s <= now_s:
                self._end(request, "expired")
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting.pop(0)
            request.status, request.admitted_s = "running", now_s
            self.running.append(request)
        return [(request, self._next(request, now_s)) for request in list(self.running)]

    def _next(self, request: StubRequest, now_s: float) -> Step:
        token_id = request.script[request.num_said]
        request.num_said += 1
        request.first_token_s = request.first_token_s or now_s
        reason = None
        if token_id == END_ID or token_id in request.params.stop_ids:
            reason = "stop"
        elif request.num_said == request.params.max_tokens:
            reason = "length"
        if reason is not None:
            self._end(request, "finished")
        top = tuple((i, -1.0 - i) for i in range(request.params.top_logprobs))
        return Step(token_id, -0.5, reason, top_logprobs=top)

    def _end(self, request: StubRequest, status: str) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        request.status = status
