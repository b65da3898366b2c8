"""/v1/completions, /tokenize and /detokenize: text and ids as they are."""

import json

import pytest

from tests.server.stub_engine import END_ID, TOKENIZER, StubEngine, ids_of

_TEXT = "Once é🚀 upon <|open|>a time"


@pytest.fixture(scope="module")
def server():
    from tests.server.conftest import running

    with running(StubEngine(lambda prompt, params: [*ids_of(_TEXT), END_ID])) as found:
        yield found


def _post(server, prompt, **fields):
    return server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 100} | fields)


def test_text_goes_on_and_markers_are_text(server):
    body = _post(server, "a<|sep|>").json()
    assert body["choices"][0]["text"] == _TEXT and body["choices"][0]["finish_reason"] == "stop"
    assert list(server.engine.requests[-1].prompt) == ids_of("a<|sep|>")
    assert body["usage"]["prompt_tokens"] == 2 and body["usage"]["completion_tokens"] == len(ids_of(_TEXT)) + 1


def test_ids_are_taken_as_they_are(server):
    body = _post(server, [1, 2, 300], return_token_ids=True).json()
    assert list(server.engine.requests[-1].prompt) == [1, 2, 300]
    assert body["choices"][0]["token_ids"] == [*ids_of(_TEXT), END_ID]


def test_stream_joins_and_counts(server):
    text = _post(server, "a", stream=True, stream_options={"include_usage": True}, logprobs=1).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
    pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(piece["text"] for piece in pieces) == _TEXT and pieces[-1]["finish_reason"] == "stop"
    told = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    assert sum(len(piece["tokens"]) for piece in told) == len(ids_of(_TEXT))
    assert [offset for piece in told for offset in piece["text_offset"]][:5] == [0, 1, 2, 3, 4]
    assert chunks[-1]["usage"]["total_tokens"] == len(ids_of(_TEXT)) + 2


def test_prompts_and_choices_are_numbered(server):
    body = _post(server, ["a", "b"], n=2, stop="upon").json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in body["choices"]} == {"Once é🚀 "}
    assert [list(r.prompt) for r in server.engine.requests[-4:]] == [[97], [97], [98], [98]]
    assert body["usage"]["prompt_tokens"] == 2
    server.wait_idle()


def test_default_length_is_the_interfaces_own(server):
    body = server.client.post("/v1/completions", json={"prompt": "a"}).json()
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [600]}, None),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 40, "n": 2}, "n"),
        ({"echo": True}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 10_000}, "max_tokens"),
    ],
)
def test_refusal_names_the_field(server, fields, param):
    response = server.client.post("/v1/completions", json={"prompt": "a"} | fields)
    assert response.status_code == 400
    assert param is None or response.json()["error"]["param"] == param, response.text


def test_tokens_of_text_and_back(server):
    body = server.client.post("/tokenize", json={"prompt": "é<|sep|>", "return_token_strs": True}).json()
    assert body["tokens"] == ids_of("é<|sep|>") and body["count"] == 3 and body["max_model_len"] == 4096
    assert body["token_strs"][-1] == "<|sep|>"
    back = server.client.post("/detokenize", json={"tokens": body["tokens"]}).json()
    assert back == {"prompt": "é<|sep|>"}
    assert server.client.post("/detokenize", json={"tokens": [512]}).status_code == 400


def test_tokens_of_a_conversation_are_its_prompt(server):
    chat = {"messages": [{"role": "user", "content": "<|sep|>"}], "reasoning_effort": "low"}
    body = server.client.post("/tokenize", json=chat).json()
    server.client.post("/v1/chat/completions", json=chat)
    assert body["tokens"] == list(server.engine.requests[-1].prompt)
    assert TOKENIZER.decode(body["tokens"]).endswith("<|open|>think<|sep|>")
    assert server.client.post("/tokenize", json=chat | {"prompt": "x"}).status_code == 400
