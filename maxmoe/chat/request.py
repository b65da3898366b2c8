"""What a chat request asks for, checked: messages, tools, thinking, effort, notes, images.

A request is the JSON object of an OpenAI-compatible chat endpoint, or its part that decides the prompt. Keys that the
prompt does not depend on, such as temperature, are not looked at; `PROMPT_KEYS` are.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

EFFORTS = ("low", "high", "max")
DEFAULT_EFFORT = "max"
ROLES = ("system", "developer", "user", "assistant", "tool")
IMAGE_PARTS = ("image", "image_url")

PROMPT_KEYS = frozenset(
    "messages tools tool_choice response_format thinking thinking_effort reasoning_effort chat_template_kwargs "
    "add_generation_prompt continue_final_message image_prompts".split()
)
_TEMPLATE_KEYS = ("thinking", "enable_thinking", "thinking_effort")
_IMAGE_PROMPT = re.compile(
    r"<\|media_begin\|>image [1-9]\d*x[1-9]\d*<\|media_content\|>(<\|media_pad\|>)+<\|media_end\|>"
)


class RequestError(ValueError):
    """A request that cannot be encoded.

    Attributes:
      index: Of the message at fault; None where it is none of them.
    """

    def __init__(self, text: str, index: int | None = None):
        super().__init__(text if index is None else f"messages[{index}]: {text}")
        self.index = index


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request, read.

    Attributes:
      messages: As given. The last one is to be continued where `is_partial`.
      tools: Declared for the whole conversation, as given.
      thinking: Whether the assistant thinks before it answers.
      effort: How much: low, high or max; None for no word about it.
      tool_choice: "required" or "none" where the prompt says so; None otherwise.
      response_format: "json_object", "json_schema" or None.
      schema: What goes with "json_schema".
      image_prompts: What stands for each image of the messages, in their order.
    """

    messages: list[Mapping[str, Any]]
    tools: list[Any]
    thinking: bool
    effort: str | None
    tool_choice: Literal["required", "none"] | None
    response_format: Literal["json_object", "json_schema"] | None
    schema: Any
    image_prompts: list[str]
    add_generation_prompt: bool
    is_partial: bool


def read_request(request: Mapping[str, Any]) -> ChatRequest:
    """Checks what a request says about its prompt. RequestError says what was given and what is allowed."""
    if not isinstance(request, Mapping):
        raise RequestError(f"a chat request is an object with messages; got {request!r:.80}")
    messages = _messages(request.get("messages"))
    tools = _list(request, "tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{i}] is {tool!r:.80}; a tool is an object, as in JSONSchema function calling")
    thinking, effort = _thinking(request)
    response_format, schema = _response_format(request.get("response_format"))
    generate = _flag(request, "add_generation_prompt", True)
    partial = _flag(request, "continue_final_message", False) or messages[-1].get("partial") is True
    if partial and not (generate and messages[-1]["role"] == "assistant"):
        raise RequestError("only an assistant message at the end can be continued, with a generation prompt")
    return ChatRequest(
        messages=messages,
        tools=tools,
        thinking=thinking,
        effort=effort,
        tool_choice=_tool_choice(request.get("tool_choice"), [*tools, *_message_tools(messages)]),
        response_format=response_format,
        schema=schema,
        image_prompts=_image_prompts(request),
        add_generation_prompt=generate,
        is_partial=partial,
    )


def sorted_json(value: Any, what: str) -> str:
    """Compact JSON with keys sorted at every depth: the form of declared tools and schemas."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{what} cannot be written as JSON: {error}") from error


def _list(request: Mapping[str, Any], key: str) -> list[Any]:
    value = request.get(key)
    if value is None:
        return []
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RequestError(f"{key} must be a list; got {value!r:.80}")
    return list(value)


def _flag(request: Mapping[str, Any], key: str, default: bool) -> bool:
    value = request.get(key)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{key} must be true or false; got {value!r:.80}")
    return default if value is None else value


def _messages(given: Any) -> list[Mapping[str, Any]]:
    messages = _list({"messages": given}, "messages")
    if not messages:
        raise RequestError("messages is empty: give at least one")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"a message is an object with role and content; got {message!r:.80}", i)
        if message.get("role") not in ROLES:
            raise RequestError(f"role {message.get('role')!r:.80} is unknown; roles are {', '.join(ROLES)}", i)
        for key in ("name", "tool"):
            if not isinstance(message.get(key) or "", str):
                raise RequestError(f"{key} must be a string; got {message[key]!r:.80}", i)
        _flag(message, "partial", False)
        if message.get("partial") and i != len(messages) - 1:
            raise RequestError("partial is for the last message only, which is then continued", i)
    return messages


def declared_tools(request: ChatRequest) -> list[Any]:
    """Tools that the model may call: those of the request, then those that messages add."""
    return [*request.tools, *_message_tools(request.messages)]


def _message_tools(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    found = []
    for i, message in enumerate(messages):
        if message["role"] in ("system", "developer"):
            try:
                found += _list(message, "tools")
            except RequestError as error:
                raise RequestError(str(error), i) from error
    return found


def _thinking(request: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Whether to think, and the effort; the more special of several keys wins."""
    template = request.get("chat_template_kwargs") or {}
    if not isinstance(template, Mapping) or template.keys() - set(_TEMPLATE_KEYS):
        raise RequestError(f"chat_template_kwargs may hold {', '.join(_TEMPLATE_KEYS)}; got {template!r:.80}")
    control = request.get("thinking")
    if isinstance(control, Mapping):
        if control.get("type", "enabled") not in ("enabled", "disabled") or control.get("keep") not in (None, "all"):
            raise RequestError(
                f'thinking must have type "enabled" or "disabled", and keep "all", since earlier thinking is always '
                f"kept; got {dict(control)!r:.80}"
            )
        asked, top_effort = control.get("type", "enabled") == "enabled", control.get("effort")
    else:
        asked, top_effort = _flag(request, "thinking", True), None
    given = [top_effort, template.get("thinking_effort"), request.get("thinking_effort")]
    given.append(request.get("reasoning_effort"))
    effort = next((value for value in given if value is not None), None)
    if effort is not None and effort not in (*EFFORTS, "none"):
        raise RequestError(
            f"thinking effort {effort!r:.80} is unknown; use {', '.join(EFFORTS)}, or none for no thinking"
        )
    switches = {
        key: _flag(template, key, True) for key in ("thinking", "enable_thinking") if template.get(key) is not None
    }
    if len(set(switches.values())) > 1:
        raise RequestError(f"chat_template_kwargs contradicts itself: {switches}")
    if not next(iter(switches.values()), asked and effort != "none"):
        return False, None
    if effort is None and "thinking_effort" in request:
        return True, None  # said to be null: a prompt without a line about effort
    return True, DEFAULT_EFFORT if effort in (None, "none") else effort


def _tool_choice(choice: Any, tools: Sequence[Any]) -> Literal["required", "none"] | None:
    if choice in (None, "auto"):
        return None
    if choice == "required" and not tools:
        raise RequestError("tool_choice is required, and no tools are declared: give tools, or leave out tool_choice")
    if choice in ("required", "none"):
        return choice
    name = _function_name(choice)
    if name is None or name not in map(_function_name, tools):
        raise RequestError(
            f'tool_choice must be "auto", "none", "required" or {{"type": "function", "function": {{"name": ...}}}} '
            f"with one of the {len(tools)} declared tools; got {choice!r:.80}"
        )
    return None  # the family has no words for it: whoever generates allows only this call


def _function_name(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def _response_format(given: Any) -> tuple[Literal["json_object", "json_schema"] | None, Any]:
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind in (None, "text"):
        return None, None
    if kind == "json_object":
        return kind, None
    if kind != "json_schema" or not isinstance(given, Mapping):
        raise RequestError(f"response_format must have type text, json_object or json_schema; got {given!r:.80}")
    wrapper = given.get("json_schema")
    if not isinstance(wrapper, Mapping):
        raise RequestError(f"response_format.json_schema must be an object with a schema; got {wrapper!r:.80}")
    return kind, next((wrapper[key] for key in ("schema", "json_schema") if key in wrapper), wrapper)


def _image_prompts(request: Mapping[str, Any]) -> list[str]:
    prompts = _list(request, "image_prompts")
    for i, prompt in enumerate(prompts):
        # These become control segments, so nothing but the exact form may pass.
        if not (isinstance(prompt, str) and _IMAGE_PROMPT.fullmatch(prompt)):
            raise RequestError(f"image_prompts[{i}] is not what chat.image_prompt makes: {prompt!r:.80}")
    return prompts
