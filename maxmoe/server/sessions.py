"""Conversations kept by name, as the exact ids that the model has read and written.

An answer that is encoded again may become other ids than those that were sampled. A session keeps the ids themselves:
who resumes one sends only what is new, and that is appended. Its state is computed again, or found in the engine's
prefix cache. Answers can be saved for a while after they were given; each caller sees its own alone.
"""

import array
import collections
import dataclasses
import json
import os
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import logging

from maxmoe.server.errors import ApiError, bad_request

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FORMAT = 1
_MAX_RECENT_TOKENS = 4_000_000
_MAX_PER_CALLER = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A conversation after an answer.

    Attributes:
      ids: All of it: the prompt and every sampled token, a stop id included.
      request: What decided its prompt: messages, with the answer as the last, tools, effort.
      is_complete: Whether the answer ends as a message does; else it was cut off, and can only go on.
    """

    ids: Sequence[int]
    request: dict[str, Any]
    is_complete: bool


class SessionStore:
    """Sessions in a folder, one file each, and the answers that may still be saved, in memory."""

    def __init__(self, folder: str | Path, model_name: str, vocab_size: int):
        """Makes the folder if there is none. Sessions of another model or vocabulary are refused when they are read."""
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._model = {"format": _FORMAT, "model": model_name, "vocab_size": vocab_size}
        self._recent: collections.OrderedDict[tuple[str, str], Snapshot] = collections.OrderedDict()
        self._num_recent_tokens = 0

    def remember(self, caller: str, answer_id: str, snapshot: Snapshot) -> None:
        """Keeps an answer for `save`, until others have taken its place."""
        ids = array.array("i", snapshot.ids)  # a ninth of what a list needs
        self._recent[caller, answer_id] = dataclasses.replace(snapshot, ids=ids)
        self._num_recent_tokens += len(snapshot.ids)
        while self._num_recent_tokens > _MAX_RECENT_TOKENS and len(self._recent) > 1:
            _, dropped = self._recent.popitem(last=False)
            self._num_recent_tokens -= len(dropped.ids)

    def save(self, caller: str, name: str, answer_id: str, replace: bool = False) -> dict[str, Any]:
        """Writes a remembered answer under a name. Returns what `describe` says. Raises: ApiError."""
        snapshot = self._recent.get((caller, answer_id))
        if snapshot is None:
            raise ApiError(
                404,
                f"no answer {answer_id!r:.80} to save: it was not given here, or too long ago",
                param="response_id",
                code="response_not_found",
            )
        return self._write(caller, name, snapshot, replace)

    def fork(self, caller: str, name: str, new_name: str) -> dict[str, Any]:
        """Copies a session, which then goes its own way. Raises: ApiError."""
        return self._write(caller, new_name, self.load(caller, name), False)

    def load(self, caller: str, name: str) -> Snapshot:
        """Raises: ApiError for one that is not there, or of another model."""
        stored = self._read(caller, name)
        return Snapshot(ids=stored["ids"], request=stored["request"], is_complete=stored["is_complete"])

    def describe(self, caller: str, name: str) -> dict[str, Any]:
        """Name, time and size of a session. Raises: ApiError."""
        return _description(name, self._read(caller, name))

    def names(self, caller: str) -> list[str]:
        """All sessions of a caller."""
        folder = self._folder / _folder_name(caller)
        return sorted(file.stem for file in folder.glob("*.json")) if folder.is_dir() else []

    def delete(self, caller: str, name: str) -> None:
        """Raises: ApiError for one that is not there."""
        try:
            self._file(caller, name).unlink()
        except FileNotFoundError as error:
            raise _missing(name) from error

    def _file(self, caller: str, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise bad_request(
                f"name {name!r:.80}: up to 64 letters, digits, dots, dashes, underscores; the first a letter or digit",
                "name",
                "invalid_field",
            )
        return self._folder / _folder_name(caller) / f"{name}.json"

    def _write(self, caller: str, name: str, snapshot: Snapshot, replace: bool) -> dict[str, Any]:
        file = self._file(caller, name)
        if file.exists() and not replace:
            raise ApiError(
                409, f"there is a session {name!r} already: choose another name", param="name", code="session_exists"
            )
        if len(self.names(caller)) >= _MAX_PER_CALLER:
            raise ApiError(409, f"there are {_MAX_PER_CALLER:,} sessions, no more fit", code="too_many_sessions")
        stored = self._model | {"created": int(time.time())} | dataclasses.asdict(snapshot)
        stored["ids"] = list(snapshot.ids)
        file.parent.mkdir(exist_ok=True, mode=0o700)
        part = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
        with open(part, "x", encoding="utf-8", opener=_private) as out:
            json.dump(stored, out)
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
        return _description(name, stored)

    def _read(self, caller: str, name: str) -> dict[str, Any]:
        try:
            stored = json.loads(self._file(caller, name).read_text("utf-8"))
        except FileNotFoundError as error:
            raise _missing(name) from error
        except ValueError as error:
            logging.error("session %s of %s cannot be read: %s", name, caller, error)
            raise ApiError(409, f"session {name!r} is damaged: {error}", code="session_damaged") from error
        other = {key: stored.get(key) for key, value in self._model.items() if stored.get(key) != value}
        if other:
            wanted = {key: self._model[key] for key in other}
            raise ApiError(409, f"session {name!r} has {other}, this server {wanted}", code="session_of_another_model")
        return stored


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _folder_name(caller: str) -> str:
    return f"of-{caller}" if caller else "of-anyone"


def _missing(name: str) -> ApiError:
    return ApiError(404, f"there is no session {name!r:.80}", param="name", code="session_not_found")


def _description(name: str, stored: dict[str, Any]) -> dict[str, Any]:
    return {
        "object": "session",
        "name": name,
        "created": stored["created"],
        "model": stored["model"],
        "num_tokens": len(stored["ids"]),
        "num_messages": len(stored["request"]["messages"]),
        "is_complete": stored["is_complete"],
    }
