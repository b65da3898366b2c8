"""Configurations: the published file is read key by key, and whatever cannot be honoured is refused by name."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from maxmoe.config import IndexerConfig, load_config
from maxmoe.published_config import from_published, to_published

ROOT = Path(__file__).resolve().parents[1]
K3_FILE = ROOT / "tests/golden/k3_config.json"
K3 = json.loads(K3_FILE.read_text())
FULL_LAYERS = K3["text_config"]["linear_attn_config"]["full_attn_layers"]
DSA = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "layers": FULL_LAYERS}
LINEAR = "text_config.linear_attn_config."
WEIGHTS = "text_config.quantization_config.config_groups.group_0.weights."
REMOVED = object()


def _published(changes=None, dsa=None):
    """The published K3 file with changes at dotted paths; with `dsa`, the file of a K3.1."""
    config = copy.deepcopy(K3)
    if dsa is not None:
        config["architectures"] = ["KimiK31ForConditionalGeneration"]
        config["text_config"]["dsa_config"] = dsa
    for path, value in (changes or {}).items():
        *parents, key = path.split(".")
        section = config
        for parent in parents:
            section = section[parent]
        if value is REMOVED:
            del section[key]
        else:
            section[key] = value
    return config


def _problems(config):
    with pytest.raises(ValueError) as caught:
        from_published(config)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


# What is accepted


def test_published_k3_file_is_the_config_of_k3():
    assert load_config(K3_FILE) == load_config(ROOT / "configs/k3.py")


def test_k3_1_pro_is_k3_and_an_indexer():
    config = load_config(ROOT / "configs/k3_1_pro.py")
    assert config.indexer == IndexerConfig(num_heads=32, head_dim=128, top_k=2048, norm_eps=1e-5)
    assert dataclasses.replace(config, indexer=None) == load_config(K3_FILE)


def test_k3_1_file_is_the_config_of_k3_1_pro():
    assert from_published(_published(dsa=DSA)) == load_config(ROOT / "configs/k3_1_pro.py")


@pytest.mark.parametrize(
    ("standard", "alias"),
    [
        *(("index_n_heads", alias) for alias in ("n_heads", "num_heads")),
        ("index_head_dim", "head_dim"),
        *(("index_topk", alias) for alias in ("topk", "top_k")),
        *(("layers", alias) for alias in ("dsa_layers", "full_attn_layers")),
    ],
)
def test_dsa_config_alias_is_accepted(standard, alias):
    dsa = {alias if key == standard else key: value for key, value in DSA.items()}
    assert from_published(_published(dsa=dsa)) == from_published(_published(dsa=DSA))


def test_dsa_config_alias_given_twice_alike_is_accepted():
    assert from_published(_published(dsa=DSA | {"n_heads": 32})).indexer.num_heads == 32


def test_dsa_config_at_the_top_level_is_accepted():
    config = _published({"dsa_config": DSA, "architectures": ["KimiK31ForConditionalGeneration"]})
    assert from_published(config) == from_published(_published(dsa=DSA))


def test_dsa_config_epsilon_replaces_that_of_the_model():
    assert from_published(_published(dsa=DSA | {"norm_eps": 1e-6})).indexer.norm_eps == 1e-6
    assert from_published(_published({"text_config.rms_norm_eps": 2e-5}, DSA)).indexer.norm_eps == 2e-5


def test_text_config_alone_is_the_model_without_vision():
    assert from_published(K3["text_config"]) == dataclasses.replace(load_config(K3_FILE), vision=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"vision_config": None},
        {"text_config.quantization_config": REMOVED},
        {"quantization_config": K3["text_config"]["quantization_config"]},
        {"text_config.quantization_config.ignore": []},
        {"text_config.num_key_value_heads": REMOVED},
        {"tie_word_embeddings": REMOVED, "bos_token_id": REMOVED},
        {"text_config.temperature": 0.6, "text_config.torch_dtype": "float16", "transformers_version": "5"},
    ],
)
def test_what_decides_nothing_may_change_or_be_absent(changes):
    config = dataclasses.replace(from_published(_published(changes)), vision=None)
    assert config == dataclasses.replace(load_config(K3_FILE), vision=None)


def test_decay_without_a_bound_is_read_as_none():
    for value in (None, REMOVED):
        assert from_published(_published({LINEAR + "gate_lower_bound": value})).kda.gate_lower_bound is None


# What is refused: changes of the K3 file, and what the one message must say


def _full(*layers):
    return {LINEAR + "full_attn_layers": list(layers)}


REFUSED = {
    "unknown key": ({"text_config.rope_theta": 50000.0}, ["text_config.rope_theta=50000.0", "unknown key"]),
    "unknown key on top": ({"mtp": {}}, ["mtp={}", "unknown key"]),
    "unknown key of a part": ({LINEAR + "num_v_heads": 4}, ["linear_attn_config.num_v_heads=4", "unknown"]),
    "unknown vision key": ({"vision_config.rope_theta": 1}, ["vision_config.rope_theta=1", "unknown key"]),
    "hidden_act": ({"text_config.hidden_act": "silu"}, ["text_config.hidden_act='silu'", "'situ'"]),
    "no hidden_act": ({"text_config.hidden_act": REMOVED}, ["text_config.hidden_act: missing", "'situ'"]),
    "tied": ({"text_config.tie_word_embeddings": True}, ["tie_word_embeddings=True", "False"]),
    "tied on top": ({"tie_word_embeddings": True}, ["tie_word_embeddings=True", "False"]),
    "extra predictor": ({"text_config.num_nextn_predict_layers": 1}, ["num_nextn_predict_layers=1", "is 0"]),
    "bool for int": ({"text_config.moe_layer_freq": True}, ["moe_layer_freq=True", "allowed is 1"]),
    "grouped": ({"text_config.num_expert_group": 8}, ["text_config.num_expert_group=8", "allowed is 1"]),
    "softmax": ({"text_config.moe_router_activation_func": "softmax"}, ["='softmax'", "'sigmoid'"]),
    "grouped heads": ({"text_config.num_key_value_heads": 8}, ["num_key_value_heads=8", "96"]),
    "low-rank gate": ({LINEAR + "use_full_rank_gate": False}, ["use_full_rank_gate=False", "True"]),
    "missing size": ({"text_config.hidden_size": REMOVED}, ["text_config.hidden_size: missing", "int"]),
    "missing part": ({"text_config.linear_attn_config": REMOVED}, ["linear_attn_config: missing"]),
    "bool as a size": ({"text_config.vocab_size": True}, ["text_config.vocab_size=True", "must be int"]),
    "text as a size": ({"text_config.vocab_size": "8"}, ["text_config.vocab_size='8'", "must be int"]),
    "float as a size": ({"text_config.q_lora_rank": 1536.0}, ["q_lora_rank=1536.0", "must be int"]),
    "text as epsilon": ({"text_config.rms_norm_eps": "1e-5"}, ["rms_norm_eps='1e-5'", "int or float"]),
    "null as a size": ({"text_config.kv_lora_rank": None}, ["kv_lora_rank=None", "must be int"]),
    "list as a part": ({"text_config": []}, ["text_config", "[]"]),
    "bos differs": ({"bos_token_id": 7}, ["bos_token_id=7", "163584"]),
    "lists overlap": (_full(3, *FULL_LAYERS), ["full_attn_layers", "kda_layers", "both", "[3]"]),
    "lists miss a layer": (_full(*FULL_LAYERS[:-1]), ["full_attn_layers", "kda_layers", "neither", "[93]"]),
    "layer 0": (_full(0, *FULL_LAYERS), ["full_attn_layers=[0, 4,", "1..93"]),
    "layer 94": (_full(*FULL_LAYERS, 94), ["full_attn_layers=[4,", "1..93"]),
    "layers descend": (_full(*FULL_LAYERS[::-1]), ["full_attn_layers=[93,", "ascend"]),
    "layer twice": (_full(4, *FULL_LAYERS), ["full_attn_layers=[4, 4,", "ascend"]),
    "layer is a bool": (_full(True, *FULL_LAYERS), ["full_attn_layers=[True,", "1..93"]),
    "expert width": ({"text_config.moe_intermediate_size": 3070}, ["expert_dim=3070", "multiple of 32"]),
    "latent width": ({"text_config.routed_expert_hidden_size": 48}, ["latent_dim=48", "multiple of 32"]),
    "top-k": ({"text_config.num_experts_per_token": 897}, ["top_k=897", "896 experts"]),
    "width of 0": ({"text_config.qk_nope_head_dim": 0}, ["qk_nope_head_dim=0", "at least 1"]),
    "token id": ({"text_config.eos_token_id": 163840, "eos_token_id": 163840}, ["eos_id=163840", "163840"]),
    "positive decay": ({LINEAR + "gate_lower_bound": 5.0}, ["gate_lower_bound=5.0", "negative"]),
    "one tap": ({LINEAR + "short_conv_kernel_size": 1}, ["conv_width=1", "at least 2"]),
    "another format": (
        {"text_config.quantization_config.format": "nvfp4-pack-quantized"},
        ["quantization_config.format='nvfp4-pack-quantized'", "'mxfp4-pack-quantized'"],
    ),
    "another method": (
        {"quantization_config": {"quant_method": "fp8", "format": "fp8"}},
        ["quantization_config.quant_method='fp8'", "'compressed-tensors'"],
    ),
    "another group size": ({WEIGHTS + "group_size": 16}, ["weights.group_size=16", "allowed is 32"]),
    "quantised cache": (
        {"text_config.quantization_config.kv_cache_scheme": {"num_bits": 8}},
        ["kv_cache_scheme={'num_bits': 8}", "None"],
    ),
    "vision switch": ({"vision_config.merge_type": "mean"}, ["vision_config.merge_type='mean'", "sd2_tpool"]),
    "vision width": ({"vision_config.text_hidden_size": 64}, ["text_hidden_size=64", "must be 7168"]),
    "merge": ({"vision_config.merge_kernel_size": [2]}, ["merge_kernel_size=[2]", "two integers"]),
    "architecture": ({"architectures": ["LlamaForCausalLM"]}, ["LlamaForCausalLM", "KimiK3For", "KimiK31For"]),
    "K3.1 without an index": (
        {"architectures": ["KimiK31ForConditionalGeneration"]},
        ["KimiK31ForConditionalGeneration", "dsa_config missing", "needs dsa_config"],
    ),
    "K3 with an index": ({"text_config.dsa_config": DSA}, ["KimiK3ForCondit", "dsa_config given"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_names_key_value_and_what_is_allowed(case):
    changes, wanted = REFUSED[case]
    problems = _problems(_published(changes))
    assert any(all(text in problem for text in wanted) for problem in problems), problems


REFUSED_DSA = {
    "unknown key": ({**DSA, "index_rope": True}, ["dsa_config.index_rope=True", "unknown key"]),
    "aliases disagree": ({**DSA, "topk": 64}, ["index_topk=2048", "topk=64", "one fact"]),
    "nothing": ({}, ["text_config.dsa_config", "none of", "index_topk, topk, top_k"]),
    "another layer": ({**DSA, "layers": [3, *FULL_LAYERS]}, ["layers=[3, 4,", "exactly", "[4, 8,"]),
    "a layer less": ({**DSA, "layers": FULL_LAYERS[1:]}, ["layers=[8,", "exactly", "[4, 8,"]),
    "0-based layers": ({**DSA, "layers": [n - 1 for n in FULL_LAYERS]}, ["layers=[3, 7,", "[4, 8,"]),
    "bool": ({**DSA, "index_topk": True}, ["dsa_config.index_topk=True", "must be int"]),
    "no keys kept": ({**DSA, "index_topk": 0}, ["top_k=0", "at least 1"]),
    "not an object": ([], ["dsa_config", "[]"]),
}


@pytest.mark.parametrize("case", REFUSED_DSA)
def test_dsa_config_refusal_names_key_value_and_what_is_allowed(case):
    dsa, wanted = REFUSED_DSA[case]
    problems = _problems(_published(dsa=dsa))
    assert any(all(text in problem for text in wanted) for problem in problems), problems


def test_dsa_config_given_in_both_places_is_refused():
    assert any("give it once" in problem for problem in _problems(_published({"dsa_config": DSA}, DSA)))


def test_all_problems_stand_in_one_message():
    changes, wanted = {}, []
    for case in ("unknown key", "hidden_act", "tied", "extra predictor", "lists overlap", "text as a size"):
        changes |= REFUSED[case][0]
        wanted.append(REFUSED[case][1])
    problems = _problems(_published(changes))
    for texts in wanted:
        assert any(all(text in problem for text in texts) for problem in problems), (texts, problems)
    assert len(problems) == len(set(problems)) == len(wanted)


def test_inconsistent_sizes_stand_in_one_message():
    config = load_config(K3_FILE)
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(
            config, num_layers=80, num_dense_layers=81, moe=dataclasses.replace(config.moe, latent_dim=33)
        )
    for text in ("full_attention_layers=(3,", "0..79", "num_dense_layers=81", "moe.latent_dim=33"):
        assert text in str(caught.value)


# Override, round trip, files


def test_override_replaces_fields_at_any_depth():
    config = load_config(ROOT / "configs/k3_1_pro.py")
    changed = config.override("moe.top_k = 8", "norm_eps=1e-6", "max_len=4096", "situ.gate_beta=2")
    assert (changed.moe.top_k, changed.norm_eps, changed.max_len) == (8, 1e-6, 4096)
    assert type(changed.situ.gate_beta) is float and changed.situ.gate_beta == 2.0
    assert changed.override("moe.top_k=16", "norm_eps=1e-5", "max_len=1048576", "situ.gate_beta=4.0") == config
    assert config.override("indexer=None", "vision=None") == dataclasses.replace(config, indexer=None, vision=None)
    assert config.override("kda.gate_lower_bound=None").kda.gate_lower_bound is None
    assert config.override() == config


def test_override_checks_the_outcome_not_the_steps():
    """What fits together may be given in any order."""
    config = load_config(K3_FILE)
    assert config.override("moe.num_experts=8", "moe.top_k=4") == config.override("moe.top_k=4", "moe.num_experts=8")


@pytest.mark.parametrize(
    ("assignment", "wanted"),
    [
        ("norm_eps", ["'norm_eps'", "FIELD=VALUE"]),
        ("hidden_size=7", ["ModelConfig has no field 'hidden_size'", "model_dim"]),
        ("moe.experts=7", ["MoEConfig has no field 'experts'", "num_experts"]),
        ("moe.top_k.x=7", ["'top_k' is 16", "no fields"]),
        ("indexer.top_k=7", ["'indexer' is None", "no fields"]),
        ("moe.top_k=sixteen", ["'sixteen'", "literal"]),
        ("moe.top_k=2.0", ["'top_k' takes int", "float"]),
        ("moe.top_k=True", ["'top_k' takes int", "bool"]),
        ("moe.top_k=900", ["moe.top_k=900", "896 experts"]),
        ("moe=None", ["'moe' takes MoEConfig", "NoneType"]),
        ("indexer=5", ["indexer", "5"]),
        ("kda.gate_lower_bound='low'", ["gate_lower_bound", "low"]),
    ],
)
def test_override_refuses_what_it_cannot_set(assignment, wanted):
    with pytest.raises(ValueError) as caught:
        load_config(K3_FILE).override(assignment)
    for text in wanted:
        assert text in str(caught.value)


def test_override_of_an_absent_number_refuses_other_types():
    unbounded = load_config(K3_FILE).override("kda.gate_lower_bound=None")
    assert unbounded.override("kda.gate_lower_bound=-5.0") == load_config(K3_FILE)
    with pytest.raises(ValueError, match="gate_lower_bound"):
        unbounded.override("kda.gate_lower_bound='low'")


@pytest.mark.parametrize(
    "assignments",
    [
        ("vision=None",),
        ("vision=None", "indexer=None"),
        ("vision=None", "kda.gate_lower_bound=None", "norm_eps=1e-6", "moe.routed_scale=2.5"),
        ("vision=None", "full_attention_layers=()", "num_layers=1"),
        ("vision=None", "full_attention_layers=(0, 1)", "num_layers=2", "num_dense_layers=0"),
    ],
)
def test_published_form_reads_back_unchanged(assignments):
    config = load_config(ROOT / "configs/k3_1_pro.py").override(*assignments)
    assert from_published(json.loads(json.dumps(to_published(config)))) == config


def test_published_form_refuses_what_it_cannot_hold():
    """The published layout has no key for the epsilon of the low-rank norms, and no vision here yet."""
    config = load_config(K3_FILE)
    with pytest.raises(NotImplementedError, match="vision"):
        to_published(config)
    with pytest.raises((ValueError, NotImplementedError), match="lora_norm_eps"):
        to_published(config.override("vision=None", "mla.lora_norm_eps=1e-5"))


def test_load_config_takes_folder_and_file(tmp_path):
    (tmp_path / "config.json").write_text(K3_FILE.read_text())
    wanted = load_config(K3_FILE)
    assert load_config(tmp_path) == load_config(str(tmp_path / "config.json")) == wanted


def test_load_config_says_what_is_wrong_with_a_file(tmp_path):
    for source in (tmp_path, tmp_path / "absent.json", tmp_path / "absent.py"):
        with pytest.raises(FileNotFoundError, match=r"no model configuration at .*give a config\.json"):
            load_config(source)
    for text, message in (("{", "is not JSON"), ("[1]", "JSON object; found list"), ("\xff", "is not JSON")):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=message):
            load_config(tmp_path)
    for text in ("", "config = {}"):
        (tmp_path / "model.py").write_text(text)
        with pytest.raises(ValueError, match=r"must define `config`, a ModelConfig; found (NoneType|dict)"):
            load_config(tmp_path / "model.py")


@pytest.mark.parametrize("name", ["norm_eps", "mla.lora_norm_eps", "situ.gate_beta", "moe.routed_scale"])
@pytest.mark.parametrize("value", ["0.0", "-1e-5", "1e999"])
def test_factors_and_epsilons_must_be_positive_and_finite(name, value):
    with pytest.raises(ValueError, match=f"{name.split('.')[-1]}=.*positive and finite"):
        load_config(K3_FILE).override(f"{name}={value}")


def test_decay_bound_must_be_finite():
    with pytest.raises(ValueError, match="negative and finite"):
        load_config(K3_FILE).override("kda.gate_lower_bound=-1e999")
