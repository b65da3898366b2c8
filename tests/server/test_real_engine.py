"""The server over the engine itself, with a model of two layers: what comes over HTTP is what the engine says alone."""

import asyncio
import dataclasses
import json
import random
from pathlib import Path

import httpx
import jax.numpy as jnp
import pytest

from maxmoe import conversation
from maxmoe.chat.tokenizer import ByteTokenizer
from maxmoe.config import load_config
from maxmoe.inference.engine import Engine
from maxmoe.inference.grammar import Grammars
from maxmoe.inference.sampling_params import SamplingParams
from maxmoe.model.transformer import Transformer
from maxmoe.server.metrics import Metrics
from tests.inference.random_weights import random_weights
from tests.server.conftest import running

_ROOT = Path(__file__).resolve().parents[2]
_TOKENIZER = ByteTokenizer(512)
_CHUNK = 32
_LONG = "It is told again and again. " * 4


@pytest.fixture(scope="module")
def engine():
    config = load_config(_ROOT / "configs/tiny.py")
    model = Transformer(dataclasses.replace(config, num_layers=2, full_attention_layers=(1,)))
    return Engine(
        model,
        random_weights(model, jnp.float32),
        max_batch=4,
        max_len=1536,
        prefill_chunk=_CHUNK,
        prefix_cache_bytes=2**24,
        grammars=Grammars(_TOKENIZER, config.eos_id),
        thinking=conversation.thinking_markers(_TOKENIZER),
    )


@pytest.fixture(scope="module")
def direct(engine):
    """An answer by the engine, before the server has it."""
    params = SamplingParams(max_tokens=12, top_p=0.95, seed=11)
    request = engine.submit(_TOKENIZER.encode("alone"), params)
    while engine.has_work:
        engine.step()
    return request.completion()


@pytest.fixture(scope="module")
def server(engine, direct):
    with running(engine, tokenizer=_TOKENIZER, metrics=Metrics("tiny"), warm_up=False) as found:
        yield found


def _body(i: int) -> dict:
    return {"prompt": f"{i} times", "max_tokens": 10 + 3 * i, "seed": i, "return_token_ids": True}


def test_answer_is_the_engines_own(server, direct):
    body = {"prompt": "alone", "max_tokens": 12, "seed": 11, "return_token_ids": True, "logprobs": 2}
    choice = server.client.post("/v1/completions", json=body).json()["choices"][0]
    kept = direct.ids if direct.stop_id is None else [*direct.ids, direct.stop_id]
    assert choice["token_ids"] == kept and choice["finish_reason"] == direct.finish_reason
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(direct.logprobs, abs=1e-4)  # rounding of one shape
    assert len(choice["logprobs"]["top_logprobs"][0]) == 2


def test_streams_are_whole_while_others_vanish(server):
    """Sixteen streams on four slots, of which some go away; the others say what they say alone."""
    chance = random.Random(3)
    leaves = {i: chance.randrange(1, 4) for i in range(16) if chance.random() < 0.3}
    alone = [server.client.post("/v1/completions", json=_body(i)).json()["choices"][0] for i in range(16)]

    async def stream(client: httpx.AsyncClient, i: int) -> list[dict]:
        found: list[dict] = []
        async with client.stream("POST", "/v1/completions", json=_body(i) | {"stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    found.append(json.loads(line.removeprefix("data: "))["choices"][0])
                if len(found) >= leaves.get(i, 10_000):
                    break
        return found

    async def all_at_once():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return await asyncio.gather(*(stream(client, i) for i in range(16)))

    answers = asyncio.run(all_at_once())
    server.wait_idle()
    assert len(leaves) >= 3
    for i in set(range(16)) - leaves.keys():
        assert "".join(piece["text"] for piece in answers[i]) == alone[i]["text"]
        assert answers[i][-1]["token_ids"] == alone[i]["token_ids"]


def test_prefix_is_found_for_the_same_salt_alone(server):
    def cached(salt: str) -> int:
        body = {"prompt": _LONG, "max_tokens": 2, "temperature": 0, "cache_salt": salt}
        return server.client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]

    assert cached("one") == 0
    assert cached("one") >= _CHUNK
    assert cached("two") == 0
    text = server.client.get("/metrics").text
    (line,) = (line for line in text.splitlines() if line.startswith("maxmoe:prefix_cache_hits_total{"))
    assert float(line.split()[-1]) >= _CHUNK
    (line,) = (line for line in text.splitlines() if line.startswith("maxmoe:kv_cache_fragmentation_perc{"))
    assert float(line.split()[-1]) == 0  # nobody runs


_LETTER = {
    "type": "object",
    "properties": {"a": {"type": "string", "enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}


def _asks(server, **fields) -> dict:
    body = {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "none", "max_tokens": 400} | fields
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_answer_matches_its_schema(server):
    schema = {"type": "json_schema", "json_schema": {"name": "letter", "schema": _LETTER, "strict": True}}
    answer = _asks(server, response_format=schema, seed=4)
    assert json.loads(answer["choices"][0]["message"]["content"])["a"] in ("x", "y")
    assert answer["choices"][0]["finish_reason"] == "stop" and "warnings" not in answer


def test_named_tool_is_called(server):
    tools = [
        {"type": "function", "function": {"name": name, "strict": True, "parameters": _LETTER}} for name in ("f", "g")
    ]
    choice = {"type": "function", "function": {"name": "g"}}
    bias = {str(_TOKENIZER.special_ids["<|close|>"]): 100}  # or it would talk for long before it calls
    answer = _asks(server, tools=tools, tool_choice=choice, parallel_tool_calls=False, logit_bias=bias)
    (asked,) = answer["choices"][0]["message"]["tool_calls"]
    assert asked["function"]["name"] == "g" and json.loads(asked["function"]["arguments"])["a"] in ("x", "y")
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_schema_that_cannot_be_enforced_is_refused(server):
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#/nowhere"}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": schema}
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "response_format"


def test_thinking_budget_ends_thinking(server):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "seed": 1, "thinking_token_budget": 3}
    body["thinking_effort"] = None  # a prompt without the line about effort is short
    answer = server.client.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 3
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_refusal_of_the_engine_names_what_is_wrong(server):
    response = server.client.post("/v1/completions", json={"prompt": [5, 511, 512]})
    assert response.status_code == 400 and "512 is outside the vocabulary" in response.json()["error"]["message"]
