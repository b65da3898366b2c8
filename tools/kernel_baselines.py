"""Straightforward forms that the ops and kernels are measured against. Nothing in maxmoe uses them."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from maxmoe.ops import mxfp4
from maxmoe.ops.experts import ExpertWeights
from maxmoe.ops.mla import einsum, masked_softmax
from maxmoe.ops.situ import situ_glu

_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def pairwise_decay(q, k, total):
    """sum_d x_id k_jd e^(G_id - G_jd) for x = q, k, from the tensor [C, C, K] of all pairs: safe for any gate."""
    size = total.shape[-2]
    causal = jnp.tril(jnp.ones((size, size), bool))[..., None]
    difference = jnp.where(causal, total[..., :, None, :] - total[..., None, :, :], -jnp.inf)
    return (_dot("...ik,...jk,...ijk->...ij", x, k, jnp.exp(difference)) for x in (q, k))


def middle_decay(q, k, total):
    """The same from two factors, anchored at the chunk's middle token.

    One factor is e^(32 times the decay of a token), which float32 does not hold beyond 88 nats: NaN at K3's bound of
    5 per token. It stands here as the cheapest chunk scan that there is, not as one that could be used.
    """
    size = total.shape[-2]
    middle = total[..., size // 2, None, :]
    key = k * jnp.exp(middle - total)
    return (jnp.tril(_dot("...ik,...jk->...ij", x * jnp.exp(total - middle), key)) for x in (q, k))


def kda_chunk_scan(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    *,
    decayed: Callable = pairwise_decay,
    chunk_size: int = 64,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """`maxmoe.ops.kda.kda_chunked` as one writes it first: a scan over chunks, solved row by row.

    Args:
      decayed: `pairwise_decay` or `middle_decay`.
    Raises: ValueError if T is not a multiple of the chunk size.
    """
    if q.shape[1] % chunk_size:
        raise ValueError(f"{q.shape[1]} tokens: this form takes multiples of {chunk_size}")

    def chunked(x):
        x = x.astype(jnp.float32).reshape(x.shape[0], -1, chunk_size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    def one_chunk(state, chunk):
        q, k, v, g, beta = chunk
        total = jnp.cumsum(g, axis=-2)
        a_qk, a_kk = decayed(q, k, total)
        lower = beta[..., None] * jnp.tril(a_kk, -1)
        error = beta[..., None] * (v - _dot("...ik,...kv->...iv", k * jnp.exp(total), state))

        def one_row(i, solved):
            known = _dot("...j,...jv->...v", jax.lax.dynamic_index_in_dim(lower, i, -2, keepdims=False), solved)
            row = jax.lax.dynamic_index_in_dim(solved, i, -2, keepdims=False) - known
            return jax.lax.dynamic_update_index_in_dim(solved, row, i, -2)

        delta = jax.lax.fori_loop(0, chunk_size, one_row, error)
        out = _dot("...ik,...kv->...iv", q * jnp.exp(total), state) + _dot("...ij,...jv->...iv", a_qk, delta)
        last = total[..., -1:, :]
        update = _dot("...ik,...iv->...kv", k * jnp.exp(last - total), delta)
        return jnp.exp(last[..., 0, :, None]) * state + update, out

    state, out = jax.lax.scan(one_chunk, state.astype(jnp.float32), tuple(map(chunked, (q, k, v, g, beta))))
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(*q.shape[:3], -1)
    return out.astype(v.dtype), state


def dequantize_then_ragged_dot(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    experts: ExpertWeights,
    layer: int,
    gate_beta: float,
    linear_beta: float,
) -> Float[Array, "N D"]:
    """`maxmoe.ops.experts.routed_experts` by way of all experts in x's dtype and a grouped product over them."""
    num_experts = experts.gate_packed.shape[1]
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    group_sizes = jnp.bincount(flat, length=num_experts).astype(jnp.int32)

    def product(rows, packed, scale):
        dense = jnp.swapaxes(mxfp4.dequantize(packed[layer], scale[layer], x.dtype), -1, -2)
        out = jax.lax.ragged_dot(rows, dense, group_sizes, preferred_element_type=jnp.float32)
        return out.astype(x.dtype)

    rows = x[order // expert_ids.shape[1]]
    gate = product(rows, experts.gate_packed, experts.gate_scale)
    up = product(rows, experts.up_packed, experts.up_scale)
    out = product(situ_glu(gate, up, gate_beta, linear_beta), experts.down_packed, experts.down_scale)
    out = jnp.zeros_like(out).at[order].set(out).reshape(*expert_ids.shape, -1)
    return jnp.sum(weights[..., None] * out.astype(jnp.float32), axis=1).astype(x.dtype)


def paged_sparse_attention(
    q: Float[Array, "B T H R+r"],
    pages: Float[Array, "P page R+r"],
    page_table: Int[Array, "B n"],
    indices: Int[Array, "B T top_k"],
    scale: float,
    latent_dim: int,
) -> Float[Array, "B T H R"]:
    """The context of `maxmoe.ops.sparse_mla.sparse_context`, on a paged cache of whole rows."""
    page_size = pages.shape[1]
    batch = jnp.arange(q.shape[0])[:, None, None]
    named = indices >= 0
    slot = jnp.where(named, indices, 0)
    chosen = pages[page_table[batch, slot // page_size], slot % page_size]
    chosen = jnp.where(named[..., None], chosen, 0)
    scores = scale * einsum("bqhc,bqkc->bqhk", q, chosen, dtype=jnp.float32)
    probs = masked_softmax(scores, named[:, :, None])
    return einsum("bqhk,bqkr->bqhr", probs.astype(q.dtype), chosen[..., :latent_dim])


def bf16_matmul_tpu(
    x: Float[Array, "M K"],
    w: Float[Array, "K N"],
    *,
    block: tuple[int, int, int] = (256, 512, 512),
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "M N"]:
    """x w in a Pallas kernel without anything but the product: what an MXFP4 kernel's bundles are held against.

    Args:
      block: Rows, columns and depth of one step; they must divide M, N and K.
    """
    rows, columns, depth = block

    def kernel(x, w, out, accumulator):
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            accumulator[...] = jnp.zeros_like(accumulator)

        accumulator[...] += jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)

        @pl.when(step == pl.num_programs(2) - 1)
        def _():
            out[...] = accumulator[...].astype(out.dtype)

    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // rows, w.shape[1] // columns, x.shape[1] // depth),
        in_specs=[
            pl.BlockSpec((rows, depth), lambda i, j, k: (i, k)),
            pl.BlockSpec((depth, columns), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype),
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="bf16_matmul_tpu",
    )(x, w)
