"""A long prompt of the packaged model on meshes that split it along `seq`, beside one device. Prints JSON.

    JAX_PLATFORMS=cpu python tests/model/prompt_over_seq.py 65536

Runs in a process of its own, which has 8 CPU devices.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import maxmoe as mm
from maxmoe.inference import steps
from maxmoe.model.cache import to_plain

FOLDER = Path(mm.__file__).parent / "data/tiny"
SHARDS = (1, 2, 4, 8)
CHUNK = 8192  # tokens of one prefill step
LONG = 65_536  # tokens of the step whose memory is told, which is compiled and not run
CHANGED = 1e-4  # of values of size 1: a hundred times what the order of sums changes, a hundredth of another choice


def main(num_tokens):
    """Runs the prompt on one device and on eight; compiles a step for each number of shards."""
    config = dataclasses.replace(mm.load_config(FOLDER), max_len=max(num_tokens, LONG))
    model = mm.Transformer(config)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, num_tokens), np.int32)
    facts, results = {"tokens": num_tokens, "bytes_per_device": {}, "seconds": {}}, {}
    for count in SHARDS:
        mesh = None if count == 1 else mm.make_mesh({"seq": count})
        params = mm.load_params(FOLDER, model, mesh, dtype="float32")
        facts["bytes_per_device"][count] = step_bytes(model, params, mm.init_cache(model, 1, LONG, mesh=mesh))
        if count in (SHARDS[0], SHARDS[-1]):
            began = time.perf_counter()
            results[count] = prefilled(model, params, ids, mm.init_cache(model, 1, num_tokens, mesh=mesh))
            facts["seconds"][count] = round(time.perf_counter() - began, 1)
        print(count, facts, file=sys.stderr, flush=True)
    (wanted, rows), (found, other_rows) = results.values()
    facts["largest_logit"] = float(np.abs(wanted).max())
    facts["logits_differ_by"] = float(np.abs(found - wanted).max())
    # Latent rows of the layer above two that select: a token that was given another choice below has other rows here.
    facts["tokens_with_other_rows"] = int((np.abs(other_rows - rows).max(axis=-1) > CHANGED).sum())
    print(json.dumps(facts))


def prefilled(model, params, ids, cache):
    """Logits after the prompt, and the latent rows [tokens, R+r] of the last layer."""
    for first in range(0, ids.shape[1], CHUNK):
        chunk = ids[:, first : first + CHUNK]
        logits, cache = steps.prefill_in_place(model, params, chunk, cache, jnp.full(1, chunk.shape[1], jnp.int32))
    return np.asarray(logits), np.asarray(to_plain(cache).stacks[-1][-1].rows)[-1, 0]


def step_bytes(model, params, cache):
    """What one device holds while a prompt of `LONG` tokens fills an empty cache: weights, cache and temporaries."""
    ids, lengths = jax.ShapeDtypeStruct((1, LONG), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    with steps.on_mesh_of(params):
        memory = steps._prefill_donating.lower(model, params, ids, cache, lengths).compile().memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", SHARDS[-1])
    main(int(sys.argv[1]))
