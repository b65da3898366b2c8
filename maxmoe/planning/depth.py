"""FLOPs of a deep model from two shallow ones.

The compiler counts the body of a loop once, and a deep model is a loop over superblocks. So the FLOPs of a step are
those of a model with one superblock in its longest stack, unrolled, and then per further superblock the difference to
one with two. Loops inside a layer stay counted once.
"""

import dataclasses
from collections.abc import Callable

from maxmoe.config import ModelConfig
from maxmoe.model.stacks import FFN, Mixer, plan_stacks


def at_depth(config: ModelConfig, superblocks: int) -> ModelConfig:
    """The model with another number of superblocks in its longest stack."""
    plans = list(plan_stacks(config))
    longest = max(range(len(plans)), key=lambda i: plans[i].count)
    plans[longest] = plans[longest]._replace(count=superblocks)
    kinds = [kind for plan in plans for kind in plan.layers * plan.count]
    return dataclasses.replace(
        config,
        num_layers=len(kinds),
        full_attention_layers=tuple(i for i, kind in enumerate(kinds) if kind.mixer is Mixer.MLA),
        num_dense_layers=sum(kind.ffn is FFN.DENSE for kind in kinds),
        # So that both shallow models mix as many bank entries per layer: their difference is then one superblock.
        attn_res_block_size=max(config.attn_res_block_size, len(kinds)),
    )


def flops_at_depth(config: ModelConfig, flops_of: Callable[[ModelConfig], float | None]) -> float | None:
    """FLOPs of the whole model; None where the compiler gives no usable number.

    Args:
      flops_of: Compiles the step of an unrolled model.
    """
    count = max(plan.count for plan in plan_stacks(config))
    if count <= 2:
        return flops_of(config)
    one, two = flops_of(at_depth(config, 1)), flops_of(at_depth(config, 2))
    if one is None or two is None or two < one:  # a deeper model cannot cost less
        return None
    return one + (count - 1) * (two - one)
