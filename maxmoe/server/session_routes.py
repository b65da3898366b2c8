"""/v1/sessions: conversations kept by name. Saving an answer, listing, forking, deleting; going on is a chat."""

import asyncio
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from maxmoe.server.chat_completions import resume_session
from maxmoe.server.endpoint import read
from maxmoe.server.errors import ApiError
from maxmoe.server.fields import Fields
from maxmoe.server.gate import JsonResponse
from maxmoe.server.service import Service

SessionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class SaveFields(Fields):
    """An answer to keep."""

    name: SessionName
    response_id: str = Field(description="The id of a chat completion that was given here, with one choice.")
    replace: bool | None = Field(None, description="Whether a session of that name may be replaced.")


class ForkFields(Fields):
    """The copy."""

    name: SessionName


async def save(request: Request, service: Service) -> Response:
    """POST /v1/sessions."""
    _check_on(service)
    fields, _ = await read(request, service, SaveFields)
    caller, store = request.state.caller, service.sessions
    return JsonResponse(
        await asyncio.to_thread(store.save, caller, fields.name, fields.response_id, bool(fields.replace)), 201
    )


async def index(request: Request, service: Service) -> Response:
    """GET /v1/sessions."""
    _check_on(service)
    names = await asyncio.to_thread(service.sessions.names, request.state.caller)
    return JsonResponse({"object": "list", "data": [{"object": "session", "name": name} for name in names]})


async def show(request: Request, service: Service) -> Response:
    """GET /v1/sessions/{name}."""
    _check_on(service)
    name = request.path_params["name"]
    return JsonResponse(await asyncio.to_thread(service.sessions.describe, request.state.caller, name))


async def fork(request: Request, service: Service) -> Response:
    """POST /v1/sessions/{name}/fork."""
    _check_on(service)
    fields, _ = await read(request, service, ForkFields)
    name = request.path_params["name"]
    return JsonResponse(await asyncio.to_thread(service.sessions.fork, request.state.caller, name, fields.name), 201)


async def delete(request: Request, service: Service) -> Response:
    """DELETE /v1/sessions/{name}."""
    _check_on(service)
    name = request.path_params["name"]
    await asyncio.to_thread(service.sessions.delete, request.state.caller, name)
    return JsonResponse({"object": "session.deleted", "name": name, "deleted": True})


async def resume(request: Request, service: Service) -> Response:
    """POST /v1/sessions/{name}/resume."""
    _check_on(service)
    return await resume_session(request, service, request.path_params["name"])


def _check_on(service: Service) -> None:
    if service.sessions is None:
        raise ApiError(404, "this server keeps no sessions: start it with --session_dir", code="sessions_are_off")


ROUTES = (
    ("POST", "/v1/sessions", save),
    ("GET", "/v1/sessions", index),
    ("GET", "/v1/sessions/{name}", show),
    ("DELETE", "/v1/sessions/{name}", delete),
    ("POST", "/v1/sessions/{name}/fork", fork),
    ("POST", "/v1/sessions/{name}/resume", resume),
)
