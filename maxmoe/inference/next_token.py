"""The step from logits to the next token of every row, one program: adjust, force or draw, tell, and keep count.

`Rows` holds what an answer's request says, `Progress` what its tokens have changed. A part of either that no row of
the batch needs is None, and is then no part of the program.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from maxmoe.inference.budget import Budgets, ThinkingMarkers, ThinkingState, follow, forced_ids, start_thinking
from maxmoe.inference.penalties import Extras, TokenCounts, adjust, count_all, count_tokens, stack_extras
from maxmoe.inference.sampling import (
    INVALID_TOKEN,
    RowSettings,
    draw,
    row_keys,
    seed_words,
    stack_settings,
    token_logprobs,
    top_logprobs,
)
from maxmoe.inference.sampling_params import MAX_TOP_LOGPROBS, SamplingParams


class Rows(NamedTuple):
    """What stays the same along the answers of a batch."""

    settings: RowSettings
    words: UInt32[Array, "B 2"]  # of the seeds
    extras: Extras | None
    budgets: Budgets | None


class Progress(NamedTuple):
    """What each token changes; `positions` are those of the next tokens."""

    positions: Int[Array, "B"]
    counts: TokenCounts | None
    thinking: ThinkingState | None


class Thought(NamedTuple):
    """After a token: where it leaves the row, and whether a budget chose it in place of what would have been drawn."""

    state: ThinkingState
    forced: Bool[Array, "B"]


class Chosen(NamedTuple):
    """One token per row.

    Attributes:
      tokens: -1 for a row whose logits are no distribution.
      logprobs: See `token_logprobs`: the model's own, of forced and penalised tokens too.
      top: The 20 likeliest tokens and their log-probabilities, best first; None without extras.
      thought: None without markers of thinking.
    """

    tokens: Int[Array, "B"]
    logprobs: Float[Array, "B"]
    top: tuple[Int[Array, "B K"], Float[Array, "B K"]] | None
    thought: Thought | None


class Said(NamedTuple):
    """What there is of an answer.

    Attributes:
      thinking: The row's `Chosen.thought.state` beside its last token; None before the first.
    """

    ids: Int[np.ndarray, "N"]
    thinking: ThinkingState | None = None


NOTHING_SAID = Said(np.zeros(0, np.int32))


def lay_out(
    params: Sequence[SamplingParams],
    prompts: Sequence[Int[np.ndarray, "T"]],
    seeds: Sequence[int],
    stop_ids: Sequence[frozenset[int]],
    vocab_size: int,
    markers: ThinkingMarkers | None = None,
    said: Sequence[Said] | None = None,
) -> tuple[Rows, Progress]:
    """Several requests side by side, as host arrays.

    Args:
      said: By each so far, as when other requests join its batch or it comes back to one; None for nothing. What
        comes next is what would have come without the break.
    """
    lengths = [prompt.size for prompt in prompts]
    said = [NOTHING_SAID] * len(prompts) if said is None else said
    extras = stack_extras(params, stop_ids, lengths, vocab_size)
    budgets, thinking = None, None
    if markers is not None:
        budgets, thinking = start_thinking(markers, params, prompts, [row.thinking for row in said])
    rows = Rows(settings=stack_settings(params), words=seed_words(seeds), extras=extras, budgets=budgets)
    counts = None if extras is None else count_all(prompts, [row.ids for row in said], vocab_size)
    positions = [length + row.ids.size for length, row in zip(lengths, said, strict=True)]
    return rows, Progress(np.array(positions, np.int32), counts, thinking)


@functools.partial(jax.jit, donate_argnames="progress")
def next_tokens(
    logits: Float[Array, "B V"],
    rows: Rows,
    progress: Progress,
    active: Bool[Array, "B"] | None = None,
) -> tuple[Chosen, Progress]:
    """The next token of every row, and the progress after it; `progress` is used up.

    A forced id takes the place of what was drawn, unless the logits are no distribution.

    Args:
      active: Rows that take their token; the others stay where they are. None for all.
    """
    chosen = choose(logits, rows, progress)
    taken = chosen.tokens if active is None else jnp.where(active, chosen.tokens, INVALID_TOKEN)
    return chosen, advance(rows, progress, taken)


def choose(logits: Float[Array, "B V"], rows: Rows, progress: Progress) -> Chosen:
    """The next token of every row."""
    logits = logits.astype(jnp.float32)
    settings = rows.settings
    adjusted = logits if rows.extras is None else adjust(logits, progress.positions, rows.extras, progress.counts)
    drawn = tokens = draw(adjusted, settings, row_keys(rows.words, progress.positions))
    thought = None
    if rows.budgets is not None:
        forced = forced_ids(rows.budgets, progress.thinking)
        tokens = jnp.where((forced >= 0) & (drawn != INVALID_TOKEN), forced, drawn)
        thought = Thought(follow(rows.budgets, progress.thinking, tokens), forced=tokens != drawn)
    return Chosen(
        tokens,
        token_logprobs(logits, settings, tokens),
        None if rows.extras is None else top_logprobs(logits, settings, MAX_TOP_LOGPROBS),
        thought,
    )


def advance(rows: Rows, progress: Progress, tokens: Int[Array, "B"]) -> Progress:
    """The progress after one more token per row; a row with a negative token stays where it is."""
    return Progress(
        positions=progress.positions + (tokens >= 0),
        counts=None if progress.counts is None else count_tokens(progress.counts, tokens),
        thinking=None if rows.budgets is None else follow(rows.budgets, progress.thinking, tokens),
    )
