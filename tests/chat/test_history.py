"""Histories: tool results beside their calls; nothing of a conversation is lost without a word."""

import pytest

from maxmoe import chat
from maxmoe.chat.history import place_results
from maxmoe.chat.tokenizer import ByteTokenizer

_BYTES = ByteTokenizer(512)
_USER = {"role": "user", "content": "q"}


def _asks(*ids, **more) -> dict:
    """An assistant message that calls one tool per id, named after it."""
    calls = [{"id": i, "type": "function", "function": {"name": f"f{i}", "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": calls, **more}


def _result(tool_call_id, **more) -> dict:
    return {"role": "tool", "tool_call_id": tool_call_id, "content": "x", **more}


def _prepare(*messages, strict=False, **request):
    return chat.prepare({"messages": list(messages), **request}, _BYTES, strict=strict)


# --- order and names of results


@pytest.mark.parametrize(
    ("messages", "placed"),
    [
        ([_asks(1, 2), _result(2), _result(1)], [(0, None), (2, ("f1", 1)), (1, ("f2", 2))]),
        ([_asks("1"), _result(1)], [(0, None), (1, ("f1", 1))]),
        ([_asks(1, 2), _result(2), _result("?")], [(0, None), (1, ("f1", 1)), (2, ("f2", 2))]),
        ([_asks(1, 2), _result("?", name="g"), _result(1)], [(0, None), (1, ("g", 1)), (2, ("f2", 2))]),
        ([_asks(1), _result("?", name="g", tool="h")], [(0, None), (1, ("h", 1))]),
        ([_asks(1), _result(1, name="g")], [(0, None), (1, ("f1", 1))]),
        ([_asks(1), {"role": "tool", "id": 1}], [(0, None), (1, ("f1", 1))]),
        ([_asks(1, 1, 2), _result(2), _result(1), _result(1)],
         [(0, None), (2, ("f1", 1)), (3, ("f1", 2)), (1, ("f2", 3))]),
        ([_asks(1, 2), _result(2), _USER, _result(1)], [(0, None), (1, ("f2", 1)), (2, None), (3, ("f1", 2))]),
        ([_asks(1), _result(1), _asks(2), _result(2)], [(0, None), (1, ("f1", 1)), (2, None), (3, ("f2", 1))]),
    ],
)  # fmt: skip
def test_place_results(messages, placed):
    assert place_results(messages) == placed


@pytest.mark.parametrize(
    ("messages", "index"),
    [([_USER, _result(1)], 1), ([_asks(1), _result(1), _result(2)], 2), ([_asks(), _result(None)], 1)],
)
@pytest.mark.parametrize("strict", [False, True])
def test_result_of_no_call_is_an_error_that_names_it(messages, index, strict):
    with pytest.raises(chat.HistoryError, match=f"1 of {len(messages)} messages would lose history") as caught:
        _prepare(*messages, strict=strict)
    assert caught.value.index == index and f"messages[{index}]: result" in str(caught.value)
    assert "tool calls" in str(caught.value) and isinstance(caught.value, ValueError)


# --- what would be lost

_LOSSES = {
    "calls without reasoning": (
        [_USER, _asks(1, 2, reasoning_content=None), _result(1), _result(2)],
        1,
        "tool_calls (2) without reasoning_content",
    ),
    "calls without results": ([_asks(1, 2, 3), _result(2), _USER], 0, "2 of its 3 tool calls have no result"),
    "calls at the end": ([_USER, _asks(1)], 1, "1 of its 1 tool calls have no result"),
    "a result by position": ([_asks(1), _result("?")], 1, "tool_call_id '?' is none of the 1 calls before it"),
    "shared ids": ([_asks(1, 1), _result(1), _result(1)], 0, "1 of 2 tool calls have the id of another"),
    "unknown keys": ([{**_USER, "audio": {"id": 1}, "video": None}], 0, "audio of a message of role user cannot"),
    "tools of a user": ([{**_USER, "tools": [{}]}], 0, "tools of a message of role user"),
    "content beside tools": ([{"role": "system", "content": "c", "tools": [{}]}], 0, "its content is left out"),
    "two reasonings": (
        [{"role": "assistant", "reasoning_content": "a", "reasoning": "bc", "content": "c"}],
        0,
        "reasoning_content and reasoning differ, and reasoning (2 characters) is left out",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "index", "says"), _LOSSES.values(), ids=_LOSSES)
def test_loss_is_refused_when_strict_and_a_warning_otherwise(messages, index, says):
    with pytest.raises(chat.HistoryError) as caught:
        _prepare(*messages, strict=True)
    assert says in str(caught.value) and caught.value.index == index
    assert caught.value.losses[0].index == index
    with pytest.raises(chat.HistoryError):
        chat.render({"messages": messages}, strict=True)
    warnings = _prepare(*messages).warnings
    assert any(warning.startswith(f"messages[{index}]: ") and says in warning for warning in warnings)


def test_strict_lists_all_losses_with_counts():
    messages = [_asks(1, reasoning_content=""), _USER, _asks(2, reasoning_content=""), _result(2)]
    with pytest.raises(chat.HistoryError, match="^2 of 4 messages would lose history: ") as caught:
        _prepare(*messages, strict=True)
    assert [loss.index for loss in caught.value.losses] == [0, 0, 2]


def test_thinking_off_drops_reasoning_only_with_a_word():
    messages = [_USER, {"role": "assistant", "content": "c", "reasoning_content": "r" * 1234}, _USER]
    with pytest.raises(chat.HistoryError, match=r"messages\[1\]: thinking is off, so its reasoning \(1,234 characters"):
        _prepare(*messages, strict=True, thinking=False)
    (warning,) = _prepare(*messages, thinking=False).warnings
    assert "thinking is off" in warning


def test_complete_history_has_no_warnings():
    messages = [
        _USER,
        _asks(1, 2),
        _result(2),
        _result(1),
        {"role": "assistant", "content": "a", "reasoning": "r"},
        _USER,
    ]
    assert _prepare(*messages, strict=True).warnings == ()
    assert _prepare(_USER, _asks(1), strict=True, add_generation_prompt=False).warnings == (), "what is trained on"
    assert _prepare(_USER, {"role": "assistant", "content": "a", "partial": True}, strict=True).warnings == ()


@pytest.mark.parametrize(
    ("reasoning", "says"), [(None, "the model sees that it did not think"), ("\n\n", "2 blank characters")]
)
def test_what_the_sender_cannot_repair_is_a_warning_also_when_strict(reasoning, says):
    messages = [_USER, {"role": "assistant", "content": "a", "reasoning_content": reasoning}, _USER]
    (warning,) = _prepare(*messages, strict=True).warnings
    assert warning.startswith("messages[1]: ") and says in warning


def test_encode_logs_the_warnings(caplog):
    with caplog.at_level("WARNING"):
        chat.encode({"messages": [_USER, _asks(1), _result("?")]}, _BYTES)
    assert "messages[2]: tool_call_id '?'" in caplog.text
