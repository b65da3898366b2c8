"""/v1/messages, in Anthropic's form: the same chat, written differently.

Thinking is on unless it is disabled, as everywhere in this family; it comes in blocks that are to be sent back, and
their `signature` is empty and not looked at. A budget of thinking is the hard one, `thinking_token_budget`.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from maxmoe.server.chat_fields import ToolName
from maxmoe.server.endpoint import answer, new_id, read
from maxmoe.server.errors import ApiError, bad_request
from maxmoe.server.fields import Count, Fields, Items, OpenFields, PositiveCount, SamplingFields, StopString
from maxmoe.server.gate import JsonResponse
from maxmoe.server.generation import Generation, Plan, Update
from maxmoe.server.planning import Ask, beside_loop, encode, plan_chat
from maxmoe.server.readers import Finished
from maxmoe.server.service import Service
from maxmoe.server.streams import event

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_HINTS = ("type", "cache_control")  # of a tool, not for the model


class Block(Fields):
    """A piece of a message's content. Hints about caches and signatures of thinking change nothing."""

    type: Literal["text", "thinking", "tool_use", "tool_result", "image", "document", "redacted_thinking"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | Items[Block] | None" = None
    is_error: bool | None = None
    signature: str | None = None
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None
    source: dict[str, Any] | None = None


class AnthropicMessage(Fields):
    """Of the conversation."""

    role: Literal["user", "assistant"]
    content: str | Items[Block]


class AnthropicTool(OpenFields):
    """A tool that the model may use."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]


class AnthropicToolChoice(Fields):
    """Whether tools may or must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicThinking(Fields):
    """Whether to think, and at most how many tokens."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None


class CountFields(Fields):
    """A conversation."""

    model: str | None = None
    messages: Annotated[Items[AnthropicMessage], Field(min_length=1)]
    system: str | Items[Block] | None = None
    tools: Items[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None
    reasoning_effort: str | None = Field(None, description="low, high or max (the default).")


class MessagesFields(CountFields, SamplingFields):
    """A conversation to go on with."""

    max_tokens: PositiveCount
    top_k: Count | None = None
    stop_sequences: Annotated[Items[StopString], Field(max_length=16)] | None = None
    metadata: dict[str, str] | None = Field(None, description="Has no effect.")
    history: Literal["strict", "lenient"] | None = None


async def messages(request: Request, service: Service) -> Response:
    """POST /v1/messages."""
    fields, body = await read(request, service, MessagesFields)
    choice, thinking = fields.tool_choice, fields.thinking
    prompt, paths = _chat_of(fields, body.value)
    ask = Ask(
        endpoint="/v1/messages",
        request=prompt,
        paths=paths,
        fields=fields,
        max_tokens=fields.max_tokens,
        num_bytes=body.num_bytes,
        history=fields.history,
        stops=tuple(fields.stop_sequences or ()),
        max_calls=1 if choice is not None and choice.disable_parallel_tool_use else None,
        thinking_token_budget=None if thinking is None else thinking.budget_tokens,
        warnings=_untold(fields),
    )
    plan = await plan_chat(service, ask, request.state.caller)
    return await answer(request, service, plan, MessagesForm(service, plan), bool(fields.stream))


async def count_tokens(request: Request, service: Service) -> Response:
    """POST /v1/messages/count_tokens."""
    fields, body = await read(request, service, CountFields)
    prompt, paths = _chat_of(fields, body.value)
    ask = Ask(
        endpoint="/v1/messages",
        request=prompt,
        paths=paths,
        fields=SamplingFields(),
        max_tokens=None,
        history="lenient",
    )
    counted = await beside_loop(body.num_bytes, encode, service, ask)
    return JsonResponse({"input_tokens": len(counted.ids)})


def _chat_of(fields: CountFields, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The conversation in the form that `chat.prepare` reads, and where each of its messages stands in the request.

    Raises: ApiError for content that is not text.
    """
    found: Items[dict[str, Any]] = []
    paths: Items[str] = []
    if fields.system is not None:
        found.append({"role": "system", "content": _text(fields.system, "system")})
        paths.append("system")
    for i, message in enumerate(fields.messages):
        found += _assistant(message, i) if message.role == "assistant" else _user(message, i)
        paths += [f"messages[{i}]"] * (len(found) - len(paths))
    if found[-1]["role"] == "assistant":
        found[-1]["partial"] = True
    chat: dict[str, Any] = {"messages": found}
    if fields.tools:
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
    if fields.tool_choice is not None:
        choice = fields.tool_choice
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = named if choice.type == "tool" else _TOOL_CHOICES[choice.type]
    if fields.thinking is not None:
        chat["thinking"] = {"type": "disabled" if fields.thinking.type == "disabled" else "enabled"}
    if fields.reasoning_effort is not None:
        chat["reasoning_effort"] = fields.reasoning_effort
    return chat, paths


def _untold(fields: CountFields) -> tuple[str, ...]:
    blocks = [
        f"messages[{i}].content[{j}].is_error"
        for i, message in enumerate(fields.messages)
        for j, block in enumerate(message.content)
        if isinstance(block, Block) and block.is_error
    ]
    return (f"{', '.join(blocks[:3])}: the model is told the text of the result alone",) if blocks else ()


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    renamed = {"input_schema": "parameters"}
    function = {renamed.get(key, key): value for key, value in tool.items() if key not in _HINTS}
    return {"type": "function", "function": function}


def _assistant(message: AnthropicMessage, index: int) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": "assistant", "content": message.content}]
    thoughts, texts, calls = [], [], []
    for j, block in enumerate(message.content):
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "text":
            texts.append(block.text or "")
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            raise _unreadable(block, f"messages[{index}].content[{j}]")
    told = {"role": "assistant", "content": "".join(texts), "reasoning_content": "".join(thoughts)}
    return [told | ({"tool_calls": calls} if calls else {})]


def _user(message: AnthropicMessage, index: int) -> list[dict[str, Any]]:
    """Results of tools become messages of their own, before what the user says."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    results, texts = [], []
    for j, block in enumerate(message.content):
        path = f"messages[{index}].content[{j}]"
        if block.type == "tool_result" and texts:
            raise bad_request(f"{path}: results of tools come before text", path, "invalid_field")
        if block.type == "tool_result":
            text = _text(block.content or "", path)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif block.type == "text":
            texts.append(block.text or "")
        else:
            raise _unreadable(block, path)
    return results + ([{"role": "user", "content": "".join(texts)}] if texts or not results else [])


def _text(content: str | list[Block], path: str) -> str:
    if isinstance(content, str):
        return content
    for j, block in enumerate(content):
        if block.type != "text":
            raise _unreadable(block, f"{path}[{j}]")
    return "".join(block.text or "" for block in content)


def _unreadable(block: Block, path: str) -> ApiError:
    return bad_request(f"{path} is of type {block.type}, which cannot be told to the model here", path, "invalid_field")


class MessagesForm:
    """Anthropic's message, and its events."""

    def __init__(self, service: Service, plan: Plan):
        """For one request."""
        self._service, self._plan, self._id = service, plan, new_id("msg_")
        self._index = -1  # of the block that is open
        self._kind: Any = None
        self._finished: Finished | None = None

    def whole(self, generation: Generation, results: list[Finished]) -> dict[str, Any]:
        """See `Form`."""
        (result,) = results
        message, content = result.message, []
        if message["reasoning_content"]:
            content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for call in message["tool_calls"]:
            content.append(_tool_use(call["id"], call["function"]["name"], _object(call["function"]["arguments"])))
        body = self._head(content) | _stop(result) | {"usage": _usage(generation)}
        warnings = [*self._plan.warnings, *result.warnings]
        return body | ({"warnings": warnings} if warnings else {})

    def begin(self) -> list[bytes]:
        """See `Form`."""
        usage = {"input_tokens": len(self._plan.prompts[0]), "output_tokens": 0}
        message = self._head([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        if self._plan.warnings:
            message["warnings"] = list(self._plan.warnings)
        return [event({"type": "message_start", "message": message}, "message_start")]

    def update(self, generation: Generation, update: Update) -> list[bytes]:
        """See `Form`."""
        events: list[bytes] = []
        for piece in update.pieces:
            if piece.channel == "reasoning_content":
                self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""}, events)
                self._add({"type": "thinking_delta", "thinking": piece.value}, events)
            elif piece.channel == "content":
                self._open("text", {"type": "text", "text": ""}, events)
                self._add({"type": "text_delta", "text": piece.value}, events)
            else:
                self._add_call(piece.value[0], events)
        if update.finished is not None:
            self._close(events)
            self._finished = update.finished
        return events

    def end(self, generation: Generation) -> list[bytes]:
        """See `Form`."""
        delta = {"type": "message_delta", "delta": _stop(self._finished), "usage": _usage(generation)}
        if self._finished.warnings:
            delta["warnings"] = list(self._finished.warnings)
        return [event(delta, "message_delta"), event({"type": "message_stop"}, "message_stop")]

    def failure(self, error: ApiError) -> list[bytes]:
        """See `Form`."""
        return [event(error.anthropic_body(), "error")]

    def _head(self, content: list[Any]) -> dict[str, Any]:
        model = self._service.options.model_name
        return {"id": self._id, "type": "message", "role": "assistant", "model": model, "content": content}

    def _add_call(self, entry: dict[str, Any], events: list[bytes]) -> None:
        function = entry["function"]
        if "id" in entry:
            self._open(("call", entry["index"]), _tool_use(entry["id"], function["name"], {}), events)
        if function["arguments"]:
            self._add({"type": "input_json_delta", "partial_json": function["arguments"]}, events)

    def _open(self, kind: Any, block: dict[str, Any], events: list[bytes]) -> None:
        if kind == self._kind:
            return
        self._close(events)
        self._index, self._kind = self._index + 1, kind
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        events.append(event(start, "content_block_start"))

    def _add(self, delta: dict[str, Any], events: list[bytes]) -> None:
        block = {"type": "content_block_delta", "index": self._index, "delta": delta}
        events.append(event(block, "content_block_delta"))

    def _close(self, events: list[bytes]) -> None:
        if self._kind is not None:
            events.append(event({"type": "content_block_stop", "index": self._index}, "content_block_stop"))
            self._kind = None


def _tool_use(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _object(arguments: str) -> dict[str, Any]:
    """Arguments as an object; what the model wrote where that is no JSON object, under the name `raw`."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {"raw": arguments}
    return value if isinstance(value, dict) else {"raw": arguments}


def _stop(result: Finished) -> dict[str, Any]:
    reason = "stop_sequence" if result.stop_string is not None else _STOP_REASONS[result.finish_reason]
    return {"stop_reason": reason, "stop_sequence": result.stop_string}


def _usage(generation: Generation) -> dict[str, Any]:
    used = generation.usage()
    cached = used["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": used["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": used["completion_tokens"],
    }
