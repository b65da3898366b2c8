"""Server-sent events, and waiting for an answer while the client may go away.

Whoever goes away, or does not read for `write_timeout_s`, ends the work for its request, and frees the slots it holds.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from maxmoe.server.gate import ClientGone, json_bytes

PING = b": waiting\n\n"
_PIECE_BYTES = 65_536
DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


def event(data: Any, name: str | None = None) -> bytes:
    """One event; Anthropic's and the newer of OpenAI's interfaces name theirs."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json_bytes(data) + b"\n\n"


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """What the work returns. Raises: ClientGone, once the work is cancelled, if the client goes away before."""
    return await _while_connected(request.receive, work)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], write_timeout_s: float):
        """Sends `first`, then `events`, which is closed at the end, however it comes."""
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, 200, headers)
        del self.headers["content-length"]
        self._first, self._events, self._write_timeout_s = first, events, write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Raises: ClientGone."""
        await _while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._write(send, self._first)
            async for data in self._events:
                await self._write(send, data)
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, data: bytes) -> None:
        """In pieces, so that the time is for so many bytes, however many events have gathered for a slow reader."""
        for start in range(0, len(data), _PIECE_BYTES):
            body = data[start : start + _PIECE_BYTES]
            try:
                async with asyncio.timeout(self._write_timeout_s):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except TimeoutError as error:
                raise ClientGone from error
