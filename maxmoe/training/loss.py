"""Cross entropy of next tokens, over a vocabulary that is split over devices.

Logits exist for a few tokens at a time, in both passes, and stay split: over the vocabulary only maxima, sums and the
logits of labels are added up.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxmoe import axes
from maxmoe.ops.linear import linear
from maxmoe.sharding import constrain

LOGITS_AT_ONCE = 2**26  # per row of the batch, over the whole vocabulary


def token_losses(
    hidden: Float[Array, "B T D"], lm_head: Float[Array, "V D"], labels: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """-log softmax(hidden lm_head^T)[label], in float32.

    The gradient of the head is summed over tokens in float32.
    """
    batch, num_tokens, _ = hidden.shape
    vocab = lm_head.shape[0]
    limit = max(LOGITS_AT_ONCE, vocab)
    # Tokens that lie together on a device along "seq" are one block; a step takes one token of each block.
    steps = next(n for n in range(1, num_tokens + 1) if num_tokens % n == 0 and num_tokens // n * vocab <= limit)
    head = lm_head.astype(jnp.float32)

    def stepped(x):
        return jnp.moveaxis(x.reshape(batch, num_tokens // steps, steps, *x.shape[2:]), 2, 0)

    @jax.checkpoint
    def some_tokens(hidden, head, labels):
        hidden = constrain(hidden, axes.BATCH, axes.TOKENS, None)
        logits = linear(hidden, head.astype(hidden.dtype)).astype(jnp.float32)
        logits = constrain(logits, axes.BATCH, axes.TOKENS, axes.VOCAB)
        top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        log_sum = jnp.log(jnp.sum(jnp.exp(logits - top), axis=-1)) + top[..., 0]
        # A sum over the vocabulary, where a gather would bring the logits together.
        of_label = jnp.where(jnp.arange(vocab) == labels[..., None], logits, 0)
        return log_sum - jnp.sum(of_label, axis=-1)

    def one_step(_, step):
        return None, some_tokens(step[0], head, step[1])

    _, losses = jax.lax.scan(one_step, None, (stepped(hidden), stepped(labels)))
    return jnp.moveaxis(losses, 0, 2).reshape(batch, num_tokens)


def next_token_loss(
    hidden: Float[Array, "B T D"],
    lm_head: Float[Array, "V D"],
    ids: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The sum of the losses of masked tokens, and their number.

    Args:
      mask: Which tokens are to be predicted, each from those before it. The first of a row never is.
    """
    # The label of position t is token t + 1; the last position has none.
    labels = jnp.roll(ids, -1, axis=1)
    wanted = jnp.roll(mask, -1, axis=1).at[:, -1].set(False)
    losses = token_losses(hidden, lm_head, labels)
    return jnp.sum(jnp.where(wanted, losses, 0)), jnp.sum(wanted, dtype=jnp.float32)
