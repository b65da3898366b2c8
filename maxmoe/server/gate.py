"""The outermost layer: trace ids, API keys, rates, the form of errors, and a line in the log for every request."""

import json
from typing import Any

from absl import logging
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maxmoe.server.errors import ApiError
from maxmoe.server.keys import Keys
from maxmoe.server.limits import RateLimiter
from maxmoe.server.metrics import Metrics
from maxmoe.server.request_log import RequestLog, trace_id_of

ANTHROPIC_PATHS = ("/v1/messages",)
_GUARDED = ("/v1/", "/tokenize", "/detokenize")


class ClientGone(Exception):
    """Whoever asked does not listen any more."""


class Gate:
    """An ASGI application around another.

    Each request's scope gets a `state` with its `caller`, see `Keys.caller`, and its `log`.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        keys: Keys,
        rates: RateLimiter | None = None,
        allowed_hosts: frozenset[str] | None = None,
    ):
        """Guards an application.

        Args:
          rates: None for no limit to them.
          allowed_hosts: Names under which the server may be asked; None for any. Where no key is asked for, this keeps
            out pages of other sites, whose names can be made to lead to this machine.
        """
        self._app, self._metrics, self._keys, self._rates = app, metrics, keys, rates
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        trace_id = trace_id_of(headers)
        log = RequestLog(trace_id, scope["method"], path)
        status: int | None = None

        async def send_traced(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-trace-id"] = trace_id
            await send(message)

        try:
            self._check_host(headers)
            caller = self._keys.caller(headers) if path.startswith(_GUARDED) else ""
            log.add(key=caller or None)
            if self._rates is not None and path.startswith(_GUARDED):
                self._rates.check(caller)
            scope["app"] = self._app  # unknown paths and methods then raise, and get the form of other errors
            scope["state"] = {**scope.get("state", {}), "caller": caller, "log": log}
            await self._app(scope, receive, send_traced)
        except ApiError as error:
            log.add(error=error.code, param=error.param)
            self._metrics.error(error.kind)
            await error_response(error, path)(scope, receive, send_traced)
        except HTTPException as error:
            answer = ApiError(error.status_code, f"{scope['method']} {path:.200}: {error.detail}", code="no_such_route")
            log.add(error=answer.code)
            response = error_response(answer, path)
            response.headers.update(error.headers or {})
            await response(scope, receive, send_traced)
        except ClientGone:
            log.add(error="client_gone")
        except Exception as error:
            logging.exception("trace id %s: a fault in the server", trace_id)
            log.add(error="internal_error")
            self._metrics.error("server_error")
            if status is None:
                fault = ApiError(500, f"a fault in the server ({type(error).__name__}); see its log for {trace_id}")
                await error_response(fault, path)(scope, receive, send_traced)
            raise
        finally:
            log.write(status)

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if self._allowed_hosts is not None and name.lower() not in self._allowed_hosts:
            raise ApiError(
                403,
                f"this server is asked as {name!r:.80} and answers as {', '.join(sorted(self._allowed_hosts))} alone: "
                "start it with --allowed_hosts, or with API keys",
                code="host_not_allowed",
            )


def error_response(error: ApiError, path: str) -> Response:
    """An error in the form of the interface that the path belongs to."""
    body = error.anthropic_body() if path.startswith(ANTHROPIC_PATHS) else error.openai_body()
    return JsonResponse(body, error.status, error.headers)


class JsonResponse(Response):
    """JSON as UTF-8; half a character, which has no UTF-8 form, as an escape."""

    media_type = "application/json"

    def __init__(self, body: Any, status: int = 200, headers: dict[str, str] | None = None):
        """Encodes the body."""
        super().__init__(json_bytes(body), status, headers)


def json_bytes(value: Any) -> bytes:
    """Compact JSON."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace")
