"""What a request is refused with: a status, words that say what to do, and the two forms in which clients expect it."""

from collections.abc import Mapping
from typing import Any

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that is not answered.

    Attributes:
      status: Of HTTP.
      message: For the client: what was given, what is allowed, what to do.
      param: Path of the field at fault, such as `messages[0].content`; None where it is none.
      code: One word for programs; it and `param` hold nothing of a prompt, so they go into logs.
      retry_after_s: After which trying again makes sense; None where it does not.
      details: More fields of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        details: Mapping[str, Any] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s, self.details = retry_after_s, dict(details or {})

    @property
    def headers(self) -> dict[str, str]:
        """Of the response."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})

    @property
    def kind(self) -> str:
        """The type of the error, as OpenAI's clients know it."""
        return _OPENAI_TYPES.get(self.status, "invalid_request_error")

    def openai_body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error | self.details}

    def anthropic_body(self) -> dict[str, Any]:
        """As Anthropic's clients read it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        message = self.message if self.param is None or self.param in self.message else f"{self.param}: {self.message}"
        return {"type": "error", "error": {"type": kind, "message": message} | self.details}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Something in the request is wrong."""
    return ApiError(400, message, param=param, code=code)


def too_long(num_prompt_tokens: int, max_tokens: int | None, max_len: int, advice: str = "") -> ApiError:
    """Prompt and answer do not fit into the context; the numbers are in the words and, for programs, in the details.

    Args:
      max_tokens: That were asked for; None where the prompt alone is too long.
      advice: What of the prompt to shorten.
    """
    asked = "" if max_tokens is None else f" and max_tokens={max_tokens:,} more"
    excess = num_prompt_tokens + (max_tokens or 1) - max_len
    room = "" if max_tokens is None or num_prompt_tokens >= max_len else f" or ask for {max_len - num_prompt_tokens:,}"
    return ApiError(
        400,
        f"the prompt has {num_prompt_tokens:,} tokens{asked}; this server's context is {max_len:,} tokens, {excess:,} "
        f"too few. Nothing was cut off. Shorten the prompt{room}{advice}",
        param="messages" if max_tokens is None else "max_tokens",
        code="context_length_exceeded",
        details={"prompt_tokens": num_prompt_tokens, "max_tokens": max_tokens, "max_model_len": max_len},
    )
