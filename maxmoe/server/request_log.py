"""One line of JSON for each request: when, who, what, how it ended, how long. Prompts and answers only if asked for."""

import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

LOGGER = logging.getLogger("maxmoe.server.requests")
_TRACE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def trace_id_of(headers: Mapping[str, str]) -> str:
    """The `x-trace-id` that came with a request, or a new one."""
    given = headers.get("x-trace-id", "")
    return given if _TRACE_ID.fullmatch(given) else secrets.token_hex(16)


class RequestLog:
    """What is known of one request while it goes on."""

    def __init__(self, trace_id: str, method: str, path: str):
        """Begins the clock."""
        self._began_s = time.perf_counter()
        self._entry: dict[str, Any] = {"time": time.time(), "trace_id": trace_id, "method": method, "path": path[:200]}

    def add(self, **facts: Any) -> None:
        """Notes facts; None says nothing."""
        self._entry |= {key: value for key, value in facts.items() if value is not None}

    def write(self, status: int | None) -> None:
        """Ends the line; without a status, the client was gone before it had one."""
        self._entry["status"] = 499 if status is None else status
        self._entry["duration_s"] = round(time.perf_counter() - self._began_s, 6)
        LOGGER.info("%s", json.dumps(self._entry))
