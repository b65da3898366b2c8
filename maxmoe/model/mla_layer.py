"""The full-attention layer: gated latent attention without positions, and in K3.1 a lightning indexer."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from maxmoe import axes
from maxmoe.config import IndexerConfig, MLAConfig
from maxmoe.model.cache import MLACache, Spans, slot_axes
from maxmoe.ops import dispatch, mla
from maxmoe.ops.indexer import select_tokens, write_keys
from maxmoe.ops.latent_cache import LatentRows, read_rows, write_rows
from maxmoe.ops.linear import linear
from maxmoe.ops.norm import layer_norm, rms_norm
from maxmoe.ops.sparse_mla import sparse_attention
from maxmoe.ops.sparse_shards import dense_attention_over_shards, first_slot, sparse_attention_over_shards
from maxmoe.params import declare, normal, ones, zeros
from maxmoe.sharding import activation_axes, current_mesh, shard_map


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

    def queries(
        self, x: Float[Array, "B T D"], q_latent: Float[Array, "B T Q"]
    ) -> tuple[Float[Array, "B T I J"], Float[Array, "B T I"]]:
        """Queries of the index heads, and the weights of the heads' scores in a token's sum."""
        c = self.config
        q = linear(q_latent, self.q_proj).reshape(*x.shape[:-1], c.num_heads, c.head_dim)
        head_weights = linear(x, self.weights_proj).astype(jnp.float32) * c.num_heads**-0.5
        return q, head_weights * c.head_dim**-0.5


class MLALayer(nn.Module):
    """Token mixer over every earlier token, or over those that its indexer selects."""

    config: MLAConfig
    indexer_config: IndexerConfig | None
    model_dim: int
    implementation: str | None = None  # of ops that have kernels; see `ops.dispatch`

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
        return self._mix(x, cache, layer, spans, mla.attention)

    read_window = prefill  # rows of tokens that are not kept lie behind a sequence's end, where nobody reads

    def decode(
        self, x: Float[Array, "B 1 D"], cache: MLACache, layer: Int[Array, ""], spans: Spans
    ) -> tuple[Float[Array, "B 1 D"], MLACache]:
        """Attends from one token; to every earlier one in the absorbed form."""
        return self._mix(x, cache, layer, spans, mla.absorbed_attention)

    def _mix(self, x, cache, layer, spans, dense_attention):
        c = self.config
        q_latent = rms_norm(linear(x, self.q_down), self.q_norm, c.lora_norm_eps)
        q = linear(q_latent, self.q_up).reshape(*x.shape[:-1], c.num_heads, c.qk_head_dim)
        cache = self._append(x, cache, layer, spans)
        positions = spans.positions(x.shape[1])
        # With no more slots than the indexer selects, every one would be.
        is_sparse = self.indexer_config is not None and cache.num_slots > self.indexer_config.top_k
        index_queries = self.indexer.queries(x, q_latent) if is_sparse else None
        if (mesh := current_mesh()) is not None and slot_axes(mesh, cache.rows):
            out = self._attend_over_shards(mesh, q, index_queries, cache, layer, positions)
        elif is_sparse:
            out = self._attend_to_selected(q, index_queries, cache, layer, positions)
        else:
            out = dense_attention(q, read_rows(cache.rows, layer).astype(x.dtype), self.kv_up, positions)
        gate = jax.nn.sigmoid(linear(x, self.gate_proj))
        return linear(out.reshape(gate.shape) * gate, self.out_proj), cache

    def _append(self, x, cache, layer, spans):
        """Writes the tokens' latents and index keys at their positions; padding, and what has no slot, is dropped."""
        latent, shared = jnp.split(linear(x, self.kv_down), [self.config.kv_lora_rank], axis=-1)
        latent = rms_norm(latent, self.kv_norm, self.config.lora_norm_eps)
        new = (jnp.concatenate([latent, shared], axis=-1),)
        if self.indexer_config is not None:
            new = (*new, self.indexer.keys(x))
        args = (cache, layer, spans.slots(x.shape[1]), new)
        if (mesh := current_mesh()) is None:
            return _write(*args, ())
        kept, batch = _cache_specs(mesh, cache), activation_axes(mesh, axes.BATCH, x.shape[0])
        row = PartitionSpec(batch)  # tokens whole: each device writes those that its slots hold
        write = functools.partial(_write, slot_axes=slot_axes(mesh, cache.rows))
        return shard_map(write, (kept, PartitionSpec(), row, (row,) * len(new)), kept)(*args)

    def _attend_to_selected(self, q, index_queries, cache, layer, positions):
        top_k, name = self.indexer_config.top_k, self.implementation
        with jax.named_scope("indexer"):
            index_q, head_weights = index_queries
            args = index_q, cache.index_keys, layer, head_weights, positions, top_k
            selected = select_tokens(*args, implementation=dispatch.for_op("select_candidates", name))
        self.sow("intermediates", "selected", selected)
        name = dispatch.for_op("sparse_context", name)
        return sparse_attention(q, cache.rows, layer, self.kv_up, selected, implementation=name)

    def _attend_over_shards(self, mesh, q, index_queries, cache, layer, positions):
        """Attention in the absorbed form, each device over its own slots of the cache."""
        rank, own_dim = self.config.kv_lora_rank, self.config.qk_nope_head_dim
        w_kv = self.kv_up.reshape(q.shape[2], -1, rank).astype(q.dtype)
        q_latent, q_shared = jnp.split(mla.absorb_queries(q, w_kv[:, :own_dim]), [rank], axis=-1)
        batch = activation_axes(mesh, axes.BATCH, q.shape[0])
        seq = activation_axes(mesh, axes.TOKENS, q.shape[1])
        heads = activation_axes(mesh, axes.HEADS, q.shape[2])
        by_head, by_token = PartitionSpec(batch, seq, heads), PartitionSpec(batch, seq)
        attend = functools.partial(
            _attend_shard,
            top_k=None if index_queries is None else self.indexer_config.top_k,
            scale=q.shape[-1] ** -0.5,
            implementation=self.implementation,
            slot_axes=slot_axes(mesh, cache.rows),
            head_axis=heads[0] if heads else None,
            query_axis=seq[0] if seq else None,
        )
        index_specs = None if index_queries is None else (by_token, by_token)
        in_specs = (by_head, by_head, index_specs, _cache_specs(mesh, cache), PartitionSpec(), by_token)
        context = shard_map(attend, in_specs, by_head)(q_latent, q_shared, index_queries, cache, layer, positions)
        return mla.einsum("bthr,hvr->bthv", context, w_kv[:, own_dim:])


def _cache_specs(mesh, cache):
    batch = activation_axes(mesh, axes.BATCH, cache.rows.latent.shape[1])
    slots = slot_axes(mesh, cache.rows)
    rows = PartitionSpec(None, batch, slots)
    keys = None if cache.index_keys is None else PartitionSpec(None, batch, None, slots)
    return MLACache(rows=LatentRows(rows, rows), index_keys=keys)


def _write(cache, layer, slots, new, slot_axes):
    if slot_axes:
        slots = slots - first_slot(slot_axes, cache.num_slots)
    rows = write_rows(cache.rows, layer, slots, new[0])
    keys = cache.index_keys if len(new) == 1 else write_keys(cache.index_keys, layer, slots, new[1])
    return MLACache(rows=rows, index_keys=keys)


def _attend_shard(q, q_shared, index_queries, cache, layer, positions, *, top_k, scale, implementation, **where):
    if index_queries is None:
        return dense_attention_over_shards(q, q_shared, cache.rows, layer, positions, scale, **where)
    index_q, head_weights = index_queries
    return sparse_attention_over_shards(
        q,
        q_shared,
        index_q,
        cache.index_keys,
        head_weights,
        cache.rows,
        layer,
        positions,
        top_k,
        scale,
        implementation=dispatch.for_op("sparse_context", implementation),
        index_implementation=dispatch.for_op("select_candidates", implementation),
        **where,
    )
