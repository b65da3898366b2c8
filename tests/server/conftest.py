"""Servers on loopback, each in a thread of its own."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import uvicorn

from maxmoe.server.app import make_app
from maxmoe.server.connections import PunctualProtocol
from maxmoe.server.engine_thread import EngineThread
from maxmoe.server.service import Options, Service
from tests.server.stub_engine import TOKENIZER, StubEngine


class RecordedMetrics:
    """Keeps what it is told."""

    def __init__(self):
        self.calls: list[tuple[str, dict]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **facts: self.calls.append((name, facts | dict(enumerate(arguments))))

    def render(self) -> tuple[bytes, str]:
        return b"# metrics\n", "text/plain"

    def of(self, name: str) -> list[dict]:
        return [facts for called, facts in self.calls if called == name]


class Running:
    """A server that answers at `url`."""

    def __init__(self, url: str, service: Service, metrics: RecordedMetrics):
        self.url, self.service, self.metrics = url, service, metrics
        self.client = httpx.Client(base_url=url, timeout=30)

    @property
    def engine(self) -> StubEngine:
        return self.service.engine_thread.engine

    def chat(self, content: str = "hi", **fields) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.client.post("/v1/chat/completions", json={"messages": messages} | fields)

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Until no request runs or waits, in the engine and in the server's own count."""
        until = time.monotonic() + seconds
        thread = self.service.engine_thread
        while thread.num_live or self.engine.has_work:
            assert time.monotonic() < until, f"{thread.num_live} requests are still counted"
            time.sleep(0.005)


@contextlib.contextmanager
def running(
    engine,
    *,
    tokenizer=TOKENIZER,
    max_waiting=256,
    warm_up=True,
    sessions=None,
    metrics=None,
    app_settings=None,
    **options,
):
    metrics = metrics or RecordedMetrics()
    service = Service(
        tokenizer=tokenizer,
        engine_thread=EngineThread(engine, max_waiting=max_waiting, warm_up=warm_up),
        metrics=metrics,
        options=Options(model_name="tiny", **options),
        sessions=sessions,
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        app = make_app(service, **app_settings or {})
        config = uvicorn.Config(app, http=PunctualProtocol, log_level="warning", lifespan="on")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        found = Running(f"http://127.0.0.1:{port}", service, metrics)
        until = time.monotonic() + 30
        while not server.started or service.engine_thread.absence is not None:
            assert time.monotonic() < until
            time.sleep(0.005)
        try:
            yield found
        finally:
            found.client.close()
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """Starts a server of an engine, with settings of `running`."""
    with contextlib.ExitStack() as opened:
        yield lambda engine=None, **settings: opened.enter_context(running(engine or StubEngine(), **settings))


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    """One server for tests that leave nothing behind."""
    with running(StubEngine()) as found:
        yield found
