"""Routed experts: MXFP4 weights, SiTU-GLU, tokens grouped by expert.

Tokens are sorted by expert and cut into blocks of rows that share one, so that each block is one small dense
FFN whose weights are dequantised just before use: no copy of the experts in a wider type ever exists whole. Gradients
compute a block again, so that nothing of it is kept from the forward pass.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from maxmoe.ops import dispatch, mxfp4
from maxmoe.ops.situ import situ_glu

MAX_BLOCK_ROWS = 128
AT_ONCE = 5 * 2**18  # weights that may be dequantised together; twice as many for a single row, which writes none out


class ExpertWeights(NamedTuple):
    """Weights of the E routed experts of L layers, as published: packed codes and scales, `[out, in]` each."""

    gate_packed: UInt8[Array, "L E F D/2"]
    gate_scale: UInt8[Array, "L E F D/32"]
    up_packed: UInt8[Array, "L E F D/2"]
    up_scale: UInt8[Array, "L E F D/32"]
    down_packed: UInt8[Array, "L E D F/2"]
    down_scale: UInt8[Array, "L E D F/32"]


class ExpertMasters(NamedTuple):
    """What training rounds to `ExpertWeights`, in bfloat16 or float32."""

    gate: Float[Array, "L E F D"]
    up: Float[Array, "L E F D"]
    down: Float[Array, "L E D F"]


def routed_experts(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    experts: ExpertWeights,
    layer: int | Int[Array, ""],
    gate_beta: float,
    linear_beta: float,
    implementation: str | None = None,
) -> Float[Array, "N D"]:
    """sum_k weights_k * expert_k(x), with expert(x) = situ_glu(x Wg^T, x Wu^T) Wd^T rounded to x's dtype.

    The sum runs in float32 in the order of k, whatever else is in the batch, and is rounded once.

    Args:
      layer: Which of the stacked layers; its experts are read in place, a few at a time, never sliced out whole.
      expert_ids: An id outside 0..E-1, such as that of a padding token, names no expert and adds nothing.
      gate_beta, linear_beta: Of `situ_glu`.
      implementation: See `expert_outputs`.
    """
    outputs = expert_outputs(x, expert_ids, experts, layer, gate_beta, linear_beta, implementation=implementation)
    return weighted_sum(outputs, expert_ids, weights, experts.gate_packed.shape[1])


def weighted_sum(
    outputs: Float[Array, "N k D"], expert_ids: Int[Array, "N k"], weights: Float[Array, "N k"], num_experts: int
) -> Float[Array, "N D"]:
    """The sum of `routed_experts` over what `expert_outputs` gave."""
    named = _named(expert_ids, num_experts)
    weighted = jnp.where(named[..., None], weights[..., None] * outputs.astype(jnp.float32), 0)
    return sum(weighted[:, j] for j in range(expert_ids.shape[1])).astype(outputs.dtype)


def expert_outputs(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    experts: ExpertWeights,
    layer: int | Int[Array, ""],
    gate_beta: float,
    linear_beta: float,
    places: Int[Array, "E"] | None = None,
    implementation: str | None = None,
    expected_rows: int | None = None,
) -> Float[Array, "N k D"]:
    """expert(x) of every assignment, differentiable in x. What stands where an id names no expert means nothing.

    A kernel works on the N * k assignments as rows in the order of their experts, those that name none last. Beside
    the outputs two arrays [N * k, D] in x's dtype exist for that; all other cost is that of rows that have an expert.

    Args:
      gate_beta, linear_beta: Of `situ_glu`.
      places: For a stack that holds some of the E experts, in any order: where each lies, -1 for those that are not
        there, which then are not named. How tokens are grouped depends on E alone, so that neither what else is
        held nor where changes a bit of an output. None for a stack that holds them all, in order.
      implementation: See `dispatch.choose`. No kernel takes `places`. The one for GPU has the plain form's gradient.
      expected_rows: How many of the assignments name an expert as a rule, where most do not, as on a device that has
        few of all experts: what the kernel's block sizes suit. None for all.
    Raises: NotImplementedError for a named kernel that cannot run.
    """

    def unless_places(refusal):
        if places is not None:
            return "only the plain form takes `places`: a kernel wants a stack of all experts, in order"
        return refusal((expert_ids.size, x.shape[1]), x.dtype, experts)

    refusals = {
        "pallas_tpu": lambda: unless_places(_tpu().moe_experts_tpu_refusal),
        "pallas_gpu": lambda: unless_places(_gpu().moe_experts_gpu_refusal),
    }
    chosen = dispatch.choose("expert_outputs", implementation, refusals)
    expert_ids, layer = expert_ids.astype(jnp.int32), jnp.asarray(layer, jnp.int32)
    if chosen == "pallas_tpu":  # has a gradient of its own
        kernel = functools.partial(_tpu_kernel, expected_rows)
        return _in_rows(kernel, (gate_beta, linear_beta), x, expert_ids, experts, layer)
    return _outputs((chosen, gate_beta, linear_beta), x, expert_ids, experts, layer, places)


def expert_outputs_from_masters(
    x: Float[Array, "N D"],
    expert_ids: Int[Array, "N k"],
    masters: ExpertMasters,
    layer: int | Int[Array, ""],
    gate_beta: float,
    linear_beta: float,
    packed: ExpertWeights | None = None,
    implementation: str | None = None,
) -> Float[Array, "N k D"]:
    """`expert_outputs` of the masters packed by `mxfp4.quantize`, bit for bit; differentiable in x and in the masters.

    Gradients are those at the packed weights. Rounding has none: a rounded weight's goes to its master as it is, after
    a sum over tokens in float32 and one rounding to the master's dtype.

    The plain form packs the experts in use, a few at a time. The TPU kernel wants all E experts of the layer packed,
    4.25 bits per weight. The gradient pass holds float32 sums of the size of the layer's masters.

    Args:
      masters: Only `layer` of them is read; the gradient of the others is 0.
      packed: What the masters were packed to, where that is known. Only shape and dtype of masters then matter.
      implementation: See `dispatch.choose`; there is a kernel for TPU.
    Raises: ValueError if F or D is not a multiple of 32; NotImplementedError for a named kernel that cannot run.
    """
    shapes = jax.eval_shape(_packed, masters)
    refusals = {
        "pallas_tpu": lambda: _tpu().moe_experts_tpu_refusal((expert_ids.size, x.shape[1]), x.dtype, shapes),
        "pallas_gpu": lambda: "no GPU kernel takes masters; pack them for inference, and call expert_outputs",
    }
    chosen = dispatch.choose("expert_outputs", implementation, refusals)
    expert_ids, layer = expert_ids.astype(jnp.int32), jnp.asarray(layer, jnp.int32)
    if chosen == "pallas_tpu":
        kernel = functools.partial(_tpu_masters_kernel, packed)
        return _in_rows(kernel, (gate_beta, linear_beta), x, expert_ids, masters, layer)
    experts = masters if packed is None else _PackedMasters(packed, masters)
    return _outputs((chosen, gate_beta, linear_beta), x, expert_ids, experts, layer, None)


class _PackedMasters(NamedTuple):
    packed: ExpertWeights
    masters: ExpertMasters


def _packed(masters):
    return ExpertWeights(*(leaf for master in masters for leaf in mxfp4.quantize(master)))


# The plain form, and a GPU kernel with the gradient of the plain form.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _outputs(how, x, expert_ids, experts, layer, places):
    chosen, *betas = how
    if chosen == "pallas_gpu":
        return _in_rows(_gpu_kernel, betas, x, expert_ids, experts, layer)
    plan, block_weights, per_step = _prepare(x, expert_ids, experts, layer, places)

    def ffn(chosen, rows):
        w = block_weights(chosen)
        # One product of twice the width is faster than two. Its columns come out as the next product takes them.
        pairs = ((w.gate_packed, w.up_packed), (w.gate_scale, w.up_scale))
        packed, scale = (jnp.concatenate([mxfp4.packed_order(a, axis=-2) for a in pair], axis=-2) for pair in pairs)
        gate, up = jnp.split(mxfp4.matmul(rows, packed, scale), 2, axis=-1)
        return mxfp4.matmul(situ_glu(gate, up, *betas), w.down_packed, w.down_scale)

    out = _run_blocks(ffn, mxfp4.packed_order(x), plan, per_step)
    return out.reshape(-1, x.shape[1])[plan.slots]


def _outputs_forward(how, *args):
    return _outputs(how, *args), args


def _outputs_backward(how, saved, d_outputs):
    """Gradients of x, and of masters where the experts are masters; by blocks, as the forward pass."""
    x, expert_ids, experts, layer, places = saved
    masters = experts.masters if isinstance(experts, _PackedMasters) else experts
    betas, of_masters = how[1:], isinstance(masters, ExpertMasters)
    plan, block_weights, per_step = _prepare(x, expert_ids, experts, layer, places)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    flat = jnp.asarray(d_outputs).reshape(-1, x.shape[1])
    chosen, assignments = _steps(plan, per_step)
    top_k = expert_ids.shape[1]

    def one_step(step, carry):
        d_rows, sums = carry
        w, own = block_weights(chosen[step]), assignments[step]
        pairs = ((w.gate_packed, w.gate_scale), (w.up_packed, w.up_scale), (w.down_packed, w.down_scale))
        gate_w, up_w, down_w = (mxfp4.dequantize(*pair, x.dtype) for pair in pairs)
        # Where there is no row a zero stands, not just any token: 0 times its NaN would reach a sum over rows.
        rows, d_out = (jnp.where(own[..., None] >= 0, value, 0) for value in (x[own // top_k], flat[own]))
        gate, up = (dot("bnd,bfd->bnf", rows, w).astype(x.dtype) for w in (gate_w, up_w))
        hidden, pull = jax.vjp(lambda gate, up: situ_glu(gate, up, *betas), gate, up)
        d_gate, d_up = pull(dot("bnd,bdf->bnf", d_out, down_w).astype(x.dtype))
        d_x = dot("bnf,bfd->bnd", d_gate, gate_w) + dot("bnf,bfd->bnd", d_up, up_w)
        if of_masters:
            products = ((d_gate, rows), (d_up, rows), (d_out, hidden))
            new = (dot("bno,bni->boi", d, value) for d, value in products)
            sums = tuple(total.at[chosen[step]].add(d, mode="drop") for total, d in zip(sums, new, strict=True))
        return d_rows.at[step].set(d_x.astype(x.dtype)), sums

    sums = tuple(jnp.zeros(leaf.shape[1:], jnp.float32) for leaf in masters) if of_masters else ()
    steps_in_use = jnp.sum(chosen[:, 0] < plan.num_experts)
    d_rows = jnp.zeros((*assignments.shape, x.shape[1]), x.dtype)
    d_rows, sums = jax.lax.fori_loop(0, steps_in_use, one_step, (d_rows, sums))
    d_x = _sum_of_assignments(d_rows.reshape(-1, x.shape[1]), plan.slots, plan.named)
    if not of_masters:
        return d_x, None, None, None, None
    d_masters = (jnp.zeros_like(m).at[layer].set(d.astype(m.dtype)) for m, d in zip(masters, sums, strict=True))
    d_masters = ExpertMasters(*d_masters)
    return d_x, None, d_masters if experts is masters else _PackedMasters(None, d_masters), None, None


_outputs.defvjp(_outputs_forward, _outputs_backward)


def _prepare(x, expert_ids, experts, layer, places):
    """The plan of blocks, block_weights(experts of a step) -> their packed weights, and the blocks of a step."""
    experts = experts.packed if isinstance(experts, _PackedMasters) else experts
    num_experts, expert_dim = experts[0].shape[1:3]
    if places is not None:
        num_experts = places.shape[0]
        held = _named(expert_ids, num_experts) & (places[expert_ids] >= 0)
        expert_ids = jnp.where(held, expert_ids, num_experts)
    block_rows = _block_rows(expert_ids.size, num_experts)
    plan = _plan_blocks(expert_ids, num_experts, block_rows)

    def block_weights(chosen):
        chosen = jnp.minimum(chosen, num_experts - 1)
        if places is not None:
            chosen = jnp.maximum(places[chosen], 0)
        w = jax.tree.map(lambda leaf: leaf[layer, chosen], experts)
        return _packed(w) if isinstance(w, ExpertMasters) else w

    at_once = AT_ONCE if block_rows > 1 else 2 * AT_ONCE
    per_step = max(1, min(plan.block_experts.size, at_once // (3 * expert_dim * x.shape[1])))
    return plan, block_weights, per_step


def _steps(plan, per_step):
    """Experts [steps, blocks] and assignments [steps, blocks, rows] of `per_step` blocks together; -1 for no row."""
    pad = -plan.block_experts.size % per_step
    chosen = jnp.pad(plan.block_experts, (0, pad), constant_values=plan.num_experts).reshape(-1, per_step)
    assignments = jnp.pad(plan.block_assignments, ((0, pad), (0, 0)), constant_values=-1)
    return chosen, assignments.reshape(*chosen.shape, -1)


def _run_blocks(ffn, x, plan, per_step):
    """Runs `per_step` blocks together; steps after the last block in use cost nothing."""
    chosen, assignments = _steps(plan, per_step)
    # Any row will do where there is none.
    tokens = jnp.maximum(assignments, 0) // plan.slots.shape[1]
    if chosen.shape[0] == 1:
        return ffn(chosen[0], x[tokens[0]])

    def one_step(_, step):
        chosen, tokens = step
        in_use = chosen[0] < plan.num_experts
        return None, jax.lax.cond(in_use, ffn, lambda _, rows: jnp.zeros_like(rows), chosen, x[tokens])

    return jax.lax.scan(one_step, None, (chosen, tokens))[1]


class _Plan(NamedTuple):
    num_experts: int
    block_experts: Int[Array, "blocks"]  # E for a block that is not used
    block_assignments: Int[Array, "blocks rows"]  # n * k + j of each row; -1 where there is none
    slots: Int[Array, "N k"]  # where in the joined blocks each assignment's output lies
    named: Array  # bool [N, k]


def _named(expert_ids, num_experts):
    return (expert_ids >= 0) & (expert_ids < num_experts)


def _block_rows(num_assignments: int, num_experts: int) -> int:
    """Rows per block: 1 where experts outnumber assignments, else room for a quarter more than the mean share."""
    if num_assignments <= num_experts:
        return 1
    return min(MAX_BLOCK_ROWS, -(-5 * num_assignments // (4 * num_experts)) + 15 & ~15)


def _plan_blocks(expert_ids, num_experts, rows):
    named = _named(expert_ids, num_experts)
    flat = jnp.where(named, expert_ids, num_experts).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    group_sizes = jnp.bincount(flat, length=num_experts + 1)
    group_starts = jnp.cumsum(group_sizes) - group_sizes
    group_blocks = -(-group_sizes[:num_experts] // rows)
    block_ends = jnp.cumsum(group_blocks)
    # Each expert in use wastes at most rows - 1 rows of its last block.
    num_blocks = (flat.size + min(num_experts, flat.size) * (rows - 1)) // rows
    blocks = jnp.arange(num_blocks)
    block_experts = jnp.searchsorted(block_ends, blocks, side="right")
    rank_of_block = blocks - jnp.append(block_ends - group_blocks, 0)[block_experts]
    row_in_group = rank_of_block[:, None] * rows + jnp.arange(rows)
    in_group = row_in_group < group_sizes[block_experts][:, None]
    filled = in_group & (block_experts < num_experts)[:, None]
    sorted_row = jnp.where(filled, group_starts[block_experts][:, None] + row_in_group, 0)
    block_assignments = jnp.where(filled, order[sorted_row], -1)

    rank = jnp.arange(flat.size) - group_starts[flat[order]]
    first_row = jnp.append((block_ends - group_blocks) * rows, 0)[flat[order]]
    slots = jnp.zeros_like(flat).at[order].set(jnp.where(flat[order] < num_experts, first_row + rank, 0))
    return _Plan(num_experts, block_experts, block_assignments, slots.reshape(expert_ids.shape), named)


# Kernels: rows in the order of their experts, and back.


class _Rows(NamedTuple):
    assignment: Int[Array, "N*k"]  # of each row, in the order of experts; those that name none are last
    row: Int[Array, "N k"]  # of each assignment
    named: Array  # bool [N, k]


def _in_rows(kernel, betas, x, expert_ids, experts, layer):
    """[N, k, D] by kernel(rows [N * k, D], int32 group_sizes [E], experts, layer, *betas) -> [N * k, D]."""
    num_experts = experts[0].shape[1]
    named = _named(expert_ids, num_experts)
    flat = jnp.where(named, expert_ids, num_experts).reshape(-1)
    by_expert, assignment = jax.lax.sort_key_val(flat, jnp.arange(flat.size, dtype=jnp.int32))
    ends = jnp.searchsorted(by_expert, jnp.arange(num_experts, dtype=jnp.int32), side="right").astype(jnp.int32)
    row = jnp.zeros_like(flat).at[assignment].set(jnp.arange(flat.size, dtype=jnp.int32), unique_indices=True)
    rows = _Rows(assignment, row.reshape(expert_ids.shape), named)
    out = kernel(_rows_of_tokens(x, rows), jnp.diff(ends, prepend=0), experts, layer, *betas)
    return _outputs_of_rows(out, rows)


# Each row comes from one place, so that both gradients are gathers too, where autodiff would scatter.


@jax.custom_vjp
def _rows_of_tokens(x, rows):
    return x[rows.assignment // rows.row.shape[1]]


_rows_of_tokens.defvjp(
    lambda x, rows: (_rows_of_tokens(x, rows), rows),
    lambda rows, gradient: (_sum_of_assignments(gradient, rows.row, rows.named), None),
)


@jax.custom_vjp
def _outputs_of_rows(out, rows):
    return out[rows.row]


_outputs_of_rows.defvjp(
    lambda out, rows: (_outputs_of_rows(out, rows), rows),
    lambda rows, gradient: (gradient.reshape(-1, gradient.shape[-1])[rows.assignment], None),
)


def _sum_of_assignments(rows, where, named):
    """The sum over a token's assignments, in float32; `where` each [N, k] has its row."""
    return jnp.sum(jnp.where(named[..., None], rows[where], 0), axis=1, dtype=jnp.float32).astype(rows.dtype)


def _tpu_kernel(expected_rows, rows, group_sizes, experts, layer, *betas):
    weights = _tpu().Mxfp4Experts(*experts)
    return _tpu().moe_experts_tpu(rows, group_sizes, weights, layer, *betas, expected_rows=expected_rows)


def _tpu_masters_kernel(packed, rows, group_sizes, masters, layer, *betas):
    from pallas_kernels.moe_experts_master_tpu import MasterExperts, packed_forward, quantised_forward

    of_layer = MasterExperts(*(leaf[layer] for leaf in masters))
    if packed is None:
        return quantised_forward(rows, group_sizes, of_layer, mxfp4.quantize, *betas)
    of_packed = _tpu().Mxfp4Experts(*(leaf[layer][None] for leaf in packed))
    how = _tpu().settings(rows.shape[0], *betas, None, None, None)
    return packed_forward(how, rows, group_sizes, of_layer, of_packed)


def _gpu_kernel(rows, group_sizes, experts, layer, *betas):
    return _gpu().moe_experts_gpu(rows, group_sizes, experts, layer, *betas)


def _tpu():
    """The kernel for TPU; importing Pallas takes a second that few need."""
    from pallas_kernels import moe_experts_tpu

    return moe_experts_tpu


def _gpu():
    from pallas_kernels import moe_experts_gpu

    return moe_experts_gpu
