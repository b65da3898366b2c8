"""Choosing the next token from logits: greedy or random, filtered or not, row by row in one program.

The order is temperature, top_k, top_p, min_p: each filter looks at what the ones before it left, and sees the
probabilities at the chosen temperature. A token is drawn by the Gumbel-max trick from noise that depends on the
row's seed and the token's position alone, so that an answer does not depend on what else is in the batch.
"""

import dataclasses
import math
import operator
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

INVALID_TOKEN = -1  # what `sample` gives for a row without a distribution
MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 100.0

_LEAST_DIVISOR = 1e-30  # a smaller temperature would be flushed to zero; at this one all ties are broken already


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is answered.

    Attributes:
      temperature: 0..100; logits are divided by it. 0 is greedy: the likeliest token, the lower id of a tie.
      top_p: In (0, 1]; keeps the likeliest tokens whose mass first reaches it. 1 keeps all.
      top_k: Keeps that many likeliest tokens, the lower ids of a tie first; 0 keeps all.
      min_p: 0..1; keeps tokens at least this fraction as likely as the likeliest. 0 keeps all.
      seed: 0..2**63-1; None draws one from the operating system for each request.
      max_tokens: The longest answer, in tokens, the stop id included.
      stop_ids: Ids that end the answer, besides the model's own end of turn.
    Raises: ValueError naming the field, its value and what is allowed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        def require(name: str, allowed: bool, text: str) -> None:
            if not allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be {text}")

        ranges = (
            ("temperature", 0.0, MAX_TEMPERATURE, f"a number in 0..{MAX_TEMPERATURE:g}, where 0 is greedy"),
            ("top_p", 0.0, 1.0, "a number above 0 and up to 1"),
            ("min_p", 0.0, 1.0, "a number in 0..1"),
        )
        for name, low, high, text in ranges:
            value = getattr(self, name)
            is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            require(name, is_number and math.isfinite(value) and low <= value <= high, text)
        require("top_p", self.top_p > 0, "a number above 0 and up to 1")
        require("top_k", _is_int(self.top_k) and self.top_k >= 0, "an integer >= 0, where 0 keeps all")
        require("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 1, "an integer >= 1")
        seeded = _is_int(self.seed) and 0 <= self.seed <= MAX_SEED
        require("seed", self.seed is None or seeded, "an integer in 0..2**63-1, or None for a fresh one")
        is_sequence = isinstance(self.stop_ids, Sequence | set | frozenset) and not isinstance(self.stop_ids, str)
        valid = is_sequence and all(_is_int(stop_id) and stop_id >= 0 for stop_id in self.stop_ids)
        require("stop_ids", valid, "a sequence of token ids >= 0")
        object.__setattr__(self, "stop_ids", tuple(operator.index(stop_id) for stop_id in self.stop_ids))


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


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
def sample(
    logits: Float[Array, "B V"], settings: RowSettings, keys: Key[Array, "B"]
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Chooses one token per row.

    A row at temperature 0 gets its likeliest token, the lowest id of a tie. Any other row gets a draw from
    softmax(logits / temperature) restricted to the tokens that pass its filters. Logits of +inf share all
    probability equally. The vocabulary is sorted only if some row has a filter, noise made only if some row draws.

    Args:
      logits: float32.
      keys: From `row_keys`; not used by greedy rows.
    Returns:
      tokens: int32; -1 for a row that holds a NaN, or -inf alone.
      logprobs: float32, in nats: of the tokens under softmax(logits / temperature) before the filters, at
        temperature 1 for greedy rows; NaN beside a token of -1.
    """
    logits = logits.astype(jnp.float32)
    infinite = logits == jnp.inf
    certain = jnp.any(infinite, axis=-1, keepdims=True)
    invalid = jnp.any(jnp.isnan(logits), axis=-1) | jnp.all(logits == -jnp.inf, axis=-1)
    logits = jnp.where(certain, jnp.where(infinite, 0, -jnp.inf), logits)

    draws = settings.temperature > 0
    divisor = jnp.where(draws, jnp.maximum(settings.temperature, _LEAST_DIVISOR), 1)
    # The largest becomes exactly 0, so that no temperature overflows.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / divisor[:, None]

    def draw():
        filtered = draws & ((settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0))
        kept = jax.lax.cond(jnp.any(filtered), lambda: _kept(scaled, settings), lambda: jnp.ones(scaled.shape, bool))
        # mode="high": in the default mode, tokens rarer than about 1e-7 would never be drawn.
        noise = jax.vmap(lambda key: jax.random.gumbel(key, scaled.shape[-1:], jnp.float32, mode="high"))(keys)
        return jnp.where(draws[:, None], jnp.where(kept, scaled + noise, -jnp.inf), logits)

    scores = jax.lax.cond(jnp.any(draws), draw, lambda: logits)
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    logprobs = chosen - jax.nn.logsumexp(scaled, axis=-1)
    return jnp.where(invalid, INVALID_TOKEN, tokens), jnp.where(invalid, jnp.nan, logprobs)


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
