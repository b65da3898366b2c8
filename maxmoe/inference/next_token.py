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
from maxmoe.inference.penalties import (
    EarlyStops,
    LogitBias,
    Penalties,
    TokenCounts,
    adjust,
    count_all,
    count_tokens,
    stack_biases,
    stack_early_stops,
    stack_penalties,
)
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
    bias: LogitBias | None
    penalties: Penalties | None
    early_stops: EarlyStops | None
    budgets: Budgets | None


class Progress(NamedTuple):
    """What each token changes; `positions` are those of the next tokens."""

    positions: Int[Array, "B"]
    counts: TokenCounts | None
    thinking: ThinkingState | None


class Thought(NamedTuple):
    """After a token: how many of the answer's were thinking and how many were not, and whether a budget chose it.

    `forced` is true where the budget's id is not what would have been drawn.
    """

    num_thinking: Int[Array, "B"]
    num_answer: Int[Array, "B"]
    forced: Bool[Array, "B"]


class Chosen(NamedTuple):
    """One token per row.

    Attributes:
      tokens: -1 for a row whose logits are no distribution.
      logprobs: See `token_logprobs`: the model's own, of forced and penalised tokens too.
      top: The 20 likeliest tokens and their log-probabilities, best first; None if no row asks for them.
      thought: None without markers of thinking.
    """

    tokens: Int[Array, "B"]
    logprobs: Float[Array, "B"]
    top: tuple[Int[Array, "B K"], Float[Array, "B K"]] | None
    thought: Thought | None


def lay_out(
    params: Sequence[SamplingParams],
    prompts: Sequence[Int[np.ndarray, "T"]],
    seeds: Sequence[int],
    stop_ids: Sequence[frozenset[int]],
    vocab_size: int,
    markers: ThinkingMarkers | None = None,
    answers: Sequence[Int[np.ndarray, "N"]] | None = None,
) -> tuple[Rows, Progress]:
    """Several requests side by side, as arrays on the host where nothing has to be computed.

    Args:
      answers: What each has said already, as when other requests join its batch or it comes back to one; None for
        nothing. What comes next is what would have come without the break.
    """
    lengths = [prompt.size for prompt in prompts]
    answers = [np.zeros(0, np.int32)] * len(prompts) if answers is None else answers
    penalties = stack_penalties(params)
    budgets, thinking = (None, None) if markers is None else start_thinking(markers, params, prompts, answers)
    rows = Rows(
        settings=stack_settings(params),
        words=seed_words(seeds),
        bias=stack_biases(params),
        penalties=penalties,
        early_stops=stack_early_stops(params, stop_ids, lengths),
        budgets=budgets,
    )
    counts = None if penalties is None else count_all(prompts, answers, vocab_size)
    positions = [length + answer.size for length, answer in zip(lengths, answers, strict=True)]
    return rows, Progress(np.array(positions, np.int32), counts, thinking)


@functools.partial(jax.jit, static_argnames="with_top", donate_argnames="progress")
def next_tokens(
    logits: Float[Array, "B V"],
    rows: Rows,
    progress: Progress,
    with_top: bool = False,
    active: Bool[Array, "B"] | None = None,
) -> tuple[Chosen, Progress]:
    """The next token of every row, and the progress after it; `progress` is used up.

    A forced id takes the place of what was drawn, unless the logits are no distribution.

    Args:
      active: Rows that take their token; the others stay where they are. None for all.
    """
    chosen = choose(logits, rows, progress, with_top)
    taken = chosen.tokens if active is None else jnp.where(active, chosen.tokens, INVALID_TOKEN)
    return chosen, advance(rows, progress, taken)


def choose(logits: Float[Array, "B V"], rows: Rows, progress: Progress, with_top: bool = False) -> Chosen:
    """The next token of every row."""
    logits = logits.astype(jnp.float32)
    settings = rows.settings
    adjusted = adjust(logits, progress.positions, rows.bias, rows.penalties, progress.counts, rows.early_stops)
    drawn = tokens = draw(adjusted, settings, row_keys(rows.words, progress.positions))
    thought = None
    if rows.budgets is not None:
        forced = forced_ids(rows.budgets, progress.thinking)
        tokens = jnp.where((forced >= 0) & (drawn != INVALID_TOKEN), forced, drawn)
        counts = follow(rows.budgets, progress.thinking, tokens).counts()
        thought = Thought(*counts, forced=tokens != drawn)
    return Chosen(
        tokens,
        token_logprobs(logits, settings, tokens),
        top_logprobs(logits, settings, MAX_TOP_LOGPROBS) if with_top else None,
        thought,
    )


def advance(rows: Rows, progress: Progress, tokens: Int[Array, "B"]) -> Progress:
    """The progress after one more token per row; a row with a negative token stays where it is."""
    return Progress(
        positions=progress.positions + (tokens >= 0),
        counts=None if progress.counts is None else count_tokens(progress.counts, tokens),
        thinking=None if rows.budgets is None else follow(rows.budgets, progress.thinking, tokens),
    )
