"""Kimi Delta Attention over packed sequences on TPU: 64 tokens of several heads per program.

    S <- diag(exp g_t) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T;   o_t = S^T q_t

The state of a sequence stays in VMEM, in the output block that becomes its final state, from the sequence's first
chunk to its last. Sequences may start and end anywhere: a list of work items, made from `cu_seqlens` and held in
scalar memory, names for each program the chunk, the sequence and the rows of the chunk that belong to it.
Source: Kimi Linear, arXiv:2510.26692, and the chunked form of it derived in `kda_chunk_math_tpu`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import kda_chunk_math_tpu as math
from pallas_kernels.kda_work_list_tpu import CLEAR, COMPUTE, unpack_item, work_list
from pallas_kernels.tiling import KDA_CHUNK_TPU7X, KDA_CHUNK_V5P, KDA_CHUNK_V6E, KdaChunkTpuTiling

CHUNK = math.CHUNK
_DIM = math.DIM


def kda_chunk_refusal(
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], dtype: jnp.dtype, num_states: int | None = None
) -> str | None:
    """Why `kda_chunk_tpu` cannot run for q [B, T, H, K] and v [B, T, H, V] of this dtype; None if it can."""
    batch, num_tokens, heads, key_dim = q_shape
    if (key_dim, v_shape[-1]) != (_DIM, _DIM):
        return f"key and value dims {key_dim} and {v_shape[-1]}: the TPU kernel handles {_DIM} and {_DIM}"
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        return f"values of {jnp.dtype(dtype).name}: the TPU kernel handles float32 and bfloat16"
    if num_tokens < 1 or heads < 1 or batch < 1:
        return f"q of shape {q_shape}: batch, tokens and heads must be at least 1"
    if num_states is not None and num_states < 1:
        return "no initial state: the TPU kernel handles 1 sequence or more"
    return None


def kda_chunk_tpu(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    cu_seqlens: jax.Array | None = None,
    state_positions: jax.Array | None = None,
    tiling: KdaChunkTpuTiling | None = None,
    interpret=None,
):
    """Runs KDA over a batch of rows, or over sequences packed one after another in a single row.

    No exponent is ever positive, so any gate is safe, bounded or not; a token never depends on a later one, not even
    by rounding. A NaN spreads through its sequence's part of a chunk, and never to another sequence.

    Args:
      q: Queries [B, T, H, 128], float32 or bfloat16, already scaled by K**-0.5.
      k: Keys [B, T, H, 128].
      v: Values [B, T, H, 128], float32 or bfloat16; the outputs have its dtype.
      g: Log decay per key channel [B, T, H, 128], in nats, <= 0; computed on in float32.
      beta: Step size [B, T, H].
      state: S before the first token of each sequence, float32 [N, H, 128, 128]; N is B without `cu_seqlens`.
      cu_seqlens: int32 [N + 1], nondecreasing from 0 to at most T, with B == 1: sequence n is the tokens from
        cu_seqlens[n] up to cu_seqlens[n + 1]. A sequence of no tokens keeps its state. Outputs beyond the last are 0.
      state_positions: int32 [P], in any order, each in 1..T: states wanted besides the final ones. Entry p asks for
        the state after the row's first p tokens, of the sequence that token p - 1 belongs to. Multiples of 64 cost
        nothing but the write; any other position cuts a chunk in two.
      tiling: None for that of the chip which is compiled for.
      interpret: Passed on to `pallas_call`.
    Returns: Outputs [B, T, H, 128] in v's dtype, final states float32 [N, H, 128, 128] and, if `state_positions` is
      given, the states asked for, float32 [B, P, H, 128, 128].
    Raises: NotImplementedError with the text of `kda_chunk_refusal`; ValueError if shapes do not belong together.
    """
    for x in (q, k, v):
        refusal = kda_chunk_refusal(q.shape, v.shape, x.dtype, state.shape[0])
        if refusal:
            raise NotImplementedError(f"kda_chunk_tpu: {refusal}")
    batch, num_tokens, heads, _ = q.shape
    _check_shapes(q, k, v, g, beta, state, cu_seqlens)
    starts = np.arange(batch + 1, dtype=np.int32) * num_tokens if cu_seqlens is None else cu_seqlens
    asked = None
    if state_positions is not None:
        rows = np.arange(batch, dtype=np.int32)[:, None] * num_tokens
        asked = (rows + state_positions.astype(np.int32)[None, :]).reshape(-1)
    lanes = [x.reshape(batch * num_tokens, heads * _DIM) for x in (q, k, v, g.astype(jnp.float32))]
    beta = beta.astype(jnp.float32).reshape(batch * num_tokens, heads)
    out, *states = _packed(*lanes, beta, state.astype(jnp.float32), starts, asked, tiling or _chip()[0], interpret)
    out = out.reshape(batch, num_tokens, heads, _DIM)
    if asked is None:
        return out, states[0]
    return out, states[0], states[1].reshape(batch, -1, heads, _DIM, _DIM)


def _check_shapes(q, k, v, g, beta, state, cu_seqlens):
    batch, _, heads, _ = q.shape
    for name, x, shape in (
        ("k", k, q.shape),
        ("v", v, q.shape),
        ("g", g, q.shape),
        ("beta", beta, q.shape[:3]),
        ("state", state, (state.shape[0], heads, _DIM, _DIM)),
    ):
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}: q of shape {q.shape} needs {shape}")
    if cu_seqlens is None:
        if state.shape[0] != batch:
            raise ValueError(f"{state.shape[0]} states for {batch} rows: without cu_seqlens there is one per row")
        return
    if batch != 1:
        raise ValueError(f"cu_seqlens with {batch} rows: packed sequences share one row; reshape q to [1, B * T, ...]")
    if cu_seqlens.shape != (state.shape[0] + 1,):
        raise ValueError(f"cu_seqlens of shape {cu_seqlens.shape}: {state.shape[0]} states need {state.shape[0] + 1}")


def _packed(q, k, v, g, beta, state, starts, asked, tiling, interpret):
    """The kernel call: tokens [T, H * 128], beta [T, H], states [N, H, 128, 128], asked [P] or None."""
    num_tokens, heads = beta.shape
    group = heads_of_program(heads, tiling.heads_per_program)
    items = work_list(starts, asked, num_tokens, CHUNK)
    # One program reads its heads' columns; as a block of [T, H] they would not start at a multiple of 128 lanes.
    beta = jnp.moveaxis(beta.reshape(num_tokens, heads // group, group), 1, 0)

    def token_block(h, w, chunk, seq, slot, meta):
        return chunk[w], h

    tokens = pl.BlockSpec((CHUNK, group * _DIM), token_block)
    betas = pl.BlockSpec((None, CHUNK, group), lambda h, w, chunk, seq, slot, meta: (h, chunk[w], 0))
    states = pl.BlockSpec((None, group, _DIM, _DIM), lambda h, w, chunk, seq, slot, meta: (seq[w], h, 0, 0))
    out_specs = [tokens, states]
    out_shape = [jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, jnp.float32)]
    if asked is not None:
        out_specs.append(
            pl.BlockSpec((None, group, _DIM, _DIM), lambda h, w, chunk, seq, slot, meta: (slot[w], h, 0, 0))
        )
        out_shape.append(jax.ShapeDtypeStruct((asked.shape[0], *state.shape[1:]), jnp.float32))
    return pl.pallas_call(
        functools.partial(_kernel, group=group, tiling=tiling),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(items),
            grid=(heads // group, items[0].shape[0]),
            in_specs=[tokens, tokens, tokens, tokens, betas, states],
            out_specs=out_specs,
            scratch_shapes=math.scratch(group),
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost((q, k, v, g, beta, state), out_shape, heads, items[0].shape[0]),
        interpret=False if interpret is None else interpret,
        name="kda_chunk_tpu",
    )(*items, q, k, v, g, beta, state)


def _cost(operands, results, heads, num_items):
    """What the compiler is told: everything passes HBM once, and every item takes a chunk's work."""
    flops, exponentials = math.chunk_cost()
    return pl.CostEstimate(
        flops=flops * heads * num_items,
        transcendentals=exponentials * heads * num_items,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*operands, *results)),
    )


def _kernel(chunk, seq, slot, meta, q, k, v, g, beta, state_in, out, state, *rest, group, tiling):
    """One work item of one group of heads; `state` is carried from item to item in the window of the final state."""
    del chunk, seq, slot
    asked, scratch = (rest[0], rest[1:]) if len(rest) > len(math.scratch(group)) else (None, rest)
    item = unpack_item(meta[pl.program_id(1)])

    @pl.when(item.first)
    def _():
        _copy(state_in, state)

    stages = math.chunk_stages(q, k, v, g, beta, state, out, item.start, item.end, scratch, tiling)
    # The compiler joins branches under one condition, so that as many conditions keep the stages apart.
    todo = jnp.where(item.mode == COMPUTE, len(stages), 0)
    for i, stage in enumerate(stages):
        pl.when(todo > (i if tiling.branch_per_stage else 0))(stage)

    @pl.when(item.mode == CLEAR)
    def _():
        row = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, _DIM), 0)

        @pl.loop(0, group)
        def _(h):
            lanes = pl.ds(pl.multiple_of(h * _DIM, _DIM), _DIM)
            out[:, lanes] = jnp.where(row >= item.start, jnp.zeros((), out.dtype), out[:, lanes])

    if asked is not None:

        @pl.when(item.emit)
        def _():
            _copy(state, asked)


def _chip():
    """Tiling for the chip that is compiled for, and how many cores share the programs of one kernel."""
    try:
        chip = pltpu.get_tpu_info()
    except ValueError:  # no TPU, and none that is compiled for: the interpreter
        return KDA_CHUNK_V6E, 1
    if chip.generation <= 5:
        return KDA_CHUNK_V5P, chip.num_cores
    return (KDA_CHUNK_V6E if chip.generation == 6 else KDA_CHUNK_TPU7X), chip.num_cores


def heads_of_program(heads: int, most: int) -> int:
    """The largest number up to `most` that divides the heads so that every core has as many programs as the others."""
    divisors = [n for n in range(1, most + 1) if heads % n == 0]
    return max([n for n in divisors if heads // n % _chip()[1] == 0] or divisors)


def _copy(source, target):
    """Head by head, which keeps the program short."""

    @pl.loop(0, source.shape[0])
    def _(h):
        target[h] = source[h]
