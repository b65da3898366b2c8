"""What a model is made of and how many bytes it takes, from its configuration alone."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp

from maxmoe.checkpoint.hf_names import count_vision_weights
from maxmoe.config import ModelConfig
from maxmoe.model.cache import cache_bytes
from maxmoe.model.stacks import FFN, Mixer, plan_stacks
from maxmoe.model.transformer import Transformer
from maxmoe.params import abstract_params, count_bytes, count_weights


def describe(config: ModelConfig, mesh: jax.sharding.Mesh | None = None) -> str:
    """Layers, weights, bytes and cache of a model as text. Makes no array.

    Args:
      mesh: Not supported yet; must be None.
    """
    if mesh is not None:
        raise NotImplementedError("describe: bytes per device of a mesh are not supported yet; pass mesh=None")
    tree = nn.unbox(abstract_params(Transformer(config)))
    text, vision = count_weights(tree), count_vision_weights(config)
    plans = plan_stacks(config)
    kinds = collections.Counter(kind for plan in plans for kind in plan.layers * plan.count)
    count = {part: sum(n for kind, n in kinds.items() if part in kind) for part in (*Mixer, *FFN)}
    one_token = cache_bytes(config, 1, 2, jnp.bfloat16) - cache_bytes(config, 1, 1, jnp.bfloat16)
    constant = cache_bytes(config, 1, 1, jnp.bfloat16) - one_token
    attention = "gated latent attention"
    if config.indexer is not None:
        attention += f" over the {config.indexer.top_k:,} tokens that its indexer selects"
    blocks = " + ".join(f"{plan.count} x {plan.size}" for plan in plans)
    moe = config.moe
    return "\n".join(
        [
            f"layers            {config.num_layers}, in superblocks of {blocks}",
            f"  mixers          {count[Mixer.KDA]} Kimi Delta Attention, {count[Mixer.MLA]} {attention}",
            f"  FFNs            {count[FFN.DENSE]} dense, {count[FFN.MOE]} LatentMoE: {moe.top_k} of "
            f"{moe.num_experts} experts on {moe.latent_dim:,} of {config.model_dim:,} channels",
            f"weights           {text + vision:,}" + (f", {vision:,} of them vision" if vision else ""),
            f"  active          {count_active_weights(config, tree):,} per token, without the embedding table",
            f"bytes, as stored  {count_bytes(tree):,}" + (f" + {2 * vision:,} vision" if vision else ""),
            f"cache, bfloat16   {one_token:,} bytes per token, {constant:,} per sequence",
            f"context           {config.max_len:,} tokens",
        ]
    )


def count_active_weights(config: ModelConfig, tree: dict) -> int:
    """Weights that one token meets: all but the embedding table and the experts it is not routed to."""
    stacks = [stack for name, stack in tree.items() if name.startswith("stacks_")]
    experts = sum(count_weights(part) for stack in stacks for name, part in stack.items() if "experts_" in name)
    idle = experts // config.moe.num_experts * (config.moe.num_experts - config.moe.top_k)
    return count_weights(tree) - idle - count_weights({"embedding": tree["embedding"]})
