"""The official client, unchanged, against a server on loopback."""

import json

import openai
import pytest

from tests.server.stub_engine import TOKENIZER, StubEngine, call, message

_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}},
    },
}


def _adds(prompt, params):
    """Asks for a sum, then tells it; thinks each time."""
    text = TOKENIZER.decode(prompt)
    results = text.count('role="tool"')
    if results < 2:
        return message("", thinking=f"step {results}", calls=call("add", 1, a=str(results), b="1"))
    return message('{"sum": 3}', thinking="done")


@pytest.fixture(scope="module")
def client(shared_clients_server):
    with openai.OpenAI(base_url=f"{shared_clients_server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def shared_clients_server():
    from tests.server.conftest import running

    with running(StubEngine(_adds)) as found:
        yield found


@pytest.mark.parametrize("streams", [False, True])
def test_loop_over_tool_calls_keeps_the_whole_history(client, shared_clients_server, streams):
    messages = [{"role": "user", "content": "add up"}]
    for _ in range(5):
        if streams:
            with client.chat.completions.stream(model="tiny", messages=messages, tools=[_TOOL]) as stream:
                choice = stream.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(model="tiny", messages=messages, tools=[_TOOL]).choices[0]
        messages.append(choice.message)
        if choice.finish_reason != "tool_calls":
            break
        for asked in choice.message.tool_calls:
            arguments = json.loads(asked.function.arguments)
            result = str(int(arguments["a"]) + int(arguments["b"]))
            messages.append({"role": "tool", "tool_call_id": asked.id, "content": result})
    assert choice.finish_reason == "stop" and choice.message.content == '{"sum": 3}'
    assert len({m["tool_call_id"] for m in messages if isinstance(m, dict) and m["role"] == "tool"}) == 2
    text = TOKENIZER.decode(shared_clients_server.engine.requests[-1].prompt)
    assert "step 0<|close|>think" in text and "step 1<|close|>think" in text


def test_usage_of_a_stream(client):
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            tools=[_TOOL],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens_details.reasoning_tokens == 6
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_structured_output_parses(client):
    import pydantic

    class Sum(pydantic.BaseModel):
        sum: int

    done = [{"role": "user", "content": 'role="tool" role="tool"'}]
    parsed = client.chat.completions.parse(model="tiny", messages=done, response_format=Sum)
    assert parsed.choices[0].message.parsed == Sum(sum=3)
    assert "is not forced to" in parsed.warnings[0]


def test_errors_are_of_the_classes_that_the_client_has(client):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="tiny", messages=messages, temperature=500)
    assert caught.value.param == "temperature" and caught.value.code == "invalid_field"
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.chat.completions.create(model="gpt", messages=messages)
    with pytest.raises(openai.BadRequestError, match="not a field"):
        client.chat.completions.create(model="tiny", messages=messages, extra_body={"magic": 1})


def test_completion(client):
    whole = client.completions.create(model="tiny", prompt="ab", max_tokens=20, logprobs=1)
    assert whole.choices[0].text.startswith("step 0") and whole.choices[0].finish_reason == "length"
    assert whole.choices[0].logprobs.text_offset[:3] == [0, 1, 2]
    chunks = client.completions.create(model="tiny", prompt="ab", max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_response(client):
    whole = client.responses.create(model="tiny", input='role="tool" role="tool"', instructions="Add.")
    assert whole.output_text == '{"sum": 3}' and whole.status == "completed"
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.usage.output_tokens_details.reasoning_tokens == 4


def test_response_goes_on_after_a_call(client, shared_clients_server):
    tool = {"type": "function", **_TOOL["function"]}
    items = [{"role": "user", "content": "add up"}]
    for _ in range(5):
        response = client.responses.create(model="tiny", input=items, tools=[tool])
        items += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        items += [{"type": "function_call_output", "call_id": asked.call_id, "output": "1"} for asked in calls]
    assert response.output_text == '{"sum": 3}'
    text = TOKENIZER.decode(shared_clients_server.engine.requests[-1].prompt)
    assert "step 0<|close|>think" in text and "step 1<|close|>think" in text


def test_response_streams_to_the_same(client):
    tool = {"type": "function", **_TOOL["function"]}
    with client.responses.stream(model="tiny", input="add up", tools=[tool]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    reasoning, asked = final.output
    assert reasoning.content[0].text == "step 0" and json.loads(asked.arguments) == {"a": "0", "b": "1"}
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == asked.arguments


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 4096
    assert client.models.retrieve("tiny").capabilities == {"vision": False}
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_key_that_is_not_accepted(serve):
    from maxmoe.server.keys import Keys

    server = serve(app_settings={"keys": Keys(["k" * 16])})
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong").chat.completions.create(
            model="tiny", messages=messages
        )
    right = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k" * 16)
    assert right.chat.completions.create(model="tiny", messages=messages).choices[0].finish_reason == "stop"


def test_full_queue_is_the_clients_rate_limit_error(serve):
    server = serve(StubEngine(max_batch=1), max_waiting=1)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], n=3)
