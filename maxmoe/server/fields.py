"""Fields of requests: their types, and errors that name the path of what is wrong.

Types are strict, and what is not a field is refused: a setting that is spelled wrong must not pass for one that was
followed. Ranges of sampling are those of `SamplingParams`, which checks them itself; bounds here keep integers within
what arrays hold.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from maxmoe.inference.sampling_params import MAX_SEED, MAX_TOP_LOGPROBS, SamplingParams
from maxmoe.server.errors import ApiError, bad_request

DEFAULT_TOP_P = 0.95  # the publisher's advice for this family, with temperature 1
MAX_CHOICES = 64
MAX_STOPS = 16
_MAX_INT = 2**31 - 1
_MAX_ERRORS_SHOWN = 3
_FIELD_OF_PARAM = {"stop_ids": "stop_token_ids"}

Count = Annotated[int, Field(ge=0, le=_MAX_INT)]
PositiveCount = Annotated[int, Field(ge=1, le=_MAX_INT)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_INT)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]


_Entry = TypeVar("_Entry")
# Of a list with a million wrong entries, the first is told.
Items = Annotated[list[_Entry], Field(fail_fast=True)]


class Fields(BaseModel):
    """A request's body, or an object in it."""

    model_config = ConfigDict(extra="forbid", strict=True)


class OpenFields(BaseModel):
    """An object of which only some fields matter here; the others are judged by whoever reads them."""

    model_config = ConfigDict(extra="allow", strict=True)


class SamplingFields(Fields):
    """What every endpoint that generates has."""

    model: str | None = Field(None, description="A name that /v1/models lists; may be left out.")
    stream: bool | None = None
    temperature: float | None = Field(None, description="0..100; 0 is greedy. Default 1.")
    top_p: float | None = Field(None, description=f"In (0, 1]. Default {DEFAULT_TOP_P}.")


class ExtendedSamplingFields(SamplingFields):
    """What the endpoints in OpenAI's form add."""

    top_k: Count | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], float] | None = Field(None, max_length=1024)
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    min_tokens: Count | None = None
    stop: StopString | Annotated[Items[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    priority: Annotated[int, Field(ge=0, le=1_000_000)] | None = Field(
        None, description="More is later: such requests give way to others. Nobody can ask to come before them."
    )
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Keeps cached prefixes apart from those of requests with another salt."
    )
    return_token_ids: bool | None = Field(None, description="Adds the ids of prompt and answer to each choice.")
    user: str | None = Field(None, description="Has no effect.")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


Model = TypeVar("Model", bound=BaseModel)


def read_fields(model: type[Model], body: Any) -> Model:
    """Checks a body. Raises: ApiError that names the path of each field at fault."""
    if not isinstance(body, dict):
        raise bad_request(f"the body must be a JSON object; got {_shown(body)}")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        problems = {_path(body, found["loc"]): found for found in reversed(error.errors(include_url=False))}
    paths = sorted(problems, key=lambda path: path.count(".") + path.count("["), reverse=True)
    lines = [f"{path}: {_problem(model, problems[path])}" for path in paths[:_MAX_ERRORS_SHOWN]]
    more = f"; and {len(paths) - _MAX_ERRORS_SHOWN} more" if len(paths) > _MAX_ERRORS_SHOWN else ""
    unknown = problems[paths[0]]["type"] == "extra_forbidden"
    raise bad_request("; ".join(lines) + more, paths[0], "unknown_field" if unknown else "invalid_field")


def _path(body: Any, loc: Sequence[int | str]) -> str:
    """Where in the body an error is; names of alternatives in a union are not places and are left out."""
    path, at = "", body
    for i, part in enumerate(loc):
        is_last = i == len(loc) - 1
        if isinstance(part, int) and isinstance(at, list) and part < len(at):
            path, at = f"{path}[{part}]", at[part]
        elif isinstance(part, str) and isinstance(at, dict) and (part in at or is_last) and part != "[key]":
            path, at = f"{path}.{part}" if path else part, at.get(part)
    return path or "body"


def _problem(model: type[BaseModel], found: Mapping[str, Any]) -> str:
    if found["type"] == "missing":
        return "is required"
    if found["type"] == "extra_forbidden":
        fields = f"; the fields are {', '.join(sorted(model.model_fields))}" if len(found["loc"]) == 1 else ""
        return f"is not a field that this server knows{fields}"
    problem = "must be an object" if found["type"] in ("model_type", "dict_type") else found["msg"][:200]
    return f"{problem}; got {_shown(found['input'])}"


def _shown(value: Any) -> str:
    return f"{value!r:.80}"


def sampling_params(fields: SamplingFields, **settings: Any) -> SamplingParams:
    """What a request asks of sampling; a field that is null or absent has its default.

    Args:
      settings: What does not stand in the request under the name that `SamplingParams` has for it.
    Raises: ApiError that names the field.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    given = {name: getattr(fields, name, None) for name in (*names, "seed", "min_tokens")}
    given["stop_ids"] = getattr(fields, "stop_token_ids", None)
    bias = getattr(fields, "logit_bias", None)
    given["logit_bias"] = None if bias is None else {int(token_id): value for token_id, value in bias.items()}
    chosen = {"top_p": DEFAULT_TOP_P} | {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingParams(**chosen | settings)
    except ValueError as error:
        raise refused_by_engine(error) from error


def refused_by_engine(error: ValueError) -> ApiError:
    """The answer to what `SamplingParams` or an engine refuses, whose words begin with the name of the field."""
    match = re.match(r"(?:prompt \d+: )?([a-z_]+)=", str(error))
    name = None if match is None else _FIELD_OF_PARAM.get(match[1], match[1])
    return bad_request(re.sub(r"^prompt \d+(: )?", "" if match else "the prompt", str(error)), name, "invalid_field")


def checked_top_logprobs(asked: bool | None, number: int | None) -> int:
    """How many likeliest tokens are told, of `logprobs` and `top_logprobs`. Raises: ApiError."""
    if number and not asked:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs", "invalid_field")
    if number is not None and number > MAX_TOP_LOGPROBS:
        raise bad_request(f"top_logprobs={number}: at most {MAX_TOP_LOGPROBS}", "top_logprobs", "invalid_field")
    return number or 0
