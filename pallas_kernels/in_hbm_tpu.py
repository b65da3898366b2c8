"""Operands that a kernel on TPU reads where they lie."""

import jax
from jax.experimental.pallas import tpu as pltpu


def in_hbm(stack: jax.Array) -> jax.Array:
    """An operand of `pallas_call` of which the kernel reads a part, such as one layer of a stack, kept in HBM.

    The compiler does not see which part, and moves the whole operand into vector memory where it fits.
    """
    return pltpu.with_memory_space_constraint(stack, pltpu.HBM)
