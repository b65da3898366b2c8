"""Grammars of answers: what a request demands of JSON and of tool calls, written for llguidance.

A grammar describes everything behind thinking: the response, the calls, the end of the message, tag by tag. Tags are
spelled by the very ids of the family's encoding, so that a parser that is driven by ids reads them; what stands between
them is text or JSON. Markers cannot come from text, for they are ids of their own.

Source: the grammar that the family was trained to produce; llguidance's documentation of its variant of Lark.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from maxmoe.chat.markup import Segment, close_tag, open_tag
from maxmoe.chat.request import ChatRequest, RequestError, declared_tools, read_request
from maxmoe.chat.tokenizer import Tokenizer

_TYPES = {"integer": "number"} | {name: name for name in ("string", "number", "boolean", "null", "object", "array")}
_MAX_COUNTED_CHARS = 4096  # longer bounds of strings would make automata that are too large


def answer_grammar(request: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """What the answer to a request must match once thinking is over; "" where anything may come.

    There is something to match where response_format asks for JSON, where tool_choice demands calls, and where a
    declared tool is strict. A message that is only continued is not constrained: what it must match has begun already.

    Raises: RequestError for a request or a schema that cannot be read.
    """
    read = read_request(request)
    tools = [] if read.tool_choice == "none" else [_function(tool) for tool in declared_tools(read)]
    only = _named(request.get("tool_choice"))
    must_call = only is not None or read.tool_choice == "required"
    strict = any(tool.get("strict") is True for tool in tools)
    if read.is_partial or not (read.response_format or must_call or strict):
        return ""
    allowed = [tool for tool in tools if only is None or tool.get("name") == only]
    grammar = _Grammar(tokenizer)
    grammar.rule("start", " ".join(_message(grammar, read, must_call, allowed, request.get("parallel_tool_calls"))))
    return grammar.text()


def _message(grammar: "_Grammar", read: ChatRequest, must_call: bool, tools: Sequence[Mapping], parallel: Any):
    """The parts of a message behind its thinking."""
    if read.thinking:
        yield grammar.tag(open_tag("response"))
    if read.response_format is None:
        yield "TEXT"
    else:
        schema = {"type": "object"} if read.response_format == "json_object" else read.schema
        yield grammar.json(schema, "response_format")
    yield grammar.tag(close_tag("response"))
    if tools:
        calls = "call" if parallel is False else "call+"
        grammar.rule("tools", f"{grammar.tag(open_tag('tools'))} {calls} {grammar.tag(close_tag('tools'))}")
        grammar.rule("call", " | ".join(_call(grammar, number, tool) for number, tool in enumerate(tools)))
        yield "tools" if must_call else "tools?"
    yield grammar.tag(close_tag("message"))


def _call(grammar: "_Grammar", number: int, tool: Mapping[str, Any]) -> str:
    """The rule of calls of one tool."""
    parameters = tool.get("parameters")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    properties = parameters.get("properties")
    required = parameters.get("required") or []
    if not isinstance(required, list):
        raise RequestError(f"required of tool {tool.get('name')!r:.80} must be a list of names; got {required!r:.80}")
    if not isinstance(properties, Mapping) or not properties:
        arguments = "any_argument*" if properties is None else ""
    else:
        names = [
            grammar.rule(f"argument_{number}_{place}", _argument(grammar, key, schema, parameters))
            for place, (key, schema) in enumerate(properties.items())
        ]
        if tool.get("strict") is True:
            arguments = " ".join(
                name if key in required else f"{name}?" for name, key in zip(names, properties, strict=True)
            )
        else:
            arguments = f"({' | '.join(names)}){'+' if required else '*'}"
    head = grammar.tag(open_tag("call", {"tool": str(tool.get("name")), "index": "\0"}))
    return grammar.rule(f"call_{number}", f"{head} {arguments} {grammar.tag(close_tag('call'))}")


def _argument(grammar: "_Grammar", key: str, schema: Any, parameters: Mapping[str, Any]) -> str:
    """One argument: its type stands in the tag, and decides how the value is written.

    A schema that says neither `type` nor `enum` nor `const`, such as a reference, allows any value.
    """
    schema = schema if isinstance(schema, Mapping) else {}
    fixed = _fixed_values(schema)
    kind = schema.get("type")
    if kind is None:
        kinds = list(_TYPES) if fixed is None else [_type_of(value) for value in fixed]
    else:
        kinds = kind if isinstance(kind, list) else [kind]
    if unknown := [name for name in kinds if not isinstance(name, str) or name not in _TYPES]:
        raise RequestError(f"argument {key!r:.80} has the type {unknown[0]!r:.80}; types are {', '.join(_TYPES)}")
    shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    forms = []
    for name in dict.fromkeys(_TYPES[name] for name in kinds):
        values = None if fixed is None else [value for value in fixed if _type_of(value) == name]
        if values == []:
            continue
        if name == "string":
            value = _string(schema, values)
        elif values is not None:
            value = grammar.json({"enum": values}, key)
        else:
            value = grammar.json({**shared, **schema} if kind in (name, "integer") else {"type": name}, key)
        tag = grammar.tag(open_tag("argument", {"key": key, "type": name}))
        forms.append(f"{tag} {value} {grammar.tag(close_tag('argument'))}")
    if not forms:
        raise RequestError(f"argument {key!r:.80} allows no value: its type and its enum contradict each other")
    return " | ".join(forms)


def _fixed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The few values that a schema allows; None where it does not list them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _type_of(value: Any) -> str:
    """As the encoding of calls names it."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    names = {str: "string", int: "number", float: "number", dict: "object"}
    return names.get(type(value), "array")


def _string(schema: Mapping[str, Any], values: list[str] | None) -> str:
    """Raw text, as strings are written in calls; one of a few, or of a bounded length, where the schema says so."""
    if values is not None:
        return "(" + " | ".join(json.dumps(text) for text in values) + ")"
    longest = schema.get("maxLength")
    if isinstance(longest, int) and 0 <= longest <= _MAX_COUNTED_CHARS:
        return f"/(?s:.{{0,{longest}}})/"
    return "TEXT"


class _Grammar:
    """Rules by name, and how a tokenizer spells tags."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._rules = {"TEXT": "/(?s:.*)/", "INDEX": "/[1-9][0-9]*/", "KEY": '/[^"]*/'}
        kinds = " | ".join(self._forms_of_any())
        self._rules["any_argument"] = f"({kinds}) {self.tag(close_tag('argument'))}"

    def _forms_of_any(self):
        for kind in dict.fromkeys(_TYPES.values()):
            tag = self.tag(open_tag("argument", {"key": "\1", "type": kind}))
            yield f"{tag} " + ("TEXT" if kind == "string" else self.json({"type": kind}, kind))

    def rule(self, name: str, body: str) -> str:
        """Adds a rule. Returns its name."""
        self._rules[name] = body
        return name

    def tag(self, segments: Sequence[Segment]) -> str:
        r"""A tag, id by id; `\0` in it stands for a call's number, `\1` for any key."""
        parts = []
        for segment in segments:
            if segment.text in ("\0", "\1"):
                parts.append("INDEX" if segment.text == "\0" else "KEY")
            else:
                ids = self._tokenizer.encode(segment.text, allow_special=segment.allow_special)
                parts += [f"<[{token_id}]>" for token_id in ids]
        return " ".join(parts)

    def json(self, schema: Any, what: str) -> str:
        """JSON that a schema describes."""
        if not isinstance(schema, Mapping):
            raise RequestError(f"the schema of {what} must be an object; got {schema!r:.80}")
        try:
            return "%json " + json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the schema of {what} cannot be written as JSON: {error}") from error

    def text(self) -> str:
        """The whole grammar."""
        return "\n".join(f"{name}: {body}" for name, body in self._rules.items())


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def _named(choice: Any) -> str | None:
    return _function(choice).get("name") if isinstance(choice, Mapping) else None
