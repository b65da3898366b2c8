"""Serving on meshes of 8 devices beside one device: serve_on_meshes.py FOLDER MESH... Prints the answers as JSON."""

import json
import sys

import jax

import maxmoe as mm
from maxmoe.inference.drafting import NgramDrafter
from maxmoe.sharding import parse_mesh

PROMPTS = [[(7 * i) % 251 for i in range(41)], [5, 6] * 9, [9], [(11 * i) % 251 for i in range(20)]]
CHUNK, MAX_LEN = 16, 128


def answers(folder, mesh, **settings):
    """Greedy answers to more prompts than there are slots; the first is preempted on the way."""
    model = mm.Transformer(mm.load_config(folder))
    params = mm.load_params(folder, model, mesh, dtype="float32")
    engine = mm.Engine(model, params, mesh, max_batch=2, max_len=MAX_LEN, prefill_chunk=CHUNK, **settings)
    asked = mm.SamplingParams(temperature=0.0, max_tokens=8)
    requests = [engine.submit(prompt, asked) for prompt in PROMPTS]
    while len(requests[0].steps) < 3:
        engine.step()
    engine._serving.preempt(requests[0])
    while engine.has_work:
        engine.step()
    return [[step.token_id for step in request.steps] for request in requests]


def main(folder, meshes):
    """Serves on one device, then on each mesh, with and without drafts."""
    jax.config.update("jax_num_cpu_devices", 8)
    found = {"one device": answers(folder, None)}
    for name in meshes:
        mesh = mm.make_mesh(parse_mesh(name))
        found[name] = answers(folder, mesh)
        found[f"{name}, drafts"] = answers(folder, mesh, drafter=NgramDrafter, num_draft_tokens=3)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
