"""Two training steps on meshes of 8 devices, beside one device. Prints what differs, as JSON, by mesh.

steps_on_meshes.py [MESH...]

Runs in a process of its own, with eight CPU devices.
"""

import dataclasses
import json
import sys

import jax
import numpy as np

import maxmoe as mm
from maxmoe.sharding import parse_mesh
from maxmoe.training.optimizer import OptimizerSettings
from maxmoe.training.step import Trainer, train_step
from tests.training.smallest import float32_params, random_batch, smallest_model

MESHES = ["data=2,expert=2,tensor=2"]
MODEL = smallest_model(scan_layers=True)
SETTINGS = OptimizerSettings(peak_lr=1e-3, warmup_steps=0, num_steps=100)


def _masters_split(state):
    """Elements of masters on the busiest device, over an eighth of all elements."""
    leaves = jax.tree.leaves(state.masters)
    parts = sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in leaves)
    return 8 * parts / sum(leaf.size for leaf in leaves)


def run(trainer, params, batch, mesh):
    """Losses of two steps, the norm of the first gradient, the moments after the first step, and how masters lie."""
    state = trainer.init(params, mesh)
    split = _masters_split(state) if mesh is not None else None
    state, first = train_step(trainer, state, batch)
    moments = jax.tree.map(np.asarray, state.optimizer)
    spread = _masters_split(state) if mesh is not None else None
    state, second = train_step(trainer, state, batch)
    numbers = {"loss": first.loss, "second_loss": second.loss, "norm": first.gradient_norm, "tokens": first.num_tokens}
    return {name: float(x) for name, x in numbers.items()}, moments, [split, spread]


def main(meshes):
    """Compares the meshes."""
    batch, params = random_batch(MODEL, 16), float32_params(MODEL)
    trainer = Trainer(model=MODEL, optimizer=SETTINGS)
    wanted, moments, _ = run(trainer, params, batch, None)
    report = {"one device": wanted}
    for name in meshes:
        sizes = parse_mesh(name)
        # Where tokens are split too, in micro-batches: a sum over rows that are cut another way.
        here = dataclasses.replace(trainer, micro_batches=2 if "seq" in sizes else 1)
        found, at_mesh, spread = run(here, params, batch, mm.make_mesh(sizes))
        off = {}
        for (path, got), want in zip(
            jax.tree_util.tree_leaves_with_path(at_mesh), jax.tree.leaves(moments), strict=True
        ):
            off[jax.tree_util.keystr(path)] = float(np.max(np.abs(got - want)) / (np.max(np.abs(want)) + 1e-30))
        worst = max(off, key=off.get)
        report[name] = {**found, "worst": [worst, off[worst]], "spread": spread}
        print(name, report[name], file=sys.stderr, flush=True)
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or MESHES)
