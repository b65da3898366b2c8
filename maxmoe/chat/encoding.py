"""A chat request becomes token ids, exactly as the family was trained.

The order of a prompt: declared tools, effort, messages, a note on tool choice, a note on the answer's format, and the
beginning of the assistant's message. So tools and effort decide the whole prefix, and the notes only its end.

Text of users, tools and models is encoded without special ids, segment by segment, so that nothing they write can end
a message or begin one.

Source: the family's chat encoding, as published with its checkpoints; the sentences in this file are those it was
trained on.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging

from maxmoe.chat.history import HistoryError, Loss, ToolResult, find_losses, place_results, reasoning_of
from maxmoe.chat.markup import Segment, close_tag, control, marker_ids, message, open_tag, plain
from maxmoe.chat.request import IMAGE_PARTS, ChatRequest, RequestError, read_request, sorted_json
from maxmoe.chat.tokenizer import Tokenizer
from maxmoe.chat.tool_calls import read_calls, render_call

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema."
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools."
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"

_NUM_LARGEST_SHOWN = 3


class ContextOverflowError(ValueError):
    """A prompt longer than the context.

    Attributes:
      num_tokens: Of the prompt.
      max_len: What is allowed.
    """

    def __init__(self, num_tokens: int, max_len: int, by_block: Mapping[str, int]):
        largest = sorted(by_block.items(), key=lambda block: -block[1])[:_NUM_LARGEST_SHOWN]
        shown = ", ".join(f"{name} {count:,}" for name, count in largest)
        super().__init__(
            f"the prompt has {num_tokens:,} tokens, max_len is {max_len:,}: {num_tokens - max_len:,} too many. Nothing "
            f"was cut off. Largest: {shown}. Shorten these, or raise max_len"
        )
        self.num_tokens, self.max_len = num_tokens, max_len


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """An encoded request.

    Attributes:
      ids: Token ids.
      is_assistant: For each id, whether it belongs to what a model is trained to say.
      num_stub_ids: Ids at its end that open the channel in which the model goes on, 3 in the published vocabulary. The
        family's own service does not count them among prompt_tokens.
      block_ends: Where each message, or other part of the prompt, ends; the last one is the number of ids.
      allows_tool_calls: Whether tools are declared and not forbidden: what `Parser` wants to know.
      warnings: What of the history the model does not see, or sees changed; one sentence each, naming the message.
    """

    ids: list[int]
    is_assistant: list[bool]
    num_stub_ids: int
    block_ends: list[int]
    allows_tool_calls: bool
    warnings: tuple[str, ...]


def render(request: Mapping[str, Any], *, strict: bool = False) -> list[Segment]:
    """The segments of a request's prompt, in order. Each is encoded by itself. See `prepare`."""
    read = read_request(request)
    blocks = list(_blocks(read))
    _checked_losses(read, strict)
    return [segment for _, segments in blocks for segment in segments]


def encode(
    request: Mapping[str, Any], tokenizer: Tokenizer, *, strict: bool = False, max_len: int | None = None
) -> list[int]:
    """The ids of a request's prompt; warnings are logged. See `prepare`."""
    prompt = prepare(request, tokenizer, strict=strict, max_len=max_len)
    for warning in prompt.warnings:
        logging.warning("%s", warning)
    return prompt.ids


def prepare(
    request: Mapping[str, Any], tokenizer: Tokenizer, *, strict: bool = False, max_len: int | None = None
) -> Prompt:
    """Encodes a request, with what an engine and a caller want to know about its prompt.

    Args:
      request: See `request.PROMPT_KEYS`.
      strict: Whether to refuse a request that would lose history instead of warning: an assistant message with tool
        calls and no reasoning, a call without a result, a result without a call, and the like.
      max_len: In tokens, for the prompt alone.
    Raises:
      HistoryError: In strict use, all that would be lost; always, a tool result that no call explains.
      RequestError: Anything else that is wrong with the request.
      ContextOverflowError: More than max_len tokens.
      All are ValueErrors, as is the one for a vocabulary without markers.
    """
    marker_ids(tokenizer)
    read = read_request(request)
    blocks = list(_blocks(read))
    losses = _checked_losses(read, strict)
    ids: list[int] = []
    is_assistant: list[bool] = []
    ends = [0]
    markup: dict[Segment, list[int]] = {}  # the same few tags, over and over
    for _, segments in blocks:
        for segment in segments:
            if segment not in markup:
                markup[segment] = tokenizer.encode(segment.text, allow_special=segment.allow_special)
            ids += markup[segment]
            is_assistant += [segment.is_assistant] * (len(ids) - len(is_assistant))
        ends.append(len(ids))
    if max_len is not None and len(ids) > max_len:
        sizes = {name: end - begin for (name, _), (begin, end) in zip(blocks, itertools.pairwise(ends), strict=True)}
        raise ContextOverflowError(len(ids), max_len, sizes)
    has_tools = bool(read.tools) or any(map(_declares_tools, read.messages))
    return Prompt(
        ids=ids,
        is_assistant=is_assistant,
        num_stub_ids=sum(len(markup[segment]) for segment in _stub(read)),
        block_ends=ends[1:],
        allows_tool_calls=has_tools and read.tool_choice != "none",
        warnings=tuple(map(str, losses)),
    )


def _checked_losses(request: ChatRequest, strict: bool) -> list[Loss]:
    losses = find_losses(request)
    if strict and (repairable := [loss for loss in losses if loss.can_be_repaired]):
        raise HistoryError(repairable, len(request.messages))
    return losses


def _blocks(request: ChatRequest) -> Iterator[tuple[str, list[Segment]]]:
    """The parts of the prompt, each with the name that an error gives it."""
    if request.tools:
        yield "tools", _declaration(_TOOLS, request.tools, "tools")
    if request.thinking and request.effort is not None:
        yield "effort", _note("thinking-effort", _EFFORT.format(request.effort))
    images = _images(request)
    for index, result in place_results(request.messages):
        if request.is_partial and index == len(request.messages) - 1:
            continue
        yield f"messages[{index}]", _message(request, index, result, images)
    if request.tool_choice is not None:
        yield "tool_choice", _note("tool-choice", _TOOL_CHOICE[request.tool_choice])
    if request.response_format is not None:
        text = _RESPONSE_FORMAT.format(request.response_format)
        if request.response_format == "json_schema":
            text += _SCHEMA.format(sorted_json(request.schema, "response_format.json_schema"))
        yield "response_format", _note("response-format", text)
    if request.is_partial:
        yield f"messages[{len(request.messages) - 1}]", _partial(request, images)
    elif request.add_generation_prompt:
        yield "generation prompt", [*open_tag("message", {"role": "assistant"}), *_stub(request)]


def _stub(request: ChatRequest) -> list[Segment]:
    """What opens the channel in which a new message begins."""
    if request.is_partial or not request.add_generation_prompt:
        return []
    return open_tag("think" if request.thinking else "response")


def _note(kind: str, text: str) -> list[Segment]:
    return message({"role": "system", "type": kind}, plain(text))


def _declaration(heading: str, tools: Any, what: str) -> list[Segment]:
    return _note("tool-declare", f"{heading}\n\n```json\n{sorted_json(tools, what)}\n```")


def _declares_tools(given: Mapping[str, Any]) -> bool:
    return given["role"] in ("system", "developer") and bool(given.get("tools"))


def _message(
    request: ChatRequest, index: int, result: ToolResult | None, images: dict[int, list[str]]
) -> list[Segment]:
    given = request.messages[index]
    if result is not None:
        attributes = {"role": "tool", "tool": result.name, "index": str(result.number)}
        return message(attributes, _content(given, index, images))
    role = "system" if given["role"] == "developer" else given["role"]
    if _declares_tools(given):
        return _declaration(_MORE_TOOLS, given["tools"], f"messages[{index}].tools")
    attributes = {"role": role} | ({"name": given["name"]} if given.get("name") else {})
    if role != "assistant":
        return message(attributes, _content(given, index, images))
    start = len(open_tag("message", attributes))
    whole = message(attributes, _answer(request, index, images))
    return whole[:start] + [segment._replace(is_assistant=True) for segment in whole[start:]]


def _answer(request: ChatRequest, index: int, images: dict[int, list[str]]) -> list[Segment]:
    """What stands inside a finished message of the assistant."""
    given, body = request.messages[index], []
    if request.thinking:
        reasoning = reasoning_of(given, index)
        body += [*open_tag("think"), *(plain(reasoning) if reasoning.strip() else []), *close_tag("think")]
    body += [*open_tag("response"), *_content(given, index, images), *close_tag("response")]
    calls = read_calls(given, index)
    if calls:
        body += open_tag("tools")
        for number, call in enumerate(calls, start=1):
            body += render_call(call, number, index)
        body += close_tag("tools")
    return body


def _partial(request: ChatRequest, images: dict[int, list[str]]) -> list[Segment]:
    """An assistant's message up to where it goes on: in its thinking if it has no content yet, else in its content."""
    index = len(request.messages) - 1
    given = request.messages[index]
    if given.get("tool_calls"):
        raise RequestError("a message with tool calls cannot be continued; leave out partial", index)
    reasoning = reasoning_of(given, index)
    if reasoning and not request.thinking:
        raise RequestError("thinking is off, so a message that thinks cannot be continued", index)
    name = {"name": given["name"]} if given.get("name") else {}
    body = open_tag("message", {"role": "assistant"} | name)
    if request.thinking:
        body += [*open_tag("think"), *plain(reasoning)]
        if given.get("content") is None:
            return body
        body += close_tag("think")
    return [*body, *open_tag("response"), *_content(given, index, images)]


def _images(request: ChatRequest) -> dict[int, list[str]]:
    """The image prompts of each message, by its index."""
    found: dict[int, list[str]] = {}
    left = iter(request.image_prompts)
    num_images = 0
    for i, given in enumerate(request.messages):
        content = given.get("content")
        parts = [part for part in content if _is_image(part)] if isinstance(content, list | tuple) else []
        num_images += len(parts)
        found[i] = list(itertools.islice(left, len(parts)))
    if num_images != len(request.image_prompts):
        raise RequestError(
            f"the messages hold {num_images} images, and image_prompts has {len(request.image_prompts)}: give one per "
            "image, as chat.image_prompt makes it"
        )
    order = [i for i, _ in place_results(request.messages) if found[i]]
    if order != sorted(order):
        raise RequestError(
            "tool results with images are not in the order of their calls, so that prompt and images would be in "
            "different orders: send them in the order of the calls",
            order[0],
        )
    return found


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def _content(given: Mapping[str, Any], index: int, images: dict[int, list[str]]) -> list[Segment]:
    content = given.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return plain(content)
    if not isinstance(content, list | tuple):
        raise RequestError(f"content must be text, a list of parts, or null; got {content!r:.80}", index)
    segments: list[Segment] = []
    prompts = iter(images[index])
    for i, part in enumerate(content):
        if _is_image(part):
            segments.append(control(next(prompts)))
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            segments += plain(part["text"])
        else:
            raise RequestError(
                f"content[{i}] is neither text nor an image, and nothing else is known: {part!r:.80}", index
            )
    return segments
