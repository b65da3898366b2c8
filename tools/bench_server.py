"""What the server adds to an engine: time per request, and per streamed token.

    python tools/bench_server.py
    python tools/bench_server.py --streams 64 --tokens 300 --requests 500

The engine is a stand-in. It runs with the server in one process, the client in another, which reads raw sockets.
Per request: one token that is ready at once, one request after the other on a kept connection, the whole time from the
first byte sent to the last received. Per token: all streams at once, first with tokens that are ready at once, where
the time of the whole is divided by all tokens; then with a token for each stream every --step_ms, as an engine gives
them, so that each is written by itself. What the whole takes beyond the steps is divided by their number. Beside both
stands the processor time of the server's process for each token; the stand-in's own is part of it.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

_STREAMS = flags.DEFINE_integer("streams", 64, "Streams at once.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 300, "Of each.", lower_bound=2)
_REQUESTS = flags.DEFINE_integer("requests", 500, "Requests, one after the other.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "How often streams are measured; medians are printed.", lower_bound=1)
_STEP_MS = flags.DEFINE_float("step_ms", 20.0, "Between tokens of a stream, where they are paced.", lower_bound=0.1)
_MAX_S = 60.0  # for the server to start


def _serve(port: int, step_s: float) -> None:
    import uvicorn

    from maxmoe.server.app import make_app
    from maxmoe.server.engine_thread import EngineThread
    from maxmoe.server.metrics import Metrics
    from maxmoe.server.service import Options, Service
    from tests.server.stub_engine import TOKENIZER, StubEngine

    letters = TOKENIZER.encode("abcdefghij" * 1000)
    engine = StubEngine(lambda prompt, params: letters, max_batch=1024, max_len=20_000, step_s=step_s)
    service = Service(
        tokenizer=TOKENIZER,
        engine_thread=EngineThread(engine),
        metrics=Metrics("stub"),
        options=Options(model_name="stub"),
    )
    uvicorn.run(make_app(service), port=port, access_log=False, log_level="warning")


def _request(**fields) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": "What is a monad?"}], **fields}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return (head + f"Content-Length: {len(body)}\r\n\r\n").encode() + body


async def _response(reader: asyncio.StreamReader) -> bytes:
    """The body of a response that has a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(head.decode())
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(int(length.split(b":")[1]))


async def _time_requests(port: int, count: int) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request, times = _request(max_tokens=1), []
    for _ in range(count):
        began = time.perf_counter()
        writer.write(request)
        await _response(reader)
        times.append(time.perf_counter() - began)
    writer.close()
    return times


async def _stream(port: int, num_tokens: int) -> float:
    """Reads one stream. Returns when its first token came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request(max_tokens=num_tokens, stream=True))
    first = 0.0
    text = b""
    while b"data: [DONE]" not in text[-64:]:
        piece = await reader.read(1 << 16)
        if not piece:
            raise RuntimeError("a stream broke off")
        first = first or time.perf_counter()
        text += piece
    writer.close()
    return first


async def _time_streams(port: int, count: int, num_tokens: int) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(_stream(port, num_tokens) for _ in range(count)))
    return time.perf_counter() - began


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait_for(port: int) -> None:
    until = time.monotonic() + _MAX_S
    while time.monotonic() < until:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"the server did not start within {_MAX_S:g} s")


@contextlib.contextmanager
def _server(step_s: float) -> Iterator[tuple[int, int]]:
    """A server in a process of its own. Yields its port and the id of the process."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(port, step_s), daemon=True)
    process.start()
    try:
        _wait_for(port)
        asyncio.run(_time_requests(port, 50))
        yield port, process.pid
    finally:
        process.terminate()
        process.join(30)


def _tell_streams(step_s: float) -> None:
    count, num_tokens = _STREAMS.value, _TOKENS.value
    each = count * num_tokens if step_s == 0 else num_tokens
    walls, processors = [], []
    with _server(step_s) as (port, pid):
        for _ in range(_ROUNDS.value):
            before_s = _processor_s(pid)
            walls.append((asyncio.run(_time_streams(port, count, num_tokens)) - step_s * num_tokens) / each * 1e3)
            processors.append((_processor_s(pid) - before_s) / (count * num_tokens) * 1e3)
    what = "per token of all streams" if step_s == 0 else f"per step of {_STEP_MS.value:g} ms, beyond it"
    print(
        f"{count} streams, {what}, ms: {statistics.median(walls):.3f} ({min(walls):.3f} to {max(walls):.3f}); "
        f"processor time per token {statistics.median(processors):.3f}",
        flush=True,
    )


def main(argv: list[str]) -> None:
    """Prints the figures."""
    with _server(0.0) as (port, _):
        times = asyncio.run(_time_requests(port, _REQUESTS.value))
    last = statistics.quantiles(times, n=100)[98]
    print(f"per request, ms: median {statistics.median(times) * 1e3:.2f}, 99 % below {last * 1e3:.2f}", flush=True)
    _tell_streams(0.0)
    _tell_streams(_STEP_MS.value / 1e3)


if __name__ == "__main__":
    app.run(main)
