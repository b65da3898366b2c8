"""Runs `maxmoe.ops.kda_shards` on meshes of up to eight devices: python kda_shards_on_devices.py RESULTS.npz.

`test_kda_shards` starts it in a process of eight devices, makes the same inputs, and judges the results.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from maxmoe.ops.kda_shards import kda_over_shards, short_conv_over_shards
from tests.ops.kda_reference import random_inputs
from tests.ops.quick_jit import quick_jit

NUM_TOKENS, CHUNK = 72, 4  # 9 tokens on each of 8 devices: two chunks and a part of one
LENGTHS = (72, 31, 0)  # real tokens of each row of the case "padded"
MESHES = {"seq8": (8, 1), "seq2": (2, 1), "seq4_tensor2": (4, 2), "seq6": (6, 1)}
CHECKED = ("seq8", "seq4_tensor2")  # also with check_vma
CONV_TOKENS = {"seq8": (1, 2, 3, 5), "seq2": (1, 2, 4), "seq4_tensor2": (1, 2), "seq6": (1,)}  # per device


def make_mesh(seq, tensor):
    devices = np.array(jax.devices()[: seq * tensor]).reshape(seq, tensor)
    return Mesh(devices, ("seq", "tensor"), axis_types=(AxisType.Auto,) * 2)


def kda_cases():
    """Name -> inputs, all of one shape."""
    cases = {gate: random_inputs(i, NUM_TOKENS, gate, 3, 4) for i, gate in enumerate(("bound", "uniform", "weak"))}
    q, k, v, g, beta, state = random_inputs(3, NUM_TOKENS, "weak", 3, 4)
    cases["unbounded"] = (q, k, v, np.full_like(g, -60), beta, state)
    mixed = np.where(np.random.default_rng(4).random(g.shape) < 0.9, 0, np.float32(-60))
    cases["often kept, else forgotten"] = (q, k, v, mixed, beta, state)
    keys = np.broadcast_to(k[:, :1], k.shape)
    cases["repeated keys"] = (q, keys, v, np.full_like(g, -1e-3), np.full_like(beta, 0.999), state)
    real = np.arange(NUM_TOKENS)[:, None] < np.array(LENGTHS)[:, None, None]  # [B, T, 1]
    cases["padded"] = (q, k * real[..., None], v, g * real[..., None], beta * real, state)
    return cases


def kda_cotangents():
    rng = np.random.default_rng(5)
    _, _, v, _, _, state = kda_cases()["weak"]
    return tuple(rng.standard_normal(x.shape).astype(np.float32) for x in (v, state))


def wide_inputs(gate):
    return random_inputs(6, 128, gate, batch=1, heads=2, key_dim=128, value_dim=128)


def conv_inputs(num_tokens, dtype):
    """x, taps, state, lengths: a row for every number of real tokens; and cotangents of both results."""
    rng = np.random.default_rng(num_tokens)
    rows, channels, taps = num_tokens + 1, 6, 4
    x, state, d_y, d_state = (
        rng.standard_normal((rows, n, channels)).astype(np.float32) for n in (num_tokens, 3, num_tokens, 3)
    )
    weight = rng.standard_normal((channels, taps)).astype(np.float32)
    lengths = np.arange(rows, dtype=np.int32)
    return (jnp.asarray(x, dtype), weight, jnp.asarray(state, dtype), lengths), (d_y, jnp.asarray(d_state, dtype))


def sharded_kda(mesh, check_vma=False, chunk_size=CHUNK):
    tokens, state = PartitionSpec(None, "seq", "tensor"), PartitionSpec(None, "tensor")
    return jax.shard_map(
        lambda *inputs: kda_over_shards(*inputs, "seq", chunk_size=chunk_size),
        mesh=mesh,
        in_specs=(tokens,) * 5 + (state,),
        out_specs=(tokens, state),
        check_vma=check_vma,
    )


def sharded_conv(mesh, check_vma=False):
    tokens, weight = PartitionSpec(None, "seq", "tensor"), PartitionSpec("tensor")
    state = PartitionSpec(None, None, "tensor")
    return jax.shard_map(
        lambda *inputs: short_conv_over_shards(*inputs, "seq"),
        mesh=mesh,
        in_specs=(tokens, weight, state, PartitionSpec()),
        out_specs=(tokens, state),
        check_vma=check_vma,
    )


def conv_with_gradients(conv, inputs, cotangents):
    """Results, and gradients of x, taps and state."""
    results, pull = jax.vjp(lambda *floats: conv(*floats, inputs[3]), *inputs[:3])
    return results, pull(cotangents)


def later_poisoned(inputs):
    """NaN in all that stands in the last of eight shards, and in all of row 1."""
    q, k, v, g, beta, state = (x.copy() for x in inputs)
    for x in (q, k, v, g, beta):
        x[:, -9:] = np.nan
    one_row = [x.copy() for x in inputs]
    for x in one_row:
        x[1] = np.nan
    return (q, k, v, g, beta, state), tuple(one_row)


def _run_kda(results):
    cases, cotangents = kda_cases(), kda_cotangents()
    for name, sizes in MESHES.items():
        for check_vma in (False, True) if name in CHECKED else (False,):
            kda = sharded_kda(make_mesh(*sizes), check_vma)

            def run(inputs, kda=kda):
                outputs, pull = jax.vjp(kda, *inputs)
                return *outputs, *pull(cotangents)

            run = quick_jit(run)
            for case, inputs in cases.items():
                results[f"kda/{name}/{check_vma}/{case}"] = run(inputs)
    kda = quick_jit(sharded_kda(make_mesh(8, 1)))
    later, row = later_poisoned(cases["uniform"])
    results["clean"], results["later"], results["row"] = kda(*cases["uniform"]), kda(*later), kda(*row)
    q, k, v, *others = cases["weak"]
    half = jnp.asarray(v, jnp.bfloat16)
    results["bfloat16"], results["of bfloat16"] = kda(q, k, half, *others), kda(q, k, half.astype(jnp.float32), *others)
    wide = jax.jit(sharded_kda(make_mesh(8, 1), chunk_size=16))  # compiled as users do
    for gate in ("uniform", "weak"):
        results[f"wide/{gate}"] = wide(*wide_inputs(gate))


def _run_conv(results):
    for name, sizes in MESHES.items():
        for check_vma in (False, True) if name in CHECKED else (False,):
            conv = sharded_conv(make_mesh(*sizes), check_vma)
            for per_shard in CONV_TOKENS[name]:
                for dtype in ("float32", "bfloat16"):
                    inputs, cotangents = conv_inputs(per_shard * sizes[0], dtype)
                    run = quick_jit(lambda i, c, conv=conv: jax.tree.leaves(conv_with_gradients(conv, i, c)))
                    results[f"conv/{name}/{check_vma}/{per_shard}/{dtype}"] = run(inputs, cotangents)
    x, weight = np.arange(1, 7, dtype=np.float32).reshape(1, 6, 1), np.array([[1, 2, 3, 4]], np.float32)
    for seq in (2, 3, 6):
        conv = quick_jit(sharded_conv(make_mesh(seq, 1)))
        for length in (2, 6):
            state, lengths = np.zeros((1, 3, 1), np.float32), np.array([length])
            results[f"counted/{seq}/{length}"] = conv(x, weight, state, lengths)


def _compile_for_memory(results):
    inputs = [jax.ShapeDtypeStruct((1, 2048, 2, 16), jnp.float32)] * 4
    inputs += [jax.ShapeDtypeStruct((1, 2048, 2), jnp.float32), jax.ShapeDtypeStruct((1, 2, 16, 16), jnp.float32)]
    for seq in (1, 2, 4, 8):
        compiled = jax.jit(sharded_kda(make_mesh(seq, 1), chunk_size=64)).lower(*inputs).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        results[f"compiled/{seq}"] = [
            np.array([text.count(f" {kind}(") for kind in ("collective-permute", "all-reduce", "all-gather")]),
            np.array(memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes),
        ]


def main(path):
    results = {}
    _run_kda(results)
    _run_conv(results)
    _compile_for_memory(results)
    arrays = {f"{name}#{i}": np.asarray(x) for name, found in results.items() for i, x in enumerate(found)}
    # Files of numpy know no bfloat16: its values go as float32, its name beside them.
    dtypes = {f"{name}@": np.array(x.dtype.name) for name, x in arrays.items()}
    is_half = {name: x.dtype == jnp.bfloat16 for name, x in arrays.items()}
    np.savez(path, **{name: x.astype(np.float32) if is_half[name] else x for name, x in arrays.items()}, **dtypes)


if __name__ == "__main__":
    main(sys.argv[1])
