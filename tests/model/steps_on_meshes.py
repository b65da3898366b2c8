"""Every step of a model on meshes of 8 devices, beside one device. Prints what differs, as JSON, by mesh.

steps_on_meshes.py FOLDER [MESH...]     with meshes given, all but whole sequences

Runs in a process of its own, or in several that share the devices; which of them it is comes from the environment, as
from a scheduler.
"""

import json
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

import maxmoe as mm
from maxmoe import distributed
from maxmoe.sharding import parse_mesh

MESHES = [
    "data=2",
    "seq=8",
    "expert=8",
    "tensor=4",
    "data=2,expert=4",
    "data=2,seq=4",
    "data=2,tensor=2",
    "expert=4,tensor=2",
    "seq=4,tensor=2",
    "seq=2,expert=4",
    "data=2,seq=2,tensor=2",
    "seq=2,expert=2,tensor=2",
]
NUM_DEVICES = 8
MAX_LEN = 128  # tokens; more than the indexer selects
LENGTHS = [75, 41, 5, 0]  # of the first chunk
MORE = [1, 17, 24, 30]  # of the second, which is padded to the same width and so compiles nothing


def run(model, params, ids, mesh, with_forward):
    """Logits of whole sequences if asked for, of two chunks of prompt, of two decoded tokens, and the state after."""
    found = {"forward": mm.forward(model, params, ids[:, :37])} if with_forward else {}
    cache = mm.init_cache(model, 4, MAX_LEN, mesh=mesh)
    width = max(LENGTHS)
    found["chunk"], cache = mm.prefill(model, params, ids[:, :width], cache, LENGTHS)
    rest = np.zeros((4, width), np.int32)
    for row, tokens, first, count in zip(rest, ids, LENGTHS, MORE, strict=True):
        row[:count] = tokens[first : first + count]
    found["more"], cache = mm.prefill(model, params, rest, cache, MORE)
    for step in range(2):
        found[f"token_{step}"], cache = mm.decode_step(model, params, ids[:, 100 + step], cache)
    found["state"] = cache.stacks[0][0].state
    found = {name: _whole(value) for name, value in found.items()}
    found["chunk"] = found["chunk"][:3]  # the last row has no tokens yet
    return found, cache


def _whole(x):
    return np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))


def main(folder, meshes):
    """Compares the meshes; all of them if none is given."""
    with_forward = not meshes  # a third of the time
    job = distributed.start(timeout_s=60)
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES // job.num_processes)
    model = mm.Transformer(mm.load_config(folder))
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (4, MAX_LEN), np.int32)
    wanted, _ = run(model, mm.load_params(folder, model, dtype="float32"), ids, None, with_forward)
    report = {}
    for name in meshes or MESHES:
        mesh = mm.make_mesh(parse_mesh(name))
        found, cache = run(model, mm.load_params(folder, model, mesh, dtype="float32"), ids, mesh, with_forward)
        differences = {name: float(np.max(np.abs(found[name] - wanted[name]))) for name in wanted}
        rows, state = cache.stacks[0][-1].rows.latent, cache.stacks[0][0].state
        parts = {"rows": rows.sharding.shard_shape(rows.shape), "state": state.sharding.shard_shape(state.shape)}
        report[name] = {"differences": differences, "parts": parts}
        print(name, differences, file=sys.stderr, flush=True)
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
