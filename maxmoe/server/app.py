"""The ASGI application: which path is answered by what."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp

from maxmoe.server import openapi, session_routes
from maxmoe.server.chat_completions import chat_completions
from maxmoe.server.completions import completions
from maxmoe.server.errors import ApiError
from maxmoe.server.gate import Gate, JsonResponse
from maxmoe.server.keys import Keys
from maxmoe.server.limits import RateLimiter
from maxmoe.server.messages import count_tokens, messages
from maxmoe.server.responses import responses
from maxmoe.server.service import Service
from maxmoe.server.tokens import detokenize, tokenize

Endpoint = Callable[[Request, Service], Awaitable[Response]]


def make_app(
    service: Service,
    *,
    keys: Keys | None = None,
    requests_per_minute: int | None = None,
    allowed_hosts: frozenset[str] | None = None,
    extra_routes: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """The server of one engine, whose thread begins and ends with the application's lifespan.

    Args:
      keys: Who may ask; None for everybody.
      requests_per_minute: Of each key; None for no limit.
      allowed_hosts: See `Gate`.
      extra_routes: Of pages beside the interface, such as a chat page at /.
    """

    def route(path: str, endpoint: Endpoint, method: str = "POST") -> Route:
        async def handle(request: Request) -> Response:
            return await endpoint(request, service)

        return Route(path, handle, methods=[method])

    routes = [
        route("/v1/chat/completions", chat_completions),
        route("/v1/completions", completions),
        route("/v1/responses", responses),
        route("/v1/messages", messages),
        route("/v1/messages/count_tokens", count_tokens),
        route("/v1/models", _models, "GET"),
        route("/v1/models/{name:path}", _model, "GET"),
        route("/tokenize", tokenize),
        route("/detokenize", detokenize),
        *(route(path, endpoint, method) for method, path, endpoint in session_routes.ROUTES),
        route("/health", _health, "GET"),
        route("/ready", _ready, "GET"),
        route("/metrics", _metrics, "GET"),
        route("/openapi.json", _openapi, "GET"),
        *extra_routes,
    ]

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        service.engine_thread.start()
        try:
            yield
        finally:
            await service.engine_thread.stop()

    router = Router(routes, redirect_slashes=False, lifespan=lifespan)
    rates = None if requests_per_minute is None else RateLimiter(requests_per_minute)
    return Gate(router, service.metrics, keys or Keys(), rates, allowed_hosts)


async def _models(request: Request, service: Service) -> Response:
    return JsonResponse({"object": "list", "data": [_card(service)]})


async def _model(request: Request, service: Service) -> Response:
    service.check_model(request.path_params["name"])
    return JsonResponse(_card(service))


def _card(service: Service) -> dict[str, Any]:
    name = service.options.model_name
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "maxmoe",
        "max_model_len": service.max_len,
        "capabilities": {"vision": False},
    }


async def _health(request: Request, service: Service) -> Response:
    """Whether the process is worth keeping: 503 once the engine's thread has ended."""
    if service.engine_thread.is_alive:
        return JsonResponse({"status": "ok"})
    raise ApiError(503, service.engine_thread.absence or "the engine has ended", code="engine_unavailable")


async def _ready(request: Request, service: Service) -> Response:
    """Whether requests would be taken now."""
    if service.engine_thread.absence is not None:
        raise ApiError(503, service.engine_thread.absence, code="engine_unavailable", retry_after_s=10)
    load = service.engine_thread.load()
    return JsonResponse({"status": "ready", "running": load.num_running, "waiting": load.num_waiting})


async def _metrics(request: Request, service: Service) -> Response:
    load = service.engine_thread.load()
    service.metrics.engine_state(
        running=load.num_running,
        waiting=load.num_waiting,
        cache_usage=load.usage,
        cache_fragmentation=load.fragmentation,
        device_bytes=load.device_bytes,
        prefix_queries=load.num_queried_tokens,
        prefix_hits=load.num_hit_tokens,
        preemptions=load.num_preemptions,
    )
    body, content_type = service.metrics.render()
    return Response(body, headers={"content-type": content_type})


async def _openapi(request: Request, service: Service) -> Response:
    return JsonResponse(openapi.description(service.options))
