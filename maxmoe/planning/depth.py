"""Costs of a deep model from two shallow ones.

The compiler counts the body of a loop once, and a deep model is a loop over superblocks. So the costs of a step are
those of a model with one superblock in its longest stack, unrolled, and then per further superblock the difference to
one with two. Loops inside a layer stay counted once.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from maxmoe.config import ModelConfig
from maxmoe.model.stacks import FFN, Mixer, plan_stacks


class Costs(NamedTuple):
    """Of one step on one device; None where the compiler gives no usable number."""

    flops: float | None
    bytes_accessed: float | None


UNKNOWN_COSTS = Costs(None, None)


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


def costs_at_depth(config: ModelConfig, costs_of: Callable[[ModelConfig], Costs]) -> Costs:
    """Costs of the whole model.

    Args:
      costs_of: Compiles the step of an unrolled model.
    """
    count = max(plan.count for plan in plan_stacks(config))
    if count <= 2:
        return costs_of(config)
    one, two = costs_of(at_depth(config, 1)), costs_of(at_depth(config, 2))
    return Costs(*(_extrapolated(a, b, count) for a, b in zip(one, two, strict=True)))


def _extrapolated(one, two, count):
    """None also where the deeper model is said to cost less."""
    if one is None or two is None or two < one:
        return None
    return one + (count - 1) * (two - one)


def more_bank_bytes(config: ModelConfig, local_tokens: float, itemsize: int) -> float:
    """Bytes that the whole model reads of its residual bank beyond what `costs_at_depth` saw, on one device.

    Both mixtures of a layer read every entry of the bank; the shallow models have one.
    """
    if max(plan.count for plan in plan_stacks(config)) <= 2:
        return 0.0
    more = config.num_attn_res_blocks - 1
    return 2.0 * config.num_layers * more * local_tokens * config.model_dim * itemsize
