"""What all endpoints share: the engine's thread, the tokenizer, and how the server was told to behave."""

import dataclasses
import time

from maxmoe.chat.tokenizer import Tokenizer
from maxmoe.server.engine_thread import EngineThread
from maxmoe.server.errors import ApiError
from maxmoe.server.metrics import Metrics
from maxmoe.server.sessions import SessionStore


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How the server behaves.

    Attributes:
      model_name: That clients know the model by.
      strict_history: Whether a request that would lose history is refused; otherwise it is answered with warnings.
      mirrors_reasoning: Whether thinking is also told under the name `reasoning`, for clients that know only that.
      lenient_markers, force_nonempty_content: Of `chat.Parser`.
      logs_bodies: Whether requests and answers go into the log.
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
    lenient_markers: bool = False
    force_nonempty_content: bool = False
    logs_bodies: bool = False
    max_request_s: float | None = None
    max_body_bytes: int = 16 * 2**20
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
