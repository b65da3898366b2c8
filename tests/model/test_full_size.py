"""The published models at full size, without an array: counts, bytes, every tensor of the published table.

The tables here are written out from the published checkpoint's description, not from the model's code.
"""

import dataclasses
import functools
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

import maxmoe as mm
from maxmoe.checkpoint.hf_names import PREFIX, count_vision_weights, published_pieces, vision_tensors
from maxmoe.params import abstract_params, count_bytes, count_weights

ROOT = Path(__file__).resolve().parents[2]
FULL_ATTENTION = {*range(3, 92, 4), 92}
BYTES = {"U8": 1, "BF16": 2, "F32": 4}


@functools.cache
def _model(name):
    return mm.Transformer(mm.load_config(ROOT / f"configs/{name}.py"))


@functools.cache
def _params(name):
    return nn.unbox(abstract_params(_model(name)))


def _leaves(name):
    """Pairs of a weight's path and its shape."""
    return [
        ("/".join(key.key for key in path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(_params(name))
    ]


# Counts


def test_k3_has_the_published_number_of_weights():
    text, vision = count_weights(_params("k3")), count_vision_weights(_model("k3").config)
    assert text == 2_779_484_476_000
    assert vision == 401_214_464 + 46_144_512
    assert text + vision == 2_779_931_834_976


def test_k3_1_pro_adds_the_indexers():
    indexer = 4096 * 1536 + 128 * 7168 + 32 * 7168 + 2 * 128
    assert 24 * indexer == 178_526_208
    assert count_weights(_params("k3_1_pro")) == count_weights(_params("k3")) + 24 * indexer


def test_k3_active_weights_per_token():
    """All text weights but the experts that a token is not sent to; then without the table it is looked up in."""
    config = _model("k3").config
    experts = sum(count_weights({path: leaf}) for path, leaf in _leaves("k3") if "/experts_" in path)
    assert experts == 92 * 896 * 3 * 3072 * 3584 == 2_722_740_830_208
    chosen = experts * config.moe.top_k // config.moe.num_experts
    active = count_weights(_params("k3")) - experts + chosen
    embedding = count_weights({"embedding": _params("k3")["embedding"]})
    assert active == 105_364_017_760
    assert active - embedding == 104_189_612_640
    assert active - 2 * embedding == 103_015_207_520  # and without the head, which is as large


@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        ("stacks_1/scanned/layers_0/mixer/", 22 * 443_740_384),
        ("stacks_1/scanned/layers_3/mixer/", 22 * 232_196_096),
        ("stacks_2/scanned/layers_0/mixer/", 232_196_096),
        ("stacks_0/scanned/layers_0/ffn/", 726_663_168),
        ("stacks_1/scanned/layers_2/ffn/", 22 * (6_423_424 + 51_383_808 + 132_120_576)),
        ("stacks_1/experts_2/", 22 * 896 * 33_030_144),
        ("stacks_1/scanned/layers_1/", 22 * (443_740_384 + 43_008 + 6_423_424 + 51_383_808 + 132_120_576)),
    ],
)
def test_k3_weights_by_part(layer, wanted):
    assert sum(count_weights({path: leaf}) for path, leaf in _leaves("k3") if path.startswith(layer)) == wanted


# Layout


def test_k3_is_scanned_in_three_stacks():
    stacks = {name: part for name, part in _params("k3").items() if name.startswith("stacks_")}
    assert sorted(stacks) == ["stacks_0", "stacks_1", "stacks_2"]
    for name, count, size in (("stacks_0", 1, 4), ("stacks_1", 22, 4), ("stacks_2", 1, 1)):
        assert len(stacks[name]["scanned"]) == size
        assert {leaf.shape[0] for leaf in jax.tree.leaves(stacks[name])} == {count}


def _equations(jaxpr):
    """Equations of a program, those inside its loops and calls included."""
    inner = (_equations(part) for equation in jaxpr.eqns for part in jaxprs_in_params(equation.params))
    return len(jaxpr.eqns) + sum(inner)


def _forward_program(model, params):
    """The traced forward of 8 tokens; nothing is computed."""
    ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    program = jax.make_jaxpr(lambda params, ids: model.apply({"params": params}, ids))(params, ids)
    assert [(out.shape, out.dtype) for out in program.out_avals] == [((1, 8, 163_840), jnp.float32)]
    return program.jaxpr


def test_program_size_does_not_grow_with_depth():
    """61 layers in blocks of 8 have as many residual blocks as 93 in blocks of 12, namely 8, and the same stacks."""
    k3 = _model("k3").config
    full = tuple(layer for layer in range(60) if layer % 4 == 3)
    shallow = mm.Transformer(
        dataclasses.replace(k3, num_layers=61, full_attention_layers=(*full, 60), attn_res_block_size=8)
    )
    assert shallow.config.num_attn_res_blocks == k3.num_attn_res_blocks == 8
    sizes = [
        _equations(_forward_program(shallow, nn.unbox(abstract_params(shallow)))),
        _equations(_forward_program(_model("k3"), _params("k3"))),
    ]
    assert sizes[0] == sizes[1] > 1000


# The published table


def _layer_table(layer):
    """Name after the layer's prefix -> dtype and shape."""
    d, inner = 7168, 12_288
    table = {
        **{f"{name}.weight": ("BF16", (d,)) for name in ("input_layernorm", "post_attention_layernorm")},
        **{f"{name}_res_norm.weight": ("BF16", (d,)) for name in ("self_attention", "mlp")},
        **{f"{name}_res_proj.weight": ("BF16", (1, d)) for name in ("self_attention", "mlp")},
        "self_attn.g_proj.weight": ("BF16", (inner, d)),
        "self_attn.o_proj.weight": ("BF16", (d, inner)),
    }
    if layer in FULL_ATTENTION:
        table |= {
            "self_attn.q_a_proj.weight": ("BF16", (1536, d)),
            "self_attn.q_a_layernorm.weight": ("BF16", (1536,)),
            "self_attn.q_b_proj.weight": ("BF16", (18_432, 1536)),
            "self_attn.kv_a_proj_with_mqa.weight": ("BF16", (576, d)),
            "self_attn.kv_a_layernorm.weight": ("BF16", (512,)),
            "self_attn.kv_b_proj.weight": ("BF16", (24_576, 512)),
        }
    else:
        table |= {f"self_attn.{name}_proj.weight": ("BF16", (inner, d)) for name in "qkv"}
        table |= {f"self_attn.{name}_conv1d.weight": ("F32", (inner, 1, 4)) for name in "qkv"}
        table |= {
            "self_attn.A_log": ("F32", (128,)),
            "self_attn.dt_bias": ("F32", (inner,)),
            "self_attn.f_a_proj.weight": ("BF16", (128, d)),
            "self_attn.f_b_proj.weight": ("BF16", (inner, 128)),
            "self_attn.b_proj.weight": ("BF16", (96, d)),
            "self_attn.o_norm.weight": ("F32", (128,)),
        }
    return table | (_moe_table() if layer else _dense_table("mlp.", 33_792))


def _dense_table(start, hidden):
    return {
        start + "gate_proj.weight": ("BF16", (hidden, 7168)),
        start + "up_proj.weight": ("BF16", (hidden, 7168)),
        start + "down_proj.weight": ("BF16", (7168, hidden)),
    }


def _moe_table():
    table = {
        "gate.weight": ("BF16", (896, 7168)),
        "gate.e_score_correction_bias": ("F32", (896,)),
        "routed_expert_down_proj.weight": ("BF16", (3584, 7168)),
        "routed_expert_up_proj.weight": ("BF16", (7168, 3584)),
        "routed_expert_norm.weight": ("BF16", (3584,)),
        **_dense_table("shared_experts.", 6144),
    }
    for expert in range(896):
        for name in ("w1", "w3"):
            table[f"experts.{expert}.{name}.weight_packed"] = ("U8", (3072, 1792))
            table[f"experts.{expert}.{name}.weight_scale"] = ("U8", (3072, 112))
        table[f"experts.{expert}.w2.weight_packed"] = ("U8", (3584, 1536))
        table[f"experts.{expert}.w2.weight_scale"] = ("U8", (3584, 96))
    return {"block_sparse_moe." + name: entry for name, entry in table.items()}


def _text_table():
    table = {
        "lm_head.weight": ("BF16", (163_840, 7168)),
        "model.embed_tokens.weight": ("BF16", (163_840, 7168)),
        "model.norm.weight": ("BF16", (7168,)),
        "model.output_attn_res_norm.weight": ("BF16", (7168,)),
        "model.output_attn_res_proj.weight": ("BF16", (1, 7168)),
    }
    for layer in range(93):
        table |= {f"model.layers.{layer}.{name}": entry for name, entry in _layer_table(layer).items()}
    return {"language_model." + name: entry for name, entry in table.items()}


def _vision_table():
    table = {
        "vision_tower.patch_embed.proj.weight": (1024, 3, 14, 14),
        "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1024),
        "vision_tower.encoder.final_layernorm.weight": (1024,),
        "mm_projector.proj.0.weight": (4096, 4096),
        "mm_projector.proj.2.weight": (7168, 4096),
        "mm_projector.post_norm.weight": (7168,),
    }
    for block in range(27):
        start = f"vision_tower.encoder.blocks.{block}."
        table |= {start + "norm0.weight": (1024,), start + "norm1.weight": (1024,)}
        table |= {start + "wqkv.weight": (4608, 1024), start + "wo.weight": (1024, 1536)}
        table |= {start + "mlp.fc0.weight": (4096, 1024), start + "mlp.fc1.weight": (1024, 4096)}
    return table


def _assert_same_table(got, wanted):
    """Names a few of the differences only: the tables have half a million entries."""
    for what, names in (("missing", wanted.keys() - got.keys()), ("extra", got.keys() - wanted.keys())):
        assert not names, f"{len(names)} {what}: {sorted(names)[:5]}"
    differing = [f"{name}: {got[name]}, not {wanted[name]}" for name in wanted if got[name] != wanted[name]]
    assert not differing, f"{len(differing)} differ: {differing[:5]}"


def _num_bytes(table):
    """Bytes by dtype."""
    totals = dict.fromkeys(BYTES, 0)
    for dtype, shape in table.values():
        size = BYTES[dtype]
        for length in shape:
            size *= length
        totals[dtype] += size
    return totals


def test_k3_has_every_name_dtype_and_shape_of_the_published_table():
    pieces = list(published_pieces(_model("k3")))
    table = {PREFIX + piece.name: (piece.dtypes[0], piece.shape) for piece in pieces}
    assert len(pieces) == len(table) and {len(piece.dtypes) for piece in pieces} == {1}
    wanted = _text_table()
    _assert_same_table(table, wanted)
    config = _model("k3").config
    vision = {name: ("BF16", tuple(shape)) for name, shape in vision_tensors(config.vision, config.model_dim).items()}
    _assert_same_table(vision, {name: ("BF16", shape) for name, shape in _vision_table().items()})
    totals = _num_bytes(table | vision)
    assert len(table) + len(vision) == 497_220
    assert totals == {"U8": 1_446_456_066_048, "BF16": 114_359_769_088, "F32": 44_489_728}
    assert sum(totals.values()) == 1_560_860_324_864


def test_k3_bytes_in_memory_are_those_of_the_file_but_for_padding():
    """A_log is cut from 128 to the 96 heads, in 69 layers; the vision tensors are not loaded."""
    vision_bytes = 2 * count_vision_weights(_model("k3").config)
    assert count_bytes(_params("k3")) == 1_560_860_324_864 - vision_bytes - 69 * (128 - 96) * 4


def test_k3_1_pro_adds_the_indexer_tensors_to_the_table():
    """A config with the K3.1 indexer has K3's tensors and five more in each full-attention layer."""
    added = {}
    for piece in published_pieces(_model("k3_1_pro")):
        if "indexer" in piece.name:
            added[piece.name] = (piece.dtypes, piece.shape)
            assert piece.optional == piece.name.endswith("k_norm.bias")
    either = ("BF16", "F32")
    wanted = {}
    for layer in sorted(FULL_ATTENTION):
        start = f"model.layers.{layer}.self_attn.indexer."
        wanted[start + "wq_b.weight"] = (either, (4096, 1536))
        wanted[start + "wk.weight"] = (either, (128, 7168))
        wanted[start + "weights_proj.weight"] = (either, (32, 7168))
        wanted[start + "k_norm.weight"] = wanted[start + "k_norm.bias"] = (either, (128,))
    _assert_same_table(added, wanted)
