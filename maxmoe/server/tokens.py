"""/tokenize and /detokenize: text, or a conversation, to ids, and ids to text."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from maxmoe.server.chat_fields import DetokenizeFields, TokenizeFields
from maxmoe.server.endpoint import read
from maxmoe.server.errors import bad_request
from maxmoe.server.fields import SamplingFields
from maxmoe.server.gate import JsonResponse
from maxmoe.server.planning import Ask, beside_loop, encode
from maxmoe.server.service import Service

_KEYS = ("messages", "tools", "reasoning_effort", "thinking", "add_generation_prompt")


async def tokenize(request: Request, service: Service) -> Response:
    """POST /tokenize."""
    fields, body = await read(request, service, TokenizeFields)
    if (fields.prompt is None) == (fields.messages is None):
        raise bad_request("give prompt or messages, one of them", "prompt", "invalid_field")
    if fields.prompt is not None:
        ids = await beside_loop(body.num_bytes, _ids_of, service, fields.prompt)
    else:
        ids = (await beside_loop(body.num_bytes, encode, service, chat_of(body.value))).ids
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_len, "tokens": ids}
    if fields.return_token_strs:
        answer["token_strs"] = [service.tokenizer.decode([token_id]) for token_id in ids]
    return JsonResponse(answer)


def _ids_of(service: Service, text: str) -> list[int]:
    return service.tokenizer.encode(text, allow_special=True)


async def detokenize(request: Request, service: Service) -> Response:
    """POST /detokenize."""
    fields, _ = await read(request, service, DetokenizeFields)
    try:
        return JsonResponse({"prompt": service.tokenizer.decode(fields.tokens)})
    except ValueError as error:
        raise bad_request(f"tokens: {error}", "tokens", "invalid_field") from error


def chat_of(body: dict[str, Any]) -> Ask:
    """The conversation of a body, to be encoded and not answered."""
    prompt = {key: body[key] for key in _KEYS if key in body}
    return Ask(endpoint="/tokenize", request=prompt, fields=SamplingFields(), max_tokens=None, history="lenient")
