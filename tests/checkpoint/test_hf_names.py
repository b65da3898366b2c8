"""The table of published names: every weight lies in the tensors that the published layout has, and in no other."""

import dataclasses
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest

import maxmoe as mm
from maxmoe.checkpoint.hf_names import (
    PREFIX,
    VISION_PREFIXES,
    count_vision_weights,
    publish,
    published_pieces,
    vision_tensors,
)
from maxmoe.checkpoint.safetensors_io import CheckpointReader
from maxmoe.params import abstract_params

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden"


def _pieces(config, scan):
    return list(published_pieces(mm.Transformer(config, scan)))


def _described(pieces):
    return {piece.name: (piece.shape, piece.dtypes, piece.optional, piece.padded, piece.is_scale) for piece in pieces}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", ["tiny_k3", "tiny_k31"])
def test_pieces_are_the_tensors_of_a_published_file(name, scan):
    pieces = _pieces(mm.load_config(GOLDEN / name), scan)
    with CheckpointReader(GOLDEN / name) as reader:
        stored = {name: (info.dtype, info.shape) for name, info in reader.tensors.items()}
    assert stored == {PREFIX + piece.name: (piece.dtypes[0], piece.shape) for piece in pieces}
    assert len(stored) == len(pieces)
    optional = {piece.name.rpartition("self_attn.")[2] for piece in pieces if piece.optional}
    assert optional == ({"indexer.k_norm.bias"} if name == "tiny_k31" else set())


@pytest.mark.parametrize("scan", [False, True])
def test_pieces_fill_every_weight_exactly_once(scan):
    """In a model with a stack of dense layers, a stack of two superblocks, and a KDA layer at the end."""
    config = dataclasses.replace(
        mm.load_config(GOLDEN / "tiny_k31"), num_layers=7, full_attention_layers=(1, 3, 5), num_dense_layers=2
    )
    filled = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(nn.unbox(abstract_params(mm.Transformer(config, scan)))):
        filled[tuple(key.key for key in path)] = np.zeros(leaf.shape, np.int32)
    pieces = _pieces(config, scan)
    for piece in pieces:
        filled[piece.path][piece.index] += 1
        part = filled[piece.path][piece.index]
        assert piece.padded or np.prod(piece.shape) == part.size, piece
    wrong = ["/".join(path) for path, counts in filled.items() if not np.all(counts == 1)]
    assert not wrong, wrong
    assert len({piece.name for piece in pieces}) == len(pieces)


def test_pieces_do_not_depend_on_the_layout():
    """Stacked or not, the same tensors; and each is where the layer's kind puts it."""
    config = dataclasses.replace(
        mm.load_config(GOLDEN / "tiny_k31"), num_layers=6, full_attention_layers=(1, 3), num_dense_layers=1
    )
    scanned, unrolled = (_described(_pieces(config, scan)) for scan in (True, False))
    assert scanned == unrolled

    def layers_with(suffix):
        return [layer for layer in range(6) if f"model.layers.{layer}.{suffix}" in scanned]

    assert layers_with("self_attn.A_log") == layers_with("self_attn.q_proj.weight") == [0, 2, 4, 5]
    assert layers_with("self_attn.kv_b_proj.weight") == layers_with("self_attn.indexer.wk.weight") == [1, 3]
    assert layers_with("self_attn.g_proj.weight") == layers_with("mlp_res_proj.weight") == [0, 1, 2, 3, 4, 5]
    assert layers_with("mlp.down_proj.weight") == [0]
    assert layers_with("block_sparse_moe.experts.7.w2.weight_scale") == [1, 2, 3, 4, 5]
    assert layers_with("block_sparse_moe.experts.8.w2.weight_scale") == []


@pytest.mark.parametrize(("num_heads", "length"), [(4, 128), (128, 128), (160, 160)])
def test_decay_per_head_is_padded_to_128_or_whole(num_heads, length):
    config = mm.load_config(GOLDEN / "tiny_k3").override(
        "full_attention_layers=()", "num_layers=1", f"kda.num_heads={num_heads}"
    )
    shapes = {piece.shape for piece in _pieces(config, True) if piece.padded}
    assert shapes == {(length,)}


@pytest.mark.parametrize("scan", [False, True])
def test_publish_gives_published_names_shapes_and_values(scan):
    """From a tree whose every value says which weight it is part of."""
    config = dataclasses.replace(
        mm.load_config(GOLDEN / "tiny_k31"), num_layers=5, full_attention_layers=(0, 2, 4), num_dense_layers=1
    )
    model = mm.Transformer(config, scan)
    rng = np.random.default_rng(0)

    def draw(leaf):
        if leaf.dtype == np.uint8:
            return rng.integers(0, 255, leaf.shape, np.uint8)
        return rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype)

    params = jax.tree.map(draw, nn.unbox(abstract_params(model)))
    tensors = publish(params, config)
    described = {name.removeprefix(PREFIX): array.shape for name, array in tensors.items()}
    assert described == {piece.name: piece.shape for piece in _pieces(config, scan)}
    first = 1 + 2 * 1  # layer 3: place 0 of the second superblock of (KDA, MLA)
    stack = params["stacks_1"]
    mixer = (stack["scanned"] if scan else stack["superblocks_1"])["layers_0"]["mixer"]
    mixer = jax.tree.map(lambda leaf: leaf[1], mixer) if scan else mixer
    start = f"language_model.model.layers.{first}."
    assert np.array_equal(tensors[start + "self_attn.A_log"], np.pad(mixer["a_log"], (0, 124)))
    assert np.array_equal(tensors[start + "self_attn.k_conv1d.weight"][:, 0], mixer["k_conv"])
    assert tensors[start + "self_attn.f_b_proj.weight"].tobytes() == mixer["decay_up"].tobytes()
    experts = stack["experts_0"]["down_scale"][1, 6]
    assert np.array_equal(tensors[start + "block_sparse_moe.experts.6.w2.weight_scale"], experts)
    head = tensors["language_model.lm_head.weight"]
    assert head.dtype.name == "bfloat16" and head.tobytes() == params["lm_head"].tobytes()


def test_publish_keeps_the_dtypes_of_the_tree():
    """Of one that was loaded in float32, say."""
    model = mm.Transformer(mm.load_config(GOLDEN / "tiny_k3"))
    shapes = nn.unbox(abstract_params(model))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.uint8 if leaf.dtype == np.uint8 else np.float32), shapes)
    tensors = publish(params, model.config)
    dtypes = {name: array.dtype.name for name, array in tensors.items()}
    assert set(dtypes.values()) == {"float32", "uint8"}
    assert all((dtype == "uint8") == (".experts." in name) for name, dtype in dtypes.items())


def test_vision_tensors_are_known_by_prefix_and_counted():
    config = mm.load_config(ROOT / "configs/k3.py")
    names = vision_tensors(config.vision, config.model_dim)
    assert len(names) == 2 + 27 * 6 + 4 and all(name.startswith(VISION_PREFIXES) for name in names)
    assert count_vision_weights(config) == 401_214_464 + 46_144_512
    assert count_vision_weights(dataclasses.replace(config, vision=None)) == 0
