"""The collectives that a step needs on a mesh, by arithmetic: for comparing meshes, and where nothing can be compiled.

Per layer, the outputs of mixer and FFN are summed over `tensor`. Latents of tokens go to the devices of their experts,
and outputs come back: over `expert` by all-to-all or, where that is less, by all-gather and reduce-scatter; devices
along the other axes that split experts have the same tokens, and only add their outputs up. Where cache slots are
split, queries of all heads go to every part, candidates of the indexer are gathered, and partial attention is summed.
"""

import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh

from maxmoe import axes
from maxmoe.config import ModelConfig
from maxmoe.model.stacks import Mixer, plan_stacks
from maxmoe.planning.chips import COLLECTIVE_FLOOR_S, Topology
from maxmoe.planning.hlo import Collective
from maxmoe.planning.placement import token_axes
from maxmoe.planning.work import num_moe_layers
from maxmoe.sharding import MESH_AXES, activation_axes, split_experts

_ACTIVATION_BYTES = 2  # bfloat16


def expected_collectives(
    config: ModelConfig, topology: Topology, mesh: AbstractMesh, phase: str, batch: int, chunk: int
) -> list[Collective]:
    """What one step exchanges; see the module's docstring.

    Args:
      chunk: Tokens per sequence in the step.
    """
    split_by = token_axes(mesh, batch, chunk)
    local = batch * chunk / math.prod(mesh.shape[name] for name in split_by)
    passes = 3 if phase == "train" else 1
    found = []

    def add(kind, count, moved, names):
        size = math.prod(mesh.shape[name] for name in names)
        if size > 1 and count:
            sent = moved * (size - 1) / size * (2 if kind == "all-reduce" else 1)
            across = _crosses_nodes(topology, mesh, names)
            found.append(
                Collective(kind, passes * count, int(moved), int(sent), size, across, f"over {', '.join(names)}")
            )

    add("all-reduce", 2 * config.num_layers, local * config.model_dim * _ACTIVATION_BYTES, ("tensor",))

    held = split_experts(mesh, config.moe)
    exchanging = tuple(name for name in held.expert_axes + held.hidden_axes if name in split_by)
    adding = tuple(name for name in held.expert_axes + held.hidden_axes if name not in split_by)
    latent, moe = local * config.moe.latent_dim * _ACTIVATION_BYTES, num_moe_layers(config)
    others = math.prod(mesh.shape[name] for name in exchanging)
    if config.moe.top_k < others:
        add("all-to-all", 2 * moe, latent * config.moe.top_k, exchanging)
    else:
        add("all-gather", moe, latent * others, exchanging)
        add("reduce-scatter", moe, latent * others, exchanging)
    add("all-reduce", moe, latent, adding)

    num_mla = sum(kind.mixer is Mixer.MLA for plan in plan_stacks(config) for kind in plan.layers * plan.count)
    slots = activation_axes(mesh, axes.SLOTS, 2**30)
    if phase == "decode" and slots:
        parts = math.prod(mesh.shape[name] for name in slots)
        add("all-gather", num_mla, local * config.mla.num_heads * config.mla.cache_dim * _ACTIVATION_BYTES, ("tensor",))
        if config.indexer is not None:
            add("all-gather", num_mla, local * config.indexer.top_k * 8 * parts, slots)  # a score and an index each
        add("all-reduce", num_mla, local * config.mla.num_heads * (config.mla.kv_lora_rank + 1) * 4, slots)
    return found


def _crosses_nodes(topology, mesh, names):
    """Devices are numbered with the last mesh axis fastest."""
    first = min(MESH_AXES.index(name) for name in names)
    span = math.prod(mesh.shape[name] for name in MESH_AXES[first:])
    return bool(topology.chip.node_size) and span > topology.chip.node_size


def network_seconds(topology: Topology, collectives: Sequence[Collective]) -> float:
    """Time to send what must be sent, with all links of a device at work and nothing else in the way."""
    return sum(c.count * c.sent_bytes / topology.chip.send_bytes_per_s(c.across_nodes) for c in collectives)


def floor_seconds(topology: Topology, collectives: Sequence[Collective]) -> float:
    """Time that so many collectives take one after another, however little they move. An estimate, and no bound."""
    return sum(c.count for c in collectives) * COLLECTIVE_FLOOR_S[topology.chip.platform].value
