"""One answer on its way, whose state can be taken at any time, also after Ctrl-C.

A step gives the memory of the old state to the new one. An interrupt in the middle would leave neither, so it waits.
"""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jaxtyping import Array, Float

from maxmoe.checkpoint.session import Session
from maxmoe.inference.answer import Answer, InvalidLogitsError, Step
from maxmoe.inference.next_token import Chosen
from maxmoe.inference.sampling import RowSettings
from maxmoe.model.cache import Cache

_DRAWN_WITH = (*RowSettings._fields, "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclasses.dataclass
class BatchState:
    """Where a batch stands on the device: after the tokens that the cache holds, whether the host has seen them or not.

    Attributes:
      logits: After each row's last token; None until the prompts are read.
      on_way: The tokens that the host is fetching or has fetched last, with their log-probabilities.
    """

    cache: Cache
    logits: Float[Array, "rows V"] | None = None
    on_way: Chosen | None = None


class Run:
    """One answer on its way: an iterator of its steps, whose state can be taken at any time.

    Attributes:
      steps: The steps so far. After an interrupt, such as Ctrl-C, `session` may add the one that was on its way.
    """

    def __init__(
        self,
        batches: Iterator[list[Step | None]],
        answer: Answer,
        state: BatchState,
        decode_token: Callable[..., tuple[Array, Cache]],
    ):
        """Made by an engine: from the steps of a batch of one, and what keeps up to date beside it."""
        self._batches, self._answer, self._state, self._decode_token = batches, answer, state, decode_token
        self.steps: list[Step] = answer.steps

    def __iter__(self) -> "Run":
        return self

    def __next__(self) -> Step:
        return self._valid(next(self._batches)[0])

    def _valid(self, step: Step | None) -> Step:
        if step is None:
            raise InvalidLogitsError(self._answer.failure, [None])
        return step

    def finish_text(self) -> str:
        """What an interrupted run holds back of its text, since more tokens would have to tell whether to stop."""
        return "" if self._answer.text is None or self._answer.finished else self._answer.text.finish()

    def session(self) -> Session:
        """Ends the run and hands over its state: that of the prompt and of all `steps`, a stop id included.

        To go on, give it to `Engine.resume`.

        Raises:
          RuntimeError: Taken already, or interrupted before the prompt was read, or twice in one step.
          InvalidLogitsError: Logits without a distribution.
        """
        answer, state = self._answer, self._state
        if state is None:
            raise RuntimeError("this run has handed over its session already")
        if state.logits is None or any(leaf.is_deleted() for leaf in jax.tree.leaves(state.cache)):
            raise RuntimeError("no session: the run stopped before its prompt was read, or in the middle of a step")
        self._batches.close()
        num_cached = int(state.cache.lengths[0])
        if num_cached > answer.prompt.size + len(answer.steps):
            self._valid(answer.take(jax.device_get(state.on_way), 0))
        if num_cached < answer.prompt.size + len(answer.steps):
            with interrupts_wait():
                state.logits, state.cache = self._decode_token(state.on_way.tokens, state.cache, np.ones(1, bool))
        self._state = None
        answered = np.array([step.token_id for step in answer.steps], np.int32)
        return Session(
            cache=state.cache,
            token_ids=(np.concatenate([answer.prompt, answered]),),
            logits=state.logits,
            seeds=(answer.seed,),
            sampling={name: np.asarray(getattr(answer.params, name)).item() for name in _DRAWN_WITH}
            | {"logit_bias": [list(pair) for pair in answer.params.logit_bias]},
        )


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Lets Ctrl-C wait until the block is done; a second one does not wait."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # it does not come here
        return
    waiting = []

    def wait(number, frame):
        waiting.append(number)
        if len(waiting) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if waiting:
        handler(waiting[0], None)
