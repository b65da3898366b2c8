"""What the endpoints that generate have in common: run a plan, answer at once or as a stream, note it in the log."""

import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from maxmoe.server.errors import ApiError
from maxmoe.server.fields import Model, read_fields
from maxmoe.server.gate import JsonResponse
from maxmoe.server.generation import Generation, Plan, Update
from maxmoe.server.limits import JsonBody, read_json
from maxmoe.server.readers import Finished
from maxmoe.server.service import Service
from maxmoe.server.streams import PING, EventStream, while_connected


class Form(Protocol):
    """How an interface writes answers down."""

    def whole(self, generation: Generation, results: list[Finished]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def begin(self) -> list[bytes]:
        """The first events of a stream."""

    def update(self, generation: Generation, update: Update) -> list[bytes]:
        """Events for what is new of one answer."""

    def end(self, generation: Generation) -> list[bytes]:
        """The last events."""

    def failure(self, error: ApiError) -> list[bytes]:
        """The last events where something has failed on the way."""


async def read(request: Request, service: Service, model: type[Model]) -> tuple[Model, JsonBody]:
    """A request's fields, checked, and its body as it came. Raises: ApiError; what `read_json` raises."""
    body = await read_json(request, service.options)
    fields = read_fields(model, body.value)
    if service.options.logs_bodies:
        request.state.log.add(body=body.value)
    service.check_model(getattr(fields, "model", None))
    return fields, body


def new_id(prefix: str) -> str:
    """An id for an answer: the prefix, and 24 hexadecimal digits."""
    return f"{prefix}{secrets.token_hex(12)}"


async def answer(
    request: Request,
    service: Service,
    plan: Plan,
    form: Form,
    streams: bool,
    on_end: Callable[[list[Finished]], None] | None = None,
) -> Response:
    """Runs a plan. Raises: ApiError for what is wrong before the first byte; ClientGone.

    Args:
      on_end: Called with complete answers.
    """
    generation = Generation(service, plan)
    if not streams:
        return await while_connected(request, _whole(request, service, generation, form, on_end))
    events = _events(request, service, generation, form, on_end)
    first = await anext(events)  # from here on its end cleans up, even if nobody takes another event
    return EventStream(first, events, service.options.write_timeout_s)


async def _whole(
    request: Request, service: Service, generation: Generation, form: Form, on_end: Callable | None
) -> Response:
    with generation:
        await generation.start()
        async for _ in generation.updates():
            pass
        results = generation.in_order()
        body = form.whole(generation, results)
    _note(request, service, generation)
    if on_end is not None:
        on_end(results)
    return JsonResponse(body)


async def _events(
    request: Request, service: Service, generation: Generation, form: Form, on_end: Callable | None
) -> AsyncIterator[bytes]:
    with generation:
        await generation.start()
        yield b"".join(form.begin())
        try:
            async for updates in generation.updates():
                events = [event for update in updates for event in form.update(generation, update)]
                if events:
                    yield b"".join(events)
                elif not updates:
                    yield PING
            if on_end is not None:
                on_end(generation.in_order())
            yield b"".join(form.end(generation))
        except ApiError as error:
            service.metrics.error(error.kind)
            request.state.log.add(error=error.code)
            yield b"".join(form.failure(error))
        finally:
            _note(request, service, generation)


def _note(request: Request, service: Service, generation: Generation) -> None:
    used = generation.usage()
    if service.options.logs_bodies:
        request.state.log.add(answers=[result.message for result in generation.results.values()])
    request.state.log.add(
        prompt_tokens=used["prompt_tokens"],
        completion_tokens=used["completion_tokens"],
        finish_reasons=[result.finish_reason for result in generation.results.values()],
    )
