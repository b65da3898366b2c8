"""Lists of the best keys per group, which the indexer's kernels keep while scores stream by.

A key's group is its slot modulo the number of groups, so neighbours, which often score alike, spread over the
groups. Each group keeps its `kept` best keys, best first. Everything here is elementwise over arrays whose elements
are groups: no element moves between lanes.
"""

import jax.numpy as jnp

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
