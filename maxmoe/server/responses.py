"""/v1/responses, the newer of OpenAI's forms, without what needs a memory of earlier requests."""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from maxmoe.server.endpoint import answer, new_id, read
from maxmoe.server.errors import ApiError
from maxmoe.server.generation import Generation, Plan, Update
from maxmoe.server.planning import Ask, plan_chat
from maxmoe.server.readers import Channel, Finished, Piece
from maxmoe.server.response_fields import ResponseFields, chat_of
from maxmoe.server.service import Service
from maxmoe.server.streams import event


async def responses(request: Request, service: Service) -> Response:
    """POST /v1/responses."""
    fields, body = await read(request, service, ResponseFields)
    prompt, paths = chat_of(fields, body.value)
    ask = Ask(
        endpoint="/v1/responses",
        request=prompt,
        paths=paths,
        fields=fields,
        max_tokens=fields.max_output_tokens,
        num_bytes=body.num_bytes,
        history=fields.history,
        max_calls=1 if fields.parallel_tool_calls is False else None,
        thinking_token_budget=fields.thinking_token_budget,
    )
    plan = await plan_chat(service, ask, request.state.caller)
    return await answer(request, service, plan, ResponseForm(service, plan, fields), bool(fields.stream))


class _Item:
    """One item of the output while it comes."""

    def __init__(self, channel: Channel, index: int, call: dict[str, Any] | None = None):
        self.channel, self.index, self.text = channel, index, ""
        self.call = call
        self.id = new_id({"reasoning_content": "rs_", "content": "msg_", "tool_calls": "fc_"}[channel])

    @property
    def part(self) -> dict[str, Any]:
        """The content of a message or of thinking."""
        if self.channel == "content":
            return {"type": "output_text", "text": self.text, "annotations": []}
        return {"type": "reasoning_text", "text": self.text}

    def as_dict(self, status: str) -> dict[str, Any]:
        """The item."""
        if self.channel == "reasoning_content":
            content = [self.part] if self.text else []
            return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}
        if self.channel == "content":
            content = [self.part] if self.text or status == "completed" else []
            return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self.call["id"],
            "name": self.call["function"]["name"],
            "arguments": self.text,
            "status": status,
        }


class ResponseForm:
    """A response, and its events."""

    def __init__(self, service: Service, plan: Plan, fields: ResponseFields):
        """For one request."""
        self._service, self._plan, self._fields = service, plan, fields
        self._id, self._created = new_id("resp_"), int(time.time())
        self._number = 0  # of the next event
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._finished: Finished | None = None

    def whole(self, generation: Generation, results: list[Finished]) -> dict[str, Any]:
        """See `Form`."""
        (self._finished,) = results
        return self._response(generation, self._output(self._finished.message))

    def begin(self) -> list[bytes]:
        """See `Form`."""
        response = self._response(None, [])
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def update(self, generation: Generation, update: Update) -> list[bytes]:
        """See `Form`."""
        events = [event for piece in update.pieces for event in self._piece(piece)]
        if update.finished is not None:
            self._finished = update.finished
            events += self._close()
        return events

    def end(self, generation: Generation) -> list[bytes]:
        """See `Form`."""
        response = self._response(generation, [item.as_dict("completed") for item in self._items])
        return [self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: ApiError) -> list[bytes]:
        """See `Form`."""
        told = {"code": error.code or error.kind, "message": error.message}
        response = self._response(None, []) | {"status": "failed", "error": told}
        return [self._event("response.failed", response=response)]

    def _event(self, kind: str, /, **facts: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **facts}, kind)

    def _piece(self, piece: Piece) -> list[bytes]:
        call, value = None, piece.value
        if piece.channel == "tool_calls":
            (entry,) = piece.value
            call, value = (entry if "id" in entry else None), entry["function"]["arguments"]
        events = []
        if self._open is None or self._open.channel != piece.channel or call is not None:
            events += self._close()
            events += self._begin(_Item(piece.channel, len(self._items), call))
        item = self._open
        item.text += value
        if value:
            names = {"reasoning_content": "reasoning_text", "content": "output_text"}
            name = names.get(piece.channel, "function_call_arguments")
            place = {"logprobs": []} if piece.channel == "content" else {}
            events.append(self._event(f"response.{name}.delta", **self._place(item), delta=value, **place))
        return events

    def _place(self, item: _Item) -> dict[str, Any]:
        place = {"item_id": item.id, "output_index": item.index}
        return place if item.channel == "tool_calls" else place | {"content_index": 0}

    def _begin(self, item: _Item) -> list[bytes]:
        self._items.append(item)
        self._open = item
        started = item.as_dict("in_progress")
        events = [self._event("response.output_item.added", output_index=item.index, item=started)]
        if item.channel != "tool_calls":
            events.append(self._event("response.content_part.added", **self._place(item), part=item.part))
        return events

    def _close(self) -> list[bytes]:
        item, self._open = self._open, None
        if item is None:
            return []
        place, events = self._place(item), []
        if item.channel == "tool_calls":
            name = item.call["function"]["name"]
            events.append(self._event("response.function_call_arguments.done", **place, name=name, arguments=item.text))
        elif item.channel == "content":
            events.append(self._event("response.output_text.done", **place, text=item.text, logprobs=[]))
            events.append(self._event("response.content_part.done", **place, part=item.part))
        else:
            events.append(self._event("response.reasoning_text.done", **place, text=item.text))
            events.append(self._event("response.content_part.done", **place, part=item.part))
        whole = item.as_dict("completed")
        return [*events, self._event("response.output_item.done", output_index=item.index, item=whole)]

    def _output(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[_Item] = []
        for channel in ("reasoning_content", "content"):
            if message[channel]:
                found.append(_Item(channel, len(found)))
                found[-1].text = message[channel]
        for call in message["tool_calls"]:
            found.append(_Item("tool_calls", len(found), call))
            found[-1].text = call["function"]["arguments"]
        return [item.as_dict("completed") for item in found]

    def _response(self, generation: Generation | None, output: list[dict[str, Any]]) -> dict[str, Any]:
        fields, finished = self._fields, self._finished
        status, incomplete = "in_progress", None
        if finished is not None:
            status = "incomplete" if finished.finish_reason == "length" else "completed"
            incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        warnings = [*self._plan.warnings, *(() if finished is None else finished.warnings)]
        sampling = self._plan.params[0]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "model": self._service.options.model_name,
            "output": output,
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": self._plan.tier, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"} if fields.text is None else self._format()},
            "tool_choice": self._dumped(fields.tool_choice) or "auto",
            "tools": [self._dumped(tool) for tool in fields.tools or ()],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if generation is None else _usage(generation),
            "metadata": fields.metadata or {},
        } | ({"warnings": warnings} if warnings else {})

    def _format(self) -> dict[str, Any]:
        given = self._fields.text.format
        return {"type": "text"} if given is None else self._dumped(given)

    @staticmethod
    def _dumped(value: Any) -> Any:
        return value if value is None or isinstance(value, str) else value.model_dump(by_alias=True, exclude_unset=True)


def _usage(generation: Generation) -> dict[str, Any]:
    used = generation.usage()
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": used["prompt_tokens_details"],
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": used["completion_tokens_details"],
        "total_tokens": used["total_tokens"],
    }
