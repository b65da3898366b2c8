"""Verifying drafts: a model that has read a draft says which of its tokens stand, and what comes after them.

Nothing that a reader of answers could see changes. Each token is chosen as if there were no draft, with the row's own
noise, and the draft counts only as far as it said the same: answers are equal token for token, drawn ones too. So any
drafter will do, and what it says need not be drawn from a known distribution.

Tokens of a window are the last one of the answer, which no state holds yet, and then the draft. State follows without a
copy per token: latent rows behind what was taken are never read, and KDA layers keep their state while they read a
window, then replay as much of it as was taken, from the inputs of their recurrences.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxmoe.inference.next_token import Chosen, Progress, Rows, advance, choose
from maxmoe.inference.sampling import INVALID_TOKEN
from maxmoe.inference.steps import on_mesh_of
from maxmoe.model.cache import Cache
from maxmoe.model.transformer import Transformer
from maxmoe.step_jit import StepJit


class Verdict(NamedTuple):
    """What came of a window.

    Attributes:
      chosen: As of `next_tokens`, with an axis for the window behind that of rows.
      num_taken: How many of them are tokens of the answer: the first, then one more for each drafted token that holds;
        0 in rows that took no part. An invalid token ends a row's, and is one of them.
    """

    chosen: Chosen
    num_taken: Int[Array, "B"]


def verify_in_place(
    model: Transformer,
    params: dict,
    window: Int[Array, "B W+1"],
    num_drafted: Int[Array, "B"],
    cache: Cache,
    rows: Rows,
    progress: Progress,
    active: Bool[Array, "B"],
) -> tuple[Verdict, Cache, Progress]:
    """Reads windows, chooses tokens along them, and appends to each row its tokens that stand.

    Cache and progress are used up. The last chosen token of a row is not in the cache yet.

    Args:
      window: Token of the answer, then its draft; what stands beyond `num_drafted` does not matter.
      num_drafted: 0..W.
      active: Rows that take part; the others are left as they are.
    """
    with on_mesh_of(params):
        return _verify(model, params, window, num_drafted, cache, rows, progress, active)


@functools.partial(StepJit, static_argnums=0, donate_argnums=(4, 6))  # cache and progress
def _verify(model, params, window, num_drafted, cache, rows, progress, active):
    lengths = jnp.where(active, num_drafted + 1, 0)
    logits, read = model.apply({"params": params}, window, cache, lengths, method="read_window")
    verdict, progress = judge(logits, window[:, 1:], num_drafted, rows, progress, active)
    return verdict, model.apply({"params": params}, read, verdict.num_taken, method="keep_window"), progress


def judge(
    logits: Float[Array, "B W+1 V"],
    draft: Int[Array, "B W"],
    num_drafted: Int[Array, "B"],
    rows: Rows,
    progress: Progress,
    active: Bool[Array, "B"],
) -> tuple[Verdict, Progress]:
    """Chooses tokens along a draft, as far as it holds. Returns them, and the progress after those that are taken.

    Args:
      logits: After the token before the draft, then after each drafted token.
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

    windows = jnp.arange(width + 1), jnp.swapaxes(logits, 0, 1), padded.T
    (progress, _), outputs = jax.lax.scan(step, (progress, active), windows)
    chosen, taken = jax.tree.map(lambda array: jnp.swapaxes(array, 0, 1), outputs)
    return Verdict(chosen, jnp.sum(taken, axis=1, dtype=jnp.int32)), progress
