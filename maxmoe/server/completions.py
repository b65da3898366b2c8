"""/v1/completions: text that goes on, in OpenAI's older form. Nothing is read from it, and nothing put around it."""

import time
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from maxmoe.server.chat_fields import StreamOptions
from maxmoe.server.endpoint import answer, new_id, read
from maxmoe.server.errors import ApiError, bad_request
from maxmoe.server.fields import MAX_CHOICES, ExtendedSamplingFields, Items, PositiveCount, TokenId
from maxmoe.server.generation import Generation, Plan, Update
from maxmoe.server.logprobs import text_logprobs
from maxmoe.server.planning import beside_loop, choices_params, salt_of
from maxmoe.server.readers import Finished, TextReader
from maxmoe.server.service import Service
from maxmoe.server.streams import DONE, event

_DEFAULT_MAX_TOKENS = 16  # the interface's own
_Ids = Annotated[Items[TokenId], Field(min_length=1)]


class CompletionFields(ExtendedSamplingFields):
    """A completion."""

    prompt: str | _Ids | Annotated[Items[str], Field(min_length=1)] | Annotated[Items[_Ids], Field(min_length=1)] = (
        Field(description="Text, in which the names of special ids become these; or ids; or a list of either.")
    )
    max_tokens: PositiveCount | None = Field(None, description=f"Default: {_DEFAULT_MAX_TOKENS}.")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="Tells the log-probability of each token, and those of so many likeliest ones."
    )
    stream_options: StreamOptions | None = None


async def completions(request: Request, service: Service) -> Response:
    """POST /v1/completions."""
    fields, body = await read(request, service, CompletionFields)
    plan = await beside_loop(body.num_bytes, _plan, service, fields, request.state.caller)
    return await answer(request, service, plan, CompletionForm(service, plan, fields), bool(fields.stream))


def _plan(service: Service, fields: CompletionFields, caller: str) -> Plan:
    given = (
        fields.prompt if isinstance(fields.prompt, list) and not isinstance(fields.prompt[0], int) else [fields.prompt]
    )
    count = fields.n or 1
    if len(given) * count > MAX_CHOICES:
        raise bad_request(
            f"{len(given)} prompts with n={count} make {len(given) * count} answers; at most {MAX_CHOICES}",
            "n",
            "invalid_field",
        )
    prompts, params = [], []
    for i, prompt in enumerate(given):
        ids = service.tokenizer.encode(prompt, allow_special=True) if isinstance(prompt, str) else prompt
        if not ids:
            raise bad_request(f"prompt {i} is empty: give at least one character", "prompt", "invalid_field")
        prompts += [ids] * count
        params += choices_params(
            fields,
            len(ids),
            fields.max_tokens or min(_DEFAULT_MAX_TOKENS, max(service.max_len - len(ids), 1)),
            service.max_len,
            top_logprobs=fields.logprobs or 0,
        )

    return Plan(
        endpoint="/v1/completions",
        prompts=prompts,
        params=params,
        readers=[TextReader(service.tokenizer, stops=fields.stops, min_tokens=each.min_tokens) for each in params],
        priority=fields.priority or 0,
        cache_salt=salt_of(caller, fields),
    )


class CompletionForm:
    """OpenAI's text completion, and its chunks."""

    def __init__(self, service: Service, plan: Plan, fields: CompletionFields):
        """For one request."""
        self._service, self._plan, self._fields = service, plan, fields
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.options.model_name,
        }
        self._offsets = [0] * len(plan.prompts)  # characters that each stream has told
        self._tells_usage = bool(fields.stream_options and fields.stream_options.include_usage)

    def whole(self, generation: Generation, results: list[Finished]) -> dict[str, Any]:
        """See `Form`."""
        choices = []
        for index, result in enumerate(results):
            text = result.message["content"]
            choices.append(self._choice(index, text, self._logprobs(result.steps, 0), result.finish_reason))
            if self._fields.return_token_ids:
                choices[-1] |= {"prompt_token_ids": self._plan.prompts[index], "token_ids": result.ids}
        return self._head | {"choices": choices, "usage": generation.usage()}

    def begin(self) -> list[bytes]:
        """See `Form`."""
        return []

    def update(self, generation: Generation, update: Update) -> list[bytes]:
        """See `Form`."""
        events = []
        for piece in update.pieces:
            logprobs = self._logprobs(piece.steps, self._offsets[update.index])
            self._offsets[update.index] += len(piece.value)
            events.append(event(self._head | {"choices": [self._choice(update.index, piece.value, logprobs, None)]}))
        if update.finished is not None:
            choice = self._choice(update.index, "", None, update.finished.finish_reason)
            if self._fields.return_token_ids:
                choice |= {"prompt_token_ids": self._plan.prompts[update.index], "token_ids": update.finished.ids}
            events.append(event(self._head | {"choices": [choice]}))
        return events

    def end(self, generation: Generation) -> list[bytes]:
        """See `Form`."""
        if not self._tells_usage:
            return [DONE]
        return [event(self._head | {"choices": [], "usage": generation.usage()}), DONE]

    def failure(self, error: ApiError) -> list[bytes]:
        """See `Form`."""
        return [event(error.openai_body()), DONE]

    def _choice(self, index: int, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, steps: Any, offset: int) -> dict[str, Any] | None:
        return None if self._fields.logprobs is None else text_logprobs(self._service.tokenizer, steps, offset)
