"""/v1/messages, in Anthropic's form."""

import json

import pytest

from tests.server.stub_engine import TOKENIZER, StubEngine, call, message

_TOOL = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object"}}


def _post(server, messages, **fields):
    return server.client.post("/v1/messages", json={"max_tokens": 500, "messages": messages} | fields)


def _asks(prompt, params):
    if 'role="tool"' in TOKENIZER.decode(prompt):
        return message("Sunny.", thinking="fine")
    return message("I look.", thinking="where?", calls=call("weather", 1, city="Bern"))


@pytest.fixture(scope="module")
def server():
    from tests.server.conftest import running

    with running(StubEngine(_asks)) as found:
        yield found


def test_loop_over_tool_use(server):
    messages = [{"role": "user", "content": "weather?"}]
    first = _post(server, messages, tools=[_TOOL], system="Be brief.").json()
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
    assert first["content"][0]["thinking"] == "where?" and first["content"][2]["input"] == {"city": "Bern"}
    assert first["stop_reason"] == "tool_use" and first["usage"]["output_tokens"] > 10
    result = {"type": "tool_result", "tool_use_id": first["content"][2]["id"], "content": "sun"}
    messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = _post(server, messages, tools=[_TOOL], system="Be brief.").json()
    assert second["content"][1] == {"type": "text", "text": "Sunny."} and second["stop_reason"] == "end_turn"
    text = TOKENIZER.decode(server.engine.requests[-1].prompt)
    assert "where?<|close|>think" in text and "Be brief." in text and '"parameters":{"type":"object"}' in text


def test_stream_joins_to_the_answer(server):
    lines = _post(server, [{"role": "user", "content": "weather?"}], tools=[_TOOL], stream=True).text.split("\n\n")
    events = [json.loads(line.split("data: ", 1)[1]) for line in lines if line]
    assert all(line.startswith(f"event: {event['type']}\n") for line, event in zip(lines, events, strict=False))
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    blocks = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert blocks == ["thinking", "text", "tool_use"] and stops == [0, 1, 2]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "where?"
    assert "".join(delta.get("text", "") for delta in deltas) == "I look."
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"city": "Bern"}


def test_stop_sequence_is_named(server):
    body = _post(server, [{"role": "user", "content": "x"}], stop_sequences=["look"]).json()
    assert body["stop_reason"] == "stop_sequence" and body["stop_sequence"] == "look"
    assert body["content"][1]["text"] == "I "


def test_thinking_is_off_or_limited(server):
    _post(server, [{"role": "user", "content": "x"}], thinking={"type": "enabled", "budget_tokens": 7})
    assert server.engine.requests[-1].params.thinking_token_budget == 7
    _post(server, [{"role": "user", "content": "x"}], thinking={"type": "disabled"})
    assert TOKENIZER.decode(server.engine.requests[-1].prompt).endswith("<|open|>response<|sep|>")


def test_last_message_of_the_assistant_is_continued(server):
    _post(server, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}])
    assert TOKENIZER.decode(server.engine.requests[-1].prompt).endswith("<|open|>response<|sep|>It is")


def test_count_tokens_counts_the_prompt(server):
    messages = [{"role": "user", "content": "weather?"}]
    count = server.client.post("/v1/messages/count_tokens", json={"messages": messages, "tools": [_TOOL]}).json()
    _post(server, messages, tools=[_TOOL])
    assert count == {"input_tokens": len(server.engine.requests[-1].prompt)}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 500}, "temperature"),
        ({"magic": 1}, "magic: is not a field"),
        ({"tools": [_TOOL], "tool_choice": {"type": "tool", "name": "weather"}}, "cannot be forced"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0] is of type image"),
        (
            {
                "system": "s",
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "q", "content": "r"}]},
                ],
            },
            "messages[1]: result 1 after",
        ),
    ],
)
def test_refusal_has_the_interfaces_form(server, fields, says):
    response = _post(server, fields.pop("messages", [{"role": "user", "content": "x"}]), **fields)
    body = response.json()
    assert response.status_code == 400 and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error" and says in body["error"]["message"]
