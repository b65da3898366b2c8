"""Connections that send no request in time are closed, so that nobody can hold all there are by saying nothing."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 20.0


class PunctualProtocol(H11Protocol):
    """Uvicorn's own HTTP/1.1, with a limit to the time between a connection's being free and its next request."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the wait."""
        self._cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Begins to wait for the next request."""
        self._await_request()
        super().on_response_complete()

    def _await_request(self) -> None:
        self._cancel()
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._close_if_free)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _close_if_free(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
