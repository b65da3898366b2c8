"""Markers that a model spells with ordinary text instead of writing their ids."""

from collections.abc import Iterator

from maxmoe.chat.markup import CLOSE, OPEN, SEP


class SpelledMarkers:
    """Finds the borders of the channels in text that comes in pieces of any size."""

    MARKERS = (f"{CLOSE}think{SEP}", f"{OPEN}response{SEP}", f"{OPEN}tools{SEP}")

    def __init__(self):
        """Starts before any text."""
        self._held = ""  # what may become a marker

    def feed(self, text: str) -> Iterator[str]:
        """Yields what came, marker by marker and the text between them; the beginning of a marker waits for more."""
        text = self._held + text
        while found := [(text.find(marker), marker) for marker in self.MARKERS if marker in text]:
            at, marker = min(found)
            if at:
                yield text[:at]
            yield marker
            text = text[at + len(marker) :]
        longest = max(map(len, self.MARKERS)) - 1
        begins = (
            n for n in range(min(longest, len(text)), 0, -1) if any(m.startswith(text[-n:]) for m in self.MARKERS)
        )
        num_held = next(begins, 0)
        self._held = text[len(text) - num_held :]
        if len(text) > num_held:
            yield text[: len(text) - num_held]

    def take_held(self) -> str:
        """What still waits, and now waits no longer."""
        held, self._held = self._held, ""
        return held
