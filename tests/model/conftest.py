"""Models that the tests of this folder share. Compiling is what takes time here, so each is made once.

`golden` gives the reference models whole; `short_model` is three layers of one of them, one of each kind, which
compile in a third of the time and still hold every part: both FFNs, both mixers, the indexer, a second block of
attention residuals.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import maxmoe as mm
from maxmoe.checkpoint.safetensors_io import CheckpointReader
from maxmoe.checkpoint.safetensors_writer import write_checkpoint
from maxmoe.published_config import to_published

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
def rearranged(tmp_path_factory):
    """A function that makes a model of some layers of `tiny_k31` and its checkpoint: their numbers, in the new order.

    `rearranged(layers, **changes)` returns the configuration, with the changes made, and the folder.
    """

    def make(layers, **changes):
        folder = tmp_path_factory.mktemp("rearranged")
        with CheckpointReader(GOLDEN / "tiny_k31") as reader:
            tensors = {name: reader.read(name) for name in reader.tensors if ".layers." not in name}
            for new, old in enumerate(layers):
                start = f"language_model.model.layers.{old}."
                for name in reader.tensors:
                    if name.startswith(start):
                        tensors[name.replace(start, f"language_model.model.layers.{new}.")] = reader.read(name)
        write_checkpoint(folder, tensors)
        config = mm.load_config(GOLDEN / "tiny_k31")
        return dataclasses.replace(config, num_layers=len(layers), **changes), folder

    return make


@pytest.fixture(scope="session")
def short_folder(rearranged):
    """The checkpoint of three layers of `tiny_k31`: (KDA, dense), (KDA, experts), (MLA with indexer, experts)."""
    config, folder = rearranged([0, 1, 3], full_attention_layers=(2,), attn_res_block_size=2)
    (folder / "config.json").write_text(json.dumps(to_published(config)))
    return folder


@pytest.fixture(scope="session")
def load_short_model(short_folder):
    """A function that loads those layers."""
    model = mm.Transformer(mm.load_config(short_folder))
    return lambda dtype: (model, mm.load_params(short_folder, model, dtype=dtype))


@pytest.fixture(scope="session")
def short_model(load_short_model):
    """Those layers in float32: a model and its parameters."""
    return load_short_model("float32")


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
