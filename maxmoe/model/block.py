"""One layer with its block attention residuals, and the superblock that a stack scans."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from maxmoe import axes
from maxmoe.config import ModelConfig
from maxmoe.model.cache import KDACache, MLACache, Spans
from maxmoe.model.kda_layer import KDALayer
from maxmoe.model.mla_layer import MLALayer
from maxmoe.model.moe_layer import DenseFFN, LatentMoE, StackedExperts
from maxmoe.model.stacks import FFN, LayerKind, Mixer, StackPlan
from maxmoe.ops import dispatch
from maxmoe.ops.attn_res import mix_and_norm
from maxmoe.params import declare, normal, ones
from maxmoe.sharding import activation_spec, constrain, current_mesh, shard_map


class Layer(nn.Module):
    """Mixer and FFN, each fed by a mixture of the bank and the running sum.

    `prefill` and `decode` run both. Where something happens in between, such as fetching the experts that a router
    chose, `prefill_mixer` and `decode_mixer` run the first half. Barriers keep the compiler from fusing across the
    borders of such parts, and from using what it knows of the layer's number: parts that are compiled on their own,
    for any layer, then give the same bits as the whole model.
    """

    config: ModelConfig
    kind: LayerKind
    may_restart: bool  # whether a residual block can begin at this place of its stack
    implementation: str | None = None  # of ops that have kernels; see `ops.dispatch`

    def setup(self):
        c, d, bf16, vector = self.config, (self.config.model_dim,), jnp.bfloat16, (axes.NORM,)
        name = self.implementation
        self.mixer_norm = declare(self, "mixer_norm", d, bf16, vector, ones)
        self.mixer_res_norm = declare(self, "mixer_res_norm", d, bf16, vector, ones)
        self.mixer_res_proj = declare(self, "mixer_res_proj", d, bf16, vector, normal)
        self.ffn_norm = declare(self, "ffn_norm", d, bf16, vector, ones)
        self.ffn_res_norm = declare(self, "ffn_res_norm", d, bf16, vector, ones)
        self.ffn_res_proj = declare(self, "ffn_res_proj", d, bf16, vector, normal)
        if self.kind.mixer is Mixer.KDA:
            self.mixer = KDALayer(c.kda, c.model_dim, c.norm_eps, name)
        else:
            self.mixer = MLALayer(c.mla, c.indexer, c.model_dim, name)
        if self.kind.ffn is FFN.DENSE:
            self.ffn = DenseFFN(c.situ, c.model_dim, c.dense_dim)
        else:
            self.ffn = LatentMoE(c.moe, c.situ, c.model_dim, c.norm_eps, name)

    def prefill(self, *args):
        """A chunk of tokens through the layer; see `_wire`."""
        return self._wire(self.mixer.prefill, *args)

    def decode(self, *args):
        """One token through the layer; see `_wire`."""
        return self._wire(self.mixer.decode, *args)

    def read_window(self, *args):
        """`prefill` that keeps recurrent state as it is; see `_wire`."""
        return self._wire(self.mixer.read_window, *args)

    def keep_window(self, cache, superblock, spans):
        """Appends to the state what the spans say of a window that was read."""
        if self.kind.mixer is not Mixer.KDA:
            return cache
        return self.mixer.keep_window(cache, spans.layer(superblock), spans)

    def prefill_mixer(self, *args):
        """A chunk of tokens through the mixer; see `_mix`."""
        return self._mix(self.mixer.prefill, *args)

    def decode_mixer(self, *args):
        """One token through the mixer; see `_mix`."""
        return self._mix(self.mixer.decode, *args)

    def _wire(self, mixer, current, bank, cache, experts, depth, superblock, spans):
        """`depth` is the layer's 0-based number; every block_size-th layer banks the sum and restarts it."""
        mixed, current, bank, cache = self._mix(mixer, current, bank, cache, depth, superblock, spans)
        mixed, current = jax.lax.optimization_barrier((mixed, current))
        if self.kind.ffn is FFN.DENSE:
            current = current + self.ffn(mixed)
        else:
            current = current + self.ffn(mixed, spans.real(current.shape[1]), experts, superblock)
        current = constrain(jax.lax.optimization_barrier(current), axes.BATCH, axes.TOKENS, None)
        self.sow("intermediates", "residual_sum", current)
        return current, bank, cache

    def _mix(self, mixer, current, bank, cache, depth, superblock, spans):
        """Returns what the FFN is to be applied to, then running sum, bank and cache without the FFN's part."""
        eps, block_size = self.config.norm_eps, self.config.attn_res_block_size
        depth = jax.lax.optimization_barrier(jnp.int32(depth))
        name = dispatch.for_op("mix_and_norm", self.implementation)
        mix = functools.partial(_mix_and_norm, eps, name)
        weights = self.mixer_res_norm, self.mixer_res_proj, self.mixer_norm
        mixed = mix(current, bank, -(-depth // block_size), *weights)
        restart = depth % block_size == 0
        if self.may_restart:
            slot = depth // block_size
            bank = bank.at[slot].set(jnp.where(restart, current, bank[slot]))
        out, cache = mixer(mixed, cache, spans.layer(superblock), spans)
        self.sow("intermediates", "mixer_out", out)
        current = jnp.where(restart, out, current + out) if self.may_restart else current + out
        weights = self.ffn_res_norm, self.ffn_res_proj, self.ffn_norm
        return mix(current, bank, depth // block_size + 1, *weights), current, bank, cache


def _mix_and_norm(eps, implementation, current, bank, num_entries, res_norm, res_proj, norm):
    """`mix_and_norm` of the tokens that each device has: every token's residuals are its own."""

    def each_device(current, bank, num_entries, res_norm, res_proj, norm):
        return mix_and_norm(current, bank, num_entries, res_norm, res_proj, eps, norm, implementation)

    args = current, bank, num_entries, res_norm, res_proj, norm
    if (mesh := current_mesh()) is None:
        return each_device(*args)
    tokens = activation_spec(mesh, (axes.BATCH, axes.TOKENS), current.shape[:2])
    in_specs = (tokens, PartitionSpec(None, *tokens), *[PartitionSpec()] * 4)
    return shard_map(each_device, in_specs, tokens)(*args)


def layer_of(config: ModelConfig, plan: StackPlan, place: int, implementation: str | None = None) -> Layer:
    """The layer at one place of a stack's superblocks; equal for all of them, and for like places."""
    block_size = config.attn_res_block_size
    may_restart = any((plan.first + i * plan.size + place) % block_size == 0 for i in range(plan.count))
    return Layer(config, plan.layers[place], may_restart, implementation)


class Superblock(nn.Module):
    """The layers of one superblock. The carry holds running sum, bank and the whole stack's cache."""

    config: ModelConfig
    plan: StackPlan
    implementation: str | None = None

    def setup(self):
        places = range(self.plan.size)
        self.layers = [layer_of(self.config, self.plan, place, self.implementation) for place in places]

    def prefill(self, carry, superblock: int | Int[Array, ""], spans: Spans, experts):
        """A chunk of tokens through superblock number `superblock` of the stack."""
        return self._chain([layer.prefill for layer in self.layers], carry, superblock, spans, experts)

    def decode(self, carry, superblock: int | Int[Array, ""], spans: Spans, experts):
        """One token through superblock number `superblock` of the stack."""
        return self._chain([layer.decode for layer in self.layers], carry, superblock, spans, experts)

    def read_window(self, carry, superblock: int | Int[Array, ""], spans: Spans, experts):
        """`prefill` that keeps recurrent state as it is."""
        return self._chain([layer.read_window for layer in self.layers], carry, superblock, spans, experts)

    def keep_window(self, carry, superblock: int | Int[Array, ""], spans: Spans, experts):
        """Appends to the state what the spans say of a window that was read; the rest of the carry has no part."""
        del experts
        current, bank, caches = carry
        pairs = zip(self.layers, caches, strict=True)
        return (current, bank, tuple(layer.keep_window(cache, superblock, spans) for layer, cache in pairs)), None

    def _chain(self, layers, carry, superblock, spans, experts):
        current, bank, caches = carry
        caches = list(caches)
        for place, layer in enumerate(layers):
            depth = self.plan.first + superblock * self.plan.size + place
            with jax.named_scope(f"layer_{place}"):
                current, bank, caches[place] = layer(
                    current, bank, caches[place], experts[place], depth, superblock, spans
                )
        return (current, bank, tuple(caches)), None


class Stack(nn.Module):
    """Equal superblocks in a row: scanned over stacked weights, or unrolled with weights of their own."""

    config: ModelConfig
    plan: StackPlan
    scan: bool
    implementation: str | None = None

    def setup(self):
        kinds = self.plan.layers
        self.experts = [
            StackedExperts(self.config.moe, self.plan.count) if kind.ffn is FFN.MOE else None for kind in kinds
        ]
        if not self.scan:
            self.superblocks = [Superblock(self.config, self.plan, self.implementation) for _ in range(self.plan.count)]
            return
        stack = nn.scan(
            Superblock,
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=self.plan.count,
            metadata_params={nn.PARTITION_NAME: axes.LAYERS},
            methods=["prefill", "decode", "read_window", "keep_window"],
        )
        self.scanned = stack(self.config, self.plan, self.implementation)

    def prefill(
        self,
        current: Float[Array, "B T D"],
        bank: Float[Array, "A B T D"],
        caches: tuple[KDACache | MLACache, ...],
        spans: Spans,
    ):
        """A chunk of tokens through every superblock. Returns running sum, bank and caches."""
        return self._run("prefill", (current, bank, caches), spans)

    def decode(self, current, bank, caches, spans: Spans):
        """One token through every superblock. Returns running sum, bank and caches."""
        return self._run("decode", (current, bank, caches), spans)

    def read_window(self, current, bank, caches, spans: Spans):
        """A window of tokens through every superblock. Returns running sum, bank and caches."""
        return self._run("read_window", (current, bank, caches), spans)

    def keep_window(self, caches, spans: Spans):
        """Appends to the state what the spans say of a window that was read. Returns the caches."""
        return self._run("keep_window", (None, None, caches), spans)[2]

    def _run(self, method, carry, spans):
        experts = tuple(stacked() if stacked is not None else None for stacked in self.experts)
        if self.scan:
            carry, _ = getattr(self.scanned, method)(carry, jnp.arange(self.plan.count), spans, experts)
        else:
            for i, superblock in enumerate(self.superblocks):
                carry, _ = getattr(superblock, method)(carry, i, spans, experts)
        return carry
