"""Loading: the tree has the file's bits or there is no tree, and one error says all that is wrong."""

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import maxmoe as mm
from maxmoe.checkpoint.hf_names import publish
from maxmoe.checkpoint.safetensors_io import CheckpointError, CheckpointReader
from maxmoe.checkpoint.safetensors_writer import write_checkpoint
from maxmoe.config import VisionConfig

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
PREFIX = "language_model."
LAYER = PREFIX + "model.layers."
NORM = PREFIX + "model.norm.weight"
DECAY = LAYER + "5.self_attn.A_log"
EXPERT = LAYER + "3.block_sparse_moe.experts.2.w1."
INDEXER = LAYER + "7.self_attn.indexer."


def _model(name="tiny_k3", scan=None):
    return mm.Transformer(mm.load_config(GOLDEN / name), scan)


def _tensors(name="tiny_k3"):
    with CheckpointReader(GOLDEN / name) as reader:
        return {key: reader.read(key) for key in reader.tensors}


def _folder(path, tensors, name="tiny_k3", max_shard_bytes=None):
    folder = path / "checkpoint"
    write_checkpoint(folder, tensors, max_shard_bytes)
    shutil.copy(GOLDEN / name / "config.json", folder)
    return folder


def _refusal(folder, model=None):
    with pytest.raises(CheckpointError) as caught:
        mm.load_params(folder, model or _model())
    return caught.value


def _assert_same_bits(got, wanted):
    assert got.keys() == wanted.keys()
    for name in wanted:
        left, right = np.asarray(got[name]), np.asarray(wanted[name])
        same = (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
        assert same, f"{name}: {left.dtype} {left.shape}, {right.dtype} {right.shape}"


def _assert_same_tree(got, wanted):
    flat_got, flat_wanted = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (got, wanted)
    )
    _assert_same_bits(flat_got, flat_wanted)


# What loads


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", ["tiny_k3", "tiny_k31"])
def test_loaded_tree_has_exactly_the_bits_of_the_file(name, scan):
    model = _model(name, scan)
    params = mm.load_params(GOLDEN / name, model)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    _assert_same_bits(publish(params, model.config), _tensors(name))


def test_prefix_is_optional(tmp_path):
    tensors = {name.removeprefix(PREFIX): array for name, array in _tensors().items()}
    assert tensors.keys().isdisjoint(_tensors())
    loaded = mm.load_params(_folder(tmp_path, tensors), _model())
    _assert_same_tree(loaded, mm.load_params(GOLDEN / "tiny_k3", _model()))


def test_several_shards_in_another_order_equal_one_file(tmp_path):
    folder = _folder(tmp_path, dict(reversed(_tensors().items())), max_shard_bytes=200_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    _assert_same_tree(mm.load_params(folder, _model()), mm.load_params(GOLDEN / "tiny_k3", _model()))


@pytest.mark.parametrize("dtype", ["float32", jnp.float32, "bfloat16"])
def test_dtype_casts_what_the_file_has_in_bf16_and_nothing_else(dtype):
    stored = mm.load_params(GOLDEN / "tiny_k3", _model())
    cast = mm.load_params(GOLDEN / "tiny_k3", _model(), dtype=dtype)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(stored)} == {"bfloat16", "float32", "uint8"}
    wanted = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.dtype == jnp.bfloat16 else leaf, stored)
    _assert_same_tree(cast, wanted)


@pytest.mark.parametrize("length", [4, 64, 200])
def test_decay_may_be_padded_with_zeros_to_any_length(tmp_path, length):
    tensors = _tensors()
    heads = tensors[DECAY][:4]
    tensors[DECAY] = np.pad(heads, (0, length - 4))
    params = mm.load_params(_folder(tmp_path, tensors), _model())
    assert np.array_equal(params["stacks_1"]["superblocks_0"]["layers_1"]["mixer"]["a_log"], heads)


def test_scale_bytes_0_and_254_are_numbers(tmp_path):
    tensors = _tensors()
    tensors[EXPERT + "weight_scale"] = np.resize(np.uint8([0, 254]), tensors[EXPERT + "weight_scale"].shape)
    params = mm.load_params(_folder(tmp_path, tensors), _model())
    _assert_same_bits(publish(params, _model().config), tensors)


def test_indexer_tensors_may_be_f32(tmp_path):
    """In some layers or in all: the tree then holds them exactly, whatever a stack mixes."""
    for scan in (False, True):
        tensors = _tensors("tiny_k31")
        wide = tensors[INDEXER + "wk.weight"].astype(np.float32) * np.float32(1 + 2**-20)
        tensors[INDEXER + "wk.weight"] = wide
        model = _model("tiny_k31", scan)
        params = mm.load_params(_folder(tmp_path / str(scan), tensors, "tiny_k31"), model)
        _assert_same_bits(publish(params, model.config), tensors)
        tensors |= {name: array.astype(np.float32) for name, array in tensors.items() if ".indexer." in name}
        params = mm.load_params(_folder(tmp_path / f"{scan} all", tensors, "tiny_k31"), model)
        _assert_same_bits(publish(params, model.config), tensors)


def test_mixed_indexer_dtypes_in_one_stack_keep_every_value(tmp_path):
    """Layers 3 and 7 made alike, so that one scanned weight takes a BF16 and an F32 tensor."""
    config = dataclasses.replace(
        _model("tiny_k31").config, num_dense_layers=0, full_attention_layers=(3, 7), num_layers=8
    )
    model = mm.Transformer(config, True)
    tensors = {name: array for name, array in _tensors("tiny_k31").items() if f"{LAYER}8." not in name}
    dense = [name for name in tensors if name.startswith(LAYER + "0.mlp.")]
    for name in dense:
        del tensors[name]
    for name in [name for name in tensors if name.startswith(LAYER + "1.block_sparse_moe.")]:
        tensors[name.replace(LAYER + "1.", LAYER + "0.")] = tensors[name]
    narrow = LAYER + "3.self_attn.indexer.wk.weight"
    tensors[INDEXER + "wk.weight"] = tensors[INDEXER + "wk.weight"].astype(np.float32) * np.float32(1 + 2**-20)
    params = mm.load_params(_folder(tmp_path, tensors, "tiny_k31"), model)
    wanted = tensors | {narrow: tensors[narrow].astype(np.float32)}
    _assert_same_bits(publish(params, config), wanted)


def test_missing_offset_of_the_index_key_norm_is_zero(tmp_path):
    tensors = _tensors("tiny_k31")
    assert np.any(tensors[INDEXER + "k_norm.bias"])
    del tensors[INDEXER + "k_norm.bias"]
    params = mm.load_params(_folder(tmp_path, tensors, "tiny_k31"), _model("tiny_k31"))
    zeros = np.zeros(16, ml_dtypes.bfloat16)
    _assert_same_bits(publish(params, _model("tiny_k31").config), tensors | {INDEXER + "k_norm.bias": zeros})


def test_vision_tensors_are_left_aside_with_one_line(tmp_path, caplog):
    images = {
        "vision_tower.encoder.final_layernorm.weight": np.ones(8, ml_dtypes.bfloat16),
        "mm_projector.proj.0.weight": np.ones((8, 8), ml_dtypes.bfloat16),
    }
    with caplog.at_level("INFO", logger="absl"):
        loaded = mm.load_params(_folder(tmp_path, images | _tensors()), _model())
    _assert_same_tree(loaded, mm.load_params(GOLDEN / "tiny_k3", _model()))
    assert [record.getMessage() for record in caplog.records if "2 vision tensors" in record.getMessage()]


# What does not


def _change(name, **arrays):
    """A function that replaces tensors whose names begin alike, or removes those given as None."""

    def change(tensors):
        for key, array in arrays.items():
            if array is None:
                del tensors[name + key]
            else:
                tensors[name + key] = array(tensors[name + key]) if callable(array) else array

    return change


def _with_scale(value):
    def change(scale):
        scale = scale.copy()
        scale[1, 0] = value
        return scale

    return change


FAULTS = {
    "missing": (_change(NORM, **{"": None}), ["missing", NORM, "BF16 [64]"]),
    "extra": (_change(NORM, **{"2": np.zeros(3, np.float32)}), ["not part of this model", NORM + "2"]),
    "mtp": (_change(LAYER + "9.", **{"eh_proj.weight": np.zeros(3)}), ["not part of", "layers.9.eh_proj"]),
    "shape": (_change(NORM, **{"": lambda a: a[:-1]}), [NORM, "shape [63]", "expected [64]"]),
    "transposed": (
        _change(LAYER + "0.mlp.", **{"up_proj.weight": lambda a: a.T.copy()}),
        ["0.mlp.up_proj.weight", "shape [64, 96]", "expected [96, 64]"],
    ),
    "dtype": (
        _change(NORM, **{"": lambda a: a.astype(np.float32)}),
        [NORM, "dtype F32", "expected BF16"],
    ),
    "decay in BF16": (
        _change(DECAY, **{"": lambda a: a.astype(ml_dtypes.bfloat16)}),
        [DECAY, "dtype BF16", "expected F32"],
    ),
    "expert in I8": (
        _change(EXPERT, weight_packed=lambda a: a.view(np.int8)),
        ["2.w1.weight_packed", "dtype I8", "expected U8"],
    ),
    "expert without its scale": (
        _change(EXPERT, weight_scale=None),
        ["missing", EXPERT + "weight_scale", "packed weight is there", "scale is not"],
    ),
    "NaN scale": (
        _change(EXPERT, weight_scale=_with_scale(255)),
        ["unusable", EXPERT + "weight_scale", "255", "NaN"],
    ),
    "decay beyond the heads": (
        _change(DECAY, **{"": lambda a: np.append(a[:-1], np.float32(1e-3))}),
        ["unusable", DECAY, "4 values", "1 of the rest not zero"],
    ),
    "decay per channel": (
        _change(DECAY, **{"": lambda a: np.full_like(a, 0.5)}),
        ["unusable", DECAY, "4 values", "has 128", "124 of the rest not zero"],
    ),
    "decay too short": (_change(DECAY, **{"": lambda a: a[:3]}), ["unusable", DECAY, "4 values", "has 3"]),
    "decay of rank 2": (_change(DECAY, **{"": lambda a: a[None]}), [DECAY, "shape [1, 128]", "[128]"]),
}


@pytest.mark.parametrize("case", FAULTS)
def test_fault_is_refused_by_name(tmp_path, case):
    change, wanted = FAULTS[case]
    tensors = _tensors()
    change(tensors)
    problems = _refusal(_folder(tmp_path, tensors)).problems
    assert len(problems) == 1 and all(text in problems[0] for text in wanted), problems


def test_every_problem_stands_in_one_error(tmp_path):
    """All in `problems`; the message shows twenty of a kind and counts the others."""
    tensors = _tensors()
    wanted = []
    for case in ("extra", "mtp", "shape", "transposed", "decay in BF16"):
        FAULTS[case][0](tensors)
        wanted.append(FAULTS[case][1])
    missing = [name for name in tensors if ".6.block_sparse_moe.experts." in name and "_scale" in name]
    for name in missing:
        del tensors[name]
    error = _refusal(_folder(tmp_path, tensors))
    assert len(missing) == 24 and len(error.problems) == 24 + len(wanted)
    for texts in [*wanted, *([name] for name in missing)]:
        assert any(all(text in problem for text in texts) for problem in error.problems), texts
    for text in ("24 tensors missing", "and 4 more", "2 tensors not part of this model", "3 tensors do not fit"):
        assert text in str(error)


def test_every_unusable_value_stands_in_one_error(tmp_path):
    tensors = _tensors()
    for case in ("NaN scale", "decay too short"):
        FAULTS[case][0](tensors)
    tensors[LAYER + "0.self_attn.A_log"] = np.ones(128, np.float32)
    problems = _refusal(_folder(tmp_path, tensors)).problems
    for name in (EXPERT + "weight_scale", DECAY, LAYER + "0.self_attn.A_log"):
        assert any(name in problem for problem in problems), problems
    assert len(problems) == 3


@pytest.mark.parametrize("prefix", ["model.", "base_model.language_model."])
def test_another_prefix_is_refused_with_counts(tmp_path, prefix):
    """Nothing loads by chance: all are missing, and all are extra."""
    tensors = {prefix + name.removeprefix(PREFIX): array for name, array in _tensors().items()}
    error = _refusal(_folder(tmp_path, tensors))
    for text in ("618 tensors missing", "618 tensors not part of this model"):
        assert text in str(error)
    assert len(error.problems) == 2 * 618


def test_one_tensor_without_the_prefix_is_refused(tmp_path):
    tensors = _tensors()
    tensors[NORM.removeprefix(PREFIX)] = tensors.pop(NORM)
    problems = _refusal(_folder(tmp_path, tensors)).problems
    assert len(problems) == 2
    assert any(NORM in problem and "missing" in problem for problem in problems)
    assert any(problem.endswith(": model.norm.weight") for problem in problems)


@pytest.mark.parametrize("fault", ["absent", "one byte short"])
def test_incomplete_shard_is_refused_by_file_name(tmp_path, fault):
    folder = _folder(tmp_path, _tensors(), max_shard_bytes=400_000)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    if fault == "absent":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1])
    assert any(shard.name in problem for problem in _refusal(folder).problems)


def test_weights_of_another_model_are_refused(tmp_path):
    """Each way: K3's file lacks the indexers, K3.1's has them; another vocabulary does not fit."""
    missing = _refusal(GOLDEN / "tiny_k3", _model("tiny_k31")).problems
    extra = _refusal(GOLDEN / "tiny_k31", _model("tiny_k3")).problems
    assert len(missing) == 3 * 4 and all("missing" in text and ".indexer." in text for text in missing)
    assert len(extra) == 3 * 5 and all("not part" in text and ".indexer." in text for text in extra)
    larger = mm.Transformer(_model().config.override("vocab_size=640"))
    unfit = _refusal(GOLDEN / "tiny_k3", larger).problems
    assert sorted(text.split()[3] for text in unfit) == [
        f"{PREFIX}lm_head.weight:",
        f"{PREFIX}model.embed_tokens.weight:",
    ]


def test_vision_tensor_that_the_model_does_not_have_is_refused(tmp_path):
    vision = VisionConfig(
        num_layers=1,
        model_dim=8,
        qkv_dim=8,
        mlp_dim=8,
        num_heads=1,
        patch_size=2,
        pos_emb_height=2,
        pos_emb_width=2,
        merge_height=1,
        merge_width=1,
        norm_eps=1e-5,
    )
    model = mm.Transformer(dataclasses.replace(_model().config, vision=vision))
    images = {f"vision_tower.encoder.blocks.{block}.norm0.weight": np.ones(8, np.float32) for block in (0, 1)}
    problems = _refusal(_folder(tmp_path, images | _tensors()), model).problems
    assert len(problems) == 1 and "blocks.1.norm0" in problems[0]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "float8_e4m3fn"])
def test_dtype_that_weights_cannot_have_is_refused(dtype):
    with pytest.raises(ValueError, match=rf"dtype={dtype} is not a weight type; use float32"):
        mm.load_params(GOLDEN / "tiny_k3", _model(), dtype=dtype)


def test_config_that_differs_from_the_folders_is_warned_of(caplog):
    other = mm.Transformer(_model().config.override("norm_eps=1e-4", "situ.gate_beta=2.0"))
    with caplog.at_level("WARNING", logger="absl"):
        mm.load_params(GOLDEN / "tiny_k3", _model())
        assert not caplog.records
        mm.load_params(GOLDEN / "tiny_k3", other)
    (record,) = caplog.records
    assert record.getMessage().endswith("and the model differ in: norm_eps, situ")
