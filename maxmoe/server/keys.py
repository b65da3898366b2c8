"""API keys: who may ask, and under which name requests of a key are counted and logged."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from maxmoe.server.errors import ApiError

_MIN_KEY_CHARS = 16
_LABEL_CHARS = 8


class Keys:
    """The keys that are accepted; none accepts everybody.

    Digests are compared, each of them every time, so that how long it takes tells nothing about a key.
    """

    def __init__(self, keys: Iterable[str] = ()):
        """Raises: ValueError for a key that is short enough to be guessed, or is not plain ASCII."""
        given = list(keys)
        for number, key in enumerate(given, start=1):
            if len(key) < _MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError(
                    f"API key {number} of {len(given)} must be at least {_MIN_KEY_CHARS} printable ASCII characters "
                    "without blanks"
                )
        self._digests = [_digest(key) for key in given]

    @property
    def are_required(self) -> bool:
        """Whether a request needs one."""
        return bool(self._digests)

    def caller(self, headers: Mapping[str, str]) -> str:
        """A name for whoever sends these headers, which does not tell the key; "" where keys are not required.

        Raises: ApiError without a key that is accepted.
        """
        if not self._digests:
            return ""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest, found = _digest(given), False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        if not found:
            what = "is not accepted here" if given else "is missing"
            raise ApiError(
                401,
                f"the API key {what}: send Authorization: Bearer KEY",
                code="invalid_api_key" if given else "missing_api_key",
            )
        return digest.hex()[:_LABEL_CHARS]


def read_keys(file: str | None, variable: str | None) -> Keys:
    """Keys of a file, one a line, # begins a comment; and of a variable, with commas between them.

    Raises: OSError; ValueError for keys that `Keys` refuses, or a file without any.
    """
    found = [] if variable is None else [key.strip() for key in variable.split(",") if key.strip()]
    if file is not None:
        lines = [line.strip() for line in Path(file).read_text("utf-8").splitlines()]
        of_file = [line for line in lines if line and not line.startswith("#")]
        if not of_file:
            raise ValueError(f"{file} holds no API key: write one a line")
        found += of_file
    return Keys(found)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
