"""Lists of the best keys per group, which the indexer's kernels keep while scores stream by.

A key's group is its slot modulo the number of groups, so neighbours, which often score alike, spread over the
groups. Each group keeps its `kept` best keys, best first. The lists are elementwise over arrays whose elements are
groups: no element moves between lanes.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

LOWEST = float(jnp.finfo(jnp.float32).min)


def ranked(scores, visible):
    """Scores as the choice compares them: -inf only where not visible, NaN and -inf lowest among the rest.

    -0 stays: comparisons of floats take it as 0.
    """
    return jnp.where(visible, jnp.where(scores > LOWEST, scores, LOWEST), -jnp.inf)  # NaN > LOWEST is false


def insert(score, slot, scores, slots):
    """Puts one key per group into the lists; the last entry of a list falls out where the key goes in.

    A key goes behind those of equal score: keys arrive in order of their slots, so ties stand by slot. Entries are
    in descending order, hence a key that beats entry n beats all behind it.

    Args:
      score: One array over the groups; -inf goes into no list.
      slot: The same shape, int32.
      scores, slots: Lists of such arrays, one per place, best first.
    Returns: The new lists.
    """
    beats = [score > entry for entry in scores]
    new_scores = [jnp.maximum(scores[0], score)]
    new_slots = [jnp.where(beats[0], slot, slots[0])]
    for n in range(1, len(scores)):
        new_scores.append(jnp.maximum(scores[n], jnp.minimum(scores[n - 1], score)))
        new_slots.append(jnp.where(beats[n], jnp.where(beats[n - 1], slots[n - 1], slot), slots[n]))
    return new_scores, new_slots


def scoring_cost(q, keys, *, programs: int, results: int) -> pl.CostEstimate:
    """What scoring costs where every slot of the cache is visible.

    Args:
      q: [..., I, J] with the heads and queries of all programs.
      keys: [L, B, J, S].
      programs: That read the keys of a sequence once each.
      results: Elements of four bytes written.
    """
    width, num_keys = keys.shape[2:]
    read = programs * width * num_keys * keys.dtype.itemsize + q.size * q.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * (q.size // width) * (width + 1) * num_keys, bytes_accessed=read + 4 * results, transcendentals=0
    )
