"""What a request wants of the form of an answer: a grammar that the engine keeps, or only words to the model.

`chat.answer_grammar` writes the grammar of a `response_format`, of calls that are demanded, and of strict tools. It is
compiled here, beside the loop and before the engine's thread sees it, which then finds it compiled. Without grammars
the prompt still tells the model what is wanted, and the client is told that nothing more is done.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from maxmoe import chat
from maxmoe.server.errors import bad_request
from maxmoe.server.service import Service


class Constraint(NamedTuple):
    """The grammar of an answer, "" for none, and what of the request it does not enforce."""

    grammar: str
    warnings: tuple[str, ...]


async def constraint_of(service: Service, request: Mapping[str, Any]) -> Constraint:
    """What is enforced of a request that has been encoded.

    Raises: ApiError for a schema that cannot be enforced, or a named tool that nothing would force.
    """
    grammars = service.engine_thread.engine.grammars
    goes_on = request.get("add_generation_prompt") is False  # what it must match has begun already
    try:
        grammar = "" if grammars is None or goes_on else chat.answer_grammar(request, service.tokenizer)
        if grammar:
            await asyncio.to_thread(grammars.matcher, grammar)
    except ValueError as error:
        param = "response_format" if request.get("response_format") else "tools"
        raise bad_request(f"{param}: {error}", param, "unsupported_schema") from error
    return Constraint(grammar, () if grammar else _unenforced(request))


def _unenforced(request: Mapping[str, Any]) -> tuple[str, ...]:
    choice, form = request.get("tool_choice"), request.get("response_format") or {}
    if isinstance(choice, Mapping):
        raise bad_request(
            "tool_choice: one named tool cannot be forced here, and the family has no words for it; declare that tool "
            "alone, with tool_choice: required",
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
