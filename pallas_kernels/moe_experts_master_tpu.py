"""Training of routed experts on TPU against bfloat16 master weights: MXFP4 forward, gradients straight through.

The forward pass packs the masters and runs `moe_experts_tpu` on what it packed, so that training sees the weights
that serving will see. Rounding has no gradient: that of the rounded weight goes to the master as it is.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import moe_experts_tpu as kernels
from pallas_kernels.tiling import MoeExpertsTpuTiling


class MasterExperts(NamedTuple):
    """Weights of the E experts of one layer, [out, in] each."""

    gate: jax.Array  # [E, F, D]
    up: jax.Array
    down: jax.Array  # [E, D, F]


def quantised_forward(
    x: jax.Array,
    group_sizes: jax.Array,
    masters: MasterExperts,
    quantise: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    gate_beta: float,
    linear_beta: float,
    *,
    method: str | None = None,
    tiling: MoeExpertsTpuTiling | None = None,
    interpret: pltpu.InterpretParams | bool | None = None,
) -> jax.Array:
    """`moe_experts_tpu` of packed masters, differentiable in x and in the masters.

        dWg = dg^T x,  dWu = du^T x,  dWd = dout^T hidden,  each over the rows of its expert, at the packed weights

    Args:
      x, group_sizes, gate_beta, linear_beta, method, tiling, interpret: As for `moe_experts_tpu`.
      quantise: Packs weights [..., out, in] to codes and scales, along the last axis.
    Returns: [M, D].
    Raises: NotImplementedError with the text of `moe_experts_tpu_refusal`.
    """
    packed = (leaf[None] for master in masters for leaf in quantise(lax.stop_gradient(master)))
    experts = kernels.Mxfp4Experts(*packed)
    how = kernels.settings(x.shape[0], gate_beta, linear_beta, method, tiling, interpret)
    return packed_forward(how, x, group_sizes, masters, experts)


def packed_forward(
    how: tuple, x: jax.Array, group_sizes: jax.Array, masters: MasterExperts, experts: kernels.Mxfp4Experts
) -> jax.Array:
    """`quantised_forward` of masters that are packed already.

    Args:
      how: What `moe_experts_tpu.settings` gives.
      masters: Only their shapes and dtypes matter, and that they get the gradient.
      experts: What they were packed to, as a stack of one layer.
    """
    reason = kernels.moe_experts_tpu_refusal(x.shape, x.dtype, experts)
    if reason:
        raise NotImplementedError(reason)
    return _ffn(how, x, MasterExperts(*masters), group_sizes, experts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ffn(how, x, masters, group_sizes, experts):
    del masters  # they are in `experts`, packed
    return kernels.forward(how, x, group_sizes, experts, jnp.zeros((), jnp.int32))


def _ffn_fwd(how, x, masters, group_sizes, experts):
    like = MasterExperts(*(jnp.zeros((), master.dtype) for master in masters))
    return _ffn(how, x, masters, group_sizes, experts), (x, group_sizes, experts, like)


def _ffn_bwd(how, saved, dout):
    x, group_sizes, experts, like = saved
    dx, dgate, dup, hidden = kernels.backward(how, x, dout, group_sizes, experts, jnp.zeros((), jnp.int32))
    # Rows after the last group may hold anything, and 0 times NaN would reach the sums.
    in_group = jnp.arange(x.shape[0])[:, None] < jnp.sum(group_sizes)
    x, dout = (jnp.where(in_group, rows, 0) for rows in (x, dout))
    pairs = ((dgate, x), (dup, x), (dout, hidden))
    products = (_grouped_outer(rows, columns, group_sizes) for rows, columns in pairs)
    masters = MasterExperts(*(product.astype(leaf.dtype) for product, leaf in zip(products, like, strict=True)))
    no_gradient = jax.tree.map(lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0), (group_sizes, experts))
    return dx, masters, *no_gradient


_ffn.defvjp(_ffn_fwd, _ffn_bwd)


def _grouped_outer(rows, columns, group_sizes):
    """rows^T columns within each group, float32 [E, out, in], by the compiler's own grouped product."""
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return lax.ragged_dot_general(
        rows, columns, group_sizes.astype(jnp.int32), dims, preferred_element_type=jnp.float32
    )
