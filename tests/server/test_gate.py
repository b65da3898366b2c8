"""Keys, rates, limits, trace ids, logs, and the form of errors that no endpoint makes."""

import json
import logging
import re
import socket
import time

import pytest

from maxmoe.server.keys import Keys, read_keys
from maxmoe.server.limits import RateLimiter
from tests.server.stub_engine import StubEngine

_KEY = "0123456789abcdef"


def _post(server, content: bytes, **headers) -> tuple[int, dict]:
    headers = {"content-type": "application/json"} | headers
    response = server.client.post("/v1/chat/completions", content=content, headers=headers)
    return response.status_code, response.json()["error"]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{", "invalid_json"),
        (b"", "invalid_json"),
        (b"\xff", "invalid_json"),
        (b'{"temperature": NaN}', "invalid_json"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b"[" * 100 + b"]" * 100, "nested_too_deeply"),
        (b"[" * 100_000, "nested_too_deeply"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "nested_too_deeply"),
        (b"[]", None),
        (b'"x"', None),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}], "model": "\\ud800"}', None),
    ],
)
def test_body_that_is_no_request(shared_server, content, code):
    status, error = _post(shared_server, content)
    assert 400 <= status < 500 and (code is None or error["code"] == code), error


@pytest.mark.parametrize(
    "content",
    [
        b'{"messages": [' + b"{}," * 300_000 + b"{}]}",
        b'{"messages": [' + b"[]," * 3_000_000 + b"[]]}",
        b'{"messages": [{"role": "user", "content": [' + b"1," * 3_000_000 + b"1]}]}",
        b'{"messages": [], "metadata": {' + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}}",
    ],
)
def test_body_of_very_many_values_is_refused_in_no_time(shared_server, content):
    began_s = time.perf_counter()
    assert _post(shared_server, content)[0] == 400
    assert time.perf_counter() - began_s < 5  # measured: 0.2 to 0.9 s


def test_depth_within_the_limit_is_read(shared_server):
    schema = json.loads('{"a":' * 50 + "1" + "}" * 50)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert shared_server.chat(tools=[tool]).status_code == 200


def test_half_a_character_is_answered(shared_server):
    body = b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}'
    headers = {"content-type": "application/json"}
    assert shared_server.client.post("/v1/chat/completions", content=body, headers=headers).status_code in (200, 400)


@pytest.mark.parametrize("chunked", [False, True])
def test_body_that_is_too_large(serve, chunked):
    server = serve(max_body_bytes=1000)
    content = iter([b"x" * 600] * 2) if chunked else b"x" * 1001
    status, error = _post(server, content)
    assert status == 413 and "1,000 bytes" in error["message"]


def test_body_that_does_not_come(serve):
    server = serve(read_timeout_s=0.1)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall((head + "Content-Length: 100\r\n\r\n{").encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 408")


def test_other_content_types_are_refused(shared_server):
    status, error = _post(shared_server, b"{}", **{"content-type": "text/plain"})
    assert status == 415 and "application/json" in error["message"]


def test_unknown_paths_and_methods_have_the_form_of_errors(shared_server):
    response = shared_server.client.get("/v1/nothing")
    assert response.status_code == 404 and response.json()["error"]["type"] == "not_found_error"
    response = shared_server.client.get("/v1/chat/completions")
    assert response.status_code == 405 and response.headers["allow"] == "POST" and response.json()["error"]
    assert shared_server.client.get("/v1/messages").json()["type"] == "error"


@pytest.mark.parametrize("headers", [{"authorization": f"Bearer {_KEY}"}, {"x-api-key": _KEY}])
def test_key_opens_what_is_guarded(serve, headers):
    server = serve(app_settings={"keys": Keys([_KEY])})
    for path in ("/v1/models", "/v1/sessions"):
        assert server.client.get(path).status_code == 401
    assert server.client.post("/tokenize", json={"prompt": "x"}).status_code == 401
    wrong = server.client.get("/v1/models", headers={"authorization": f"Bearer {_KEY}x"})
    assert wrong.status_code == 401 and wrong.json()["error"]["code"] == "invalid_api_key"
    assert wrong.headers["www-authenticate"] == "Bearer"
    assert server.client.get("/v1/models", headers=headers).status_code == 200
    for path in ("/health", "/ready", "/metrics"):
        assert server.client.get(path).status_code == 200


def test_keys_of_file_and_variable(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n{_KEY}\n\n")
    keys = read_keys(str(file), "fedcba9876543210, 0000111122223333")
    callers = {keys.caller({"x-api-key": key}) for key in (_KEY, "fedcba9876543210", "0000111122223333")}
    assert len(callers) == 3 and not any(_KEY in caller for caller in callers)
    assert read_keys(None, None).caller({}) == ""
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="holds no API key"):
        read_keys(str(file), None)
    with pytest.raises(ValueError, match="key 1 of 1 must be at least 16"):
        Keys(["short"])


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:80", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("LocalHost", 200),
        ("evil.example", 403),
        ("[", 403),
    ],
)
def test_name_of_another_site_is_refused(serve, host, status):
    server = serve(app_settings={"allowed_hosts": frozenset({"localhost", "127.0.0.1", "::1"})})
    assert server.client.get("/v1/models", headers={"host": host}).status_code == status


def test_rate_of_each_key_is_limited(serve):
    other = _KEY[::-1]
    server = serve(app_settings={"keys": Keys([_KEY, other]), "requests_per_minute": 3})
    mine = {"x-api-key": _KEY}
    assert [server.client.get("/v1/models", headers=mine).status_code for _ in range(4)] == [200, 200, 200, 429]
    refused = server.client.get("/v1/models", headers=mine)
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert server.client.get("/v1/models", headers={"x-api-key": other}).status_code == 200


def test_bucket_fills_evenly(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    rates = RateLimiter(60)
    for _ in range(60):
        rates.check("a")
    with pytest.raises(Exception, match="60 requests a minute"):
        rates.check("a")
    now_s = 1.1
    rates.check("a")
    with pytest.raises(Exception, match="60 requests a minute"):
        rates.check("a")


def test_log_has_a_line_of_json_without_what_was_said(serve, caplog):
    caplog.set_level(logging.INFO, "maxmoe.server.requests")
    server = serve(StubEngine(), app_settings={"keys": Keys([_KEY])})
    headers = {"authorization": f"Bearer {_KEY}", "x-trace-id": "trace-7"}
    body = {"messages": [{"role": "user", "content": "a secret question"}]}
    response = server.client.post("/v1/chat/completions", json=body, headers=headers)
    assert response.headers["x-trace-id"] == "trace-7"
    server.client.post("/v1/chat/completions", json=body | {"temperature": "a secret too"}, headers=headers)
    invented = server.client.get("/health", headers={"x-trace-id": "no\tgood"}).headers["x-trace-id"]
    assert re.fullmatch(r"[0-9a-f]{32}", invented)
    server.wait_idle()
    texts = [record.getMessage() for record in caplog.records if record.name == "maxmoe.server.requests"]
    first, second, _ = (json.loads(text) for text in texts)
    assert first["trace_id"] == "trace-7" and first["status"] == 200 and first["completion_tokens"] > 0
    assert first["finish_reasons"] == ["stop"] and first["duration_s"] > 0 and first["prompt_tokens"] > 0
    assert second["status"] == 400 and second["param"] == "temperature" and second["error"] == "invalid_field"
    assert "secret" not in "".join(texts) and _KEY not in "".join(texts)
    answer = response.json()["choices"][0]["message"]["content"]
    assert answer and answer not in "".join(texts)


def test_log_holds_what_was_said_where_that_is_asked_for(serve, caplog):
    caplog.set_level(logging.INFO, "maxmoe.server.requests")
    server = serve(logs_bodies=True)
    answer = server.chat("a question").json()["choices"][0]["message"]["content"]
    server.wait_idle()
    entry = json.loads(caplog.records[-1].getMessage())
    assert entry["body"]["messages"][0]["content"] == "a question" and entry["answers"][0]["content"] == answer


def test_connection_without_a_request_is_closed(serve, monkeypatch):
    monkeypatch.setattr("maxmoe.server.connections.HEAD_TIMEOUT_S", 0.2)
    server = serve(StubEngine(step_s=0.01))
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost")
        assert client.recv(100) == b""
    assert server.chat(max_tokens=50).status_code == 200  # takes longer than the limit, and is no wait for a request


def test_fault_in_the_server_is_a_500_with_the_trace_id(serve, monkeypatch, caplog):
    server = serve()

    def broken(*arguments, **facts):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("maxmoe.server.chat_completions.plan_chat", broken)
    response = server.chat()
    assert response.status_code == 500 and response.headers["x-trace-id"] in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "server_error"
    assert server.metrics.of("error") == [{0: "server_error"}]
