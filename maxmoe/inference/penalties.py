"""What changes logits before a token is drawn: biases, penalties for repeating, stop ids that come too early.

The order is that of vLLM: bias, repetition penalty, frequency and presence penalty, then the ban of early stops.
Each part is None where no row of a batch asks for it, and then costs nothing; tables with one entry per token of the
vocabulary exist for penalties alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from maxmoe.inference.sampling_params import SamplingParams

_NO_ID = np.iinfo(np.int32).max  # beyond any vocabulary: what is written there is dropped


class Penalties(NamedTuple):
    """See `SamplingParams`."""

    repetition: Float[Array, "B"]
    presence: Float[Array, "B"]
    frequency: Float[Array, "B"]


class TokenCounts(NamedTuple):
    """Which tokens a row's prompt holds, and how often its answer holds each."""

    in_prompt: Bool[Array, "B V"]
    in_answer: Int[Array, "B V"]


class LogitBias(NamedTuple):
    """Ids and what is added to their logits; rows with fewer of them end in ids beyond the vocabulary."""

    ids: Int[Array, "B K"]
    values: Float[Array, "B K"]


class EarlyStops(NamedTuple):
    """Ids that may not come before position `until` of the sequence; filled up as those of `LogitBias`."""

    ids: Int[Array, "B K"]
    until: Int[Array, "B"]


def stack_penalties(params: Sequence[SamplingParams]) -> Penalties | None:
    """The penalties of a batch as host arrays; None if no row has one."""
    penalties = Penalties(
        repetition=np.array([p.repetition_penalty for p in params], np.float32),
        presence=np.array([p.presence_penalty for p in params], np.float32),
        frequency=np.array([p.frequency_penalty for p in params], np.float32),
    )
    neutral = np.all(penalties.repetition == 1) and not np.any(penalties.presence) and not np.any(penalties.frequency)
    return None if neutral else penalties


def count_all(
    prompts: Sequence[Int[np.ndarray, "T"]], answers: Sequence[Int[np.ndarray, "N"]], vocab_size: int
) -> TokenCounts:
    """Counts after what there is of each answer, as host arrays."""
    counts = TokenCounts(np.zeros((len(prompts), vocab_size), bool), np.zeros((len(prompts), vocab_size), np.int32))
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        counts.in_prompt[row, prompt] = True
        counts.in_answer[row] = np.bincount(answer, minlength=vocab_size)
    return counts


def stack_biases(params: Sequence[SamplingParams]) -> LogitBias | None:
    """The biases of a batch as host arrays; None if no row has one."""
    if not any(p.logit_bias for p in params):
        return None
    ids = _fill_up([[token_id for token_id, _ in p.logit_bias] for p in params])
    values = np.zeros(ids.shape, np.float32)
    for row, p in zip(values, params, strict=True):
        row[: len(p.logit_bias)] = [bias for _, bias in p.logit_bias]
    return LogitBias(ids, values)


def stack_early_stops(
    params: Sequence[SamplingParams], stop_ids: Sequence[frozenset[int]], prompt_lens: Sequence[int]
) -> EarlyStops | None:
    """Until where which stop ids are banned, as host arrays; None if no row has min_tokens."""
    if not any(p.min_tokens for p in params):
        return None
    until = np.array([length + p.min_tokens for length, p in zip(prompt_lens, params, strict=True)], np.int32)
    return EarlyStops(_fill_up([sorted(ids) for ids in stop_ids]), until)


def adjust(
    logits: Float[Array, "B V"],
    positions: Int[Array, "B"],
    bias: LogitBias | None,
    penalties: Penalties | None,
    counts: TokenCounts | None,
    early_stops: EarlyStops | None,
) -> Float[Array, "B V"]:
    """The logits that tokens at `positions` are drawn from. NaN stays NaN."""
    if bias is not None:
        logits = jax.vmap(lambda row, ids, values: row.at[ids].add(values, mode="drop"))(logits, *bias)
    if penalties is not None:
        repeated = counts.in_prompt | (counts.in_answer > 0)
        repetition = penalties.repetition[:, None]
        logits = jnp.where(repeated, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits -= penalties.frequency[:, None] * counts.in_answer
        logits -= penalties.presence[:, None] * (counts.in_answer > 0)
    if early_stops is not None:
        banned = jnp.where((positions < early_stops.until)[:, None], early_stops.ids, _NO_ID)
        logits = jax.vmap(lambda row, ids: row.at[ids].min(-jnp.inf, mode="drop"))(logits, banned)
    return logits


def count_tokens(counts: TokenCounts, tokens: Int[Array, "B"]) -> TokenCounts:
    """The counts after one more token of each answer; a negative token is none."""
    rows = jnp.arange(tokens.shape[0])
    in_answer = counts.in_answer.at[rows, jnp.where(tokens < 0, _NO_ID, tokens)].add(1, mode="drop")
    return counts._replace(in_answer=in_answer)


def _fill_up(lists: Sequence[Sequence[int]]) -> Int[np.ndarray, "B K"]:
    """Rows of ids side by side, of a width that is a power of four, so that there are few shapes to compile."""
    width = 1
    while width < max(map(len, lists)):
        width *= 4
    ids = np.full((len(lists), width), _NO_ID, np.int32)
    for row, given in zip(ids, lists, strict=True):
        row[: len(given)] = given
    return ids
