"""Arguments of tool calls: JSON into tags, and tags back into JSON while they arrive."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from maxmoe.chat.markup import Segment, close_tag, open_tag, plain
from maxmoe.chat.request import RequestError


class GivenCall(NamedTuple):
    """A tool call of an earlier message: its arguments as given, its id as text, None without one."""

    name: str
    arguments: Any
    id: str | None


def read_calls(message: Mapping[str, Any], index: int) -> list[GivenCall]:
    """The tool calls of `messages[index]`. RequestError for one without a name."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list | tuple):
        raise RequestError(f"tool_calls must be a list; got {calls!r:.80}", index)
    found = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not (isinstance(name, str) and name) or call.get("type", "function") != "function":
            raise RequestError(f"tool_calls[{i}] must be a function with a name; got {call!r:.80}", index)
        call_id = None if call.get("id") is None else str(call["id"])
        found.append(GivenCall(name, function.get("arguments"), call_id))
    return found


def render_call(call: GivenCall, number: int, index: int) -> list[Segment]:
    """A call as the model writes it.

    Args:
      call: Its arguments are an object, or its JSON. A string that is no JSON is kept as it is.
      number: Of the call in its message, from 1.
      index: Of the message, for errors. RequestError for JSON that is no object.
    """
    name, arguments, _ = call
    body: list[Segment] = []
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except RecursionError as error:
            raise RequestError(f"the arguments of call {number} ({name}) are nested too deeply", index) from error
        except ValueError:
            body = [*open_tag("json", {"type": "object"}), *plain(arguments), *close_tag("json")]
            arguments = None
    elif isinstance(arguments, str):
        arguments = None
    if arguments is not None and not isinstance(arguments, Mapping):
        raise RequestError(
            f"the arguments of call {number} ({name}) must be an object, or its JSON; got {arguments!r:.80}", index
        )
    for key, value in (arguments or {}).items():
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"argument {key!r} of call {number} ({name}) is no JSON: {error}", index) from error
        body += [*open_tag("argument", {"key": str(key), "type": _type_name(value)}), *plain(text)]
        body += close_tag("argument")
    return [*open_tag("call", {"tool": name, "index": str(number)}), *body, *close_tag("call")]


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    for name, types in (("boolean", bool), ("number", int | float), ("string", str), ("object", Mapping)):
        if isinstance(value, types):  # in this order: a bool is an int
            return name
    return "array"


class ArgumentsBuilder:
    """Builds the JSON of a call's arguments from tags, giving out its text as soon as it cannot change.

    The pieces, joined, are `json` once the call has ended. Only where a key comes twice, the pieces hold both values,
    which readers of JSON resolve as `json` does: the last one counts.
    """

    def __init__(self):
        """Starts without arguments."""
        self._values: dict[str, str] = {}  # JSON by key
        self._raw: str | None = None  # arguments that are no JSON object, as the model wrote them
        self._key = ""
        self._is_string = True
        self._body: list[str] = []

    @property
    def json(self) -> str:
        """What has been closed so far."""
        if self._raw is not None:
            return self._raw
        return "{" + ", ".join(f"{_dump(key)}: {value}" for key, value in self._values.items()) + "}"

    def open(self, key: str, type_name: str) -> str:
        """Begins an argument."""
        self._key, self._is_string, self._body = key, type_name == "string", []
        return self._lead(key) + ('"' if self._is_string else "")

    def feed(self, text: str) -> str:
        """Takes a piece of the value. Only strings come out at once: other values are checked when they end."""
        self._body.append(text)
        return _dump(text)[1:-1] if self._is_string else ""

    def close(self) -> str:
        """Ends the argument; a value that is not what its type says becomes a string."""
        body = "".join(self._body)
        self._values[self._key] = _dump(body) if self._is_string else _checked_json(body)
        return '"' if self._is_string else self._values[self._key]

    def add_object(self, body: str) -> str:
        """Takes arguments that come as one text: a JSON object, or else kept as it is."""
        entries = json.loads(_checked_json(body))
        if not isinstance(entries, dict):
            if self._values:
                return self.open("json", "string") + self.feed(body) + self.close()
            self._raw = body
            return body
        pieces = []
        for key, entry in entries.items():
            pieces += [self._lead(key), _dump(entry)]
            self._values[key] = pieces[-1]
        return "".join(pieces)

    def end(self) -> str:
        """Ends the call."""
        if self._raw is not None:
            return ""
        return "}" if self._values else "{}"

    @property
    def is_complete(self) -> bool:
        """Whether nothing can be added: the arguments were one text that is no JSON object."""
        return self._raw is not None

    def _lead(self, key: str) -> str:
        return f"{', ' if self._values else '{'}{_dump(key)}: "


def _dump(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character, written as an escape, can only be written so
        return json.dumps(value)
    return text


def _checked_json(body: str) -> str:
    """A value in the form of its JSON; what is no JSON, NaN and numbers too large included, as a string."""
    try:
        value = json.loads(body)
        json.dumps(value, allow_nan=False)
        return _dump(value)
    except (ValueError, RecursionError):
        return _dump(body)
