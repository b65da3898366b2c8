"""What the server needs of an engine. `inference.engine.Engine` is one; tests have another."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from maxmoe.inference.answer import Step
from maxmoe.inference.sampling_params import SamplingParams


class EngineRequest(Protocol):
    """A request that the engine has taken.

    Attributes:
      status: "waiting" and "running" until it ends.
      failure: What is wrong, with status "failed".
      num_cached: Tokens of the prompt whose state was there already.
      budget_forced: Whether its thinking was ended by the budget.
      num_tokens: That it may come to hold, prompt and longest answer.
      submitted_s, admitted_s, first_token_s: On the clock of `time.perf_counter`; None until they come.
    """

    num_tokens: int
    status: str
    failure: str | None
    num_cached: int
    budget_forced: bool
    submitted_s: float
    admitted_s: float | None
    first_token_s: float | None


class ServingEngine(Protocol):
    """The engine; one thread uses it.

    Attributes:
      prefixes: The prefix cache; None without one.
      grammars: For answers that must match one; None where none can be asked for.
      metrics: With `num_preemptions`; for the thread alone.
    """

    max_len: int
    max_batch: int
    prefixes: Any
    grammars: Any
    metrics: Any

    def submit(self, prompt: Sequence[int], params: SamplingParams, **settings: Any) -> EngineRequest:
        """Queues a prompt; settings are `priority`, `deadline` in seconds from now, and `cache_salt`."""

    def step(self) -> list[tuple[EngineRequest, Step]]:
        """One iteration."""

    def cancel(self, request: EngineRequest) -> None:
        """Ends a request."""

    def warm_up(self, progress: Callable[[Any, int, int], None]) -> None:
        """Compiles what serving will need; before each program it tells which, how many are ready, and of how many."""

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
