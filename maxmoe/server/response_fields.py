"""The body of /v1/responses, and the conversation that it means."""

from typing import Annotated, Any, Literal

from pydantic import Field

from maxmoe.server.chat_fields import ToolName
from maxmoe.server.errors import bad_request
from maxmoe.server.fields import Count, Fields, Items, OpenFields, PositiveCount, SamplingFields

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class Part(Fields):
    """Of an item's content."""

    type: str
    text: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    image_url: Any = None
    file_id: Any = None
    detail: Any = None


class Item(Fields):
    """Of the input: a message, thinking, a call, or a call's result."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Items[Part] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    summary: Items[Part] | None = None
    encrypted_content: str | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | Items[Part] | None = None


class FlatTool(OpenFields):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatChoice(Fields):
    """One tool that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Fields):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextSettings(Fields):
    """Of the answer."""

    format: TextFormat | None = None


class Reasoning(Fields):
    """How much to think."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Has no effect: all is told.")


class ResponseFields(SamplingFields):
    """A response. Nothing is kept between requests: `input` is the whole conversation."""

    input: str | Annotated[Items[Item], Field(min_length=1)]
    instructions: str | None = None
    tools: Items[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: PositiveCount | None = None
    thinking_token_budget: Count | None = None
    history: Literal["strict", "lenient"] | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = Field(None, description="Has no effect: answers are not stored.")
    background: Literal[False] | None = None
    include: Items[Literal["reasoning.encrypted_content"]] | None = Field(None, description="Has no effect.")
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


def chat_of(fields: ResponseFields, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The conversation in the form that `chat.prepare` reads, and where each of its messages stands in the request.

    Thinking, a message and calls that follow each other are one message of the assistant.

    Raises: ApiError for what is not text.
    """
    messages: Items[dict[str, Any]] = []
    paths: Items[str] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
        paths.append("instructions")
    items = [Item(role="user", content=fields.input)] if isinstance(fields.input, str) else fields.input
    for i, item in enumerate(items):
        path = "input" if isinstance(fields.input, str) else f"input[{i}]"
        told = _told(item, path)
        if told["role"] == "assistant" and messages and _goes_on(messages[-1], told):
            messages[-1] |= {key: value for key, value in told.items() if key != "tool_calls"}
            messages[-1].setdefault("tool_calls", []).extend(told.get("tool_calls", []))
        else:
            messages.append(told)
            paths.append(path)
    chat: dict[str, Any] = {"messages": messages}
    if fields.tools:
        chat["tools"] = [
            {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
            for tool in body["tools"]
        ]
    if fields.tool_choice is not None:
        choice = fields.tool_choice
        named = isinstance(choice, FlatChoice)
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if named else choice
    if fields.text is not None and fields.text.format is not None:
        chat["response_format"] = _format(fields.text.format)
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        chat["reasoning_effort"] = fields.reasoning.effort
    return chat, paths


def _told(item: Item, path: str) -> dict[str, Any]:
    if item.type == "reasoning":
        return {"role": "assistant", "reasoning_content": _text(item.content or item.summary, f"{path}.content")}
    if item.type == "function_call":
        function = {"name": item.name, "arguments": item.arguments or ""}
        return {"role": "assistant", "tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output, f"{path}.output")}
    if item.role is None:
        raise bad_request(f"{path}.role is required", f"{path}.role", "invalid_field")
    return {"role": item.role, "content": _text(item.content, f"{path}.content")}


def _goes_on(before: dict[str, Any], item: dict[str, Any]) -> bool:
    """Whether an item belongs to the message of the assistant before it."""
    if before["role"] != "assistant":
        return False
    if "reasoning_content" in item:
        return False
    return "tool_calls" in item or not ("content" in before or before.get("tool_calls"))


def _text(content: str | list[Part] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for j, part in enumerate(content):
        if part.type not in _TEXT_PARTS or part.text is None:
            raise bad_request(
                f"{path}[{j}] is of type {part.type!r:.80}: only text can be told to the model here",
                f"{path}[{j}]",
                "unsupported_content",
            )
    return "".join(part.text for part in content)


def _format(given: TextFormat) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    if not given.name or given.schema_ is None:
        raise bad_request("text.format of type json_schema needs name and schema", "text.format", "invalid_field")
    strict = {} if given.strict is None else {"strict": given.strict}
    return {"type": "json_schema", "json_schema": {"name": given.name, "schema": given.schema_} | strict}
