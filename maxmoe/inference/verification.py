"""Verifying drafts: a model that has read a draft says which of its tokens stand, and what comes after them.

Nothing that a reader of answers could see changes. A draft that is certain, such as that of an n-gram drafter, is
verified by choosing each token as if there were no draft: answers are the same, token for token. A draft drawn from a
distribution of its own is accepted or replaced by speculative sampling, which leaves the distribution of answers as
it is. Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192.

Logits of a window stand after the token before the draft, then after each drafted token.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from maxmoe.inference.next_token import Chosen, Progress, Rows, advance, choose
from maxmoe.inference.sampling import INVALID_TOKEN, RowSettings, draw, draw_scores, row_keys

_ACCEPTING, _REPLACING = 1, 2  # noise that `draw` has not used at the same position


@functools.partial(jax.jit, donate_argnames="progress")
def verify_certain(
    logits: Float[Array, "B W+1 V"],
    draft: Int[Array, "B W"],
    num_drafted: Int[Array, "B"],
    rows: Rows,
    progress: Progress,
) -> tuple[Chosen, Bool[Array, "B W+1"], Progress]:
    """Chooses tokens along a draft, as far as it holds. `progress` is used up.

    Each token is what `next_tokens` would choose there, with its penalties, budget and noise; the row goes on to the
    next one as long as the draft said the same.

    Args:
      num_drafted: 0..W; what stands in `draft` beyond it does not matter.
    Returns:
      chosen: As of `next_tokens`, with an axis for the window behind that of rows.
      taken: Which of the chosen are tokens of the answer: at least the first of each row, then one more for each
        drafted token that holds. A row stops at an invalid token, which is taken.
      progress: After the tokens that were taken.
    """
    width = draft.shape[1]
    padded = jnp.pad(draft, ((0, 0), (0, 1)))

    def step(carry, window):
        progress, going = carry
        place, logits, drafted = window
        chosen = choose(logits, rows, progress)
        progress = advance(rows, progress, jnp.where(going, chosen.tokens, INVALID_TOKEN))
        holds = going & (place < num_drafted) & (chosen.tokens == drafted)
        return (progress, holds), (chosen, going)

    every = jnp.ones(draft.shape[0], bool)
    windows = jnp.arange(width + 1), jnp.swapaxes(logits, 0, 1), padded.T
    (progress, _), outputs = jax.lax.scan(step, (progress, every), windows)
    chosen, taken = jax.tree.map(lambda array: jnp.swapaxes(array, 0, 1), outputs)
    return chosen, taken, progress


@jax.jit
def verify_drawn(
    logits: Float[Array, "B W+1 V"],
    draft: Int[Array, "B W"],
    draft_logprobs: Float[Array, "B W V"],
    num_drafted: Int[Array, "B"],
    settings: RowSettings,
    words: UInt32[Array, "B 2"],
    positions: Int[Array, "B"],
) -> tuple[Int[Array, "B W+1"], Bool[Array, "B W+1"]]:
    """Accepts or replaces tokens that were drawn from a drafter's distribution.

    With p what the model would draw from and q what the drafter drew from, a token is accepted with probability
    min(1, p / q). The first that is not is replaced by a draw from max(p - q, 0), normalised; if all are accepted,
    one more is drawn from p. A greedy row accepts the likeliest token alone, and replaces others by it.

    Args:
      logits: What each token is to be drawn from: adjusted already, where there is something to adjust.
      draft: Drawn from `draft_logprobs`, with noise of the drafter's own: that of `row_keys` here would make draft and
        verdict depend on each other.
      num_drafted: 0..W; what stands in `draft` and `draft_logprobs` beyond it does not matter.
      words: Of the rows' seeds.
      positions: Of the first drafted tokens.
    Returns: Tokens, and which of them are tokens of the answer, both as `verify_certain` has them.
    """
    batch, width = draft.shape
    places = jnp.arange(width + 1)
    drafted = places < num_drafted[:, None]
    ids = jnp.where(drafted, jnp.pad(draft, ((0, 0), (0, 1))), 0)
    padded = jnp.pad(draft_logprobs, ((0, 0), (0, 1), (0, 0)))
    drafter = jnp.where(drafted[..., None], jnp.exp(padded), 0)  # beyond the draft, so that p is what is left

    def flat(array):
        return array.reshape(batch * (width + 1), *array.shape[2:])

    every = RowSettings(*(jnp.repeat(setting, width + 1) for setting in settings))
    keys = row_keys(jnp.repeat(words, width + 1, axis=0), flat(positions[:, None] + places))
    accepting, replacing = (
        jax.vmap(lambda key, use=use: jax.random.fold_in(key, use))(keys) for use in (_ACCEPTING, _REPLACING)
    )
    scores = draw_scores(flat(logits), every)
    likeliest = jnp.arange(scores.shape[-1]) == jnp.argmax(scores, axis=-1)[:, None]
    greedy = (every.temperature == 0)[:, None]
    model = jnp.where(greedy, likeliest, jax.nn.softmax(scores, axis=-1))

    of_id = functools.partial(jnp.take_along_axis, indices=flat(ids)[:, None], axis=-1)
    chance = jax.vmap(lambda key: jax.random.uniform(key, (1,)))(accepting)
    accepted = chance * of_id(flat(drafter)) < of_id(model)
    accepted = drafted & accepted.reshape(batch, width + 1)

    left = jnp.maximum(model - flat(drafter), 0)
    left = jnp.where(jnp.any(left > 0, axis=-1, keepdims=True), left, model)  # p = q: only rounding comes here
    plain = RowSettings(*(jnp.full_like(setting, value) for setting, value in zip(every, (1, 1, 0, 0), strict=True)))
    replaced = draw(jnp.log(left), plain, replacing).reshape(batch, width + 1)
    taken = jnp.pad(jnp.cumprod(accepted[:, :-1], axis=1), ((0, 0), (1, 0)), constant_values=1).astype(bool)
    return jnp.where(accepted, ids, replaced), taken
