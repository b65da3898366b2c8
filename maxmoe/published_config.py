"""The published `config.json`: read into a ModelConfig, and written from one.

Every key is used, known to be inert, or refused by name: a key that would change the model never passes
unseen. The spellings are in `published_keys.py`.
"""

import json
from collections.abc import Mapping
from typing import Any

from maxmoe import published_keys as keys
from maxmoe.config import (
    IndexerConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    SituConfig,
    VisionConfig,
)

_MISSING = object()


class _Section:
    """One object of a published config: hands out its keys and keeps account of what nobody asked for."""

    def __init__(self, values: Any, where: str, problems: list[str]):
        if not isinstance(values, Mapping):
            problems.append(f"{where}: must be an object, found {values!r}")
            values = {}
        self.values, self.where, self.problems = dict(values), where, problems
        self.known = set(keys.INERT)

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = _MISSING) -> Any:
        self.known.add(key)
        value = self.values.get(key, default)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if value is _MISSING:
            self.problems.append(f"{self.where}{key}: missing; it must be {_kind_names(kinds)}")
            return None
        if key in self.values and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            self.problems.append(f"{self.where}{key}={value!r}: must be {_kind_names(kinds)}")
            return None
        return value

    def take_alias(self, aliases: tuple[str, ...], kind: type | tuple[type, ...], default: Any = _MISSING) -> Any:
        self.known.update(aliases)
        given = [key for key in aliases if key in self.values]
        if len({json.dumps(self.values[key]) for key in given}) > 1:
            pairs = ", ".join(f"{key}={self.values[key]!r}" for key in given)
            self.problems.append(f"{self.where[:-1]}: {pairs} are one fact; give one of them")
        if not given and default is _MISSING:
            self.problems.append(f"{self.where[:-1]}: none of {', '.join(aliases)} is given; one is needed")
            return None
        return self.take(given[0], kind) if given else default

    def require(self, fixed: Mapping[str, Any], *, optional: bool = False) -> None:
        for key, allowed in fixed.items():
            self.known.add(key)
            value = self.values.get(key, allowed if optional else _MISSING)
            if value is _MISSING:
                self.problems.append(f"{self.where}{key}: missing; the family has {allowed!r}")
            elif value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
                self.problems.append(f"{self.where}{key}={value!r}: not supported; allowed is {allowed!r}")

    def refuse_unknown(self) -> None:
        for key in sorted(set(self.values) - self.known):
            self.problems.append(
                f"{self.where}{key}={self.values[key]!r}: unknown key; it might change the model. "
                "Remove it if it does not"
            )


def _kind_names(kinds: tuple[type, ...]) -> str:
    return " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)


def from_published(published: Mapping[str, Any]) -> ModelConfig:
    """Builds a ModelConfig from the object in a published `config.json`.

    Raises: ValueError that lists every key that is missing, unknown, ill-typed or of an unsupported value.
    """
    problems: list[str] = []
    top = _Section(published, "", problems)
    dsa_allowed = _check_architecture(top)
    nested = "text_config" in top.values
    text = _Section(top.take("text_config", Mapping), "text_config.", problems) if nested else top
    dsa_sections = {"text_config." if nested else "": text, "": top}
    dsa = [
        _Section(section.take("dsa_config", Mapping), f"{where}dsa_config.", problems)
        for where, section in dsa_sections.items()
        if section.values.get("dsa_config") is not None
    ]
    fields = _text_fields(text)
    kda, full_layers = _kda(_Section(text.take("linear_attn_config", Mapping), "linear_attn_config.", problems), fields)
    indexer = _indexer(dsa[0], full_layers, fields) if dsa else None
    if len(dsa) > 1:
        problems.append("dsa_config: given both at the top level and in text_config; give it once")
    if dsa_allowed is not None and dsa_allowed != bool(dsa):
        problems.append(
            f"architectures={top.values['architectures']!r}, dsa_config {'given' if dsa else 'missing'}: "
            "KimiK31ForConditionalGeneration needs dsa_config, the others have none"
        )
    vision = None
    if top.take("vision_config", (Mapping, type(None)), None) is not None:
        vision = _vision(_Section(top.values["vision_config"], "vision_config.", problems), fields["model_dim"])
    for section in {id(text): text, id(top): top}.values():
        _check_quantization(section)
        section.require({"tie_word_embeddings": False}, optional=True)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if section is not text and section.take(key, int, text.values.get(key)) != text.values.get(key):
                problems.append(f"{key}={section.values[key]!r}: text_config has {text.values.get(key)!r}")
        section.refuse_unknown()
    _raise_all(problems)
    moe = MoEConfig(**{name: fields.pop("moe." + name) for name in keys.MOE_FIELDS})
    mla = MLAConfig(**{name: fields.pop("mla." + name) for name in keys.MLA_FIELDS})
    situ = SituConfig(**{name: fields.pop("situ." + name) for name in keys.SITU_FIELDS})
    return ModelConfig(
        **fields,
        full_attention_layers=full_layers,
        kda=kda,
        mla=mla,
        moe=moe,
        situ=situ,
        indexer=indexer,
        vision=vision,
    )


def _take_fields(section: _Section, table: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    taken = {}
    for name, key in table.items():
        value = section.take(key, (int, float) if name in keys.FLOATS else int)
        taken[prefix + name] = float(value) if name in keys.FLOATS and value is not None else value
    return taken


def _text_fields(text: _Section) -> dict[str, Any]:
    fields = _take_fields(text, keys.MODEL_FIELDS)
    fields |= _take_fields(text, keys.MLA_FIELDS, "mla.")
    fields |= _take_fields(text, keys.MOE_FIELDS, "moe.")
    fields |= _take_fields(text, keys.SITU_FIELDS, "situ.")
    text.require(keys.FIXED)
    heads = fields["mla.num_heads"]
    if text.take("num_key_value_heads", int, heads) != heads:
        text.problems.append(
            f"{text.where}num_key_value_heads={text.values['num_key_value_heads']!r}: must equal "
            f"num_attention_heads={heads}; latent attention has no grouped heads"
        )
    return fields


def _kda(section: _Section, fields: Mapping[str, Any]) -> tuple[KDAConfig | None, tuple[int, ...]]:
    values = _take_fields(section, keys.KDA_FIELDS)
    bound = section.take("gate_lower_bound", (int, float, type(None)), None)
    section.require({"use_full_rank_gate": True})
    full = _layer_list(section, section.take("full_attn_layers", list), "full_attn_layers", fields["num_layers"])
    kda = _layer_list(section, section.take("kda_layers", list), "kda_layers", fields["num_layers"])
    both, missing = (
        set(full) & set(kda),
        set(range(1, (fields["num_layers"] or 0) + 1)) - set(full) - set(kda),
    )
    if both:
        section.problems.append(f"{section.where}full_attn_layers and kda_layers: both name layers {sorted(both)}")
    if missing:
        section.problems.append(
            f"{section.where}full_attn_layers and kda_layers: neither names layers {sorted(missing)}"
        )
    section.refuse_unknown()
    config = None
    if None not in values.values():
        config = KDAConfig(**values, gate_lower_bound=None if bound is None else float(bound))
    return config, tuple(layer - 1 for layer in full)


def _layer_list(section: _Section, layers: list | None, key: str, num_layers: int | None) -> list[int]:
    """Checks a 1-based, ascending list of layers."""
    layers = layers or []
    if not all(type(layer) is int and 1 <= layer <= (num_layers or layer) for layer in layers):
        section.problems.append(f"{section.where}{key}={layers!r}: must hold 1-based layers, 1..{num_layers}")
        return []
    if layers != sorted(set(layers)):
        section.problems.append(f"{section.where}{key}={layers!r}: must ascend, each layer once")
    return sorted(set(layers))


def _indexer(section: _Section, full_layers: tuple[int, ...], fields: Mapping[str, Any]) -> IndexerConfig | None:
    values = {name: section.take_alias(keys.DSA_ALIASES[name], int) for name in ("num_heads", "head_dim", "top_k")}
    eps = section.take_alias(keys.DSA_ALIASES["norm_eps"], (int, float), fields["norm_eps"])
    layers = _layer_list(section, section.take_alias(keys.DSA_ALIASES["layers"], list), "layers", fields["num_layers"])
    wanted = [layer + 1 for layer in full_layers]
    if layers != wanted:
        section.problems.append(
            f"{section.where}layers={layers}: the index must cover exactly the full-attention layers {wanted}"
        )
    section.refuse_unknown()
    if None in values.values() or eps is None:
        return None
    return IndexerConfig(**values, norm_eps=float(eps))


def _vision(section: _Section, text_dim: int | None) -> VisionConfig | None:
    values = _take_fields(section, keys.VISION_FIELDS)
    section.require(keys.FIXED_VISION)
    merge = section.take("merge_kernel_size", list)
    if merge is not None and not (len(merge) == 2 and all(type(size) is int for size in merge)):
        section.problems.append(f"{section.where}merge_kernel_size={merge!r}: must be two integers")
        merge = None
    eps = section.take("projector_ln_eps", (int, float))
    for key, wanted in (("text_hidden_size", text_dim), ("mm_hidden_size", values["model_dim"])):
        if section.take(key, int, wanted) != wanted:
            section.problems.append(f"{section.where}{key}={section.values[key]!r}: must be {wanted}")
    section.refuse_unknown()
    if None in values.values() or merge is None or eps is None:
        return None
    return VisionConfig(**values, merge_height=merge[0], merge_width=merge[1], norm_eps=float(eps))


def _check_architecture(top: _Section) -> bool | None:
    """Returns whether the named architecture has an indexer; None if it may or may not."""
    named = top.values.get("architectures", [])
    if not isinstance(named, list) or len(named) != 1 or named[0] not in keys.ARCHITECTURES:
        top.problems.append(f"architectures={named!r}: must be a list of one of {', '.join(keys.ARCHITECTURES)}")
        return None
    return None if named[0] == "KimiLinearForCausalLM" else named[0] == "KimiK31ForConditionalGeneration"


def _check_quantization(section: _Section) -> None:
    """Experts are MXFP4 by name and layout; a quantization_config may only confirm that."""
    values = section.take("quantization_config", (Mapping, type(None)), None)
    if values is None:
        return
    where = f"{section.where}quantization_config."
    quantization = _Section(values, where, section.problems)
    quantization.require({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"})
    quantization.require({"quantization_status": "compressed", "kv_cache_scheme": None}, optional=True)
    quantization.known |= {
        "ignore",
        "global_compression_ratio",
        "version",
        "sparsity_config",
        "transform_config",
    }
    groups = quantization.take("config_groups", Mapping) or {}
    for name, group in groups.items():
        part = _Section(group, f"{where}config_groups.{name}.", section.problems)
        part.require(
            {"format": "mxfp4-pack-quantized", "input_activations": None, "output_activations": None},
            optional=True,
        )
        part.known |= {"targets"}
        weights = _Section(part.take("weights", Mapping), f"{part.where}weights.", section.problems)
        weights.require(keys.FIXED_WEIGHTS)
        weights.require({"dynamic": False, "actorder": None, "block_structure": None, "zp_dtype": None}, optional=True)
        weights.known |= {"observer", "observer_kwargs"}
        weights.refuse_unknown()
        part.refuse_unknown()
    quantization.refuse_unknown()


def _raise_all(problems: list[str]) -> None:
    if problems:
        unique = list(dict.fromkeys(problems))
        raise ValueError("this published configuration is not supported:\n  " + "\n  ".join(unique))


def to_published(cfg: ModelConfig) -> dict[str, Any]:
    """The configuration of a text model in the published layout; `from_published` reads it back unchanged."""
    if cfg.vision is not None:
        raise NotImplementedError("a vision_config is not written yet; carry the published config.json along instead")
    if cfg.mla.lora_norm_eps != MLAConfig.lora_norm_eps:
        raise ValueError(f"mla.lora_norm_eps={cfg.mla.lora_norm_eps}: the published layout has no key for it")
    full = [layer + 1 for layer in cfg.full_attention_layers]
    linear = {key: getattr(cfg.kda, name) for name, key in keys.KDA_FIELDS.items()}
    linear |= {
        "gate_lower_bound": cfg.kda.gate_lower_bound,
        "use_full_rank_gate": True,
        "full_attn_layers": full,
    }
    linear["kda_layers"] = [layer for layer in range(1, cfg.num_layers + 1) if layer not in full]
    text: dict[str, Any] = {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]}
    parts = (
        (cfg, keys.MODEL_FIELDS),
        (cfg.mla, keys.MLA_FIELDS),
        (cfg.moe, keys.MOE_FIELDS),
        (cfg.situ, keys.SITU_FIELDS),
    )
    for part, table in parts:
        text |= {key: getattr(part, name) for name, key in table.items()}
    text |= {**keys.FIXED, "num_key_value_heads": cfg.mla.num_heads, "linear_attn_config": linear}
    if cfg.indexer is not None:
        names = ("num_heads", "head_dim", "top_k", "norm_eps")
        text["dsa_config"] = {keys.DSA_ALIASES[name][0]: getattr(cfg.indexer, name) for name in names}
        text["dsa_config"]["layers"] = full
    kind = "KimiK3ForConditionalGeneration" if cfg.indexer is None else "KimiK31ForConditionalGeneration"
    return {"architectures": [kind], "model_type": "kimi_k3", "text_config": text}
