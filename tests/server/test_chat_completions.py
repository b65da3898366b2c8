"""/v1/chat/completions: what comes back, streamed or not, and what is refused."""

import json

import pytest

from tests.server.stub_engine import TOKENIZER, StubEngine, call, ids_of, message

_USER = {"role": "user", "content": "hi"}
_WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def says(ids: list[int]) -> StubEngine:
    return StubEngine(lambda prompt, params: ids)


def chunks_of(response) -> list[dict]:
    assert response.headers["content-type"] == "text/event-stream"
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def joined(chunks: list[dict]) -> dict:
    """The message that deltas make."""
    whole = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                whole[key] += delta.get(key) or ""
            for entry in delta.get("tool_calls", ()):
                if "id" in entry:
                    whole["tool_calls"].append(entry["function"] | {"id": entry["id"]})
                else:
                    whole["tool_calls"][entry["index"]]["arguments"] += entry["function"]["arguments"]
    return whole


def test_answer_has_thinking_content_and_usage(serve):
    server = serve(says(message("Hello é🚀", thinking="hmm")))
    body = server.chat().json()
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello é🚀", "reasoning_content": "hmm"}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert body["object"] == "chat.completion" and body["model"] == "tiny" and "warnings" not in body
    assert body["usage"] == {
        "prompt_tokens": len(server.engine.requests[0].prompt),
        "completion_tokens": len(message("Hello é🚀", thinking="hmm")),
        "total_tokens": len(server.engine.requests[0].prompt) + len(message("Hello é🚀", thinking="hmm")),
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 3},
        "cached_tokens": 0,
    }


def test_stream_joins_to_the_answer(serve):
    calls = call("weather", 1, city="Zürich") + call("weather", 2, city="Bern")
    server = serve(says(message("I look.", thinking="two cities", calls=calls)))
    whole = server.chat(tools=[_WEATHER]).json()["choices"][0]
    chunks = chunks_of(server.chat(tools=[_WEATHER], stream=True, stream_options={"include_usage": True}))
    told = joined(chunks)
    assert told["content"] == whole["message"]["content"] == "I look."
    assert told["reasoning_content"] == whole["message"]["reasoning_content"] == "two cities"
    expected = [entry["function"] | {"id": entry["id"]} for entry in whole["message"]["tool_calls"]]
    assert told["tool_calls"] == expected and len(expected) == 2
    assert json.loads(expected[0]["arguments"]) == {"city": "Zürich"}
    assert whole["finish_reason"] == "tool_calls"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0]["delta"] == {} and chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 10
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_stop_string_is_sought_in_visible_text_alone(serve):
    server = serve(says(message("one two three four", thinking="two comes later")))
    choice = server.chat(stop="two").json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "one ", "reasoning_content": "two comes later"}
    assert choice["finish_reason"] == "stop"
    told = joined(chunks_of(server.chat(stop=["x", "two"], stream=True)))
    assert told["content"] == "one " and told["reasoning_content"] == "two comes later"
    server.wait_idle()


def test_stop_string_that_begins_and_does_not_come_is_text(serve):
    server = serve(says(message("one tw")))
    assert joined(chunks_of(server.chat(stop="two", stream=True)))["content"] == "one tw"


def test_length_cuts_off_and_says_so(serve):
    server = serve(says(message("abcdef", thinking="t")))
    choice = server.chat(max_tokens=3).json()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "t"


def test_choices_have_seeds_of_their_own(serve):
    server = serve()
    body = server.chat(n=3, seed=7, return_token_ids=True).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert len(set(texts)) == 3 and [r.params.seed for r in server.engine.requests] == [7, 8, 9]
    assert server.chat(seed=8).json()["choices"][0]["message"]["content"] == texts[1]
    assert body["usage"]["prompt_tokens"] == len(body["prompt_token_ids"])
    chunks = chunks_of(server.chat(n=3, seed=7, stream=True))
    for index, text in enumerate(texts):
        mine = [c for c in chunks if c["choices"][0]["index"] == index]
        assert joined(mine)["content"] == text


def test_logprobs_are_those_of_visible_tokens(serve):
    server = serve(says(message("é🚀b", thinking="hidden")))
    choice = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]
    told = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in told).decode() == "é🚀b"
    assert [len(entry["top_logprobs"]) for entry in told] == [2] * len(told)
    chunks = chunks_of(server.chat(logprobs=True, stream=True))
    streamed = [e for c in chunks for e in (c["choices"][0].get("logprobs") or {"content": []})["content"]]
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in told]


def test_parallel_calls_can_be_forbidden(serve):
    calls = call("weather", 1, city="Bern") + call("weather", 2, city="Basel")
    server = serve(says(message("", calls=calls)))
    choice = server.chat(tools=[_WEATHER], parallel_tool_calls=False).json()["choices"][0]
    assert [c["function"]["arguments"] for c in choice["message"]["tool_calls"]] == ['{"city": "Bern"}']
    assert choice["finish_reason"] == "tool_calls"
    assert (
        len(joined(chunks_of(server.chat(tools=[_WEATHER], parallel_tool_calls=False, stream=True)))["tool_calls"]) == 1
    )


def test_reasoning_is_mirrored_where_the_server_is_told_to(serve):
    server = serve(says(message("a", thinking="b")), mirrors_reasoning=True)
    told = server.chat().json()["choices"][0]["message"]
    assert told["reasoning"] == told["reasoning_content"] == "b"


@pytest.mark.parametrize("name", ["reasoning_effort", "thinking_budget"])
def test_effort_has_two_names(serve, name):
    server = serve()
    assert server.chat(**{name: "low"}).status_code == 200
    assert "thinking_effort=low" in bytes(i for i in server.engine.requests[0].prompt if i < 256).decode()


def test_token_budget_reaches_the_engine(serve):
    server = serve()
    for fields in ({"thinking_token_budget": 5}, {"thinking_budget": 5}, {"thinking_token_budget": -1}):
        assert server.chat(**fields).status_code == 200
    assert [r.params.thinking_token_budget for r in server.engine.requests] == [5, 5, None]


def test_instructions_without_enforcement_come_with_warnings(serve):
    server = serve(says(message("{}")))
    schema = {"name": "s", "schema": {"type": "object"}, "strict": True}
    body = server.chat(response_format={"type": "json_schema", "json_schema": schema}).json()
    assert "strict: true is not enforced" in body["warnings"][0]
    prompt = bytes(i for i in server.engine.requests[0].prompt if i < 256).decode()
    assert 'following schema:\n```json\n{"type":"object"}\n```' in prompt
    body = server.chat(tools=[_WEATHER], tool_choice="required").json()
    assert "is not forced to" in body["warnings"][0]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tmperature": 1}, "tmperature", "not a field"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"temperature": 101}, "temperature", "0..100"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_k": 2**31}, "top_k", "less than or equal"),
        ({"seed": -1}, "seed", "greater than or equal"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "not both"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "max_tokens, which is 3"),
        ({"n": 65}, "n", "less than or equal"),
        ({"stop": [""]}, "stop[0]", "at least 1 character"),
        ({"stop_token_ids": [600]}, None, "outside the vocabulary"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "match pattern"),
        ({"logit_bias": {"3": 101}}, "logit_bias", "-100..100"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"reasoning_effort": "medium"}, "reasoning_effort", "use low, high, max"),
        ({"thinking_budget": "low", "reasoning_effort": "high"}, "thinking_budget", "different things"),
        ({"thinking_budget": 4, "thinking_token_budget": 5}, "thinking_budget", "differ"),
        ({"thinking_token_budget": -2}, "thinking_token_budget", "greater than or equal"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs it"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
        ({"tools": [_WEATHER, _WEATHER]}, "tools[1].function.name", "another tool"),
        (
            {"tools": [_WEATHER], "messages": [{"role": "system", "tools": [_WEATHER]}, _USER]},
            "messages[0].tools[0].function.name",
            "another tool",
        ),
        ({"messages": [{"role": "system", "tools": [5]}, _USER]}, "messages[0].tools[0]", "object"),
        ({"tool_choice": "required"}, "tool_choice", "no tools are declared"),
        ({"tools": [_WEATHER], "tool_choice": _WEATHER["function"] | {"type": "function"}}, None, "tool_choice"),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "not a field"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role", "'assistant'"),
        ({"messages": [_USER, {"role": "user", "content": 3}]}, "messages[1].content", "valid string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "reads text alone",
        ),
    ],
)
def test_refusal_names_the_field(shared_server, fields, param, says):
    response = shared_server.client.post("/v1/chat/completions", json={"messages": [_USER]} | fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert says in error["message"], error
    assert param is None or error["param"] == param


def test_named_tool_is_refused_since_nothing_would_force_it(shared_server):
    choice = {"type": "function", "function": {"name": "weather"}}
    error = shared_server.chat(tools=[_WEATHER], tool_choice=choice).json()["error"]
    assert error["param"] == "tool_choice" and "cannot be forced" in error["message"]


def test_overflow_is_refused_with_the_numbers(serve):
    server = serve(StubEngine(max_len=400))
    response = server.chat("x" * 500)
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["prompt_tokens"] > 800 and error["max_model_len"] == 400 and "messages[0] " in error["message"]
    error = server.chat("x", max_tokens=100).json()["error"]
    assert error["prompt_tokens"] == 344 and error["max_tokens"] == 100 and "ask for 56" in error["message"]
    assert server.engine.requests == []


def test_lost_history_is_refused_with_token_counts_or_warned_about(serve):
    server = serve(says(message("a")))
    asked = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
    }
    history = [_USER, asked, {"role": "tool", "tool_call_id": "c", "content": "sun"}]
    response = server.chat(messages=history, tools=[_WEATHER])
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "history_lost" and error["param"] == "messages[1]"
    assert error["losses"][0]["tokens"] == len(json.dumps(asked)) and "without reasoning_content" in error["message"]
    body = server.chat(messages=history, tools=[_WEATHER], history="lenient").json()
    assert "messages[1]: tool_calls (1) without reasoning_content" in body["warnings"][0]
    chunks = chunks_of(server.chat(messages=history, tools=[_WEATHER], history="lenient", stream=True))
    assert chunks[0]["warnings"] == body["warnings"]


def test_spelled_markers_and_empty_answers_as_the_server_is_told(serve):
    spelled = TOKENIZER.encode("hm<|close|>think<|sep|>yes")  # as text
    server = serve(says([*spelled, *ids_of("<|close|>message<|sep|><|end_of_msg|>")]), lenient_markers=True)
    told = server.chat().json()["choices"][0]["message"]
    assert told["content"] == "yes" and told["reasoning_content"] == "hm"
    ends = ids_of("thoughts<|close|>message<|sep|><|end_of_msg|>")
    assert serve(says(ends)).chat().json()["choices"][0]["message"]["content"] is None
    server = serve(says(ends), force_nonempty_content=True)
    assert server.chat().json()["choices"][0]["message"]["content"] == "thoughts"


def test_unknown_model_is_not_found(serve):
    server = serve()
    response = server.chat(model="other")
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
    assert server.chat(model="tiny").status_code == 200
