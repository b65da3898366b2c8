"""The full-attention layer: gated latent attention without positions, and in K3.1 a lightning indexer."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmoe import axes
from maxmoe.config import IndexerConfig, MLAConfig
from maxmoe.model.cache import MLACache, Spans
from maxmoe.ops import indexer, mla
from maxmoe.ops.linear import linear
from maxmoe.ops.norm import layer_norm, rms_norm
from maxmoe.ops.sparse_mla import sparse_attention
from maxmoe.params import declare, normal, ones, zeros


class Indexer(nn.Module):
    """Chooses the tokens each query may see."""

    config: IndexerConfig
    model_dim: int
    q_lora_rank: int

    def setup(self):
        c, d = self.config, self.model_dim
        bf16, into = jnp.bfloat16, (axes.NORM, axes.EMBED)
        q_shape = (c.num_heads * c.head_dim, self.q_lora_rank)
        self.q_proj = declare(self, "q_proj", q_shape, bf16, (axes.HEADS, axes.LATENT), normal)
        self.k_proj = declare(self, "k_proj", (c.head_dim, d), bf16, into, normal)
        self.k_norm_weight = declare(self, "k_norm_weight", (c.head_dim,), bf16, (axes.NORM,), ones)
        self.k_norm_bias = declare(self, "k_norm_bias", (c.head_dim,), bf16, (axes.NORM,), zeros)
        self.weights_proj = declare(self, "weights_proj", (c.num_heads, d), bf16, into, normal)

    def keys(self, x: Float[Array, "B T D"]) -> Float[Array, "B T J"]:
        """The tokens' index keys, shared by all index heads."""
        return layer_norm(linear(x, self.k_proj), self.k_norm_weight, self.k_norm_bias, self.config.norm_eps)

    def select(
        self,
        x: Float[Array, "B T D"],
        q_latent: Float[Array, "B T Q"],
        keys: Float[Array, "B S J"],
        positions: Int[Array, "B T"],
    ) -> Int[Array, "B T top_k"]:
        """Slots that each query may see; -1 where it has fewer than top_k to choose from."""
        c = self.config
        q = linear(q_latent, self.q_proj).reshape(*x.shape[:-1], c.num_heads, c.head_dim)
        head_weights = linear(x, self.weights_proj).astype(jnp.float32) * c.num_heads**-0.5
        return indexer.select_tokens(q, keys, head_weights * c.head_dim**-0.5, positions, c.top_k)


class MLALayer(nn.Module):
    """Token mixer over every earlier token, or over those that its indexer selects."""

    config: MLAConfig
    indexer_config: IndexerConfig | None
    model_dim: int

    def setup(self):
        c, d = self.config, self.model_dim
        bf16, inner = jnp.bfloat16, c.num_heads * c.v_head_dim
        to_latent, from_latent = (axes.LATENT, axes.EMBED), (axes.HEADS, axes.LATENT)
        kv_up = c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
        self.q_down = declare(self, "q_down", (c.q_lora_rank, d), bf16, to_latent, normal)
        self.q_norm = declare(self, "q_norm", (c.q_lora_rank,), bf16, (axes.NORM,), ones)
        self.q_up = declare(self, "q_up", (c.num_heads * c.qk_head_dim, c.q_lora_rank), bf16, from_latent, normal)
        self.kv_down = declare(self, "kv_down", (c.cache_dim, d), bf16, to_latent, normal)
        self.kv_norm = declare(self, "kv_norm", (c.kv_lora_rank,), bf16, (axes.NORM,), ones)
        self.kv_up = declare(self, "kv_up", (kv_up, c.kv_lora_rank), bf16, from_latent, normal)
        self.gate_proj = declare(self, "gate_proj", (inner, d), bf16, (axes.HEADS, axes.EMBED), normal)
        self.out_proj = declare(self, "out_proj", (d, inner), bf16, (axes.EMBED, axes.HEADS), normal)
        if self.indexer_config is not None:
            self.indexer = Indexer(self.indexer_config, d, c.q_lora_rank)

    def prefill(
        self, x: Float[Array, "B T D"], cache: MLACache, layer: Int[Array, ""], spans: Spans
    ) -> tuple[Float[Array, "B T D"], MLACache]:
        """Attends from a chunk of tokens to what the cache holds and to the chunk itself."""
        q, rows, selected, cache = self._attend_to(x, cache, layer, spans)
        if selected is None:
            out = mla.attention(q, rows, self.kv_up, spans.positions(x.shape[1]))
        else:
            out = sparse_attention(q, rows, self.kv_up, selected)
        return self._output(x, out), cache

    def decode(
        self, x: Float[Array, "B 1 D"], cache: MLACache, layer: Int[Array, ""], spans: Spans
    ) -> tuple[Float[Array, "B 1 D"], MLACache]:
        """Attends from one token, in the absorbed form."""
        q, rows, selected, cache = self._attend_to(x, cache, layer, spans)
        if selected is None:
            out = mla.absorbed_attention(q, rows, self.kv_up, spans.positions(1))
        else:
            out = sparse_attention(q, rows, self.kv_up, selected)
        return self._output(x, out), cache

    def _attend_to(self, x, cache, layer, spans):
        """Queries, all cache rows with this call's tokens among them, selected slots or None, new cache."""
        c = self.config
        q_latent = rms_norm(linear(x, self.q_down), self.q_norm, c.lora_norm_eps)
        q = linear(q_latent, self.q_up).reshape(*x.shape[:-1], c.num_heads, c.qk_head_dim)
        latent, shared = jnp.split(linear(x, self.kv_down), [c.kv_lora_rank], axis=-1)
        new_rows = jnp.concatenate([rms_norm(latent, self.kv_norm, c.lora_norm_eps), shared], axis=-1)
        index_keys = None if self.indexer_config is None else self.indexer.keys(x)
        cache = cache.append(layer, spans, new_rows, index_keys)
        rows = cache.rows[layer].astype(x.dtype)
        if self.indexer_config is None or rows.shape[1] <= self.indexer_config.top_k:
            return q, rows, None, cache  # so few slots that every one would be selected
        keys = cache.index_keys[layer].astype(x.dtype)
        with jax.named_scope("indexer"):
            selected = self.indexer.select(x, q_latent, keys, spans.positions(x.shape[1]))
        self.sow("intermediates", "selected", selected)
        return q, rows, selected, cache

    def _output(self, x, out):
        gate = jax.nn.sigmoid(linear(x, self.gate_proj))
        return linear(out.reshape(gate.shape) * gate, self.out_proj)
