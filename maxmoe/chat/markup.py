"""The markup of a conversation: segments, tags and their attributes.

A tag is `<|open|>`, ordinary text, `<|sep|>`; a closing tag begins with `<|close|>`. The three markers are single ids
that only control segments can make. Everything else, names of tags included, is ordinary text, and each segment is
encoded by itself: joined strings would give other ids.

Source: the family's chat encoding, as published with its checkpoints.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from maxmoe.chat.tokenizer import Tokenizer

OPEN, CLOSE, SEP, END_OF_MSG = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"

_ATTRIBUTE = re.compile(r'\s([\w-]+)="([^"]*)"')


class Segment(NamedTuple):
    """A piece of a rendered conversation.

    Attributes:
      text: Never empty.
      allow_special: Whether names of special ids in it become these ids: true only for strings that the encoding itself
        writes, never for what a user, a tool or a model wrote.
      is_assistant: Whether it belongs to what a model is trained to say.
    """

    text: str
    allow_special: bool
    is_assistant: bool = False


class Tag(NamedTuple):
    """The inside of a tag, read back: its name and its attributes."""

    name: str
    attributes: dict[str, str]


def control(text: str) -> Segment:
    """A segment whose special strings become ids."""
    return Segment(text, True)


def plain(text: str) -> list[Segment]:
    """Text as data, for which no character is special; no segment for no text."""
    return [Segment(text, False)] if text else []


def open_tag(name: str, attributes: Mapping[str, str] | None = None) -> list[Segment]:
    """An opening tag; attributes come in their order."""
    segments = [control(OPEN), *plain(name)]
    for key, value in (attributes or {}).items():
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        segments += [*plain(f" {key}"), *plain('="'), *plain(escaped), *plain('"')]
    return [*segments, control(SEP)]


def close_tag(name: str) -> list[Segment]:
    """A closing tag."""
    return [control(CLOSE), *plain(name), control(SEP)]


def message(attributes: Mapping[str, str], body: Sequence[Segment]) -> list[Segment]:
    """A whole message; nothing stands between its elements."""
    return [*open_tag("message", attributes), *body, *close_tag("message"), control(END_OF_MSG)]


def read_tag(text: str) -> Tag:
    """Reads the text between `<|open|>` or `<|close|>` and `<|sep|>`; blanks around the name are allowed."""
    name, _, _ = text.strip().partition(" ")
    attributes = {
        key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(text.strip())
    }
    return Tag(name, attributes)


def marker_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the four markers. ValueError for a vocabulary without them, with which no chat is possible."""
    missing = [name for name in (OPEN, CLOSE, SEP, END_OF_MSG) if name not in tokenizer.special_ids]
    if missing:
        raise ValueError(
            f"this vocabulary of {tokenizer.vocab_size} ids has no {' '.join(missing)}, so it cannot hold a chat. Use "
            "the checkpoint's tiktoken.model, or a byte vocabulary of at least 512 ids"
        )
    return {name: tokenizer.special_ids[name] for name in (OPEN, CLOSE, SEP, END_OF_MSG)}
