"""Muon for stacked matrices: momentum whose singular values are pushed to one, matrix by matrix.

A leaf holds many matrices: of layers, of experts, of heads. `optax.contrib.muon` flattens all leading axes into one
before it starts, and an axis that is split over devices cannot be joined with one that is not: every device would
gather all experts. Here leading axes stay as they are, and each head of an attention projection is a matrix of its own.
Source: Muon, kellerjordan.github.io/posts/muon; the scale of updates, arXiv:2502.16982.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: steep at zero, and within 0.7 .. 1.2 after five rounds
ROUNDS = 5
UPDATE_RMS = 0.2  # root mean square of an update's entries, that of AdamW


class Matrices(NamedTuple):
    """How a leaf [..., m, n] is cut into matrices.

    Attributes:
      num_heads: Heads that are joined in `head_axis`, -2 or -1, each a matrix of its own.
      spec: How the leaf lies on the mesh; None for one device.
    """

    num_heads: int = 1
    head_axis: int = -2
    spec: NamedSharding | None = None


class MuonState(NamedTuple):
    """The momentum, one leaf per matrix leaf."""

    momentum: Any


def scale_by_muon(matrices: Any, beta: float, momentum_dtype: Any) -> optax.GradientTransformation:
    """Replaces gradients by orthogonalised Nesterov momentum with entries of root mean square 0.2.

        M <- beta M + G;   O = orthogonalized(G + beta M);   update = 0.2 sqrt(max(m, n)) O

    Args:
      matrices: A tree of `Matrices` like that of the parameters.
      momentum_dtype: Of M; sums are formed in float32.
    """

    def init(params):
        return MuonState(jax.tree.map(lambda p: jnp.zeros_like(p, momentum_dtype), params))

    def update(gradients, state, params=None):
        del params

        def new_momentum(g, m):
            return beta * m.astype(jnp.float32) + g.astype(jnp.float32)

        def direction(g, m, how):
            m = new_momentum(g, m)
            return _orthogonal_update(g.astype(jnp.float32) + beta * m, how)

        updates = jax.tree.map(direction, gradients, state.momentum, matrices)
        momentum = jax.tree.map(lambda g, m: new_momentum(g, m).astype(m.dtype), gradients, state.momentum)
        return updates, MuonState(momentum)

    return optax.GradientTransformation(init, update)


def orthogonalized(x: Float[Array, "*b m n"], rounds: int = ROUNDS) -> Float[Array, "*b m n"]:
    """The matrices with their singular values pushed into about 0.7 .. 1.2, by Newton-Schulz; zeros stay zeros.

        X <- X / |X|_F;   rounds times:  A = X X^T;   X <- a X + (b A + c A A) X

    Products are in the platform's own precision for float32, on TPU one pass of bfloat16: the iteration corrects
    itself. A is formed over the longer side, so that it is as small as it can be.
    """
    a, b, c = COEFFICIENTS
    is_tall = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if is_tall else x
    x = x / (jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)) + 1e-30)

    def one_round(_, x):
        gram = jnp.einsum("...mk,...nk->...mn", x, x)
        polynomial = b * gram + c * jnp.einsum("...mk,...kn->...mn", gram, gram)
        return a * x + jnp.einsum("...mk,...kn->...mn", polynomial, x)

    x = jax.lax.fori_loop(0, rounds, one_round, x)
    return jnp.swapaxes(x, -1, -2) if is_tall else x


def _orthogonal_update(x, how):
    """0.2 sqrt(max(m, n)) times the orthogonalised matrices of a leaf."""
    shape = x.shape
    if how.num_heads > 1:
        rows, columns = shape[-2:]
        if how.head_axis == -2:
            x = x.reshape(*shape[:-2], how.num_heads, rows // how.num_heads, columns)
        else:
            x = jnp.swapaxes(x.reshape(*shape[:-1], how.num_heads, columns // how.num_heads), -2, -3)
    scale = UPDATE_RMS * math.sqrt(max(x.shape[-2:]))
    if how.spec is None or how.num_heads > 1 or x.ndim == 2:
        x = scale * orthogonalized(x)
    else:
        x = scale * _over_layers(x, how.spec)
    if how.num_heads > 1 and how.head_axis == -1:
        x = jnp.swapaxes(x, -2, -3)
    return x.reshape(shape)


def _over_layers(x, sharding):
    """`orthogonalized` of matrices [L, ..., m, n] that are split within, with whole matrices on as many devices.

    A product over a split side would sum A over devices, in every round. Instead the mesh axes that split matrices are
    given to the layers, as far as there are layers, which takes one exchange there and one back. Matrices of single
    heads are left alone: their A is small.
    """
    spec = [(part,) if isinstance(part, str) else part for part in sharding.spec]
    spec += [None] * (x.ndim - len(spec))
    moved, kept, count = [], [[], []], 1
    for side in (0, 1):
        for axis in spec[side - 2] or ():
            size = sharding.mesh.shape[axis]
            if count * size <= x.shape[0]:
                moved.append(axis)
                count *= size
            else:
                kept[side].append(axis)
    if not moved:
        return orthogonalized(x)
    pad = [(0, -x.shape[0] % count)] + [(0, 0)] * (x.ndim - 1)
    by_layers = PartitionSpec(tuple(moved), *spec[1:-2], *(tuple(axes) or None for axes in kept))
    constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(sharding.mesh, by_layers))
    whole = constrain(orthogonalized(constrain(jnp.pad(x, pad))))
    return jax.lax.with_sharding_constraint(whole[: x.shape[0]], sharding)
