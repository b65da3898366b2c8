"""Arguments of calls: pieces of JSON that arrive one by one are the JSON of the whole."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from maxmoe.chat.tool_calls import ArgumentsBuilder

_TYPES = st.sampled_from(["string", "number", "boolean", "null", "object", "array", ""])
_BODIES = st.lists(st.text(max_size=5) | st.sampled_from(['"', "1.", "NaN", "[1]", '{"a":', '"\\ud800"', "1e999"]))
_ARGUMENTS = st.lists(st.tuples(st.text(max_size=3), _TYPES, _BODIES), max_size=4, unique_by=lambda entry: entry[0])


def _refuse_constant(name: str):
    raise ValueError(f"{name} is no JSON")


def _valid(text: str):
    text.encode()
    return json.loads(text, parse_constant=_refuse_constant)


@settings(max_examples=100)
@given(_ARGUMENTS)
def test_pieces_joined_are_the_json_of_the_whole(arguments):
    builder, pieces = ArgumentsBuilder(), []
    for key, kind, body in arguments:
        pieces.append(builder.open(key, kind))
        pieces += map(builder.feed, body)
        pieces.append(builder.close())
    pieces.append(builder.end())
    assert "".join(pieces) == builder.json
    value = _valid(builder.json)
    assert list(value) == [key for key, _, _ in arguments]
    for key, kind, body in arguments:
        if kind == "string":
            assert value[key] == "".join(body)


def test_key_that_comes_twice_has_its_last_value():
    builder = ArgumentsBuilder()
    pieces = [builder.open("n", "string"), builder.feed("1"), builder.close()]
    pieces += [builder.open("n", "number"), builder.feed("2"), builder.close(), builder.end()]
    assert builder.json == '{"n": 2}' and _valid("".join(pieces)) == {"n": 2}


def test_object_at_once_adds_to_what_is_there():
    builder = ArgumentsBuilder()
    pieces = [builder.add_object('{"a":[1],"b":{}}'), builder.open("c", "string"), builder.close(), builder.end()]
    assert "".join(pieces) == builder.json == '{"a": [1], "b": {}, "c": ""}'
    assert not builder.is_complete


def test_text_that_is_no_object_is_kept_as_it_is():
    builder = ArgumentsBuilder()
    assert builder.add_object('{"a": ') + builder.end() == builder.json == '{"a": '
    assert builder.is_complete


def test_text_that_is_no_object_after_others_is_one_of_them():
    builder = ArgumentsBuilder()
    pieces = [builder.open("a", "null"), builder.feed("null"), builder.close(), builder.add_object("x"), builder.end()]
    assert "".join(pieces) == builder.json == '{"a": null, "json": "x"}'


def test_deep_nesting_is_text():
    builder = ArgumentsBuilder()
    builder.open("a", "array")
    builder.feed("[" * 99_999)
    builder.close()
    assert _valid(builder.json) == {"a": "[" * 99_999}
