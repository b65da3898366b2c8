"""Strings that end an answer, found in text that comes in pieces.

Text that may be the beginning of a stop string is held back until more has shown whether it is one, and no other
text is. What a piece costs does not depend on how many strings there are or how much text came before: all of them
are sought at once, by the automaton of Aho and Corasick.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Turns ids into text as they arrive; see `chat.tokenizer.StreamDecoder`."""

    def feed(self, ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text that they complete, maybe ""."""

    def finish(self) -> str:
        """Ends the stream and returns what was incomplete, as text."""


MakeDetokenizer = Callable[[], Detokenizer]


class StopStrings:
    """Passes text on until it holds one of the stop strings; neither that nor what follows comes out.

    The string that ends first counts, the longest of several that end together. Without strings all text passes.

    Attributes:
      matched: The string that was found; None so far.
    """

    def __init__(self, stops: Sequence[str]):
        """Starts before any text.

        Raises: ValueError for an empty string.
        """
        if "" in stops:
            raise ValueError("a stop string is empty, and every text holds that: leave it out")
        self.matched: str | None = None
        self._held = ""  # the longest end of the text that a stop string begins with
        self._prefixes = {stop[:size] for stop in stops for size in range(len(stop) + 1)}
        self._shorter = {prefix: self._longest_end(prefix) for prefix in self._prefixes if prefix}
        self._ended = {
            prefix: max(ending, key=len)
            for prefix in self._prefixes
            if (ending := [stop for stop in stops if prefix.endswith(stop)])
        }
        begun = {stop[:size] for stop in stops for size in range(len(stop))}
        self._whole = self._prefixes - begun  # more text makes none of them longer

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Takes the next text and returns what may be passed on.

        Args:
          may_stop: Whether a string that ends within this text counts. If not, it is text like any other.
        """
        if not self._prefixes or self.matched is not None:
            return "" if self._prefixes else text
        passed = []
        for character in text:
            seen, held = self._held + character, self._held
            while held and held + character not in self._prefixes:
                held = self._shorter[held]
            held = held + character if held + character in self._prefixes else ""
            if may_stop and held in self._ended:
                self.matched = self._ended[held]
                passed.append(seen[: -len(self.matched)])
                break
            while held in self._whole:
                held = self._shorter[held]
            passed.append(seen[: len(seen) - len(held)])
            self._held = held
        return "".join(passed)

    def finish(self) -> str:
        """Ends the text and returns what was held back."""
        rest, self._held = "" if self.matched is not None else self._held, ""
        return rest

    def _longest_end(self, prefix: str) -> str:
        return next(prefix[start:] for start in range(1, len(prefix) + 1) if prefix[start:] in self._prefixes)


class StoppableText:
    """The text of an answer, id by id, up to a stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int = 0):
        """Starts before any id; strings that end within the first `min_tokens` ids do not count."""
        self._detokenizer, self._stops, self._num_free = detokenizer, StopStrings(stops), min_tokens

    @property
    def stop_string(self) -> str | None:
        """The string that ended the text; None so far."""
        return self._stops.matched

    def feed(self, token_id: int) -> str:
        """Takes the next id and returns the text that may be passed on."""
        may_stop = self._num_free <= 0
        self._num_free -= 1
        return self._stops.feed(self._detokenizer.feed([token_id]), may_stop=may_stop)

    def finish(self) -> str:
        """Ends the text and returns what was held back or incomplete."""
        rest = self._stops.feed(self._detokenizer.finish(), may_stop=False)
        return rest + self._stops.finish()
