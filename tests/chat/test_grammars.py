"""Grammars of answers: what the chat encoding writes is allowed, what breaks a schema is not."""

import functools
import importlib.util
import json

import pytest

from maxmoe import chat
from maxmoe.chat.grammars import answer_grammar
from maxmoe.chat.tokenizer import ByteTokenizer
from maxmoe.inference.grammar import Grammars

TOKENIZER = ByteTokenizer(512)
needs_llguidance = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="grammars need llguidance: pip install 'maxmoe[grammar]'"
)
ASK = [{"role": "user", "content": "go"}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"$ref": "#/$defs/n"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "number"}},
}


@functools.cache
def _grammars():
    return Grammars(TOKENIZER, TOKENIZER.end_of_msg_id)


def _tool(name, properties, required=(), **extra):
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **extra}}


WEATHER = _tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}, ["city"])
UNIT = _tool("unit", {"u": {"type": "string", "enum": ["°C", 'a"b']}, "p": POINT}, ["u"], strict=True)


def _fits(request, answer, thinking=True):
    """Whether the ids that the chat encoding gives an assistant's message, behind its thinking, match the grammar."""
    whole = chat.encode(
        {"messages": [*ASK, {"role": "assistant", **answer}], "thinking": thinking, "add_generation_prompt": False},
        TOKENIZER,
    )
    start = chat.encode({"messages": ASK, "thinking": thinking}, TOKENIZER)
    ids = whole[len(start) :]
    if thinking:
        close = [TOKENIZER.special_ids["<|close|>"], *TOKENIZER.encode("think"), TOKENIZER.special_ids["<|sep|>"]]
        assert ids[: len(close)] == close
        ids = ids[len(close) :]
    grammar = answer_grammar({"messages": ASK, "thinking": thinking, **request}, TOKENIZER)
    matcher = _grammars().matcher(grammar)
    for token_id in ids:
        if not matcher.words[token_id // 32] >> (token_id % 32) & 1:
            return False
        matcher.accept(token_id)
    return True


def _calls(*calls):
    return [
        {"id": str(i), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]


def _format(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}}


@needs_llguidance
@pytest.mark.parametrize("thinking", [True, False])
def test_json_answers(thinking):
    for content, fits in (
        ('{"x": 1, "y": 2.5}', True),
        ('{"x":-3}', True),
        ('{"x": 1.5}', False),
        ('{"y": 1}', False),
        ('{"x": 1, "z": 2}', False),
        ("```json\n{}", False),
        ("", False),
    ):
        assert _fits(_format(POINT), {"content": content}, thinking) == fits, content
    anything = {"response_format": {"type": "json_object"}}
    assert _fits(anything, {"content": '{"a": [1, "é", null]}'}, thinking)
    assert not _fits(anything, {"content": "[1]"}, thinking)


@needs_llguidance
@pytest.mark.parametrize("thinking", [True, False])
def test_required_calls(thinking):
    request = {"tools": [WEATHER, UNIT], "tool_choice": "required"}
    good = _calls(("get_weather", {"city": "Bern <|open|> \n", "days": 3}), ("unit", {"u": 'a"b', "p": {"x": 1}}))
    assert _fits(request, {"content": "", "tool_calls": good}, thinking)
    assert _fits(request, {"content": "Let me look.", "tool_calls": good[:1]}, thinking)
    assert not _fits(request, {"content": "no call"}, thinking)
    for name, arguments in (
        ("get_time", {}),
        ("get_weather", {}),
        ("get_weather", {"city": 3}),
        ("get_weather", {"city": "a", "days": 1.5}),
        ("get_weather", {"town": "a"}),
        ("unit", {"p": {"x": 1}}),
        ("unit", {"u": "K"}),
        ("unit", {"u": "°C", "p": {"x": "1"}}),
        ("unit", {"p": {"x": 1}, "u": "°C"}),  # strict: in the declared order
    ):
        assert not _fits(request, {"content": "", "tool_calls": _calls((name, arguments))}, thinking), (name, arguments)


@needs_llguidance
def test_a_named_tool_and_one_call_at_a_time():
    named = {"type": "function", "function": {"name": "get_weather"}}
    request = {"tools": [WEATHER, UNIT], "tool_choice": named, "parallel_tool_calls": False}
    call = ("get_weather", {"city": "Bern"})
    assert _fits(request, {"content": "", "tool_calls": _calls(call)})
    assert not _fits(request, {"content": "", "tool_calls": _calls(("unit", {"u": "°C"}))})
    assert not _fits(request, {"content": "", "tool_calls": _calls(call, call)})


@needs_llguidance
def test_calls_are_optional_beside_json_and_for_strict_tools():
    call = _calls(("unit", {"u": "°C"}))
    both = _format(POINT) | {"tools": [UNIT]}
    assert _fits(both, {"content": '{"x": 1}'}) and _fits(both, {"content": '{"x": 1}', "tool_calls": call})
    assert _fits({"tools": [UNIT]}, {"content": "hi"}) and _fits({"tools": [UNIT]}, {"content": "", "tool_calls": call})
    none = both | {"tool_choice": "none"}
    assert _fits(none, {"content": '{"x": 1}'}) and not _fits(none, {"content": '{"x": 1}', "tool_calls": call})


@needs_llguidance
def test_tools_that_say_nothing_of_their_arguments():
    request = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}
    assert _fits(request, {"content": "", "tool_calls": _calls(("f", {}))})
    assert _fits(request, {"content": "", "tool_calls": _calls(("f", {"a": [1, {"b": None}], "c": "x", "d": True}))})


@needs_llguidance
def test_arguments_of_several_types_and_bounded_strings():
    properties = {"v": {"type": ["string", "null"]}, "any": {}, "s": {"type": "string", "maxLength": 3}}
    request = {"tools": [_tool("f", properties)], "tool_choice": "required"}
    for arguments, fits in (({"v": None}, True), ({"v": "x"}, True), ({"v": 1}, False), ({"any": [1]}, True)):
        assert _fits(request, {"content": "", "tool_calls": _calls(("f", arguments))}) == fits, arguments
    for text, fits in (("äöü", True), ("four", False)):
        assert _fits(request, {"content": "", "tool_calls": _calls(("f", {"s": text}))}) == fits, text


@needs_llguidance
def test_values_that_are_listed_need_no_type():
    properties = {"v": {"enum": ["a", 2, None]}, "c": {"const": True}, "i": {"type": "integer", "enum": [1, 3]}}
    request = {"tools": [_tool("f", properties)], "tool_choice": "required"}
    for arguments, fits in (
        ({"v": "a"}, True),
        ({"v": 2}, True),
        ({"v": None}, True),
        ({"v": "b"}, False),
        ({"v": 3}, False),
        ({"v": True}, False),
        ({"c": True}, True),
        ({"c": False}, False),
        ({"i": 3}, True),
        ({"i": 2}, False),
    ):
        assert _fits(request, {"content": "", "tool_calls": _calls(("f", arguments))}) == fits, arguments


def test_nothing_to_match():
    plain = _tool("f", {"a": {"type": "string"}})
    partial = [*ASK, {"role": "assistant", "content": '{"x"', "partial": True}]
    for request in ({}, {"tools": [plain]}, {"response_format": {"type": "text"}}):
        assert answer_grammar({"messages": ASK, **request}, TOKENIZER) == ""
    assert answer_grammar({"messages": partial, **_format(POINT)}, TOKENIZER) == ""


def test_schemas_that_cannot_be_read_are_refused():
    request = {"messages": ASK, "tools": [_tool("f", {"a": {"type": "text"}}, strict=True)]}
    with pytest.raises(chat.RequestError, match="type 'text'; types are integer, string"):
        answer_grammar(request, TOKENIZER)
    for kind in (5, [{"type": "string"}]):
        request = {"messages": ASK, "tools": [_tool("f", {"a": {"type": kind}}, strict=True)]}
        with pytest.raises(chat.RequestError, match="types are integer, string"):
            answer_grammar(request, TOKENIZER)
    request = {"messages": ASK, "tools": [_tool("f", {"a": {}}, required=(), strict=True)]}
    request["tools"][0]["function"]["parameters"]["required"] = 5
    with pytest.raises(chat.RequestError, match="required of tool 'f' must be a list"):
        answer_grammar(request, TOKENIZER)
    request = {"messages": ASK, "tools": [_tool("f", {"a": {"type": "string", "enum": [1]}}, strict=True)]}
    with pytest.raises(chat.RequestError, match="allows no value: its type and its enum contradict"):
        answer_grammar(request, TOKENIZER)
    with pytest.raises(chat.RequestError, match="schema of response_format must be an object"):
        answer_grammar({"messages": ASK, **_format([1])}, TOKENIZER)
