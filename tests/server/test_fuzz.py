"""Requests that are wrong in random ways: each is answered, none by a 500, and no slot is lost.

`test_mutated_requests` changes whole requests in a few places, with names of fields from the server's own description,
so that most get far; MAXMOE_FUZZ_REQUESTS says how many there are in the slow run. `test_described_requests` is
schemathesis over the same description, valid and not.
"""

import copy
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from maxmoe.inference.grammar import Grammars
from maxmoe.server import openapi
from maxmoe.server.service import Options
from maxmoe.server.sessions import SessionStore
from tests.server.conftest import Running, running
from tests.server.stub_engine import END_ID, TOKENIZER, VOCAB_SIZE, StubEngine

_TIMEOUT_S = 20  # longer is a hang
_DESCRIPTION = openapi.description(Options(model_name="tiny"))
_SCHEMA = schemathesis.openapi.from_dict(_DESCRIPTION)
_NAMES = sorted({name for schema in _DESCRIPTION["components"]["schemas"].values() for name in schema["properties"]})

_NAMES += ["type", "enum", "const", "properties", "required", "items", "maxLength", "pattern", "anyOf", "$ref", "$defs"]

_PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "enum": ["x"]},
        "b": {"type": ["integer", "null"]},
        "c": {"$ref": "#/$defs/d"},
        "e": {"type": "string", "maxLength": 5},
    },
    "required": ["a"],
    "$defs": {"d": {"type": "number"}},
}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _PARAMETERS, "strict": True}}
_CALL = {"id": "f_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": "q <|open|> é🚀"},
        {"role": "assistant", "content": None, "reasoning_content": "t", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "f_0", "content": "r"},
    ],
    "tools": [_TOOL],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["x", "yz"],
    "logprobs": True,
    "top_logprobs": 2,
    "max_tokens": 60,
    "seed": 3,
    "n": 2,
    "logit_bias": {"5": 1.5},
    "thinking": {"type": "enabled", "effort": "low"},
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _PARAMETERS}},
}
_REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", _CHAT),
    ("/v1/chat/completions", _CHAT | {"stream": False, "tool_choice": "required", "parallel_tool_calls": False}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "q"}], "tools": [_TOOL], "tool_choice": "required", "n": 1},
    ),
    ("/v1/completions", {"prompt": ["a", "<|sep|>b"], "max_tokens": 9, "logprobs": 2, "stop": "q", "stream": True}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "n": 2, "min_p": 0.1, "stop_token_ids": [7], "min_tokens": 2}),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "r"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "reasoning": {"effort": "high"},
            "text": {"format": {"type": "json_object"}},
            "stream": True,
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 50,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "q"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": ""},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1]}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any"},
            "stop_sequences": ["z"],
            "stream": True,
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "q"}]}),
    ("/tokenize", {"messages": [{"role": "user", "content": "q"}], "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 300]}),
    ("/v1/sessions", {"name": "n", "response_id": "chatcmpl-0"}),
    ("/v1/sessions/saved/fork", {"name": "m"}),
    ("/v1/sessions/saved/resume", {"messages": [{"role": "user", "content": "q"}], "max_tokens": 9}),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Running]:
    store = SessionStore(tmp_path_factory.mktemp("sessions"), "tiny", VOCAB_SIZE)
    engine = StubEngine(max_batch=64)
    engine.grammars = Grammars(TOKENIZER, END_ID)
    with running(engine, sessions=store) as found:
        answer = found.chat().json()
        assert found.client.post("/v1/sessions", json={"name": "saved", "response_id": answer["id"]}).status_code == 201
        yield found
        found.wait_idle()
        assert not found.engine.running and not found.engine.waiting
        assert found.client.get("/health").status_code == 200


def _any_value(chance: random.Random, depth: int = 2) -> Any:
    simple = [
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        10**40,
        1e308,
        -0.0,
        1.5,
        "",
        "x",
        "\ud800",
        "<|end_of_msg|>",
        "é" * 50,
    ]
    kind = chance.random()
    if depth == 0 or kind < 0.7:
        return chance.choice(simple)
    if kind < 0.85:
        return [_any_value(chance, depth - 1) for _ in range(chance.randrange(4))]
    return {chance.choice(_NAMES): _any_value(chance, depth - 1) for _ in range(chance.randrange(4))}


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every list or object in a value, with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in list(items) for found in [(value, key), *_places(inner)]]


def _mutated(chance: random.Random, body: dict[str, Any]) -> Any:
    body = copy.deepcopy(body)
    for _ in range(chance.choice([1, 1, 2, 5])):
        places = _places(body)
        if not places:
            return _any_value(chance)
        holder, key = chance.choice(places)
        action = chance.random()
        if action < 0.25 and type(holder[key]) in (bool, int, float, str):  # often still right
            holder[key] = {bool: not holder[key], str: "y"}.get(type(holder[key]), chance.randrange(40))
        elif action < 0.5:
            holder[key] = _any_value(chance)
        elif action < 0.7:
            del holder[key]
        elif action < 0.85 and isinstance(holder, dict):
            holder[chance.choice(_NAMES)] = _any_value(chance)
        else:
            holder[key] = copy.deepcopy(chance.choice(places)[0])
    return body


def _post_mutated(server: Running, seed: int, count: int) -> dict[int, int]:
    chance = random.Random(seed)
    statuses: dict[int, int] = {}
    for _ in range(count):
        path, body = chance.choice(_REQUESTS)
        content = json.dumps(_mutated(chance, body)).encode()
        if chance.random() < 0.05:
            content = content[: chance.randrange(len(content))]
        headers = {"content-type": "application/json"}
        response = server.client.post(path, content=content, headers=headers, timeout=_TIMEOUT_S)
        assert _is_answer(response), (path, content, response.status_code, response.text)
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
    return statuses


def _is_answer(response: httpx.Response) -> bool:
    """Whether a request was answered or refused as it should be, and a stream ended as streams do."""
    if response.status_code >= 500:
        return False
    if response.status_code >= 400:
        return "message" in response.json()["error"]
    if response.headers["content-type"] != "text/event-stream":
        return response.json() is not None
    last = response.text.rstrip().rsplit("\n\n", 1)[-1]
    return '"server_error"' not in response.text and ("[DONE]" in last or '"type":"' in last)


def test_mutated_requests(server):
    statuses = _post_mutated(server, seed=1, count=400)
    assert statuses[200] > 40 and statuses[400] > 100


@pytest.mark.slow
def test_many_mutated_requests(server):
    count = int(os.environ.get("MAXMOE_FUZZ_REQUESTS", "10000"))
    statuses = _post_mutated(server, seed=2, count=count)
    assert sum(statuses.values()) == count


@pytest.mark.slow
@_SCHEMA.parametrize()
@hypothesis.settings(max_examples=10, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_described_requests(server, case):
    response = case.call(base_url=server.url, timeout=_TIMEOUT_S)
    case.validate_response(response, checks=[not_a_server_error, status_code_conformance])
