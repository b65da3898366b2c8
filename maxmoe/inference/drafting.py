"""Guesses of the tokens that come next, for a model to verify many at once; see `verification`.

A drafter is told every token of a sequence and proposes a few more. `NgramDrafter` needs no model: what followed the
last few tokens the last time they stood in the sequence may follow them again.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int

from maxmoe.inference.answer import Answer

_MULTIPLIER = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, odd: spreads over the high bits
_EMPTY = -1


class Drafter(Protocol):
    """Proposes continuations of one sequence. A small model that drafts is one too."""

    def extend(self, ids: Sequence[int]) -> None:
        """Takes the next tokens of the sequence: a prompt, then what was verified. What was proposed is forgotten."""

    def propose(self, max_tokens: int) -> Int[np.ndarray, "W"]:
        """Up to `max_tokens` ids that may come next, maybe none. The sequence stays as it is."""


MakeDrafter = Callable[[], Drafter]


@dataclasses.dataclass
class DraftStats:
    """How good drafts were."""

    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def acceptance(self) -> float:
        """Accepted tokens per drafted token; 0 before the first."""
        return self.num_accepted / max(self.num_drafted, 1)


class Drafts:
    """The drafts of a batch's requests, each with a drafter of its own for as long as the request is there."""

    def __init__(self, make_drafter: MakeDrafter, max_tokens: int):
        """`max_tokens` of a draft."""
        self.max_tokens, self.stats = max_tokens, DraftStats()
        self._make = make_drafter
        self._drafters: weakref.WeakKeyDictionary[Answer, _Told] = weakref.WeakKeyDictionary()

    def windows(
        self, answers: Sequence[tuple[int, Answer]], num_rows: int
    ) -> tuple[Int[np.ndarray, "B W+1"], Int[np.ndarray, "B"]]:
        """For each row the last token of its answer and a draft behind it, and how many tokens that has.

        No draft goes beyond a request's max_tokens, nor holds an id that would stop it: what is behind the end of an
        answer never gets into its state.

        Args:
          answers: With the row of each; all have said something.
        """
        window, counts = np.zeros((num_rows, self.max_tokens + 1), np.int32), np.zeros(num_rows, np.int32)
        for row, answer in answers:
            draft = self._draft(answer)
            counts[row] = draft.size
            window[row, : draft.size + 1] = answer.steps[-1].token_id, *draft
        return window, counts

    def _draft(self, answer: Answer) -> Int[np.ndarray, "W"]:
        told = self._drafters.get(answer)
        if told is None:
            told = self._drafters[answer] = _Told(self._make())
            told.drafter.extend(answer.prompt)
        told.drafter.extend([step.token_id for step in answer.steps[told.num_steps :]])
        told.num_steps = len(answer.steps)
        if answer.is_constrained:  # a grammar says what may come next, and not what after that
            return np.zeros(0, np.int32)
        room = min(self.max_tokens, answer.params.max_tokens - len(answer.steps) - 1)
        draft = np.asarray(told.drafter.propose(room), np.int32)[:room] if room > 0 else np.zeros(0, np.int32)
        stops = [place for place, token_id in enumerate(draft.tolist()) if token_id in answer.stop_ids]
        return draft[: stops[0]] if stops else draft


@dataclasses.dataclass
class _Told:
    """A drafter, and how many tokens of the answer it knows."""

    drafter: Drafter
    num_steps: int = 0


class NgramDrafter:
    """Looks up where the last tokens stood before, longest match first, latest place first.

    Each length of match has a table from the hash of that many tokens to where they stood last. A token costs one
    entry per length, whatever came before it; the tables double with the sequence. Places are verified, so that a
    collision costs a guess and never gives a wrong one.
    """

    def __init__(self, min_match: int = 2, max_match: int = 4):
        """Starts an empty sequence.

        Args:
          min_match, max_match: In tokens; only what stood after so many equal tokens is proposed.
        Raises: ValueError if they are not 1 <= min_match <= max_match.
        """
        if not 1 <= min_match <= max_match:
            raise ValueError(f"min_match={min_match}, max_match={max_match}: must be 1 <= min_match <= max_match")
        self._matches = range(max_match, min_match - 1, -1)
        self._ids = np.zeros(256, np.int32)
        self._size = 0
        self._make_tables()

    def extend(self, ids: Sequence[int]) -> None:
        """See `Drafter`."""
        new = np.asarray(ids, np.int32)
        size = self._size + new.size
        grows = size > self._ids.size
        if grows:
            self._ids = np.concatenate([self._ids[: self._size], np.zeros(2 * size - self._size, np.int32)])
        self._ids[self._size : size] = new
        self._size = size
        if grows:
            self._make_tables()
        self._index()

    def propose(self, max_tokens: int) -> Int[np.ndarray, "W"]:
        """See `Drafter`. A match so near the end that what followed it is short is taken to go round."""
        for match in self._matches:
            end = self._find(match)
            if end is not None:
                period = self._size - end
                return self._ids[end + np.arange(max_tokens) % period]
        return np.zeros(0, np.int32)

    def _find(self, match: int) -> int | None:
        """Where a former occurrence of the last tokens ended."""
        if self._size <= match:
            return None
        last = self._ids[self._size - match : self._size]
        end = int(self._tables[match][self._places(last[None])[0]])
        return end if end != _EMPTY and np.array_equal(self._ids[end - match : end], last) else None

    def _make_tables(self) -> None:
        self._place_bits = (self._ids.size - 1).bit_length()
        self._tables = {match: np.full(1 << self._place_bits, _EMPTY, np.int32) for match in self._matches}
        self._indexed = 0  # matches that end before this place are in the tables

    def _index(self) -> None:
        """Enters all matches that end before the last token: what followed them is known."""
        for match in self._matches:
            first = max(self._indexed, match)
            if first >= self._size:
                continue
            windows = np.lib.stride_tricks.sliding_window_view(self._ids[first - match : self._size - 1], match)
            self._tables[match][self._places(windows)] = np.arange(first, self._size)  # of equal ones the last stays
        self._indexed = self._size

    def _places(self, windows: Int[np.ndarray, "N match"]) -> Int[np.ndarray, "N"]:
        hashes = np.zeros(windows.shape[0], np.uint64)
        for column in windows.T:
            hashes = (hashes ^ column.astype(np.uint64)) * np.uint64(_MULTIPLIER)  # wraps at 2**64
        return (hashes >> np.uint64(64 - self._place_bits)).astype(np.int64)
