"""Parser: every generated text the family is known to produce, well-formed or not, in steps of any size."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxmoe import chat
from maxmoe.chat.tokenizer import ByteTokenizer

_GOLDEN = Path(__file__).resolve().parents[1] / "golden"
_MALFORMED = json.loads((_GOLDEN / "chat_malformed.json").read_text(encoding="utf-8"))
_BYTES = ByteTokenizer(512)

_THINK, _RESPONSE = "<|open|>think<|sep|>", "<|open|>response<|sep|>"
_END_THINK, _END_RESPONSE = "<|close|>think<|sep|>", "<|close|>response<|sep|>"
_TOOLS, _END_TOOLS = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
_END_CALL, _END_MESSAGE = "<|close|>call<|sep|>", "<|close|>message<|sep|>"
_ANSWER = _RESPONSE + "c" + _END_RESPONSE


def _call(name: str, *arguments: tuple[str, str, str], index: int = 1) -> str:
    """A whole call; arguments are key, type, value."""
    tags = (f'<|open|>argument key="{k}" type="{t}"<|sep|>{v}<|close|>argument<|sep|>' for k, t, v in arguments)
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{"".join(tags)}{_END_CALL}'


def _ids(text: str, tokenizer=_BYTES) -> list[int]:
    return tokenizer.encode(text, allow_special=True)


class _Stream:
    """What a client makes of the deltas of a stream."""

    def __init__(self):
        self.reasoning = self.content = ""
        self.calls: list[dict] = []

    def add(self, deltas: list[dict]) -> None:
        for delta in deltas:
            ((key, value),) = delta.items()
            if key == "reasoning_content":
                self.reasoning += value
            elif key == "content":
                self.content += value
            else:
                (entry,) = value
                if "id" in entry:
                    assert entry["index"] == len(self.calls) and entry["type"] == "function"
                    assert entry["function"]["arguments"] == ""
                    self.calls.append({"id": entry["id"], "type": "function", "function": dict(entry["function"])})
                else:
                    self.calls[entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]


def _read(ids, prompt=_THINK, steps=None, tokenizer=_BYTES, ended_by="stop", **options):
    """Feeds ids in steps: sizes that repeat, all at once without. Returns message, parser, and the stream's result."""
    parser = chat.Parser(tokenizer, _ids(prompt, tokenizer), **options)
    stream, at, sizes = _Stream(), 0, list(steps or [len(ids) or 1])
    while at < len(ids):
        stream.add(parser.feed(ids[at : at + sizes[0]]))
        at += sizes[0]
        sizes.append(sizes.pop(0))
    return parser.finish(ended_by), parser, stream


def _short(message) -> dict:
    """A message in the form of the golden file."""
    assert message["role"] == "assistant"
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]]
    return {"reasoning": message["reasoning_content"], "content": message["content"], "calls": calls}


@pytest.mark.parametrize("case", _MALFORMED, ids=lambda case: case["name"])
def test_malformed_text_is_read_alike_in_steps_of_any_size(case):
    ids = _ids(case["generated"])
    for steps in ([1], [2], [8], *([n, len(ids)] for n in range(1, len(ids)))):
        message, _, stream = _read(ids, steps=steps)
        assert _short(message) == case["expected"], steps
        assert (stream.reasoning or None, stream.content) == (message["reasoning_content"], message["content"] or "")
        for shown, whole in zip(stream.calls, message["tool_calls"], strict=False):
            assert shown["id"] == whole["id"]
            assert json.loads(shown["function"]["arguments"]) == json.loads(whole["function"]["arguments"])


@pytest.mark.parametrize("case", _MALFORMED, ids=lambda case: case["name"])
def test_malformed_text_in_the_published_vocabulary(published, case):
    ids = _ids(case["generated"], published)
    for steps in ([1], [2], [8], [len(ids)]):
        message, _, _ = _read(ids, steps=steps, tokenizer=published)
        assert _short(message) == case["expected"], steps


# Name, prompt, generated, then reasoning, content, calls, finish reason.
_ROWS = [
    ("skipped think", _THINK, "c" + _END_RESPONSE + _END_MESSAGE, (None, "c", [], "stop")),
    ("skipped think, tools", _THINK, "c" + _END_RESPONSE + _TOOLS + _call("f"),
     (None, "c", [["f", "{}"]], "tool_calls")),
    ("repeated open think", _THINK, _THINK + "r" + _END_THINK + _ANSWER, ("r", "c", [], "stop")),
    ("think again", _THINK, "r" + _END_THINK + _THINK + "s" + _END_THINK + _ANSWER, ("rs", "c", [], "stop")),
    ("end in think", _THINK, "r<|end_of_msg|>junk", ("r", None, [], "stop")),
    ("tools omit close", _THINK, "r" + _END_THINK + _ANSWER + _TOOLS + _call("f") + _END_MESSAGE,
     ("r", "c", [["f", "{}"]], "tool_calls")),
    ("two tools channels", _RESPONSE, "c" + _END_RESPONSE + (_TOOLS + _call("f") + _END_TOOLS) * 2 + _END_MESSAGE,
     (None, "c", [["f", "{}"], ["f", "{}"]], "tool_calls")),
    ("unclosed call at close tools", _RESPONSE, _TOOLS + _call("f").removesuffix(_END_CALL) + _END_TOOLS + _END_MESSAGE,
     (None, "", [], "stop")),
    ("argument not closed", _RESPONSE,
     _TOOLS + _call("f", ("a", "string", "x"), ("b", "number", "1")).replace("<|close|>argument<|sep|>", ""),
     (None, None, [["f", '{"a": "x", "b": 1}']], "tool_calls")),
    ("call outside tools", _RESPONSE, "c" + _call("f") + _END_MESSAGE, (None, "c", [["f", "{}"]], "tool_calls")),
    ("bad json block", _RESPONSE,
     _TOOLS + '<|open|>call tool="f"<|sep|><|open|>json<|sep|>{"a": <|close|>json<|sep|>' + _END_CALL,
     (None, None, [["f", '{"a": ']], "tool_calls")),
    ("json list", _RESPONSE,
     _TOOLS + '<|open|>call tool="f"<|sep|><|open|>json<|sep|>[1]<|close|>json<|sep|>' + _END_CALL,
     (None, None, [["f", "[1]"]], "tool_calls")),
    ("argument then json", _RESPONSE, _TOOLS + _call("f", ("a", "number", "1")).removesuffix(_END_CALL)
     + '<|open|>json type="object"<|sep|>{"b": [true, "é"]}<|close|>json<|sep|>' + _END_CALL,
     (None, None, [["f", '{"a": 1, "b": [true, "é"]}']], "tool_calls")),
    ("types", _RESPONSE, _TOOLS + _call("f", ("a", "null", "null"), ("b", "boolean", "true"), ("c", "array", "[1,2]"),
     ("d", "object", '{"x":1.50}'), ("e", "number", "1e999"), ("f", "boolean", "yes"), ("g", "number", "")),
     (None, None, [["f", '{"a": null, "b": true, "c": [1, 2], "d": {"x": 1.5}, "e": "1e999", "f": "yes", "g": ""}']],
      "tool_calls")),
    ("escaped attributes", _RESPONSE, _TOOLS + _call("f&amp;g", ("a&quot;&amp;quot;", "string", "&amp;")),
     (None, None, [["f&g", '{"a\\"&quot;": "&amp;"}']], "tool_calls")),
    ("unknown tag", _RESPONSE, "a<|open|>note x=\"1\"<|sep|>b<|close|>note<|sep|>c" + _END_RESPONSE,
     (None, "abc", [], "stop")),
    ("open response twice", _RESPONSE, _RESPONSE + "c" + _END_RESPONSE, (None, "c", [], "stop")),
    ("empty response", _RESPONSE, _END_RESPONSE + _END_MESSAGE, (None, "", [], "stop")),
    ("blank response", _RESPONSE, " \n" + _END_RESPONSE + _END_MESSAGE, (None, " \n", [], "stop")),
    ("other special ids", _RESPONSE, "a<|media_pad|>b[BOS]" + _END_RESPONSE, (None, "ab", [], "stop")),
    ("stray sep", _RESPONSE, "a<|sep|>b", (None, "ab", [], "stop")),
    ("after the end", _RESPONSE, "a" + _END_MESSAGE + "b" + _RESPONSE + "c", (None, "a", [], "stop")),
    ("no chat", "Once", " upon a time", (None, " upon a time", [], "stop")),
    ("whole message", "",
     '<|open|>message role="assistant"<|sep|>' + _THINK + "r" + _END_THINK + _ANSWER + _END_MESSAGE,
     ("r", "c", [], "stop")),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "text", "expected"), [row[1:] for row in _ROWS], ids=[row[0] for row in _ROWS])
def test_row_of_the_malformed_table(prompt, text, expected):
    for steps in ([1], [2], [8], None):
        message, parser, _ = _read(_ids(text), prompt, steps)
        assert (*_short(message).values(), parser.finish_reason) == expected


def test_stream_repeats_as_content_what_was_no_thinking():
    _, parser, stream = _read(_ids("the answer" + _END_RESPONSE + _END_MESSAGE), steps=[1])
    assert (stream.reasoning, stream.content) == ("the answer", "the answer")
    assert parser.num_reasoning_tokens == 0 and "inside its thinking" in parser.warnings[0]


# --- options


def _spelled(text: str) -> list[int]:
    """Ids of ordinary text alone."""
    return _BYTES.encode(text)


_STEPS = ([1], [2], [3], [8], None)


@pytest.mark.parametrize("steps", _STEPS)
def test_spelled_markers_count_if_asked_for(steps):
    ids = _spelled("r" + _END_THINK + _RESPONSE + "c <") + _ids(_END_RESPONSE + _END_MESSAGE)
    message, parser, stream = _read(ids, steps=steps, lenient_markers=True)
    assert _short(message) == {"reasoning": "r", "content": "c <", "calls": []}
    assert (stream.reasoning, stream.content) == ("r", "c <")
    assert sum("is spelled as text" in warning for warning in parser.warnings) == 2
    message, _, _ = _read(ids, steps=steps)
    assert message["content"] == "r" + _END_THINK + _RESPONSE + "c <", "without it, they are data"


@pytest.mark.parametrize("steps", _STEPS)
def test_spelled_tools_end_thinking_and_answers(steps):
    calls = _ids(_call("f", ("a", "string", _END_THINK[:9])) + _END_TOOLS + _END_MESSAGE)
    message, _, _ = _read(_spelled("r" + _TOOLS) + calls, steps=steps, lenient_markers=True)
    assert _short(message) == {"reasoning": "r", "content": None, "calls": [["f", '{"a": "<|close|>"}']]}
    message, _, _ = _read(_spelled("c" + _TOOLS) + calls, _RESPONSE, steps, lenient_markers=True)
    assert _short(message)["content"] == "c" and len(message["tool_calls"]) == 1


@pytest.mark.parametrize("text", ["a < b", "<|close", "<|close|>thin", "<|close|>thinking<|sep|>", "<<|open|>respons"])
def test_text_that_is_nearly_a_marker_is_text(text):
    for steps in _STEPS:
        ids = _spelled(text) + _ids(_END_THINK + _ANSWER + _END_MESSAGE)
        message, _, stream = _read(ids, steps=steps, lenient_markers=True)
        assert message["reasoning_content"] == stream.reasoning == text


def test_spelled_marker_in_an_argument_is_data():
    call = _TOOLS + '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>'
    ids = _ids(call) + _spelled(_END_THINK) + _ids("<|close|>argument<|sep|>" + _END_CALL)
    message, _, _ = _read(ids, _RESPONSE, lenient_markers=True)
    assert _short(message)["calls"] == [["f", json.dumps({"a": _END_THINK})]]


def test_length_limit_inside_a_spelled_marker_shows_nothing_of_it():
    message, parser, stream = _read(_spelled("r<|close|>thi"), steps=[1], ended_by="length", lenient_markers=True)
    assert message["reasoning_content"] == stream.reasoning == "r" and "spelled marker" in parser.warnings[0]


@pytest.mark.parametrize("end", [_END_MESSAGE, "<|end_of_msg|>", _END_THINK + "<|end_of_msg|>", ""])
def test_thinking_becomes_the_content_if_there_must_be_one(end):
    message, parser, stream = _read(_ids("r" + end), steps=[1], force_nonempty_content=True)
    assert _short(message) == {"reasoning": None, "content": "r", "calls": []}
    assert parser.num_reasoning_tokens == 0 and parser.finish_reason == "stop" and parser.finish() == message
    assert (stream.reasoning, stream.content) == ("r", "r" if end else ""), "what ends unseen, `finish` alone tells"


@pytest.mark.parametrize(
    ("text", "ended_by", "content"),
    [
        ("r", "length", None),
        ("r" + _END_THINK + _ANSWER + _END_MESSAGE, "stop", "c"),
        ("r" + _END_THINK + _TOOLS + _call("f") + _END_MESSAGE, "stop", None),
        (_END_THINK + _RESPONSE + _END_RESPONSE + _END_MESSAGE, "stop", ""),
    ],
)
def test_content_stays_as_it_is_where_it_is_no_empty_answer(text, ended_by, content):
    message, _, _ = _read(_ids(text), ended_by=ended_by, force_nonempty_content=True)
    assert message["content"] == content


# --- breaking off


@pytest.mark.parametrize("cut", range(len("<|close|>think<|sep|>")))
def test_length_limit_inside_a_marker_shows_nothing_of_it(cut):
    ids = _ids("r") + _ids(_END_THINK)[: cut % len(_ids(_END_THINK))]
    message, parser, _ = _read(ids, ended_by="length")
    assert _short(message) == {"reasoning": "r", "content": None, "calls": []} and parser.finish_reason == "length"


def test_length_limit_drops_the_open_call_and_keeps_the_closed():
    text = _TOOLS + _call("f") + '<|open|>call tool="g" index="2"<|sep|><|open|>argument key="a" type="string"<|sep|>x'
    message, parser, stream = _read(_ids(text), steps=[1], ended_by="length")
    assert _short(message)["calls"] == [["f", "{}"]] and parser.finish_reason == "length"
    assert stream.calls[1]["function"] == {"name": "g", "arguments": '{"a": "x'}, "what was sent stays sent"
    assert any("'g' is not closed" in warning for warning in parser.warnings)


def test_length_limit_after_the_message_ended_is_no_cut():
    _, parser, _ = _read(_ids(_TOOLS + _call("f") + _END_TOOLS + _END_MESSAGE), ended_by="length")
    assert parser.finish_reason == "tool_calls"


def test_finish_twice_is_finish_once():
    _, parser, _ = _read(_ids("r<|close|>thi"), ended_by="length")
    assert parser.finish() == parser.finish() and parser.finish_reason == "length" and len(parser.warnings) == 1


def test_calls_that_the_request_does_not_allow_are_dropped():
    text = "r" + _END_THINK + _ANSWER + _TOOLS + _call("f", ("a", "string", "x")) + _END_TOOLS + _END_MESSAGE
    message, parser, stream = _read(_ids(text), steps=[3], allow_tool_calls=False)
    assert _short(message) == {"reasoning": "r", "content": "c", "calls": []} and parser.finish_reason == "stop"
    assert stream.calls == [] and any("not allowed" in warning for warning in parser.warnings)


def test_string_arguments_stream_as_they_come_and_others_when_they_end():
    parser = chat.Parser(_BYTES, _ids(_RESPONSE))
    parser.feed(_ids(_TOOLS + '<|open|>call tool="f" index="1"<|sep|>'))

    def pieces(text):
        return "".join(d["tool_calls"][0]["function"]["arguments"] for d in parser.feed(_ids(text)))

    assert pieces('<|open|>argument key="a" type="string"<|sep|>') == '{"a": "'
    assert [pieces(text) for text in ("x", '"', "\n", "<|close|>argument<|sep|>")] == ["x", '\\"', "\\n", '"']
    assert pieces('<|open|>argument key="b" type="array"<|sep|>[1,') == ', "b": '
    assert [pieces(text) for text in ("2]", "<|close|>argument<|sep|>", _END_CALL)] == ["", "[1, 2]", "}"]


def test_marker_without_a_tag_becomes_text_at_the_next_marker():
    message, parser, _ = _read(_ids("use <|open|>tools to call" + _END_RESPONSE), _RESPONSE, [1])
    assert message["content"] == "use <|open|>tools to call" and "kept as text" in parser.warnings[0]


def test_marker_without_a_tag_does_not_hold_the_stream_for_ever():
    _, _, stream = _read(_ids("a<|open|>" + "b" * 5000), _RESPONSE)
    assert stream.content.startswith("a<|open|>bbb") and len(stream.content) == 5009


def test_call_ids_go_on_from_the_prompt_and_are_safe():
    prompt = _TOOLS + _call("f") + _call("g") + _END_TOOLS + _END_MESSAGE + _RESPONSE
    message, _, _ = _read(_ids(_TOOLS + _call("f") + _call("é " + "x" * 100) + _call("f")), prompt)
    first, second, third = (call["id"] for call in message["tool_calls"])
    assert (first, third) == ("f_2", "f_4")
    assert second == "__" + "x" * 60 + "_3" and len(second) == 64


def test_reasoning_tokens_are_those_inside_the_channel():
    _, parser, _ = _read(_ids("12345678" + _END_THINK + _ANSWER))
    assert parser.num_reasoning_tokens == 8, "markers are not counted"


def test_vocabulary_without_markers_is_refused():
    with pytest.raises(ValueError, match="has no <.open.> .* cannot hold a chat"):
        chat.Parser(ByteTokenizer(300), [1])


def test_id_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="512 is outside"):
        chat.Parser(_BYTES, _ids(_THINK)).feed([512])


# --- reports from the field


@pytest.mark.parametrize("steps", [[1], [3], None])
def test_think_close_omitted_before_tools(steps):
    text = "plan" + _TOOLS + _call("f", ("x", "string", "1")) + _END_TOOLS + _END_MESSAGE
    message, parser, _ = _read(_ids(text), steps=steps)
    assert _short(message) == {"reasoning": "plan", "content": None, "calls": [["f", '{"x": "1"}']]}
    assert parser.finish_reason == "tool_calls"


def test_message_close_does_not_leak_at_any_split():
    ids = _ids("hello" + _END_MESSAGE + "<|end_of_msg|>")
    for cut in range(1, len(ids)):
        message, parser, stream = _read(ids, _RESPONSE, [cut, len(ids)])
        assert message["content"] == stream.content == "hello" and parser.finish_reason == "stop"


def test_marker_spelled_as_text_is_text_and_by_id_is_none():
    parser, stream = chat.Parser(_BYTES, _ids(_RESPONSE)), _Stream()
    for piece in ("a <", "|open", "|> b"):
        stream.add(parser.feed(_BYTES.encode(piece)))
    assert stream.content == "a <|open|> b" == parser.finish()["content"]
    message, _, stream = _read([_BYTES.special_ids["<|open|>"]], _RESPONSE)
    assert (message["content"], stream.content) == ("", "")


@pytest.mark.parametrize("offset", range(8))
def test_eight_ids_per_step_over_two_calls(offset):
    text = _TOOLS + _call("f", ("a", "string", "1")) + _call("g", index=2) + _END_TOOLS + _END_MESSAGE
    ids = _ids("x" * offset + text)
    message, _, stream = _read(ids, _RESPONSE, [8])
    assert _short(message)["calls"] == [["f", '{"a": "1"}'], ["g", "{}"]]
    assert stream.calls == message["tool_calls"] and len({call["id"] for call in stream.calls}) == 2


def test_characters_over_several_published_ids(published):
    ids = [5885, 40101, 66957, 98]
    _, _, stream = _read(ids, _RESPONSE, [1], published)
    assert stream.content == "🚀🔥"
    message, parser, stream = _read(ids[:1], _RESPONSE, [1], published)
    assert message["content"] == stream.content == "" and "inside a character" in parser.warnings[0]


def test_invalid_byte_does_not_hold_later_text():
    _, _, stream = _read([0xF0, *b"ab"], _RESPONSE, [1])
    assert stream.content == "\N{REPLACEMENT CHARACTER}ab"


def test_forced_end_of_thinking_is_a_marker(published):
    parser = chat.Parser(published, _ids(_THINK, published))
    parser.feed([*published.encode("so"), 163_588, 39_964, 163_589])
    parser.feed(_ids(_THINK, published) + published.encode("more") + [163_588, 39_964, 163_589])
    parser.feed(_ids(_ANSWER, published))
    assert _short(parser.finish()) == {"reasoning": "somore", "content": "c", "calls": []}


# --- there and back

_TEXT = st.text(max_size=12) | st.sampled_from([_END_MESSAGE, "<|open|>tools", "&quot;", '"', "<|end_of_msg|>"])
_NAME = _TEXT.filter(lambda text: text.strip() and not any(0xD800 <= ord(c) < 0xE000 for c in text))
_VALUES = st.recursive(
    _NAME | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAME, inner, max_size=3),
    max_leaves=6,
)
_CALLS = st.lists(st.tuples(_NAME, st.dictionaries(_NAME, _VALUES, max_size=3)), max_size=3)


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


@settings(max_examples=60)
@given(_TEXT.map(_utf8), _TEXT.map(_utf8), _CALLS, st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_rendered_message_is_read_back(reasoning, content, calls, steps):
    reasoning = reasoning if reasoning.strip() else ""
    answer = {
        "role": "assistant",
        "reasoning_content": reasoning,
        "content": content,
        "tool_calls": [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ],
    }
    question = [{"role": "user", "content": "q"}]
    prompt = chat.encode({"messages": question}, _BYTES)
    whole = chat.prepare({"messages": [*question, answer], "add_generation_prompt": False}, _BYTES).ids
    assert whole[: len(prompt)] == prompt
    parser, stream, at = chat.Parser(_BYTES, prompt), _Stream(), len(prompt)
    while at < len(whole):
        stream.add(parser.feed(whole[at : at + steps[0]]))
        at += steps[0]
        steps = [*steps[1:], steps[0]]
    message = parser.finish()
    assert message["reasoning_content"] == (reasoning or None)
    assert message["content"] == (None if calls and not content else content)
    assert [call["function"]["name"] for call in message["tool_calls"]] == [name for name, _ in calls]
    for call, (_, arguments) in zip(message["tool_calls"], calls, strict=True):
        assert call["function"]["arguments"] == json.dumps(arguments, ensure_ascii=False)
    assert (stream.reasoning, stream.content, stream.calls) == (reasoning, content, message["tool_calls"])
    assert parser.warnings == []
    again = chat.prepare({"messages": [*question, message], "add_generation_prompt": False}, _BYTES).ids
    assert again == whole, "what was generated is encoded again id for id"
