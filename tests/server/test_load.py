"""Many clients at once, some of which go away, read slowly or say nothing: nobody else notices, and no slot is lost."""

import asyncio
import json
import random
import socket
import time

import pytest

from maxmoe.server.engine_thread import EngineThread
from tests.server.stub_engine import StubEngine


def _request(url: str, content: str, **fields) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": content}], "stream": True, **fields}).encode()
    host = url.removeprefix("http://")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return (head + f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n").encode() + body


def _content(raw: bytes) -> str:
    """The visible text of a stream, as it came over the wire."""
    assert b" 200 OK" in raw.split(b"\r\n", 1)[0], raw[:300]
    assert raw.rstrip().endswith(b"0") and b"data: [DONE]" in raw
    found = []
    for line in raw.split(b"\n"):
        if line.startswith(b'data: {"id"'):
            choices = json.loads(line.removeprefix(b"data: "))["choices"]
            found += [choice["delta"].get("content") or "" for choice in choices]
    return "".join(found)


async def _stream(url: str, content: str, bytes_to_read: int | None = None, **fields) -> bytes | None:
    """Reads a stream to its end, or leaves after so many bytes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(_request(url, content, **fields))
        if bytes_to_read is None:
            return await reader.read()
        await reader.readexactly(bytes_to_read)
        return None
    finally:
        writer.transport.abort() if bytes_to_read is not None else writer.close()


def test_streams_are_whole_while_others_vanish(serve):
    """Two hundred at once, of which three in ten go away somewhere in their answer."""
    chance = random.Random(5)
    server = serve(StubEngine(max_batch=64, step_s=0.001))
    leaves_after = [chance.choice([1, 150, 2000, 9000]) if chance.random() < 0.3 else None for _ in range(200)]
    contents = [f"question {i}" for i in range(200)]

    async def all_at_once():
        return await asyncio.gather(*(_stream(server.url, c, n) for c, n in zip(contents, leaves_after, strict=True)))

    answers = asyncio.run(all_at_once())
    server.wait_idle()
    server.engine.step_s = 0.0
    alone = [server.chat(content).json()["choices"][0]["message"]["content"] for content in contents]
    stayed = [i for i in range(200) if leaves_after[i] is None]
    assert 120 < len(stayed) < 160
    assert [_content(answers[i]) for i in stayed] == [alone[i] for i in stayed]
    cancelled = [r for r in server.engine.requests if r.status == "cancelled"]
    assert len(cancelled) > 20 and {r.status for r in server.engine.requests} <= {"finished", "cancelled"}
    assert not server.engine.running and not server.engine.waiting


def test_client_that_leaves_a_whole_answer_frees_its_slot(serve):
    server = serve(StubEngine(step_s=0.01))
    with socket.create_connection(server.url.removeprefix("http://").split(":"), timeout=10) as client:
        client.sendall(_request(server.url, "hi", stream=False))
        until = time.monotonic() + 10
        while not server.engine.running:
            assert time.monotonic() < until
            time.sleep(0.005)
    server.wait_idle()
    assert [r.status for r in server.engine.requests] == ["cancelled"]
    assert server.metrics.of("request_ended")[-1]["status"] == "abort"


def test_reader_that_stops_reading_is_given_up(serve):
    engine = StubEngine(lambda prompt, params: [97] * 40_000, max_len=50_000)
    server = serve(engine, write_timeout_s=0.3)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        client.sendall(_request(server.url, "hi", max_tokens=40_000))
        server.wait_idle(20)
        assert server.chat("still here", max_tokens=3).status_code == 200


def test_full_queue_is_429_with_a_time_to_wait(serve):
    server = serve(StubEngine(max_batch=2, step_s=0.05), max_waiting=3)

    async def many():
        return await asyncio.gather(*(_stream(server.url, f"{i}", max_tokens=4) for i in range(9)))

    statuses = [raw.split(b" ", 2)[1] for raw in asyncio.run(many())]
    assert statuses.count(b"200") == 5 and statuses.count(b"429") == 4
    assert server.metrics.of("admission_rejection") == [{0: "queue_full"}] * 4
    server.wait_idle()
    assert len(server.metrics.of("request_started")) == len(server.metrics.of("request_ended")) == 5
    response = server.chat(n=6)
    assert response.status_code == 429 and 1 <= int(response.headers["retry-after"]) <= 120
    assert response.json()["error"]["code"] == "queue_full" and response.json()["error"]["type"] == "rate_limit_error"


def test_queue_of_the_engine_takes_all_choices_or_none(serve):
    server = serve(StubEngine(max_batch=1, max_waiting=2))
    response = server.chat(n=4)
    assert response.status_code == 429
    server.wait_idle()
    assert [r.status for r in server.engine.requests] == ["cancelled"] * 2


# The thread ends by what went wrong, which the interpreter then reports.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_fault_of_the_engine_fails_everybody_and_health(serve):
    server = serve(StubEngine(step_s=0.02))

    async def two_and_a_fault():
        streams = [asyncio.create_task(_stream(server.url, f"{i}")) for i in range(2)]
        while len(server.engine.running) < 2:
            await asyncio.sleep(0.01)
        server.engine.fault = FloatingPointError("device lost")
        return await asyncio.gather(*streams)

    assert server.client.get("/health").status_code == 200
    answers = asyncio.run(two_and_a_fault())
    for raw in answers:
        assert b'data: {"error":{"message":"the engine has failed' in raw and b"data: [DONE]" in raw
    for path in ("/health", "/ready"):
        response = server.client.get(path)
        assert response.status_code == 503 and "device lost" in response.json()["error"]["message"]
    assert server.chat().status_code == 503
    assert server.service.engine_thread.num_live == 0


def test_answer_that_takes_too_long_is_given_up(serve):
    server = serve(StubEngine(step_s=0.02), max_request_s=0.1)
    response = server.chat()
    assert response.status_code == 504 and "0.1 s" in response.json()["error"]["message"]
    assert b"0.1 s" in asyncio.run(_stream(server.url, "hi"))
    server.wait_idle()


def test_failure_of_one_request_is_its_own(serve):
    engine = StubEngine()
    says_next, step = engine._next, engine.step

    def next_or_fail(request, now_s):
        if request.num_said == 5 and request.priority == 3:
            request.failure = "the logits hold a NaN"
            engine._end(request, "failed")
            return None
        return says_next(request, now_s)

    engine._next = next_or_fail
    engine.step = lambda: [(request, said) for request, said in step() if said is not None]
    server = serve(engine)
    response = server.chat(priority=3)
    assert response.status_code == 500 and "hold a NaN" in response.json()["error"]["message"]
    assert server.chat().status_code == 200


def test_stream_tells_that_it_waits(serve):
    server = serve(StubEngine(step_s=0.3), ping_s=0.05)
    assert ": waiting\n\n" in server.chat(max_tokens=2, stream=True).text


def test_engine_thread_needs_room_to_wait():
    with pytest.raises(ValueError, match="max_waiting=0"):
        EngineThread(StubEngine(), max_waiting=0)
