"""What all endpoints share: the engine's thread, the tokenizer, and how the server was told to behave."""

import dataclasses
import time
from typing import Protocol

from maxmoe.chat.tokenizer import Tokenizer
from maxmoe.server.engine_thread import EngineThread
from maxmoe.server.errors import ApiError
from maxmoe.server.sessions import SessionStore


class Metrics(Protocol):
    """What the server tells of itself; see `metrics.Metrics`."""

    def request_started(self, endpoint: str) -> None:
        """A request goes to the engine."""

    def request_ended(
        self,
        endpoint: str,
        status: str,
        queue_s: float | None,
        ttft_s: float | None,
        prompt_tokens: int,
        cached_tokens: int,
        thinking_tokens: int,
        answer_tokens: int,
        e2e_s: float,
    ) -> None:
        """It is over: by its finish reason, "abort" or "error"."""

    def token_time(self, seconds: float) -> None:
        """Between two tokens of one answer."""

    def admission_rejection(self, reason: str) -> None:
        """A request was turned away."""

    def error(self, kind: str) -> None:
        """A request was answered by an error of that type."""

    def tool_call_parse_failure(self) -> None:
        """A tool call could not be read whole."""

    def budget_hit(self, tier: str) -> None:
        """A thinking budget ended thinking."""

    def engine_state(
        self,
        running: int,
        waiting: int,
        cache_usage: float,
        prefix_queries: int,
        prefix_hits: int,
        preemptions: int = 0,
    ) -> None:
        """How the engine stands; the last three are totals."""

    def render(self) -> tuple[bytes, str]:
        """All of it for a scraper: the body, and its content type."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How the server behaves.

    Attributes:
      model_name: That clients know the model by.
      strict_history: Whether a request that would lose history is refused; otherwise it is answered with warnings.
      mirrors_reasoning: Whether thinking is also told under the name `reasoning`, for clients that know only that.
      max_request_s: Seconds after which an answer is given up; None for never.
      max_body_bytes: Of a request.
      max_depth: Of nested lists and objects in it.
      read_timeout_s: For a request's body to arrive.
      write_timeout_s: That a client may leave a stream unread once its buffers are full.
      ping_s: Seconds without a token after which a stream sends a comment, so that nobody on the way gives it up.
    """

    model_name: str
    strict_history: bool = True
    mirrors_reasoning: bool = False
    max_request_s: float | None = None
    max_body_bytes: int = 32 * 2**20
    max_depth: int = 64
    read_timeout_s: float = 60.0
    write_timeout_s: float = 30.0
    ping_s: float = 15.0


@dataclasses.dataclass(kw_only=True)
class Service:
    """The parts.

    Attributes:
      sessions: None where no folder is given for them.
    """

    tokenizer: Tokenizer
    engine_thread: EngineThread
    metrics: Metrics
    options: Options
    sessions: SessionStore | None = None
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def max_len(self) -> int:
        """Tokens of prompt and answer together."""
        return self.engine_thread.engine.max_len

    def check_model(self, name: str | None) -> None:
        """Raises: ApiError for a model that is not served."""
        if name not in (None, self.options.model_name):
            raise ApiError(
                404,
                f"the model {name!r:.80} does not exist here; this server has {self.options.model_name!r}",
                param="model",
                code="model_not_found",
            )
