"""/v1/sessions: an answer is saved with its exact ids, forked, and gone on with, token in, token out."""

import json

import pytest

from maxmoe.server.errors import ApiError
from maxmoe.server.keys import Keys
from maxmoe.server.sessions import SessionStore, Snapshot
from tests.server.stub_engine import END_ID, TOKENIZER, VOCAB_SIZE, StubEngine, call, message

_ANSWER = message("first", thinking="thought")
_TOOL = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture
def store(tmp_path):
    return SessionStore(tmp_path, "tiny", VOCAB_SIZE)


def _save(server, answer, name="mine", **fields):
    return server.client.post("/v1/sessions", json={"name": name, "response_id": answer["id"]} | fields)


def _resume(server, name="mine", **fields):
    return server.client.post(f"/v1/sessions/{name}/resume", json=fields)


def test_resumed_prompt_is_the_exact_past_and_what_is_new(serve, store):
    server = serve(StubEngine(lambda prompt, params: _ANSWER), sessions=store)
    answer = server.chat("one", reasoning_effort="low").json()
    saved = _save(server, answer)
    past = [*server.engine.requests[0].prompt, *_ANSWER]
    assert saved.status_code == 201 and saved.json()["num_tokens"] == len(past) and saved.json()["is_complete"]
    resumed = _resume(server, messages=[{"role": "user", "content": "two"}])
    prompt = list(server.engine.requests[1].prompt)
    assert prompt[: len(past)] == past
    expected = '<|open|>message role="user"<|sep|>two<|close|>message<|sep|><|end_of_msg|>'
    expected += '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    assert TOKENIZER.decode(prompt[len(past) :]) == expected
    again = _save(server, resumed.json(), replace=True).json()
    assert again["num_messages"] == 4 and again["num_tokens"] == len(prompt) + len(_ANSWER)


def test_streamed_answer_with_calls_can_be_saved_and_gone_on_with(serve, store):
    ids = message("", thinking="t", calls=call("weather", 1, city="Bern"))
    server = serve(StubEngine(lambda prompt, params: ids), sessions=store)
    stream = server.chat(tools=[_TOOL], stream=True).text
    first = json.loads(stream.split("\n\n")[0].removeprefix("data: "))
    assert _save(server, first).status_code == 201
    call_id = store.load("", "mine").request["messages"][-1]["tool_calls"][0]["id"]
    response = _resume(server, messages=[{"role": "tool", "tool_call_id": call_id, "content": "sun"}], stream=True)
    assert response.status_code == 200
    prompt = list(server.engine.requests[1].prompt)
    past = [*server.engine.requests[0].prompt, *ids]
    assert prompt[: len(past)] == past and 'role="tool" tool="weather"' in TOKENIZER.decode(prompt[len(past) :])
    assert (
        _resume(server, messages=[{"role": "user", "content": "never mind"}]).json()["error"]["code"] == "history_lost"
    )


def test_answer_that_was_cut_off_goes_on_where_it_was(serve, store):
    server = serve(StubEngine(lambda prompt, params: _ANSWER if len(prompt) < 355 else _ANSWER[10:]), sessions=store)
    answer = server.chat("one", max_tokens=10).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert not _save(server, answer).json()["is_complete"]
    response = _resume(server, messages=[{"role": "user", "content": "two"}])
    assert response.status_code == 400 and "was cut off" in response.json()["error"]["message"]
    rest = _resume(server)
    assert list(server.engine.requests[1].prompt) == [*server.engine.requests[0].prompt, *_ANSWER[:10]]
    assert rest.json()["choices"][0]["message"]["content"] == "first"
    _save(server, rest.json(), replace=True)
    kept = store.load("", "mine")
    assert kept.is_complete and kept.ids[-1] == END_ID
    assert kept.request["messages"][-1]["content"] == "first"
    assert kept.request["messages"][-1]["reasoning_content"] == "thought"


def test_fork_goes_its_own_way(serve, store):
    server = serve(StubEngine(lambda prompt, params: _ANSWER), sessions=store)
    _save(server, server.chat("one").json())
    assert server.client.post("/v1/sessions/mine/fork", json={"name": "other"}).status_code == 201
    assert server.client.post("/v1/sessions/mine/fork", json={"name": "other"}).status_code == 409
    _save(server, _resume(server, messages=[{"role": "user", "content": "two"}]).json(), replace=True)
    assert store.describe("", "other")["num_messages"] == 2 and store.describe("", "mine")["num_messages"] == 4
    listed = server.client.get("/v1/sessions").json()
    assert [entry["name"] for entry in listed["data"]] == ["mine", "other"]
    assert server.client.delete("/v1/sessions/mine").json()["deleted"]
    assert server.client.get("/v1/sessions/mine").status_code == 404
    assert _resume(server, messages=[]).status_code == 404


def test_each_key_sees_its_own(serve, store):
    keys = ["a" * 16, "b" * 16]
    server = serve(StubEngine(lambda p, q: _ANSWER), sessions=store, app_settings={"keys": Keys(keys)})
    mine, other = ({"headers": {"authorization": f"Bearer {key}"}} for key in keys)
    body = {"messages": [{"role": "user", "content": "x"}]}
    answer = server.client.post("/v1/chat/completions", json=body, **mine).json()
    save = {"name": "s", "response_id": answer["id"]}
    assert server.client.post("/v1/sessions", json=save, **other).status_code == 404
    assert server.client.post("/v1/sessions", json=save, **mine).status_code == 201
    assert server.client.get("/v1/sessions/s", **other).status_code == 404
    assert server.client.get("/v1/sessions", **other).json()["data"] == []
    assert len({request.cache_salt for request in server.engine.requests}) == 1


def test_server_without_a_folder_keeps_none(shared_server):
    response = shared_server.client.get("/v1/sessions")
    assert response.status_code == 404 and "--session_dir" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".hidden", "x" * 65])
def test_name_that_could_leave_the_folder(store, name):
    store.remember("", "id", Snapshot(ids=[1], request={"messages": []}, is_complete=True))
    with pytest.raises(ApiError, match="up to 64 letters"):
        store.save("", name, "id")


def test_session_of_another_model_or_damaged(store, tmp_path):
    store.remember("", "id", Snapshot(ids=[1], request={"messages": []}, is_complete=True))
    store.save("", "s", "id")
    with pytest.raises(ApiError, match="'other'") as caught:
        SessionStore(tmp_path, "other", VOCAB_SIZE).load("", "s")
    assert caught.value.status == 409
    (file,) = tmp_path.glob("*/s.json")
    file.write_text(file.read_text()[:-5])
    with pytest.raises(ApiError, match="damaged"):
        store.load("", "s")
    assert file.stat().st_mode & 0o077 == 0


def test_old_answers_make_room(store, monkeypatch):
    monkeypatch.setattr("maxmoe.server.sessions._MAX_RECENT_TOKENS", 25)
    for i in range(4):
        store.remember("", f"id{i}", Snapshot(ids=[0] * 10, request={"messages": []}, is_complete=True))
    with pytest.raises(ApiError, match="too long ago"):
        store.save("", "s", "id1")
    assert store.save("", "s", "id3")["num_tokens"] == 10
