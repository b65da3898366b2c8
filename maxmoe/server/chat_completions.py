"""/v1/chat/completions, in OpenAI's form, and going on with a session in the same form.

Thinking is in `reasoning_content`, the name under which the publisher's own service tells it and under which it must
come back; `reasoning` is another name that some clients know, told as well where the server is started so.
"""

import functools
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from maxmoe.server.chat_fields import ChatFields, ResumeFields, SessionResumeFields
from maxmoe.server.endpoint import answer, new_id, read
from maxmoe.server.errors import ApiError, bad_request
from maxmoe.server.fields import checked_top_logprobs
from maxmoe.server.generation import Generation, Plan, Update
from maxmoe.server.limits import JsonBody
from maxmoe.server.logprobs import chat_logprobs
from maxmoe.server.planning import Ask, plan_chat
from maxmoe.server.readers import Finished, Piece
from maxmoe.server.service import Service
from maxmoe.server.sessions import Snapshot
from maxmoe.server.streams import DONE, event

_PROMPT_KEYS = (
    "messages",
    "tools",
    "tool_choice",
    "response_format",
    "thinking",
    "thinking_effort",
    "reasoning_effort",
    "chat_template_kwargs",
    "continue_final_message",
)


async def chat_completions(request: Request, service: Service) -> Response:
    """POST /v1/chat/completions."""
    fields, body = await read(request, service, ChatFields)
    prompt = {key: body.value[key] for key in _PROMPT_KEYS if key in body.value}
    return await _answer(request, service, fields, chat_ask("/v1/chat/completions", fields, prompt, body))


async def resume_session(request: Request, service: Service, name: str) -> Response:
    """POST /v1/sessions/{name}/resume: goes on from the exact ids of a session."""
    fields, body = await read(request, service, SessionResumeFields)
    past = service.sessions.load(request.state.caller, name)
    new = body.value.get("messages") or []
    if past.is_complete != bool(new):
        what = "ends with a whole answer: give messages" if past.is_complete else "was cut off: leave out messages"
        raise bad_request(f"session {name!r} {what}", "messages", "invalid_field")
    choices = {key: body.value[key] for key in ("tool_choice", "response_format") if key in body.value}
    prompt = past.request | choices | {"messages": past.request["messages"] + new}
    if not past.is_complete:
        prompt |= {"add_generation_prompt": False}
    ask = chat_ask("/v1/sessions", fields, prompt, body, past_ids=past.ids, num_past=len(past.request["messages"]))
    return await _answer(request, service, fields, ask)


def chat_ask(endpoint: str, fields: ResumeFields, prompt: dict[str, Any], body: JsonBody, **past: Any) -> Ask:
    """What a chat's fields ask for. Raises: ApiError for fields that contradict each other."""
    if None not in (fields.max_tokens, fields.max_completion_tokens):
        raise bad_request("give max_completion_tokens or max_tokens, not both", "max_tokens", "invalid_field")
    budget, effort = fields.thinking_token_budget, fields.thinking_budget
    if isinstance(effort, str):
        if prompt.get("reasoning_effort") not in (None, effort):
            raise bad_request(
                f"thinking_budget={effort!r:.80} and reasoning_effort={prompt['reasoning_effort']!r:.80} say different "
                "things: give one",
                "thinking_budget",
                "invalid_field",
            )
        prompt |= {"reasoning_effort": effort}
    elif effort is not None:
        if budget not in (None, effort):
            raise bad_request(
                f"thinking_budget={effort} and thinking_token_budget={budget} differ: give one", "thinking_budget"
            )
        budget = effort
    form = fields.response_format
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        raise bad_request(
            "response_format.json_schema is for type json_schema, which needs it", "response_format", "invalid_field"
        )
    return Ask(
        endpoint=endpoint,
        request=prompt,
        fields=fields,
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        num_bytes=body.num_bytes,
        history=fields.history,
        stops=fields.stops,
        keeps_steps=bool(fields.logprobs),
        top_logprobs=checked_top_logprobs(fields.logprobs, fields.top_logprobs),
        max_calls=1 if fields.parallel_tool_calls is False else None,
        thinking_token_budget=None if budget == -1 else budget,
        **past,
    )


async def _answer(request: Request, service: Service, fields: ResumeFields, ask: Ask) -> Response:
    plan = await plan_chat(service, ask, request.state.caller)
    form = ChatForm(service, plan, fields)
    keep = functools.partial(_remember, service, request.state.caller, form.id, ask.request, plan)
    return await answer(request, service, plan, form, bool(fields.stream), keep)


def _remember(
    service: Service, caller: str, answer_id: str, prompt: dict[str, Any], plan: Plan, results: list[Finished]
) -> None:
    """Keeps a single answer, so that it can be saved as a session."""
    if service.sessions is None or len(results) != 1:
        return
    (result,) = results
    kept = {key: value for key, value in prompt.items() if key not in ("tool_choice", "response_format")}
    messages = list(kept["messages"])
    resumes = kept.pop("add_generation_prompt", True) is False
    if kept.pop("continue_final_message", False) or messages[-1].get("partial") or resumes:
        messages[-1] = _joined(messages[-1], result.message)
    else:
        messages.append(result.message)
    ids = [*plan.prompts[0], *result.ids]
    complete = result.ids[-1:] == [service.tokenizer.end_of_msg_id] and result.finish_reason != "length"
    snapshot = Snapshot(ids=ids, request=kept | {"messages": messages}, is_complete=complete)
    service.sessions.remember(caller, answer_id, snapshot)


def _joined(begun: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """One message from its beginning and what came after."""
    joined = {key: (begun.get(key) or "") + (rest.get(key) or "") or None for key in ("reasoning_content", "content")}
    calls = [*(begun.get("tool_calls") or ()), *(rest.get("tool_calls") or ())]
    return {"role": "assistant", **joined, "tool_calls": calls}


class ChatForm:
    """OpenAI's chat completion, and its chunks.

    Attributes:
      id: Of the answer.
    """

    def __init__(self, service: Service, plan: Plan, fields: ResumeFields):
        """For one request."""
        self.id = new_id("chatcmpl-")
        self._service, self._plan, self._fields = service, plan, fields
        self._created, self._model = int(time.time()), service.options.model_name
        options = fields.stream_options
        self._tells_usage = options is not None and bool(options.include_usage)
        self._tells_usage_always = options is not None and bool(options.continuous_usage_stats)

    def whole(self, generation: Generation, results: list[Finished]) -> dict[str, Any]:
        """See `Form`."""
        choices = [
            {
                "index": index,
                "message": self._message(result.message),
                "logprobs": chat_logprobs(self._service.tokenizer, result.steps) if self._fields.logprobs else None,
                "finish_reason": result.finish_reason,
            }
            | ({"token_ids": result.ids} if self._fields.return_token_ids else {})
            for index, result in enumerate(results)
        ]
        body = self._head("chat.completion") | {"choices": choices, "usage": self._usage(generation)}
        if self._fields.return_token_ids:
            body["prompt_token_ids"] = self._plan.prompts[0]
        return body | self._warnings([*self._plan.warnings, *(text for r in results for text in r.warnings)])

    def begin(self) -> list[bytes]:
        """See `Form`."""
        more = self._warnings(self._plan.warnings)
        if self._fields.return_token_ids:
            more["prompt_token_ids"] = self._plan.prompts[0]
        chunks = []
        for index in range(len(self._plan.prompts)):
            chunks.append(self._chunk(index, {"role": "assistant", "content": ""}, **more))
            more = {}
        return chunks

    def update(self, generation: Generation, update: Update) -> list[bytes]:
        """See `Form`."""
        more = {"usage": self._usage(generation)} if self._tells_usage_always else {}
        chunks = [self._chunk(update.index, self._delta(piece), piece, **more) for piece in update.pieces]
        if update.finished is not None:
            chunks.append(self._last_chunk(generation, update.index, update.finished, more))
        return chunks

    def end(self, generation: Generation) -> list[bytes]:
        """See `Form`."""
        if not self._tells_usage:
            return [DONE]
        return [event(self._head("chat.completion.chunk") | {"choices": [], "usage": self._usage(generation)}), DONE]

    def failure(self, error: ApiError) -> list[bytes]:
        """See `Form`."""
        return [event(error.openai_body()), DONE]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _usage(self, generation: Generation, index: int | None = None) -> dict[str, Any]:
        used = generation.usage(index)
        return used | {"cached_tokens": used["prompt_tokens_details"]["cached_tokens"]}

    def _warnings(self, warnings: Any) -> dict[str, Any]:
        return {"warnings": list(warnings)} if warnings else {}

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        told = {"role": "assistant", "content": message["content"]}
        if reasoning := message.get("reasoning_content"):
            told |= self._reasoning(reasoning)
        return told | ({"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {})

    def _reasoning(self, text: str) -> dict[str, str]:
        return {"reasoning_content": text} | ({"reasoning": text} if self._service.options.mirrors_reasoning else {})

    def _delta(self, piece: Piece) -> dict[str, Any]:
        return self._reasoning(piece.value) if piece.channel == "reasoning_content" else {piece.channel: piece.value}

    def _chunk(self, index: int, delta: dict[str, Any], piece: Piece | None = None, **more: Any) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None}
        if piece is not None and piece.steps:
            choice["logprobs"] = chat_logprobs(self._service.tokenizer, piece.steps)
        return event({**self._head("chat.completion.chunk"), "choices": [choice], **more})

    def _last_chunk(self, generation: Generation, index: int, result: Finished, more: dict[str, Any]) -> bytes:
        choice = {"index": index, "delta": {}, "finish_reason": result.finish_reason}
        choice["usage"] = self._usage(generation, index)  # where the publisher's own service has it
        if self._fields.return_token_ids:
            choice["token_ids"] = result.ids
        more = more | self._warnings(result.warnings)
        return event({**self._head("chat.completion.chunk"), "choices": [choice], **more})
