"""A server on loopback that serves the page and plays answers given in advance, and writes down what it is asked."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from maxmoe.server import page
from maxmoe.server.metrics import Metrics

STALL = "stall"  # in an answer: nothing more comes until the client goes away
BREAK = "break"  # in an answer: the connection ends here
USAGE = {
    "prompt_tokens": 210,
    "completion_tokens": 42,
    "total_tokens": 252,
    "prompt_tokens_details": {"cached_tokens": 128},
    "completion_tokens_details": {"reasoning_tokens": 30},
}


class StubServer:
    """Holds what the next requests get, and what they were.

    Attributes:
      bodies: Of the chat requests, parsed.
      keys: The Authorization header of each request to the API.
      client_left: Set once a client has gone away in the middle of an answer.
      vision: Whether the model sees.
      key: What requests must bring; None for nothing.
      metrics: What /metrics shows.
    """

    def __init__(self):
        self.url = ""
        self.reset()

    def reset(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.client_left = threading.Event()
        self.vision = False
        self.key: str | None = None
        self.metrics = Metrics("stub")
        self._answers: list[Any] = []

    def will_say(self, *deltas: Any, finish: str = "stop", pause_s: float = 0.0) -> None:
        """Queues an answer: deltas of a stream, STALL, BREAK, or {"error": ...} as it is."""
        self._answers.append((deltas, finish, pause_s))

    def will_refuse(self, status: int, message: str) -> None:
        """Queues an error instead of an answer."""
        self._answers.append(JSONResponse({"error": {"message": message, "type": "error"}}, status))

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                *page.routes(),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/metrics", self._show_metrics),
            ]
        )

    def _refusal(self, request: Request) -> Response | None:
        self.keys.append(request.headers.get("Authorization"))
        if self.key is None or self.keys[-1] == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "This server asks for an API key."}}, 401)

    async def _models(self, request: Request) -> Response:
        models = [{"id": "stub", "object": "model", "capabilities": {"vision": self.vision}}]
        return self._refusal(request) or JSONResponse({"object": "list", "data": models})

    async def _show_metrics(self, request: Request) -> Response:
        body, content_type = self.metrics.render()
        return Response(body, headers={"Content-Type": content_type})

    async def _chat(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        self.bodies.append(json.loads(await request.body()))
        answer = self._answers.pop(0)
        if isinstance(answer, Response):
            return answer
        return StreamingResponse(self._stream(*answer), media_type="text/event-stream")

    async def _stream(self, deltas: tuple[Any, ...], finish: str, pause_s: float):
        for delta in ({"role": "assistant", "content": ""}, *deltas):
            await asyncio.sleep(pause_s)
            if delta == BREAK:
                return
            if delta == STALL:
                try:
                    await asyncio.Event().wait()
                finally:  # cancelled
                    self.client_left.set()
            yield _event(delta if "error" in delta else _chunk(delta))
        yield _event(_chunk({}, finish))
        yield _event({"choices": [], "usage": USAGE})
        yield "data: [DONE]\n\n"


def _chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


@contextlib.contextmanager
def running() -> Iterator[StubServer]:
    """A server in a thread, until the block ends."""
    stub = StubServer()
    server = uvicorn.Server(uvicorn.Config(stub.app(), port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    started = threading.Event()
    for _ in range(1000):
        if server.started:
            break
        started.wait(0.01)
    stub.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield stub
    server.should_exit = True
    thread.join()
