"""The server's own description at /openapi.json, made of the types that requests are checked with."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from maxmoe.server.chat_fields import ChatFields, DetokenizeFields, SessionResumeFields, TokenizeFields
from maxmoe.server.completions import CompletionFields
from maxmoe.server.messages import CountFields, MessagesFields
from maxmoe.server.response_fields import ResponseFields
from maxmoe.server.service import Options
from maxmoe.server.session_routes import ForkFields, SaveFields

_BODIES: dict[tuple[str, str], type[BaseModel] | None] = {
    ("/v1/chat/completions", "post"): ChatFields,
    ("/v1/completions", "post"): CompletionFields,
    ("/v1/responses", "post"): ResponseFields,
    ("/v1/messages", "post"): MessagesFields,
    ("/v1/messages/count_tokens", "post"): CountFields,
    ("/v1/models", "get"): None,
    ("/v1/models/{name}", "get"): None,
    ("/tokenize", "post"): TokenizeFields,
    ("/detokenize", "post"): DetokenizeFields,
    ("/v1/sessions", "post"): SaveFields,
    ("/v1/sessions", "get"): None,
    ("/v1/sessions/{name}", "get"): None,
    ("/v1/sessions/{name}", "delete"): None,
    ("/v1/sessions/{name}/fork", "post"): ForkFields,
    ("/v1/sessions/{name}/resume", "post"): SessionResumeFields,
    ("/health", "get"): None,
    ("/ready", "get"): None,
}
_STATUSES = {
    "400": "Something in the request is wrong; the error names it.",
    "401": "No API key that is accepted.",
    "404": "There is no such thing.",
    "408": "The body did not arrive in time.",
    "409": "It is in a state that does not allow this.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "No room, or too many requests: try again after Retry-After.",
    "503": "The engine takes no requests now.",
    "504": "The answer took too long.",
}


def description(options: Options) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    models = {model for model in _BODIES.values() if model is not None}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema(
        [(model, "validation") for model in ordered], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for (path, method), model in _BODIES.items():
        paths.setdefault(path, {})[method] = _operation(path, model)
    return {
        "openapi": "3.1.0",
        "info": {"title": f"maxmoe: {options.model_name}", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": schemas.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, model: type[BaseModel] | None) -> dict[str, Any]:
    success = "201" if model in (SaveFields, ForkFields) else "200"
    operation: dict[str, Any] = {
        "responses": {success: {"description": "The answer."}}
        | {status: {"description": text} for status, text in _STATUSES.items()}
    }
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if model is not None:
        operation["summary"] = (model.__doc__ or "").splitlines()[0]
        schema = {"$ref": f"#/components/schemas/{model.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
