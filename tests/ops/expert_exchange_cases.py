"""Runs the expert-parallel forms on eight CPU devices beside one device, and prints how far apart they are.

A program of its own, for the number of CPU devices is fixed when JAX starts. It prints one JSON object: for each case
and form, the largest difference of the output and of each gradient, as a share of the largest value expected; with the
argument `tpu`, what the ragged form, which no CPU runs, is compiled to for a TPU.
"""

import collections
import functools
import json
import math
import re
import sys
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxmoe.ops import exchange_rounds, expert_exchange
from maxmoe.ops.experts import weighted_sum
from tests.ops.quick_jit import quick_jit

LATENT, HIDDEN = 5, 6
FORMS = ("gathered", "padded", "ragged")
WINDOW_ROWS = 2  # of a piece, so that there are several rounds


class Case(NamedTuple):
    mesh: dict[str, int]
    expert_axes: tuple[str, ...]
    hidden_axes: tuple[str, ...] = ()
    token_axes: tuple[str, ...] = ()
    tokens_per_device: int = 3
    num_experts: int = 16
    top_k: int = 3
    routing: str = "random"
    dtype: str = "float32"


CASES = {
    "expert8": Case({"expert": 8}, ("expert",), token_axes=("expert",)),
    "expert8_replicated": Case({"expert": 8}, ("expert",), tokens_per_device=13),
    "two_expert_axes": Case({"expert": 4, "tensor": 2}, ("expert", "tensor"), token_axes=("expert",)),
    "axes_not_in_mesh_order": Case({"expert": 4, "tensor": 2}, ("tensor", "expert"), token_axes=("tensor", "expert")),
    "hidden": Case({"expert": 4, "tensor": 2}, ("expert",), ("tensor",), ("expert",)),
    "hidden_tokens_split": Case({"expert": 4, "tensor": 2}, ("expert",), ("tensor",), ("expert", "tensor")),
    "hidden_replicated": Case({"expert": 2, "tensor": 3}, ("expert",), ("tensor",), tokens_per_device=7),
    "only_hidden": Case({"expert": 1, "tensor": 2}, ("expert",), ("tensor",), ("expert",)),
    "seq_is_expert_axis": Case(
        {"seq": 2, "expert": 2, "tensor": 2}, ("seq", "expert"), ("tensor",), ("seq", "expert"), top_k=5
    ),
    "seq_beside": Case({"seq": 2, "expert": 2, "tensor": 2}, ("expert",), ("tensor",), ("seq", "expert")),
    "experts_beside_data": Case({"data": 2, "expert": 4}, ("expert",), (), ("data",), tokens_per_device=5),
    "k_beyond_experts_here": Case({"expert": 8}, ("expert",), token_axes=("expert",), num_experts=8, top_k=6),
    "axes_of_size_one": Case({"data": 1, "expert": 1, "tensor": 1}, ("expert",), ("tensor",), ("data", "expert")),
    "no_axes": Case({"data": 4}, (), (), ("data",)),
    "one_expert_takes_all": Case({"expert": 8}, ("expert",), token_axes=("expert",), top_k=1, routing="one"),
    "one_device_takes_all": Case({"expert": 4}, ("expert",), token_axes=("expert",), top_k=4, routing="one_device"),
    "none_routed": Case({"expert": 4, "tensor": 2}, ("expert",), ("tensor",), ("expert",), routing="none"),
    "half_routed": Case({"expert": 8}, ("expert",), token_axes=("expert",), tokens_per_device=6, routing="half"),
    "bfloat16": Case({"expert": 8}, ("expert",), token_axes=("expert",), top_k=6, dtype="bfloat16"),
    "bfloat16_hidden": Case({"expert": 4, "tensor": 2}, ("expert",), ("tensor",), ("expert",), dtype="bfloat16"),
}


def compute(x, ids, into, out_of, dtype=None):
    """Experts without a loop: [M, k, D] in dtype, with two traps.

    Where an id names none stands a large multiple of a real output, so that use of it shows, in gradients too. A row
    of zeros is padding; an expert that it is routed to gets a gradient of NaN.
    """
    named = (ids >= 0) & (ids < into.shape[0])
    chosen = jnp.where(named, ids, 0)
    hidden = jnp.tanh(jnp.einsum("md,mkfd->mkf", x.astype(jnp.float32), into[chosen]))
    outputs = jnp.einsum("mkf,mkdf->mkd", hidden, out_of[chosen])
    factor = jnp.where(named, jnp.where((x == 0).all(axis=1)[:, None], jnp.nan, 1.0), 1e4)
    return (outputs * factor[..., None]).astype(dtype or x.dtype)


def ragged_on_cpu(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What `jax.lax.ragged_all_to_all` is documented to do, by gathering everything; XLA's CPU backend lacks it.

    Rows that a slice would write beyond the buffer, or that the two sides do not agree on, become NaN.
    """
    here = jax.lax.axis_index(axis_name)
    rows = jax.lax.all_gather(operand, axis_name)
    starts, sizes, places = (
        jax.lax.all_gather(a, axis_name)[:, here] for a in (input_offsets, send_sizes, output_offsets)
    )
    result, at = output, jnp.arange(output.shape[0])
    for source in range(rows.shape[0]):
        agreed = (sizes[source] == recv_sizes[source]) & (places[source] + sizes[source] <= output.shape[0])
        agreed &= starts[source] + sizes[source] <= operand.shape[0]
        written = (at >= places[source]) & (at < places[source] + sizes[source])
        taken = rows[source, jnp.clip(starts[source] + at - places[source], 0, operand.shape[0] - 1)]
        result = jnp.where(written[:, None], jnp.where(agreed, taken, jnp.nan), result)
    return result


def make_ids(case, num_tokens, rng):
    """Distinct ids per token; a few name no expert, from either side of the range."""
    num_experts, top_k = case.num_experts, case.top_k
    if case.routing == "one":
        return np.full((num_tokens, 1), 5, np.int32)
    if case.routing == "none":
        return np.full((num_tokens, top_k), num_experts, np.int32)
    among = num_experts // case.mesh["expert"] if case.routing == "one_device" else num_experts
    ids = np.stack([rng.permutation(among)[:top_k] for _ in range(num_tokens)]).astype(np.int32)
    if case.routing == "half":
        ids[num_tokens // 2 :] = num_experts
    elif case.routing == "random":
        ids[rng.random(ids.shape) < 0.15] = num_experts
        ids[1 % num_tokens, 0] = -1
    return ids


def differences(case):
    """{form: {"out": ..., "x": ..., "weights": ..., "into": ..., "out_of": ...}} of a case."""
    rng = np.random.default_rng(0)
    num_tokens = case.tokens_per_device * math.prod(case.mesh[axis] for axis in case.token_axes)
    ids = make_ids(case, num_tokens, rng)
    into = jnp.asarray(rng.normal(size=(case.num_experts, HIDDEN, LATENT)), jnp.float32)
    out_of = jnp.asarray(rng.normal(size=(case.num_experts, LATENT, HIDDEN)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(num_tokens, LATENT)), case.dtype)
    weights = jnp.asarray(rng.random(ids.shape), jnp.float32)
    cotangent = jnp.asarray(rng.normal(size=x.shape), jnp.float32)

    def alone(x, weights, into, out_of):
        return weighted_sum(compute(x, ids, into, out_of), ids, weights, case.num_experts)

    def run(function):
        def loss(*arguments):
            out = function(*arguments)
            return jnp.sum(out.astype(jnp.float32) * cotangent), out

        (_, out), gradients = quick_jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(x, weights, into, out_of)
        return dict(zip(("out", "x", "weights", "into", "out_of"), (out, *gradients), strict=True))

    expected = run(alone)
    given = {form: run(functools.partial(on_mesh(case, form), ids)) for form in FORMS}
    return {form: {name: apart(given[form][name], expected[name]) for name in expected} for form in FORMS}


def on_mesh(case, form):
    """The form as a function of (ids, x, weights, into, out_of), all whole."""
    sizes = tuple(case.mesh.values())
    devices = np.asarray(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, tuple(case.mesh), axis_types=(AxisType.Auto,) * len(case.mesh))
    tokens, split, hidden = (axes or None for axes in (case.token_axes, case.expert_axes, case.hidden_axes))

    def body(ids, x, weights, into, out_of):
        axes = {"expert_axes": case.expert_axes, "hidden_axes": case.hidden_axes, "token_axes": case.token_axes}
        shared = {**axes, "operands": (into, out_of)}
        arguments = (x, ids, weights, functools.partial(compute, dtype=jnp.float32 if case.hidden_axes else None))
        if form == "gathered":
            return expert_exchange.gathered(*arguments, case.num_experts, **shared)
        whole = exchange_rounds.window_rows
        with mock.patch.object(exchange_rounds, "window_rows", lambda *sizes: min(WINDOW_ROWS, whole(*sizes))):
            return expert_exchange.exchanged(*arguments, case.num_experts, ragged=form == "ragged", **shared)

    in_specs = (P(tokens), P(tokens), P(tokens), P(split, hidden), P(split, None, hidden))
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P(tokens), check_vma=False)


def apart(given, expected):
    """The largest difference, as a share of the largest value expected; infinite for another dtype, shape or NaN."""
    if given.dtype != expected.dtype or given.shape != expected.shape:
        return float("inf")
    given, expected = (np.asarray(a).astype(np.float64) for a in (given, expected))
    share = np.abs(given - expected).max() / (np.abs(expected).max() or 1.0)
    return float(share) if np.isfinite(share) else float("inf")


def overflow():
    """What a token gets that names one expert too often: four tokens on two devices, two experts, two ids each."""
    case = Case({"expert": 2}, ("expert",), token_axes=("expert",), num_experts=2, top_k=2)
    ids = jnp.asarray([[0, 1], [0, 0], [1, 0], [0, 1]], jnp.int32)
    into, out_of = jnp.ones((2, HIDDEN, LATENT)), jnp.ones((2, LATENT, HIDDEN))
    x, weights = jnp.ones((4, LATENT)), jnp.ones((4, 2))
    found = {}
    for form in FORMS:
        out = jax.jit(on_mesh(case, form))(ids, x, weights, into, out_of)
        found[form] = np.isnan(np.asarray(out)).any(axis=1).tolist()
    return found


def compiled_for_tpu():
    """Collectives and temporary bytes of the ragged form on four v5p chips, without one: 64 tokens a device."""
    devices = topologies.get_topology_desc(topology_name="v5p:2x2x1", platform="tpu").devices
    mesh = Mesh(np.asarray(devices), ("expert",), axis_types=(AxisType.Auto,))
    num_tokens, top_k, latent_dim, num_experts = 64 * len(devices), 16, 3584, 896

    def scale(x, ids, scales):
        return (x[:, None] * scales[jnp.minimum(ids, scales.size - 1)][..., None]).astype(x.dtype)

    def body(x, ids, weights, scales):
        axes = {"expert_axes": ("expert",), "token_axes": ("expert",)}
        return expert_exchange.exchanged(x, ids, weights, scale, num_experts, ragged=True, operands=(scales,), **axes)

    run = jax.shard_map(body, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)

    def gradient(x, ids, weights, scales):
        def loss(x, weights, scales):
            return jnp.sum(run(x, ids, weights, scales).astype(jnp.float32))

        return jax.grad(loss, (0, 1, 2))(x, weights, scales)

    shapes = [((num_tokens, latent_dim), jnp.bfloat16), ((num_tokens, top_k), jnp.int32)]
    shapes += [((num_tokens, top_k), jnp.float32), ((num_experts,), jnp.bfloat16)]
    placement = NamedSharding(mesh, P("expert"))
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=placement) for shape, dtype in shapes]
    facts = {"row_bytes": num_tokens // len(devices) * top_k * latent_dim * 2}
    for name, function in (("forward", run), ("gradient", gradient)):
        compiled = jax.jit(function).lower(*arguments).compile()
        # An operation in flight has a start and a done.
        collectives = re.findall(r"[ )]((?:ragged-)?all-to-all|all-gather|all-reduce)(?:-start)?\(", compiled.as_text())
        temp_bytes = compiled.memory_analysis().temp_size_in_bytes
        facts[name] = {"collectives": collections.Counter(collectives), "temp_bytes": temp_bytes}
    return facts


def main(names):
    if names == ["tpu"]:
        return compiled_for_tpu()
    with mock.patch.object(jax.lax, "ragged_all_to_all", ragged_on_cpu):
        found = {name: differences(CASES[name]) for name in names or CASES}
        return {"devices": jax.device_count(), "differences": found, "overflow": overflow()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
