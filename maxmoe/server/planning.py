"""From a chat, in whichever form it came, to what the engine is asked."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from maxmoe import chat
from maxmoe.inference.sampling_params import MAX_SEED, SamplingParams
from maxmoe.server.constraints import constraint_of
from maxmoe.server.errors import ApiError, bad_request, too_long
from maxmoe.server.fields import ExtendedSamplingFields, SamplingFields, sampling_params
from maxmoe.server.generation import Plan
from maxmoe.server.readers import ChatReader
from maxmoe.server.service import Service

DEFAULT_MAX_TOKENS = 131_072
_INLINE_BYTES = 16_384
_PARAMS = re.compile(r"(tools|tool_choice|response_format|chat_template_kwargs|thinking|messages)\b[\w.\[\]]*")


Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """A chat to answer.

    Attributes:
      request: For `chat.prepare`.
      fields: What was given, for its settings of sampling.
      num_bytes: About how large the request is.
      paths: Where each message stands in what the client sent; None for messages[i].
      past_ids: What the conversation begins with, exactly; `request` then has these messages, too.
      num_past: So many of its messages.
      history: "strict" or "lenient"; None for what the server does by default.
      max_calls: After so many tool calls the answer is over.
      thinking_token_budget: None for no limit.
    """

    endpoint: str
    request: dict[str, Any]
    fields: SamplingFields
    max_tokens: int | None
    num_bytes: int = 0
    paths: Sequence[str] | None = None
    past_ids: Sequence[int] | None = None
    num_past: int = 0
    history: Literal["strict", "lenient"] | None = None
    stops: tuple[str, ...] = ()
    keeps_steps: bool = False
    top_logprobs: int = 0
    max_calls: int | None = None
    thinking_token_budget: int | None = None
    warnings: tuple[str, ...] = ()


async def plan_chat(service: Service, ask: Ask, caller: str) -> Plan:
    """Encodes a conversation. Raises: ApiError that names what is wrong, with numbers where it is too long."""
    prompt = await beside_loop(ask.num_bytes, encode, service, ask)
    demands = {"parallel_tool_calls": False} if ask.max_calls == 1 else {}
    constraint = await constraint_of(service, ask.request | demands)
    warnings = ask.warnings + constraint.warnings + prompt.warnings
    return await beside_loop(ask.num_bytes, _plan, service, ask, prompt, constraint.grammar, warnings, caller)


async def beside_loop(num_bytes: int, function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls what takes long for a long request, and then in a thread, so that others need not wait for it."""
    if num_bytes > _INLINE_BYTES:
        return await asyncio.to_thread(function, *arguments)
    return function(*arguments)


def encode(service: Service, ask: Ask) -> chat.Prompt:
    """The prompt of a conversation. Raises: ApiError."""
    _check_images(ask.request)
    _check_tool_names(ask.request)
    strict = service.options.strict_history if ask.history is None else ask.history == "strict"
    longest = service.max_len - 1 if ask.past_ids is None else None
    try:
        prompt = chat.prepare(ask.request, service.tokenizer, strict=strict, max_len=longest)
        return prompt if ask.past_ids is None else _after_past(service, ask, prompt)
    except chat.HistoryError as error:
        raise _history_lost(service, ask, error) from error
    except chat.RequestError as error:
        match = _PARAMS.match(str(error))
        param = f"messages[{error.index}]" if error.index is not None else match and match[0]
        if param == "thinking" and "thinking" not in ask.request:
            param = next(key for key in ("thinking_effort", "reasoning_effort") if key in ask.request)
        raise bad_request(_renamed(ask, str(error)), param and _renamed(ask, param), "invalid_field") from error
    except chat.ContextOverflowError as error:
        largest = re.search(r"Largest: [^.]*", str(error))
        advice = _renamed(ask, f". {largest[0]}" if largest else "")
        raise too_long(error.num_tokens, None, service.max_len, advice) from error
    except ValueError as error:  # a vocabulary without markers
        raise bad_request(
            f"this model does not chat: {error}; /v1/completions continues text", code="no_chat"
        ) from error


def effort_of(request: Mapping[str, Any]) -> str:
    """The thinking effort that a checked request comes to, for counting."""
    thinking, template = request.get("thinking"), request.get("chat_template_kwargs") or {}
    effort = thinking.get("effort") if isinstance(thinking, Mapping) else None
    given = (effort, template.get("thinking_effort"), request.get("thinking_effort"), request.get("reasoning_effort"))
    return next((value for value in given if value is not None), "max")


def choices_params(
    fields: SamplingFields, num_prompt_tokens: int, max_tokens: int | None, max_len: int, **settings: Any
) -> list[SamplingParams]:
    """What each of `n` answers is sampled with; with a seed, the seeds of further ones follow it.

    Raises: ApiError, with the numbers where prompt and answer do not fit.
    """
    if num_prompt_tokens + (max_tokens or 1) > max_len:
        raise too_long(num_prompt_tokens, max_tokens, max_len)
    limit = min(DEFAULT_MAX_TOKENS, max_len - num_prompt_tokens) if max_tokens is None else max_tokens
    params = sampling_params(fields, max_tokens=limit, **settings)
    count = fields.n or 1 if isinstance(fields, ExtendedSamplingFields) else 1
    if params.seed is None:
        return [params] * count
    return [dataclasses.replace(params, seed=(params.seed + i) % (MAX_SEED + 1)) for i in range(count)]


def salt_of(caller: str, fields: SamplingFields) -> str:
    """Prefixes are shared within one caller's requests of one salt."""
    return f"{caller}/{getattr(fields, 'cache_salt', None) or ''}"


def _plan(
    service: Service, ask: Ask, prompt: chat.Prompt, grammar: str, warnings: tuple[str, ...], caller: str
) -> Plan:
    budget = ask.thinking_token_budget
    params = choices_params(
        ask.fields,
        len(prompt.ids),
        ask.max_tokens,
        service.max_len,
        top_logprobs=ask.top_logprobs,
        grammar=grammar,
        # A larger one is no limit either.
        thinking_token_budget=None if budget is None else min(budget, service.max_len),
    )

    readers = [
        ChatReader(
            service.tokenizer,
            prompt.ids,
            allow_tool_calls=prompt.allows_tool_calls,
            stops=ask.stops,
            min_tokens=each.min_tokens,
            max_calls=ask.max_calls,
            keeps_steps=ask.keeps_steps,
            lenient_markers=service.options.lenient_markers,
            force_nonempty_content=service.options.force_nonempty_content,
        )
        for each in params
    ]
    return Plan(
        endpoint=ask.endpoint,
        prompts=[prompt.ids] * len(params),
        params=params,
        readers=readers,
        warnings=warnings,
        tier=effort_of(ask.request),
        priority=getattr(ask.fields, "priority", None) or 0,
        cache_salt=salt_of(caller, ask.fields),
    )


def _after_past(service: Service, ask: Ask, whole: chat.Prompt) -> chat.Prompt:
    """The exact ids of what was said, and the encoding of what is new."""
    kept = {key: ask.request[key] for key in ask.request.keys() - {"messages", "tool_choice", "response_format"}}
    past = ask.request["messages"][: ask.num_past]
    before = chat.prepare(kept | {"messages": past, "add_generation_prompt": False}, service.tokenizer).ids
    if whole.ids[: len(before)] != before:
        raise bad_request(
            "the new messages change how earlier ones are told; begin with a message of your own", "messages"
        )
    new = whole.ids[len(before) :]
    ids = [*ask.past_ids, *new]
    return dataclasses.replace(whole, ids=ids, is_assistant=[False] * len(ids), block_ends=[len(ids)])


def _history_lost(service: Service, ask: Ask, error: chat.HistoryError) -> ApiError:
    """Says for each loss how many tokens its message has."""
    counts = {}
    for index in sorted({loss.index for loss in error.losses}):
        text = json.dumps(ask.request["messages"][index], ensure_ascii=False)
        counts[index] = len(service.tokenizer.encode(text))
    shown = ", ".join(f"messages[{index}] {count:,}" for index, count in counts.items())
    losses = [
        {"message": _renamed(ask, f"messages[{loss.index}]"), "text": loss.text, "tokens": counts[loss.index]}
        for loss in error.losses
    ]
    return ApiError(
        400,
        f"{_renamed(ask, str(error))}. Nothing was dropped. Tokens of these messages, as JSON: {_renamed(ask, shown)}. "
        'history: "lenient" answers with warnings instead',
        param=_renamed(ask, f"messages[{error.index}]"),
        code="history_lost",
        details={"losses": losses},
    )


def _renamed(ask: Ask, text: str) -> str:
    """A text about messages, in terms of what the client sent."""
    if ask.paths is None:
        return text
    return re.sub(r"messages\[(\d+)\]", lambda match: ask.paths[int(match[1])], text)


def _check_images(request: Mapping[str, Any]) -> None:
    for i, message in enumerate(request["messages"]):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if part.get("type") in ("image", "image_url", "input_image"):
                raise bad_request(
                    f"messages[{i}].content[{j}] is an image: this server reads text alone",
                    f"messages[{i}].content[{j}]",
                    "unsupported_content",
                )


def _check_tool_names(request: Mapping[str, Any]) -> None:
    """Of the request and of system messages, which may declare more."""
    names: set[str] = set()
    declared = [("", request.get("tools") or ())]
    declared += [(f"messages[{i}].", message.get("tools") or ()) for i, message in enumerate(request["messages"])]
    for place, tools in declared:
        for i, tool in enumerate(tools):
            path, name = f"{place}tools[{i}].function.name", tool["function"]["name"]
            if name in names:
                raise bad_request(f"{path}: there is another tool {name!r:.80}", path, "invalid_field")
            names.add(name)
