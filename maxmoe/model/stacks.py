"""How layers are grouped: equal superblocks in a row are stacked and scanned, so that programs stay small.

A superblock is a run of KDA layers and the full-attention layer that ends it. For the published depth of 93
that gives three stacks: the first superblock, whose first FFN is dense; 22 equal ones; the last layer alone.
"""

import enum
import functools
from typing import NamedTuple

from maxmoe.config import ModelConfig


class Mixer(enum.Enum):
    """How a layer mixes tokens."""

    KDA = "kda"
    MLA = "mla"


class FFN(enum.Enum):
    """What follows the mixer in a layer."""

    DENSE = "dense"
    MOE = "moe"


class LayerKind(NamedTuple):
    """Mixer and FFN of one layer."""

    mixer: Mixer
    ffn: FFN


class StackPlan(NamedTuple):
    """`count` equal superblocks: layer `first + i * len(layers) + j` is place j of superblock i. 0-based."""

    first: int
    count: int
    layers: tuple[LayerKind, ...]

    @property
    def size(self) -> int:
        """Layers in one superblock."""
        return len(self.layers)


@functools.cache
def plan_stacks(config: ModelConfig) -> tuple[StackPlan, ...]:
    """Groups all layers of a model, in order."""
    stacks: list[StackPlan] = []
    block: list[LayerKind] = []
    for layer in range(config.num_layers):
        mixer = Mixer.MLA if layer in config.full_attention_set else Mixer.KDA
        block.append(LayerKind(mixer, FFN.DENSE if layer < config.num_dense_layers else FFN.MOE))
        if mixer is Mixer.MLA or layer == config.num_layers - 1:
            if stacks and stacks[-1].layers == tuple(block):
                stacks[-1] = stacks[-1]._replace(count=stacks[-1].count + 1)
            else:
                stacks.append(StackPlan(layer + 1 - len(block), 1, tuple(block)))
            block = []
    return tuple(stacks)
