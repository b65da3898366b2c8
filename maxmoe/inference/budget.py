"""Thinking and its hard budget: where each row stands between the markers, and which id must come next.

A marker may be several ids long. A row that has seen the first of them is neither thinking nor answering until the
rest has come or has not. What is thought never exceeds the budget: at the cap the end-of-thinking marker is forced
from where the row stands in it, and a thinking that is opened again after the budget is spent is closed at once.

Following and forcing are functions of ids over rows that run inside a compiled step; no host looks at a token in
between.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from maxmoe.inference.sampling_params import SamplingParams

_NO_ID = -1
_NO_LIMIT = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class ThinkingMarkers:
    """The ids that open thinking, and those that close it.

    Raises: ValueError for an empty marker, a negative id, or markers of which one holds the other or begins with the
      end of the other: where they stand in a stream would then be open to doubt.
    """

    open_ids: tuple[int, ...]
    close_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("open_ids", "close_ids"):
            ids = tuple(map(int, getattr(self, name)))
            if not ids or min(ids) < 0:
                raise ValueError(f"{name}={ids}: must be at least one token id, none negative")
            object.__setattr__(self, name, ids)
        for left, right in ((self.open_ids, self.close_ids), (self.close_ids, self.open_ids)):
            meets = any(left[-size:] == right[:size] for size in range(1, min(len(left), len(right)) + 1))
            if meets or _ends_of(np.array(left), right).size:
                raise ValueError(
                    f"thinking markers {self.open_ids} and {self.close_ids} overlap: neither may hold the other, or "
                    "begin with what the other ends with"
                )


class MarkerTables(NamedTuple):
    """A marker for compiled steps: its ids, and how many of them match after one more token.

    Attributes:
      matches: [m, j]: ids matched after m were, and then came the marker's id j.
    """

    ids: Int[Array, "L"]
    matches: Int[Array, "L L"]


class Budgets(NamedTuple):
    """What stays the same along an answer: the markers, and how many more tokens each row may think."""

    open: MarkerTables
    close: MarkerTables
    limits: Int[Array, "B"]


class ThinkingState(NamedTuple):
    """Where each row stands.

    Attributes:
      thinking: Whether the marker that closes is what it waits for, rather than the one that opens.
      matched: How many ids of that marker its last tokens are.
      num_thinking, num_answer: Tokens of the answer on either side so far; those of `matched` count as if they were no
        marker, so that `counts` must take them off.
    """

    thinking: Bool[Array, "B"]
    matched: Int[Array, "B"]
    num_thinking: Int[Array, "B"]
    num_answer: Int[Array, "B"]

    def counts(self) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        """Tokens of thinking and of the answer proper; ids of markers, also of one that has begun, are neither."""
        pending = self.matched * self.thinking
        return self.num_thinking - pending, self.num_answer - (self.matched - pending)


def start_thinking(
    markers: ThinkingMarkers,
    params: Sequence[SamplingParams],
    prompts: Sequence[Int[np.ndarray, "T"]],
    reached: Sequence[ThinkingState | None],
) -> tuple[Budgets, ThinkingState]:
    """Budgets of a batch, and where each row stands, as host arrays.

    What a prompt has thought since its last marker counts towards the budget; earlier thinking is closed, and does
    not. The counts of the state are those of the answer alone.

    Args:
      reached: The state, of this row alone, after the last token of what it has said; None before the first.
    """
    stands = [_stand(markers, prompt) for prompt in prompts]
    limits = [
        _NO_LIMIT if p.thinking_token_budget is None else min(max(p.thinking_token_budget - thought, 0), _NO_LIMIT)
        for p, (_, _, thought) in zip(params, stands, strict=True)
    ]
    thinking = np.array([stand[0] for stand in stands], bool)
    matched = np.array([stand[1] for stand in stands], np.int32)
    budgets = Budgets(_tables(markers.open_ids), _tables(markers.close_ids), np.array(limits, np.int32))
    state = ThinkingState(thinking, matched, matched * thinking, matched * ~thinking)
    for row, state_of_row in enumerate(reached):
        if state_of_row is not None:
            for column, value in zip(state, state_of_row, strict=True):
                column[row] = value
    return budgets, state


def ends_thinking(markers: ThinkingMarkers, prompt: Int[np.ndarray, "T"]) -> bool:
    """Whether a prompt ends within thinking, so that its answer begins there."""
    return _stand(markers, prompt)[0]


def forced_ids(budgets: Budgets, state: ThinkingState) -> Int[Array, "B"]:
    """The id that must come next in each row, or -1 where any may."""
    spent = state.thinking & (state.num_thinking >= budgets.limits)
    return jnp.where(spent, budgets.close.ids[state.matched], _NO_ID)


def follow(budgets: Budgets, state: ThinkingState, tokens: Int[Array, "B"]) -> ThinkingState:
    """The state after one more token per row; a row with a negative token stays where it is."""
    matched = jnp.where(state.thinking, _match(budgets.close, state, tokens), _match(budgets.open, state, tokens))
    size = jnp.where(state.thinking, budgets.close.ids.size, budgets.open.ids.size)
    whole = matched == size
    grown = 1 - size * whole  # a whole marker takes back what its ids were counted as
    new = ThinkingState(
        thinking=state.thinking ^ whole,
        matched=jnp.where(whole, 0, matched),
        num_thinking=state.num_thinking + grown * state.thinking,
        num_answer=state.num_answer + grown * ~state.thinking,
    )
    return ThinkingState(*(jnp.where(tokens < 0, old, value) for old, value in zip(state, new, strict=True)))


def _match(marker: MarkerTables, state: ThinkingState, tokens: Int[Array, "B"]) -> Int[Array, "B"]:
    matched = jnp.minimum(state.matched, marker.ids.size - 1)  # of the other marker it may be more
    return jnp.max(jnp.where(tokens[:, None] == marker.ids, marker.matches[matched], 0), axis=-1)


def _tables(ids: tuple[int, ...]) -> MarkerTables:
    def longest(seen: tuple[int, ...]) -> int:
        return max(size for size in range(len(seen) + 1) if size == 0 or seen[-size:] == ids[:size])

    matches = [[longest((*ids[:matched], token)) for token in ids] for matched in range(len(ids))]
    return MarkerTables(np.array(ids, np.int32), np.array(matches, np.int32))


def _stand(markers: ThinkingMarkers, prompt: Int[np.ndarray, "T"]) -> tuple[bool, int, int]:
    """Whether a prompt ends in thinking, how much of the next marker it holds, and what it has thought since."""
    closes = _ends_of(prompt, markers.close_ids)
    closed = int(closes[-1]) if closes.size else 0
    opens = _ends_of(prompt[closed:], markers.open_ids)
    tail = prompt[closed + int(opens[0]) :] if opens.size else prompt[closed:]
    awaited = markers.close_ids if opens.size else markers.open_ids
    sizes = range(min(len(awaited) - 1, tail.size), 0, -1)
    matched = next((size for size in sizes if tuple(tail[-size:].tolist()) == awaited[:size]), 0)
    return bool(opens.size), matched, tail.size - matched if opens.size else 0


def _ends_of(ids: Int[np.ndarray, "T"], marker: tuple[int, ...]) -> Int[np.ndarray, "N"]:
    """Where each occurrence of a marker ends."""
    if ids.size < len(marker):
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(marker))
    return np.flatnonzero((windows == marker).all(axis=-1)) + len(marker)
