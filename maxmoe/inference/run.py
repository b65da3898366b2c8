"""One answer on its way, whose state can be taken at any time, also after Ctrl-C."""

from typing import TYPE_CHECKING

import jax
import numpy as np

from maxmoe.checkpoint.session import Session
from maxmoe.inference.answer import Step
from maxmoe.inference.answer_error import AnswerError
from maxmoe.inference.request import Request
from maxmoe.inference.sampling import RowSettings

if TYPE_CHECKING:
    from maxmoe.inference.serving_loop import ServingLoop

_DRAWN_WITH = (*RowSettings._fields, "repetition_penalty", "presence_penalty", "frequency_penalty")


class Run:
    """One answer on its way: an iterator of its steps, whose state can be taken at any time.

    Attributes:
      steps: The steps so far. After an interrupt, such as Ctrl-C, `session` may add the one that was on its way.
    """

    def __init__(self, request: Request, loop: "ServingLoop"):
        """Made by an engine: from a request and the loop that serves it alone."""
        self._request, self._loop = request, loop
        self.steps: list[Step] = request.steps
        self._num_told = 0

    def __iter__(self) -> "Run":
        return self

    def __next__(self) -> Step:
        if self._loop is None:
            raise StopIteration
        while self._num_told == len(self.steps) and not self._request.ended:
            self._loop.step()
        if self._num_told < len(self.steps):
            self._num_told += 1
            return self.steps[self._num_told - 1]
        if self._request.failure is not None:
            raise AnswerError(self._request.failure, [None])
        raise StopIteration

    def finish_text(self) -> str:
        """What an interrupted run holds back of its text, since more tokens would have to tell whether to stop."""
        return "" if self._request.text is None or self._request.ended else self._request.text.finish()

    def session(self) -> Session:
        """Ends the run and hands over its state: that of the prompt and of all `steps`, a stop id included.

        To go on, give it to `Engine.resume`.

        Raises:
          RuntimeError: Taken already, or interrupted before the prompt was read, or twice in one step.
          AnswerError: Logits without a distribution.
        """
        request, loop = self._request, self._loop
        if loop is None:
            raise RuntimeError("this run has handed over its session already")
        unread = loop.logits is None or loop.is_reading
        if unread or any(leaf.is_deleted() for leaf in jax.tree.leaves(loop.cache)):
            raise RuntimeError("no session: the run stopped before its prompt was read, or in the middle of a step")
        loop.catch_up(request)
        self._loop = None
        return Session(
            cache=loop.cache,
            token_ids=(request.history(),),
            logits=loop.logits,
            seeds=(request.seed,),
            sampling={name: np.asarray(getattr(request.params, name)).item() for name in _DRAWN_WITH}
            | {"logit_bias": [list(pair) for pair in request.params.logit_bias]},
        )
