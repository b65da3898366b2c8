"""Runs `maxmoe.ops.sparse_shards` on meshes of eight devices: python sparse_shards_on_devices.py RESULTS.npz.

`test_sparse_shards` starts it in a process of eight devices, makes the same inputs, and judges the results.
"""

import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from maxmoe.ops import query_blocks, sparse_shards
from maxmoe.ops.latent_cache import LatentRows, empty_rows, write_rows
from tests.ops.quick_jit import quick_jit

NUM_SLOTS, LAYER = 48, 1
MESHES = {"seq8": (8, 1, 1), "seq4_tensor2": (4, 1, 2), "seq2_expert2_tensor2": (2, 2, 2)}
SLOTS = ("seq", "tensor")


def make_mesh(name):
    sizes = MESHES.get(name, (1, 1, 1))
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, ("seq", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)


# ---- Which slots ----------------------------------------------------------------------------------------------------

SELECT_TOP_K = (1, 5, 13, 60)  # 6 slots on each of 8 devices, 48 of all
SELECT_RUNS = [  # mesh, axes of the slots, how scores travel, check_vma
    ("seq8", SLOTS, "gathered", False),
    ("seq8", SLOTS, "exchanged", True),
    ("seq4_tensor2", SLOTS, "gathered", True),
    ("seq4_tensor2", SLOTS, "exchanged", False),
    ("seq4_tensor2", ("tensor", "seq"), "exchanged", False),
    ("seq4_tensor2", ("tensor", "seq"), "gathered", False),
    ("seq4_tensor2", ("tensor",), "exchanged", False),
    ("seq2_expert2_tensor2", SLOTS, "exchanged", True),
    ("seq2_expert2_tensor2", SLOTS, "gathered", False),
]


def select_cases():
    """Name -> q, keys of two layers, head weights and positions: two sequences, five queries."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 5, 3, 4)).astype(np.float32)
    keys = rng.standard_normal((2, 2, 4, NUM_SLOTS)).astype(np.float32)
    weights = rng.standard_normal((2, 5, 3)).astype(np.float32)
    apart = np.stack([np.arange(43, 48), np.array([0, 2, 7, 11, 30])]).astype(np.int32)
    few = np.stack([np.arange(5), np.full(5, -1)]).astype(np.int32)
    last = np.full((2, 5), NUM_SLOTS - 1, np.int32)
    whole = [rng.integers(-1, 2, x.shape).astype(np.float32) for x in (q, keys, weights)]
    ones, best = np.ones_like(q), np.abs(keys) - 9 * (np.arange(NUM_SLOTS) // 6 != 3).astype(np.float32)
    cases = {
        "random": (q, keys, weights, last),
        "rows at different positions": (q, keys, weights, apart),
        "few visible": (q, keys, weights, few),
        "many ties": (*whole, last),
        "many ties, rows at different positions": (*whole, apart),
        "all equal": (q, np.zeros_like(keys), weights, last),
        "one device holds the best": (ones, best, np.ones_like(weights), last),
    }
    odd = keys.copy()
    odd[:, :, :, ::3] = np.nan
    cases["NaN scores"] = (q, odd, weights, apart)
    odd = keys.copy()
    odd[:, :, 0, ::3], odd[:, :, 0, 1::3] = np.inf, -np.inf
    cases["infinite scores"] = (q, odd, weights, last)
    stale = keys.copy()
    stale[:, 0, :, 3:], stale[:, 1, :, 31:] = np.nan, np.nan
    cases["stale slots"] = (q, stale, weights, np.stack([np.array([-1, 0, 1, 2, 2]), apart[1]]).astype(np.int32))
    return cases


def all_select_cases():
    """The sequences of all cases in one batch."""
    cases = select_cases().values()
    return [np.concatenate(parts, axis=int(i == 1)) for i, parts in enumerate(zip(*cases, strict=True))]


def sharded_select(mesh, slot_axes, check_vma):
    """For each top_k the slots as each device gives them, side by side: [B, T, P top_k]."""

    def select(q, keys, weights, positions):
        return [
            sparse_shards.select_over_shards(q, keys, LAYER, weights, positions, top_k, slot_axes)
            for top_k in SELECT_TOP_K
        ]

    rows = PartitionSpec("expert")
    keys = PartitionSpec(None, "expert", None, slot_axes)
    out = PartitionSpec("expert", None, slot_axes)
    return jax.shard_map(select, mesh=mesh, in_specs=(rows, keys, rows, rows), out_specs=out, check_vma=check_vma)


def _run_select(results):
    usual = sparse_shards.choose_exchange
    for mesh, slot_axes, form, check_vma in SELECT_RUNS:
        sparse_shards.choose_exchange = lambda *_, form=form: form
        select = quick_jit(sharded_select(make_mesh(mesh), slot_axes, check_vma))
        results[f"select/{mesh}/{slot_axes}/{form}"] = select(*all_select_cases())
    sparse_shards.choose_exchange = usual


# ---- Attention ------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How one run of the layer lies on a mesh."""

    mesh: str
    slot_axes: tuple[str, ...] = SLOTS
    head_axis: str | None = None
    query_axis: str | None = None
    budget: int = query_blocks.BUDGET
    movement: str = "queries"
    check_vma: bool = False


BLOCKS = 4000  # blocks of two or three of a device's queries, neither of which divides them all
LAYOUTS = [
    Layout("seq8", query_axis="seq"),
    Layout("seq8", check_vma=True),
    Layout("seq4_tensor2", head_axis="tensor", query_axis="seq", budget=BLOCKS),
    Layout("seq4_tensor2", head_axis="tensor"),
    Layout("seq4_tensor2", ("tensor", "seq"), head_axis="tensor", query_axis="seq", check_vma=True),
    Layout("seq4_tensor2", ("seq",), head_axis="tensor", query_axis="seq"),  # each device its own heads
    Layout("seq4_tensor2", ("tensor",), head_axis="tensor", query_axis="seq", budget=BLOCKS),  # its own queries
    Layout("seq2_expert2_tensor2", head_axis="tensor", query_axis="seq", budget=BLOCKS),
    Layout("seq4_tensor2", head_axis="tensor", query_axis="seq", budget=BLOCKS, movement="rows"),
    Layout("seq4_tensor2", ("tensor", "seq"), head_axis="tensor", query_axis="seq", movement="rows", check_vma=True),
    Layout("seq4_tensor2", ("tensor",), head_axis="tensor", movement="rows"),
    Layout("seq2_expert2_tensor2", head_axis="tensor"),
]
ATTEND_CASES = ("prefill", "decode", "wide rows")
ATTEND_TOP_K = 9  # more than the 6 slots of a device, fewer than the 48 of all
SCALE = 0.07


def attend_cases(layout):
    """The cases that run on a layout."""
    cases = ["prefill"] if layout.query_axis else ["prefill", "decode"]
    return [*cases, "wide rows"] if layout.mesh == "seq4_tensor2" and layout.budget == BLOCKS else cases


def attend_inputs(case):
    """q, q_shared, index q, index keys, head weights, rows, positions; two sequences, NaN in what none may see."""
    rng = np.random.default_rng(ATTEND_CASES.index(case))
    num_queries = 1 if case == "decode" else 16
    latent_dim, shared_dim = (128, 64) if case == "wide rows" else (16, 3)
    num_slots = 96 if case == "wide rows" else NUM_SLOTS  # wide rows lie in groups of four

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    last = np.array([num_slots - 2, num_slots // 3])  # the second sequence leaves most devices without a slot to see
    positions = (last[:, None] - num_queries + 1 + np.arange(num_queries)).astype(np.int32)
    if case == "prefill":
        positions[1] = np.arange(num_queries) - 2  # the first two see nothing, and few have top_k slots
        last = positions[:, -1]
    new, keys = normal(2, num_slots, latent_dim + shared_dim), normal(2, 2, 5, num_slots)
    for b in range(2):
        new[b, last[b] + 1 :] = np.nan
        keys[:, b, :, last[b] + 1 :] = np.nan
    slots = np.broadcast_to(np.arange(num_slots), (2, num_slots))
    rows = write_rows(empty_rows(2, 2, num_slots, latent_dim, shared_dim, jnp.float32), LAYER, slots, jnp.asarray(new))
    queries = normal(2, num_queries, 4, latent_dim), normal(2, num_queries, 4, shared_dim)
    return *queries, normal(2, num_queries, 3, 5), keys, normal(2, num_queries, 3), rows, positions


def attend_cotangent(case):
    q = attend_inputs(case)[0]
    return np.random.default_rng(9).standard_normal(q.shape).astype(np.float32)


def with_gradients(attend, inputs, cotangent):
    """Context, and gradients of q, q_shared and both parts of the rows. attend takes what attend_inputs gives."""
    q, q_shared, *index, rows, positions = inputs
    context, pull = jax.vjp(lambda q, q_shared, rows: attend(q, q_shared, *index, rows, positions), q, q_shared, rows)
    return jax.tree.leaves((context, pull(cotangent)))


def sharded_attention(kind, layout, top_k=ATTEND_TOP_K):
    """The layer on whole arrays. The layer's number comes as an argument, as a scan over layers gives it."""
    roles = {"slot_axes": layout.slot_axes, "head_axis": layout.head_axis, "query_axis": layout.query_axis}

    def attend(q, q_shared, index_q, index_keys, weights, rows, positions, layer):
        if kind == "dense":
            return sparse_shards.dense_attention_over_shards(q, q_shared, rows, layer, positions, SCALE, **roles)
        return sparse_shards.sparse_attention_over_shards(
            q, q_shared, index_q, index_keys, weights, rows, layer, positions, top_k, SCALE, **roles
        )

    queries = PartitionSpec("expert", layout.query_axis, layout.head_axis)
    index = PartitionSpec("expert", layout.query_axis)
    keys = PartitionSpec(None, "expert", None, layout.slot_axes)
    rows = LatentRows(*[PartitionSpec(None, "expert", layout.slot_axes)] * 2)
    mapped = jax.shard_map(
        attend,
        mesh=make_mesh(layout.mesh),
        in_specs=(queries, queries, index, keys, index, rows, index, PartitionSpec()),
        out_specs=queries,
        check_vma=layout.check_vma,
    )
    return lambda *inputs: mapped(*inputs, LAYER)


def _run_attention(results):
    usual = query_blocks.BUDGET, sparse_shards.choose_movement
    for number, layout in enumerate(LAYOUTS):
        query_blocks.BUDGET = layout.budget
        sparse_shards.choose_movement = lambda *_, movement=layout.movement: movement
        for kind in ("sparse", "dense"):
            run = quick_jit(functools.partial(with_gradients, sharded_attention(kind, layout)))
            for case in attend_cases(layout):
                results[f"{kind}/{number}/{case}"] = run(attend_inputs(case), attend_cotangent(case))
    query_blocks.BUDGET, sparse_shards.choose_movement = usual
    # As many of the best as there are slots: what the dense form gives.
    every = sharded_attention("sparse", Layout("seq4_tensor2", head_axis="tensor"), top_k=NUM_SLOTS + 5)
    results["all slots"] = quick_jit(functools.partial(with_gradients, every))(
        attend_inputs("prefill"), attend_cotangent("prefill")
    )
    half = sharded_attention("sparse", Layout("seq4_tensor2", head_axis="tensor"))
    *arrays, positions = attend_inputs("prefill")
    arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tuple(arrays))
    results["bfloat16"] = [quick_jit(half)(*arrays, positions)]


def _compile_for_memory(results):
    """Temporary bytes of the layer for 256 and 1024 queries per device."""
    layout = Layout("seq4_tensor2", head_axis="tensor", query_axis="seq")
    usual, query_blocks.BUDGET = query_blocks.BUDGET, 2**18

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    for tokens in (1024, 4096):
        rows = LatentRows(shape(2, 1, 2048, 1, 16), shape(2, 1, 2048, 1, 3))
        queries = shape(1, tokens, 4, 16), shape(1, tokens, 4, 3), shape(1, tokens, 3, 5)
        inputs = *queries, shape(2, 1, 5, 2048), shape(1, tokens, 3), rows, jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        mapped = jax.jit(sharded_attention("sparse", layout, top_k=64))
        memory = mapped.lower(*inputs).compile().memory_analysis()
        results[f"temp/{tokens}"] = [np.array(memory.temp_size_in_bytes)]
    query_blocks.BUDGET = usual


def main(path):
    results = {}
    _run_select(results)
    _run_attention(results)
    _compile_for_memory(results)
    results["devices"] = [np.array(jax.device_count())]
    # Files of numpy know no bfloat16: its values go as float32.
    arrays = {f"{name}#{i}": jnp.asarray(x) for name, found in results.items() for i, x in enumerate(found)}
    arrays = {name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for name, x in arrays.items()}
    np.savez(path, **{name: np.asarray(x) for name, x in arrays.items()})


if __name__ == "__main__":
    main(sys.argv[1])
