"""Tools that a model may call and that are run here: they compute and tell the time, and touch nothing else.

What a tool answers is text for the model. A call that cannot be run is answered by a text that begins with "error:"
and says what is allowed, so that the model can call again; nothing that a model writes raises.
"""

import dataclasses
import datetime
import json
import zoneinfo
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from maxmoe.chat.calculator import calculate

_JSON_TYPES = {"string": str, "integer": int, "number": int | float, "boolean": bool, "object": dict, "array": list}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tool:
    """Something that a model may call.

    Attributes:
      name, description: As the model reads them.
      parameters: JSON schema of an object; all that it allows are its `properties`, each with one type.
      function: Takes these as keywords and returns the result. ValueError says to the model what is wrong.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., str]

    def declaration(self) -> dict[str, Any]:
        """What a request's `tools` holds for it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class Toolbox:
    """The tools of one conversation, by name."""

    def __init__(self, tools: Iterable[Tool]):
        """Takes tools with different names. ValueError otherwise."""
        tools = list(tools)
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise ValueError(f"each tool once: {', '.join(tool.name for tool in tools)}")

    @classmethod
    def built_in(cls, names: Sequence[str]) -> "Toolbox":
        """Some of the tools that come with maxmoe. ValueError for another name; it lists those there are."""
        unknown = [name for name in names if name not in BUILT_IN]
        if unknown:
            raise ValueError(f"no tool is named {', '.join(map(repr, unknown))}; there are {', '.join(BUILT_IN)}")
        return cls(BUILT_IN[name] for name in names)

    def declarations(self) -> list[dict[str, Any]]:
        """What a request's `tools` holds for them."""
        return [tool.declaration() for tool in self._tools.values()]

    def run(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The results of an assistant's tool calls, one message for each, in their order."""
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": self._result(**call["function"])} for call in calls
        ]

    def _result(self, name: str, arguments: str) -> str:
        tool = self._tools.get(name)
        if tool is None:
            return f"error: no tool is named {name!r:.80}; there are {', '.join(self._tools) or 'none'}"
        try:
            return tool.function(**_read_arguments(tool, arguments))
        except ValueError as error:
            return f"error: {error}"


def _read_arguments(tool: Tool, text: str) -> dict[str, Any]:
    properties = tool.parameters["properties"]
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments are no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments must be an object with {', '.join(properties)}")
    if unknown := sorted(arguments.keys() - properties.keys()):
        raise ValueError(f"{tool.name} does not take {', '.join(unknown)}; it takes {', '.join(properties)}")
    if missing := [key for key in tool.parameters.get("required", ()) if key not in arguments]:
        raise ValueError(f"{', '.join(missing)} must be given")
    for key, value in arguments.items():
        kind = properties[key]["type"]
        is_bool = isinstance(value, bool)  # which Python counts among the integers
        if not isinstance(value, _JSON_TYPES[kind]) or (is_bool and kind != "boolean"):
            raise ValueError(f"{key} must be of type {kind}; got {value!r:.80}")
    return arguments


def _now(zone: datetime.tzinfo) -> datetime.datetime:
    return datetime.datetime.now(zone)


def _tell_time(time_zone: str = "UTC") -> str:
    if time_zone == "UTC":
        zone: datetime.tzinfo = datetime.UTC  # also where no data on time zones is installed
    else:
        try:
            zone = zoneinfo.ZoneInfo(time_zone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError(
                f"no time zone is named {time_zone!r:.80}; names are like Europe/Paris or UTC, from the IANA database"
            ) from error
    now = _now(zone)
    return f"{now.isoformat(timespec='seconds')}, {now:%A}, {time_zone}"


def _one_string(key: str, description: str, required: bool) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": "string", "description": description}}}
    return schema | ({"required": [key]} if required else {})


BUILT_IN = {
    tool.name: tool
    for tool in (
        Tool(
            name="calculator",
            description=(
                "Computes an arithmetic expression: numbers, + - * / // % **, parentheses, pi, e, and functions such "
                "as sqrt, log, sin, round, min, max, factorial. Integers are exact."
            ),
            parameters=_one_string("expression", "Such as (3 + 4) * 2 ** 10 or sqrt(2)", required=True),
            function=calculate,
        ),
        Tool(
            name="clock",
            description="Tells the current date, time and day of the week.",
            parameters=_one_string("time_zone", "From the IANA database, such as Europe/Paris; default UTC", False),
            function=_tell_time,
        ),
    )
}
