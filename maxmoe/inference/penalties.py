"""What changes logits before a token is drawn: biases, penalties for repeating, and what may not come.

The order is that of vLLM: bias, repetition penalty, frequency and presence penalty, then the bans: of stop ids that
would come too early, and of what a grammar does not allow.
All of them are `Extras` of fixed shapes, which exist where some row of a batch asks for one of them: so a step is one
of two programs, whatever is asked.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from maxmoe.inference.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_IDS, SamplingParams

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

    ids: Int[Array, "B MAX_LOGIT_BIASES"]
    values: Float[Array, "B MAX_LOGIT_BIASES"]


class EarlyStops(NamedTuple):
    """Ids that may not come before position `until` of the sequence; filled up as those of `LogitBias`."""

    ids: Int[Array, "B MAX_STOP_IDS+1"]
    until: Int[Array, "B"]


class Extras(NamedTuple):
    """All that may change logits; each part changes nothing in a row that does not ask for it."""

    bias: LogitBias
    penalties: Penalties
    early_stops: EarlyStops
    allowed: UInt32[Array, "B V/32"]  # see `grammar.Matcher.words`; what a host writes anew for each token


def stack_extras(
    params: Sequence[SamplingParams],
    stop_ids: Sequence[frozenset[int]],
    prompt_lens: Sequence[int],
    vocab_size: int,
) -> Extras | None:
    """The extras of a batch as host arrays; None if no row asks for any, nor for top log-probabilities.

    Args:
      stop_ids: All ids that end each row's answer.
    """
    if not any(map(_has_extras, params)):
        return None
    penalties = Penalties(
        repetition=np.array([p.repetition_penalty for p in params], np.float32),
        presence=np.array([p.presence_penalty for p in params], np.float32),
        frequency=np.array([p.frequency_penalty for p in params], np.float32),
    )
    ids = _fill_up([[token_id for token_id, _ in p.logit_bias] for p in params], MAX_LOGIT_BIASES)
    values = np.zeros(ids.shape, np.float32)
    for row, p in zip(values, params, strict=True):
        row[: len(p.logit_bias)] = [bias for _, bias in p.logit_bias]
    until = np.array([length + p.min_tokens for length, p in zip(prompt_lens, params, strict=True)], np.int32)
    banned = _fill_up([sorted(ids) for ids in stop_ids], MAX_STOP_IDS + 1)
    allowed = np.full((len(params), -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    return Extras(LogitBias(ids, values), penalties, EarlyStops(banned, until), allowed)


def _has_extras(params: SamplingParams) -> bool:
    penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    return bool(penalised or params.logit_bias or params.min_tokens or params.top_logprobs or params.grammar)


def count_all(
    prompts: Sequence[Int[np.ndarray, "T"]], answers: Sequence[Int[np.ndarray, "N"]], vocab_size: int
) -> TokenCounts:
    """Counts after what there is of each answer, as host arrays."""
    counts = TokenCounts(np.zeros((len(prompts), vocab_size), bool), np.zeros((len(prompts), vocab_size), np.int32))
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        counts.in_prompt[row, prompt] = True
        counts.in_answer[row] = np.bincount(answer, minlength=vocab_size)
    return counts


def adjust(
    logits: Float[Array, "B V"], positions: Int[Array, "B"], extras: Extras, counts: TokenCounts
) -> Float[Array, "B V"]:
    """The logits that tokens at `positions` are drawn from. NaN stays NaN."""
    bias, penalties, early_stops, allowed = extras
    logits = jax.vmap(lambda row, ids, values: row.at[ids].add(values, mode="drop"))(logits, *bias)
    repeated = counts.in_prompt | (counts.in_answer > 0)
    repetition = penalties.repetition[:, None]
    logits = jnp.where(repeated, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits -= penalties.frequency[:, None] * counts.in_answer
    logits -= penalties.presence[:, None] * (counts.in_answer > 0)
    banned = jnp.where((positions < early_stops.until)[:, None], early_stops.ids, _NO_ID)
    logits = jax.vmap(lambda row, ids: row.at[ids].min(-jnp.inf, mode="drop"))(logits, banned)
    token_ids = jnp.arange(logits.shape[1], dtype=jnp.uint32)
    bits = jnp.repeat(allowed, 32, axis=1)[:, : logits.shape[1]] >> (token_ids % 32)
    return jnp.where((bits & 1 == 1) | jnp.isnan(logits), logits, -jnp.inf)


def count_tokens(counts: TokenCounts, tokens: Int[Array, "B"]) -> TokenCounts:
    """The counts after one more token of each answer; a negative token is none."""
    rows = jnp.arange(tokens.shape[0])
    in_answer = counts.in_answer.at[rows, jnp.where(tokens < 0, _NO_ID, tokens)].add(1, mode="drop")
    return counts._replace(in_answer=in_answer)


def _fill_up(lists: Sequence[Sequence[int]], width: int) -> Int[np.ndarray, "B width"]:
    """Rows of ids side by side."""
    ids = np.full((len(lists), width), _NO_ID, np.int32)
    for row, given in zip(ids, lists, strict=True):
        row[: len(given)] = given
    return ids
