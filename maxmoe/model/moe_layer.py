"""The FFNs: a dense SiTU-GLU, and LatentMoE, whose routed experts work on a narrow projection."""

import functools
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from maxmoe import axes
from maxmoe.config import MXFP4_GROUP, MoEConfig, SituConfig
from maxmoe.ops import dispatch
from maxmoe.ops.expert_exchange import choose_form, exchanged, gathered
from maxmoe.ops.experts import (
    ExpertMasters,
    ExpertWeights,
    expert_outputs,
    expert_outputs_from_masters,
    weighted_sum,
)
from maxmoe.ops.linear import linear
from maxmoe.ops.mxfp4 import quantize
from maxmoe.ops.norm import rms_norm
from maxmoe.ops.router import route
from maxmoe.ops.situ import situ_glu
from maxmoe.params import declare, mxfp4_codes, mxfp4_scales, normal, ones, zeros
from maxmoe.sharding import activation_axes, current_mesh, fsdp_expert_axes, shard_map, split_experts


class DenseFFN(nn.Module):
    """SiTU-GLU: down(situ(gate(x), up(x)))."""

    situ: SituConfig
    model_dim: int
    hidden_dim: int

    def setup(self):
        d, f, bf16 = self.model_dim, self.hidden_dim, jnp.bfloat16
        self.gate = declare(self, "gate", (f, d), bf16, (axes.MLP, axes.EMBED), normal)
        self.up = declare(self, "up", (f, d), bf16, (axes.MLP, axes.EMBED), normal)
        self.down = declare(self, "down", (d, f), bf16, (axes.EMBED, axes.MLP), normal)

    def __call__(self, x: Float[Array, "B T D"], real: Bool[Array, "B T"] | None = None) -> Float[Array, "B T D"]:
        """Applies the FFN to every token; `real` is not needed, for no token sees another."""
        hidden = situ_glu(linear(x, self.gate), linear(x, self.up), self.situ.gate_beta, self.situ.linear_beta)
        return linear(hidden, self.down)


class StackedExperts(nn.Module):
    """The routed experts of the `count` layers that share a place in a stack.

    They stand outside the scan over superblocks: a scan would slice out all experts of a layer to use a few.
    """

    config: MoEConfig
    count: int

    def setup(self):
        c = self.config
        into = (axes.LAYERS, axes.EXPERT, axes.EXPERT_MLP, axes.EXPERT_EMBED)
        out_of = (axes.LAYERS, axes.EXPERT, axes.EXPERT_EMBED, axes.EXPERT_MLP)
        self.weights = ExpertWeights(
            *self._mxfp4("gate", c.expert_dim, c.latent_dim, into),
            *self._mxfp4("up", c.expert_dim, c.latent_dim, into),
            *self._mxfp4("down", c.latent_dim, c.expert_dim, out_of),
        )

    def _mxfp4(self, name, out_dim, in_dim, names):
        lead, u8 = (self.count, self.config.num_experts, out_dim), jnp.uint8
        packed = declare(self, f"{name}_packed", (*lead, in_dim // 2), u8, names, mxfp4_codes)
        return packed, declare(self, f"{name}_scale", (*lead, in_dim // MXFP4_GROUP), u8, names, mxfp4_scales)

    def __call__(self) -> ExpertWeights:
        """The weights of all layers."""
        return self.weights


class Routing(NamedTuple):
    """What the routed experts are asked: each token's latent, and whose outputs it takes with which weights."""

    latent: Float[Array, "N latent"]
    ids: Int[Array, "N top_k"]  # the number of experts, which names none, for padding
    weights: Float[Array, "N top_k"]


def run_experts(
    situ: SituConfig,
    routing: Routing,
    experts: ExpertWeights | ExpertMasters,
    layer: int | Array,
    places: Int[Array, "num_experts"] | None = None,
    implementation: str | None = None,
    expected_rows: int | None = None,
    packed: ExpertWeights | None = None,
) -> Float[Array, "N top_k latent"]:
    """The outputs that `routing` asks for; see `expert_outputs`, and for masters `expert_outputs_from_masters`."""
    args = routing.latent, routing.ids, experts, layer, situ.gate_beta, situ.linear_beta
    with jax.named_scope("experts"):
        name = dispatch.for_op("expert_outputs", implementation)
        if isinstance(experts, ExpertMasters):
            return expert_outputs_from_masters(*args, packed=packed, implementation=name)
        return expert_outputs(*args, places, name, expected_rows)


def _sum_on_mesh(mesh, config, situ, routing, experts, layer, rows_and_tokens, implementation):
    """The weighted sums [N, latent] of the experts' outputs, each expert on the device that holds it."""
    split = split_experts(mesh, config)
    of_masters = isinstance(experts, ExpertMasters)
    fsdp = fsdp_expert_axes(mesh, config) if of_masters else ()
    batch, seq = (
        activation_axes(mesh, name, size) for name, size in zip((axes.BATCH, axes.TOKENS), rows_and_tokens, strict=True)
    )
    count = math.prod(mesh.shape[axis] for axis in split.expert_axes)
    replicas = math.prod(mesh.shape[axis] for axis in batch if axis not in split.expert_axes)
    latent = routing.latent
    num_tokens = latent.shape[0] // replicas
    form = choose_form(num_tokens, config.top_k, latent.shape[1], latent.dtype.itemsize, count)
    expected_rows = -(-num_tokens * config.top_k // count)
    exchange = gathered if form == "gathered" else functools.partial(exchanged, ragged=dispatch.platform() != "cpu")
    share = functools.partial(
        exchange,
        compute=functools.partial(_master_share, situ, implementation)
        if of_masters
        else functools.partial(_expert_share, situ, implementation, expected_rows),
        num_experts=config.num_experts,
        expert_axes=split.expert_axes,
        hidden_axes=split.hidden_axes,
        token_axes=(*batch, *seq),
    )

    def each_device(latent, ids, weights, experts, layer):
        flat = (a.reshape(-1, a.shape[-1]) for a in (latent, ids, weights))
        if of_masters:
            experts = _gather_packed(experts, fsdp)
        return share(*flat, operands=(experts, layer)).reshape(latent.shape)

    by_token = PartitionSpec(batch, seq)
    into = PartitionSpec(None, split.expert_axes, split.hidden_axes, fsdp)
    out_of = PartitionSpec(None, split.expert_axes, fsdp, split.hidden_axes)
    of_one = len(experts) // 3  # arrays for each of gate, up and down
    in_specs = (by_token,) * 3 + (type(experts)(*[into] * 2 * of_one, *[out_of] * of_one), PartitionSpec())
    tokens = (a.reshape(*rows_and_tokens, -1) for a in routing)
    with jax.named_scope("experts"):
        return shard_map(each_device, in_specs, by_token)(*tokens, experts, layer).reshape(latent.shape)


def _expert_share(situ, implementation, expected_rows, x, ids, experts, layer):
    return run_experts(situ, Routing(x, ids, None), experts, layer, None, implementation, expected_rows)


def _gather_packed(masters, fsdp_axes):
    """This device's experts whole: masters, of which only the gradient is used, and what they are packed to.

    Devices exchange the packed form, a quarter of the bytes. The masters are gathered only in name: nothing reads
    their values, and so their gradients are summed over devices in float32, each device getting its own part.
    """
    packed = tuple(leaf for master in masters for leaf in quantize(jax.lax.stop_gradient(master)))

    def gather(leaf, axis):
        return jax.lax.all_gather(leaf, fsdp_axes, axis=axis, tiled=True) if fsdp_axes else leaf

    with jax.named_scope("gather_experts"):
        packed = ExpertWeights(*(gather(leaf, 3 if i < 4 else 2) for i, leaf in enumerate(packed)))
        wide = (gather(leaf.astype(jnp.float32), 3 if i < 2 else 2) for i, leaf in enumerate(masters))
        return ExpertMasters(*wide), packed


def _master_share(situ, implementation, x, ids, experts, layer):
    masters, packed = experts
    return run_experts(situ, Routing(x, ids, None), masters, layer, implementation=implementation, packed=packed)


class LatentMoE(nn.Module):
    """Routed experts on a latent of the token, plus shared experts on the token itself.

    A call is `route`, `run_experts` and `join` in a row; they also run apart, where experts are fetched in between,
    and give the same bits, for barriers keep the compiler from fusing across their borders.
    """

    config: MoEConfig
    situ: SituConfig
    model_dim: int
    norm_eps: float
    implementation: str | None = None  # of ops that have kernels; see `ops.dispatch`

    def setup(self):
        c, d, bf16 = self.config, self.model_dim, jnp.bfloat16
        self.router = declare(self, "router", (c.num_experts, d), bf16, (axes.NORM, axes.EMBED), normal)
        self.router_bias = declare(self, "router_bias", (c.num_experts,), jnp.float32, (axes.NORM,), zeros)
        self.down_proj = declare(self, "down_proj", (c.latent_dim, d), bf16, (axes.EXPERT_EMBED, axes.EMBED), normal)
        self.norm = declare(self, "norm", (c.latent_dim,), bf16, (axes.NORM,), ones)
        self.up_proj = declare(self, "up_proj", (d, c.latent_dim), bf16, (axes.EMBED, axes.EXPERT_EMBED), normal)
        self.shared = DenseFFN(self.situ, d, c.shared_dim)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        real: Bool[Array, "B T"],
        experts: ExpertWeights | ExpertMasters,
        layer: int | Array,
    ) -> Float[Array, "B T D"]:
        """Applies the FFN to every token with the experts of one layer. Padding, not `real`, is not routed.

        Args:
          experts: For training on a mesh masters of one layer, split as `ShardingRules` with `fsdp` says.
        """
        routing = jax.lax.optimization_barrier(self.route(x, real))
        if (mesh := current_mesh()) is not None:
            # No barrier, so that the shared experts can run while tokens are on their way.
            args = routing, experts, layer, x.shape[:2], self.implementation
            return self._finish(x, _sum_on_mesh(mesh, self.config, self.situ, *args))
        outputs = run_experts(self.situ, routing, experts, layer, implementation=self.implementation)
        return self.join(x, routing, jax.lax.optimization_barrier(outputs))

    def route(self, x: Float[Array, "B T D"], real: Bool[Array, "B T"]) -> Routing:
        """Chooses each token's experts."""
        c = self.config
        tokens = x.reshape(-1, x.shape[-1])
        with jax.named_scope("router"):
            ids, weights = route(tokens, self.router, self.router_bias, c.top_k, c.routed_scale)
        self.sow("intermediates", "experts", ids)
        ids = jnp.where(real.reshape(-1, 1), ids, c.num_experts)
        return Routing(linear(tokens, self.down_proj), ids, weights)

    def join(
        self, x: Float[Array, "B T D"], routing: Routing, outputs: Float[Array, "N top_k latent"]
    ) -> Float[Array, "B T D"]:
        """The FFN's result from the outputs of the experts."""
        return self._finish(x, weighted_sum(outputs, routing.ids, routing.weights, self.config.num_experts))

    def _finish(self, x, routed):
        routed = linear(rms_norm(routed, self.norm, self.norm_eps), self.up_proj)
        return routed.reshape(x.shape) + self.shared(x)
