"""Chat requests: which thinking and effort several keys ask for, and what is refused in which words."""

import pytest

from maxmoe import chat
from maxmoe.chat.request import read_request

_MESSAGES = [{"role": "user", "content": "q"}]
_TOOL = {"type": "function", "function": {"name": "f"}}


def _read(**request):
    return read_request({"messages": _MESSAGES, **request})


@pytest.mark.parametrize(
    ("request_keys", "expected"),
    [
        ({}, (True, "max")),
        ({"reasoning_effort": None}, (True, "max")),
        ({"reasoning_effort": "low"}, (True, "low")),
        ({"thinking_effort": "high", "reasoning_effort": "low"}, (True, "high")),
        ({"thinking_effort": None}, (True, None)),
        ({"thinking_effort": None, "reasoning_effort": "low"}, (True, "low")),
        ({"chat_template_kwargs": {"thinking_effort": "low"}, "reasoning_effort": "high"}, (True, "low")),
        ({"thinking": {"type": "enabled", "effort": "high", "keep": "all"}, "reasoning_effort": "low"}, (True, "high")),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, (False, None)),
        ({"thinking": False, "thinking_effort": "max"}, (False, None)),
        ({"reasoning_effort": "none"}, (False, None)),
        ({"thinking": True, "reasoning_effort": "none"}, (False, None)),
        ({"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"}, (True, "max")),
        ({"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "low"}, (False, None)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, (False, None)),
    ],
)
def test_thinking_and_effort(request_keys, expected):
    read = _read(**request_keys)
    assert (read.thinking, read.effort) == expected


@pytest.mark.parametrize(
    ("request_keys", "says"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, "messages must be a list; got 'hi'"),
        ({"messages": ["hi"]}, r"messages\[0\]: a message is an object"),
        ({"messages": [*_MESSAGES, {"role": "bot"}]}, r"messages\[1\]: role 'bot' is unknown; roles are system, dev"),
        ({"messages": [{"content": "q"}]}, r"messages\[0\]: role None"),
        ({"messages": [{"role": "user", "name": 3}]}, r"messages\[0\]: name must be a string; got 3"),
        ({"reasoning_effort": "medium"}, "effort 'medium' is unknown; use low, high, max, or none"),
        ({"thinking_effort": 3}, "effort 3 is unknown"),
        ({"thinking": "yes"}, "thinking must be true or false; got 'yes'"),
        ({"thinking": {"type": "enabled", "keep": "none"}}, 'keep "all"'),
        ({"thinking": {"type": "auto"}}, "must have type"),
        ({"chat_template_kwargs": {"effort": "low"}}, "may hold thinking, enable_thinking, thinking_effort"),
        ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False}}, "contradicts itself"),
        ({"tools": {"f": 1}}, "tools must be a list"),
        ({"tools": ["f"]}, r"tools\[0\] is 'f'; a tool is an object"),
        ({"tool_choice": "required"}, "required, and no tools are declared"),
        ({"tool_choice": "any", "tools": [_TOOL]}, 'must be "auto", "none", "required"'),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [_TOOL]}, "one of the 1 declared"),
        ({"response_format": {"type": "xml"}}, "type text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "must be an object with a schema; got None"),
        ({"add_generation_prompt": 1}, "add_generation_prompt must be true or false; got 1"),
        ({"continue_final_message": True}, "only an assistant message at the end"),
        ({"messages": [{"role": "assistant", "partial": True}, *_MESSAGES]}, r"messages\[0\]: partial is for the last"),
        ({"messages": [{"role": "system", "tools": "f"}]}, r"messages\[0\]: tools must be a list"),
    ],
)
def test_mistake_names_what_was_given_and_what_is_allowed(request_keys, says):
    with pytest.raises(chat.RequestError, match=says):
        _read(**request_keys)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": 3}, "content must be text, a list of parts, or null; got 3"),
        ({"role": "user", "content": ["hi"]}, r"content\[0\] is neither text nor an image"),
        ({"role": "user", "content": [{"type": "video_url", "video_url": {}}]}, "nothing else is known"),
        ({"role": "assistant", "tool_calls": {}, "reasoning": 3}, "reasoning must be a string; got 3"),
        ({"role": "assistant", "tool_calls": "f"}, "tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"tool_calls\[0\] must be a function with a name"),
        ({"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f"}}]}, "must be a function"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "must be an object"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}, "must be an object"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 99_999}}]}, "too deeply"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": {1}}}}]}, "is no JSON"),
        ({"role": "assistant", "partial": True, "tool_calls": [{"function": {"name": "f"}}]}, "cannot be continued"),
        ({"role": "system", "tools": [{"name": {1}}]}, r"messages\[1\]\.tools cannot be written as JSON"),
    ],
)
def test_mistake_in_a_message_names_its_index(message, says):
    with pytest.raises(chat.RequestError, match=says) as caught:
        chat.render({"messages": [*_MESSAGES, message]})
    assert "messages[1]" in str(caught.value)


def test_request_that_is_no_object_is_refused():
    with pytest.raises(chat.RequestError, match="is an object with messages"):
        chat.render(_MESSAGES)


def test_keys_that_do_not_concern_the_prompt_are_not_looked_at():
    assert chat.render({"messages": _MESSAGES, "temperature": "hot", "model": 3}) == chat.render(
        {"messages": _MESSAGES}
    )
