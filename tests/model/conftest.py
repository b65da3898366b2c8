"""Models that the tests of this folder share. Compiling is what takes time here, so each is made once.

`golden` gives the reference models whole; `short_model` is three layers of one of them, one of each kind, which
compile in a third of the time and still hold every part: both FFNs, both mixers, the indexer, a second block of
attention residuals.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import maxmoe as mm
from maxmoe.checkpoint.safetensors_io import CheckpointReader

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


class Golden(NamedTuple):
    """A reference model in float32, and what the reference computed with it."""

    model: mm.Transformer
    params: dict[str, Any]
    oracle: Mapping[str, np.ndarray]


@pytest.fixture(scope="session")
def golden(tmp_path_factory):
    """A function that loads one of the golden models: `golden(name, scan_layers=None)`."""

    @functools.cache
    def oracle(name):
        folder = tmp_path_factory.mktemp(name)
        (folder / "model.safetensors").symlink_to(GOLDEN / name / "oracle.safetensors")
        with CheckpointReader(folder) as reader:
            return {key: reader.read(key) for key in reader.tensors}

    @functools.cache
    def load(name, scan_layers=None):
        model = mm.Transformer(mm.load_config(GOLDEN / name), scan_layers)
        return Golden(model, mm.load_params(GOLDEN / name, model, dtype="float32"), oracle(name))

    return load


@pytest.fixture(scope="session")
def short_model(golden):
    """Three layers of `tiny_k31`: (KDA, dense), (KDA, experts), (MLA with indexer, experts)."""
    whole = golden("tiny_k31")
    config = dataclasses.replace(whole.model.config, num_layers=3, full_attention_layers=(2,), attn_res_block_size=2)
    first = whole.params["stacks_0"]
    layers = first["superblocks_0"]
    params = {name: value for name, value in whole.params.items() if not name.startswith("stacks_")}
    params["stacks_0"] = {
        "experts_1": first["experts_1"],
        "experts_2": first["experts_3"],
        "superblocks_0": {
            "layers_0": layers["layers_0"],
            "layers_1": layers["layers_1"],
            "layers_2": layers["layers_3"],
        },
    }
    return mm.Transformer(config), params


@pytest.fixture(scope="session")
def dense_model(short_model):
    """`short_model` without its indexer: every query sees every earlier token."""
    model, params = short_model
    last = params["stacks_0"]["superblocks_0"]["layers_2"]
    mixer = {name: value for name, value in last["mixer"].items() if name != "indexer"}
    blocks = {**params["stacks_0"]["superblocks_0"], "layers_2": {**last, "mixer": mixer}}
    params = {**params, "stacks_0": {**params["stacks_0"], "superblocks_0": blocks}}
    return mm.Transformer(dataclasses.replace(model.config, indexer=None)), params


@pytest.fixture(scope="session")
def assert_trees():
    """A function that compares two trees leaf by leaf: `assert_trees(got, wanted, relative=0.0)`.

    0 asks for the same bits, NaN included; else each leaf may differ by `relative` times its largest value.
    """

    def compare(got, wanted, relative=0.0):
        got, wanted = (jax.tree_util.tree_leaves_with_path(tree) for tree in (got, wanted))
        assert [path for path, _ in got] == [path for path, _ in wanted]
        for (path, left), (_, right) in zip(got, wanted, strict=True):
            left, right = np.asarray(left), np.asarray(right)
            name = jax.tree_util.keystr(path)
            assert (left.dtype, left.shape) == (right.dtype, right.shape), name
            if relative == 0.0:
                same = left.tobytes() == right.tobytes()
                assert same, f"{name}: {np.sum(left != right)} of {left.size} values differ"
            else:
                off, allowed = np.abs(left - right), relative * np.abs(right).max()
                assert off.max() <= allowed, f"{name}: off by {off.max():.3g}, mean {off.mean():.3g} > {allowed:.3g}"

    return compare
