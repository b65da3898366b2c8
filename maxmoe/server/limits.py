"""Bounds on what a client may send and how fast: size and depth of bodies, time to send them, requests per minute."""

import asyncio
import json
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from starlette.requests import Request

from maxmoe.server.errors import ApiError, bad_request
from maxmoe.server.service import Options

_MAX_CALLERS = 10_000
_MAX_MEMBERS = 200_000  # lists, objects and fields of a body: what checking it takes time for
_MAX_BRACKETS = 2_000_000  # the same before it is read, when brackets in texts cannot be told apart


class JsonBody(NamedTuple):
    """A request's body, read, and its size."""

    value: Any
    num_bytes: int


async def read_json(request: Request, options: Options) -> JsonBody:
    """Reads a body within the limits. Raises: ApiError; ClientDisconnect."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # also keeps pages of other sites from posting without asking
        raise ApiError(415, f"the Content-Type is {kind!r:.80}; send application/json", code="unsupported_content_type")
    raw = await _read(request, options)
    if raw.count(b"[") + raw.count(b"{") > _MAX_BRACKETS:
        raise _too_many()
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
        _check_shape(value, options.max_depth)
    except RecursionError as error:
        raise _too_deep(options.max_depth) from error
    except ValueError as error:  # not UTF-8 and numbers of thousands of digits included
        raise bad_request(f"the body is not JSON in UTF-8: {error}", code="invalid_json") from error
    return JsonBody(value, len(raw))


async def _read(request: Request, options: Options) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > options.max_body_bytes:
        raise _too_large(options.max_body_bytes)
    chunks, size = [], 0
    try:
        async with asyncio.timeout(options.read_timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > options.max_body_bytes:
                    raise _too_large(options.max_body_bytes)
                chunks.append(chunk)
    except TimeoutError as error:
        raise ApiError(
            408, f"the body did not arrive within {options.read_timeout_s:g} s", code="request_timeout"
        ) from error
    return b"".join(chunks)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _check_shape(value: Any, max_depth: int) -> None:
    num_members = 0
    todo = [_children(value)]
    while todo:
        child = next(todo[-1], None)
        if child is None:
            todo.pop()
        else:
            num_members += 1 + (len(child) if isinstance(child, dict) else 0)
            if len(todo) >= max_depth:
                raise _too_deep(max_depth)
            if num_members > _MAX_MEMBERS:
                raise _too_many()
            todo.append(_children(child))


def _children(value: Any) -> Iterator[Any]:
    """The lists and objects in one."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (child for child in inner if isinstance(child, list | dict))


def _too_deep(max_depth: int) -> ApiError:
    return bad_request(f"lists and objects are nested more than {max_depth} deep", code="nested_too_deeply")


def _too_many() -> ApiError:
    return bad_request(f"the body has more than {_MAX_MEMBERS:,} lists, objects and fields", code="too_many_values")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes:,} bytes, this server's limit", code="request_too_large")


class RateLimiter:
    """At most so many requests a minute from each caller: a bucket that fills evenly, as large as a minute's worth."""

    def __init__(self, requests_per_minute: int):
        """Starts with full buckets."""
        self._capacity = float(requests_per_minute)
        self._buckets: dict[str, tuple[float, float]] = {}  # by caller: what was left, and when

    def check(self, caller: str) -> None:
        """Counts a request. Raises: ApiError for one too many."""
        now_s = time.monotonic()
        left, then_s = self._buckets.pop(caller, (self._capacity, now_s))
        left = min(left + (now_s - then_s) * self._capacity / 60, self._capacity)
        allowed = left >= 1
        self._buckets[caller] = (left - allowed, now_s)
        if len(self._buckets) > _MAX_CALLERS:  # the one that asked longest ago
            del self._buckets[next(iter(self._buckets))]
        if not allowed:
            raise ApiError(
                429,
                f"more than {self._capacity:g} requests a minute",
                code="rate_limit_exceeded",
                retry_after_s=math.ceil((1 - left) * 60 / self._capacity),
            )
