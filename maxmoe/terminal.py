"""Writing a model's text where a person or a program reads it."""

import sys

_PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}
_PICTURES |= {code: "\N{REPLACEMENT CHARACTER}" for code in range(0x7F, 0xA0)}


def is_terminal() -> bool:
    """Whether a person reads standard output."""
    return sys.stdout.isatty()


def without_controls(text: str) -> str:
    """The text with pictures of control characters in place of them, which could take over a terminal."""
    return text.translate(_PICTURES)


def write(text: str) -> None:
    """Writes to standard output at once; what it has no characters for becomes a question mark."""
    sys.stdout.reconfigure(errors="replace")
    sys.stdout.write(text)
    sys.stdout.flush()
