"""What a request wants of the form of an answer, and how far that is enforced.

Answers are not constrained token by token here: the prompt tells the model what is wanted. This is the one place that
knows it. An engine that takes a grammar would get it from here, beside `SamplingParams`, and the warnings would go.
"""

from collections.abc import Mapping
from typing import Any

from maxmoe.server.errors import bad_request


def check_constraints(request: Mapping[str, Any]) -> tuple[str, ...]:
    """Warnings about what is asked for and only told to the model.

    Args:
      request: Of a chat: `tools`, `tool_choice`, `response_format`.
    Raises: ApiError for a named tool: the family has no words for that, so nothing at all would come of it.
    """
    choice, form = request.get("tool_choice"), request.get("response_format") or {}
    if isinstance(choice, Mapping):
        raise bad_request(
            "tool_choice: one named tool cannot be forced here; declare that tool alone, with tool_choice: required",
            "tool_choice",
            "unsupported_tool_choice",
        )
    warnings = []
    if choice == "required":
        warnings.append("tool_choice: the model is told that it must call a tool, and is not forced to")
    if form.get("type") in ("json_object", "json_schema"):
        strict = " strict: true is not enforced." if (form.get("json_schema") or {}).get("strict") else ""
        warnings.append(f"response_format: the model is told the format, and is not forced to keep it.{strict}")
    strict_tools = [
        tool["function"]["name"] for tool in request.get("tools") or () if tool["function"].get("strict") is True
    ]
    if strict_tools:
        names = ", ".join(strict_tools)
        warnings.append(f"tools: strict is not enforced ({names:.200}): check the arguments of calls")
    return tuple(warnings)
