"""Choosing the next token from logits: greedy or random, filtered or not, row by row in one program.

The order is temperature, top_k, top_p, min_p: each filter looks at what the ones before it left, and sees the
probabilities at the chosen temperature. A token is drawn by the Gumbel-max trick from noise that depends on the
row's seed and the token's position alone, so that an answer does not depend on what else is in the batch.
"""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from maxmoe.inference.sampling_params import MAX_SEED, SamplingParams

INVALID_TOKEN = -1  # what `draw` gives for a row without a distribution

_LEAST_DIVISOR = 1e-30  # a smaller temperature would be flushed to zero; at this one all ties are broken already


def fresh_seed() -> int:
    """A seed from the operating system's entropy."""
    return secrets.randbelow(MAX_SEED + 1)


class RowSettings(NamedTuple):
    """The sampling settings of a batch, one entry per row."""

    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    top_k: Int[Array, "B"]
    min_p: Float[Array, "B"]


def stack_settings(params: Sequence[SamplingParams]) -> RowSettings:
    """Lays the settings of several requests side by side, as host arrays."""
    largest = np.iinfo(np.int32).max
    return RowSettings(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_p=np.array([p.top_p for p in params], np.float32),
        top_k=np.array([min(p.top_k, largest) for p in params], np.int32),
        min_p=np.array([p.min_p for p in params], np.float32),
    )


def seed_words(seeds: Sequence[int]) -> UInt32[np.ndarray, "B 2"]:
    """Seeds as two 32-bit words each, high word first: all 63 bits count, whatever JAX's integer width is."""
    return np.array([(seed >> 32, seed & 0xFFFFFFFF) for seed in seeds], np.uint32).reshape(-1, 2)


def row_keys(words: UInt32[Array, "B 2"], positions: Int[Array, "B"]) -> Key[Array, "B"]:
    """The key of each row's next token: its seed folded with the position that the token will have."""
    keys = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(keys, positions)


@jax.jit
def draw(logits: Float[Array, "B V"], settings: RowSettings, keys: Key[Array, "B"]) -> Int[Array, "B"]:
    """Chooses one token per row.

    A row at temperature 0 gets its likeliest token, the lowest id of a tie. Any other row gets a draw from
    softmax(logits / temperature) restricted to the tokens that pass its filters. Logits of +inf share all
    probability equally. The vocabulary is sorted only if some row has a filter, noise made only if some row draws.

    Args:
      keys: From `row_keys`; not used by greedy rows.
    Returns: int32; -1 for a row that holds a NaN, or -inf alone.
    """
    invalid = jnp.any(jnp.isnan(logits), axis=-1) | jnp.all(logits == -jnp.inf, axis=-1)
    greedy = settings.temperature == 0

    def noisy():
        # mode="high": in the default mode, tokens rarer than about 1e-7 would never be drawn.
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32, mode="high"))(keys)
        return draw_scores(logits, settings) + jnp.where(greedy[:, None], 0, noise)

    scores = jax.lax.cond(jnp.all(greedy), lambda: _scaled(logits, settings), noisy)
    return jnp.where(invalid, INVALID_TOKEN, jnp.argmax(scores, axis=-1).astype(jnp.int32))


def draw_scores(logits: Float[Array, "B V"], settings: RowSettings) -> Float[Array, "B V"]:
    """Scores whose softmax is what a row draws from: logits / temperature, and -inf for what a filter drops.

    Those of a greedy row are its logits less their largest, and no distribution: the largest is its token.
    """
    draws = settings.temperature > 0
    scaled = _scaled(logits, settings)
    filtered = draws & ((settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0))
    kept = jax.lax.cond(jnp.any(filtered), lambda: _kept(scaled, settings), lambda: jnp.ones(scaled.shape, bool))
    return jnp.where(kept | ~draws[:, None], scaled, -jnp.inf)


def token_logprobs(logits: Float[Array, "B V"], settings: RowSettings, tokens: Int[Array, "B"]) -> Float[Array, "B"]:
    """Log-probabilities of tokens, in nats, under softmax(logits / temperature), at temperature 1 for greedy rows.

    Filters do not change them. NaN beside a token of -1.
    """
    scaled = _scaled(logits, settings)
    chosen = jnp.take_along_axis(scaled, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    return jnp.where(tokens < 0, jnp.nan, chosen - jax.nn.logsumexp(scaled, axis=-1))


def top_logprobs(
    logits: Float[Array, "B V"], settings: RowSettings, count: int
) -> tuple[Int[Array, "B K"], Float[Array, "B K"]]:
    """The likeliest tokens and their log-probabilities as `token_logprobs` defines them, the lower id of a tie first.

    There are `count` of them, or all where the vocabulary is smaller.
    """
    scaled = _scaled(logits, settings)
    largest, tokens = jax.lax.top_k(scaled, min(count, logits.shape[-1]))
    return tokens.astype(jnp.int32), largest - jax.nn.logsumexp(scaled, axis=-1, keepdims=True)


def _scaled(logits: Float[Array, "B V"], settings: RowSettings) -> Float[Array, "B V"]:
    """Logits over temperature, less their largest: it becomes exactly 0, so that no temperature overflows."""
    logits = logits.astype(jnp.float32)
    infinite = logits == jnp.inf
    certain = jnp.any(infinite, axis=-1, keepdims=True)
    logits = jnp.where(certain, jnp.where(infinite, 0, -jnp.inf), logits)
    divisor = jnp.where(settings.temperature > 0, jnp.maximum(settings.temperature, _LEAST_DIVISOR), 1)
    return (logits - jnp.max(logits, axis=-1, keepdims=True)) / divisor[:, None]


def _kept(scaled: Float[Array, "B V"], settings: RowSettings) -> Bool[Array, "B V"]:
    """Which tokens pass all filters.

    Every filter keeps the first so many in the order of score descending, then id ascending. How many all of them
    keep, and the score of the last one, therefore tell about any token whether it is kept, and ids need not be
    sorted along. The likeliest token always stays.

    Args:
      scaled: Scores, of which the largest in each row is 0.
    """
    vocab = scaled.shape[-1]
    # Floats that are not negative are in the order of their bits, and integers sort several times faster on a CPU.
    bits = jax.lax.bitcast_convert_type(jnp.abs(scaled), jnp.int32)
    ranked = -jax.lax.bitcast_convert_type(jax.lax.sort(bits, is_stable=False), jnp.float32)
    relative = jnp.exp(ranked)  # probabilities over that of the likeliest
    rank = jnp.arange(vocab)
    in_k = rank < jnp.where(settings.top_k > 0, settings.top_k, vocab)[:, None]
    mass = jnp.cumsum(jnp.where(in_k, relative, 0), axis=-1)
    mass_before = jnp.pad(mass[:, :-1], ((0, 0), (1, 0)))
    top_p = settings.top_p[:, None]
    in_p = (mass_before < top_p * mass[:, -1:]) | (top_p >= 1)
    passed = in_k & in_p & (relative >= settings.min_p[:, None])
    count = jnp.maximum(jnp.sum(passed, axis=-1, keepdims=True), 1)
    last_score = jnp.take_along_axis(ranked, count - 1, axis=-1)
    above, tied = scaled > last_score, scaled == last_score
    room = count - jnp.sum(above, axis=-1, keepdims=True)
    return above | (tied & (jnp.cumsum(tied, axis=-1) <= room))
