"""The KDA layer: projections, short convolutions, decay gate, delta rule, gated norm."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from maxmoe import axes
from maxmoe.config import KDAConfig
from maxmoe.model.cache import KDACache, Spans
from maxmoe.ops import dispatch, kda
from maxmoe.ops.kda_decode import kda_decode
from maxmoe.ops.kda_shards import kda_over_shards, short_conv_over_shards
from maxmoe.ops.linear import linear
from maxmoe.ops.norm import gated_rms_norm, l2_norm
from maxmoe.ops.short_conv import short_conv
from maxmoe.params import declare, normal, ones, zeros
from maxmoe.sharding import activation_axes, current_mesh, shard_map


class KDALayer(nn.Module):
    """Token mixer with a constant-size state. The output gate is full rank."""

    config: KDAConfig
    model_dim: int
    norm_eps: float
    implementation: str | None = None  # of ops that have kernels; see `ops.dispatch`

    def setup(self):
        c, d, inner = self.config, self.model_dim, self.config.inner_dim
        bf16, f32 = jnp.bfloat16, jnp.float32
        into, out_of = (axes.HEADS, axes.EMBED), (axes.EMBED, axes.HEADS)
        self.q_proj = declare(self, "q_proj", (inner, d), bf16, into, normal)
        self.k_proj = declare(self, "k_proj", (inner, d), bf16, into, normal)
        self.v_proj = declare(self, "v_proj", (inner, d), bf16, into, normal)
        self.q_conv = declare(self, "q_conv", (inner, c.conv_width), f32, (axes.HEADS, axes.NORM), normal)
        self.k_conv = declare(self, "k_conv", (inner, c.conv_width), f32, (axes.HEADS, axes.NORM), normal)
        self.v_conv = declare(self, "v_conv", (inner, c.conv_width), f32, (axes.HEADS, axes.NORM), normal)
        self.decay_down = declare(self, "decay_down", (c.head_dim, d), bf16, (axes.LATENT, axes.EMBED), normal)
        self.decay_up = declare(self, "decay_up", (inner, c.head_dim), bf16, (axes.HEADS, axes.LATENT), normal)
        self.dt_bias = declare(self, "dt_bias", (inner,), f32, (axes.HEADS,), zeros)
        self.a_log = declare(self, "a_log", (c.num_heads,), f32, (axes.HEADS,), zeros)
        self.beta_proj = declare(self, "beta_proj", (c.num_heads, d), bf16, into, normal)
        self.gate_proj = declare(self, "gate_proj", (inner, d), bf16, into, normal)
        self.out_norm = declare(self, "out_norm", (c.head_dim,), f32, (axes.NORM,), ones)
        self.out_proj = declare(self, "out_proj", (d, inner), bf16, out_of, normal)

    def prefill(
        self, x: Float[Array, "B T D"], cache: KDACache, layer: Int[Array, ""], spans: Spans
    ) -> tuple[Float[Array, "B T D"], KDACache]:
        """Mixes a chunk of tokens; padding at the end of a row leaves its state alone."""
        out, conv, state = self._run_chunk(self._projections(x), cache, layer, spans)
        return self._output(x, out), cache.write(layer, conv, state)

    def read_window(
        self, x: Float[Array, "B T D"], cache: KDACache, layer: Int[Array, ""], spans: Spans
    ) -> tuple[Float[Array, "B T D"], KDACache]:
        """`prefill` that leaves the state as it is, and puts the inputs of convolutions and recurrence beside it.

        There are few tokens, so that those are far smaller than the state. `keep_window` appends some of them.
        """
        inputs = self._projections(x)
        out, _, _ = self._run_chunk(inputs, cache, layer, spans)
        window = tuple(
            kept.at[layer].set(new.astype(kept.dtype)) for kept, new in zip(cache.window, inputs, strict=True)
        )
        return self._output(x, out), cache.replace(window=window)

    def keep_window(self, cache: KDACache, layer: Int[Array, ""], spans: Spans) -> KDACache:
        """Appends the first tokens of what `read_window` read, as many of each row as the spans say."""
        _, conv, state = self._run_chunk(tuple(kept[layer] for kept in cache.window), cache, layer, spans)
        return cache.write(layer, conv, state)

    def _run_chunk(self, inputs, cache, layer, spans):
        tokens = (*inputs, spans.real(inputs[0].shape[1]))
        conv, state = cache.read(layer)
        mix = functools.partial(_mix_chunk, self.config, self.implementation)
        args = (tokens, self._constants(), conv, state, spans.lengths)
        if (mesh := current_mesh()) is None:
            return mix(None, *args)
        batch, seq, heads = self._axes(mesh, inputs[0])
        wide = PartitionSpec(batch, seq, heads)
        kept = PartitionSpec(batch, None, None, heads), PartitionSpec(batch, heads)
        token_specs = (wide,) * 5 + (PartitionSpec(batch, seq),)
        in_specs = (token_specs, _constant_specs(heads), *kept, PartitionSpec(batch))
        seq_axis = seq[0] if seq else None
        return shard_map(functools.partial(mix, seq_axis), in_specs, (wide, *kept))(*args)

    def _output(self, x, out):
        gate = self._heads(linear(x, self.gate_proj))
        out = gated_rms_norm(out, gate, self.out_norm, self.norm_eps)
        return linear(out.reshape(*x.shape[:-1], -1), self.out_proj)

    def decode(
        self, x: Float[Array, "B 1 D"], cache: KDACache, layer: Int[Array, ""], spans: Spans
    ) -> tuple[Float[Array, "B 1 D"], KDACache]:
        """Mixes one token; rows without one keep their state."""
        tokens = tuple(a[:, 0] for a in (*self._projections(x), linear(x, self.gate_proj)))
        name = dispatch.for_op("kda_decode", self.implementation)
        mix = functools.partial(_mix_token, self.config, self.norm_eps, name)
        args = (tokens, self._constants(), self.out_norm, cache.conv, cache.state, layer, spans.lengths > 0)
        if (mesh := current_mesh()) is None:
            out, conv, state = mix(*args)
        else:
            batch, _, heads = self._axes(mesh, x)
            wide = PartitionSpec(batch, heads)
            kept = PartitionSpec(None, batch, None, None, heads), PartitionSpec(None, batch, heads)
            row = PartitionSpec(batch)
            in_specs = ((wide,) * 6, _constant_specs(heads), PartitionSpec(), *kept, PartitionSpec(), row)
            out, conv, state = shard_map(mix, in_specs, (wide, *kept))(*args)
        return linear(out[:, None], self.out_proj), cache.replace(conv=conv, state=state)

    def _projections(self, x):
        """Of every token, before the convolutions: q, k, v and decay logits of all channels, step size logits."""
        with jax.named_scope("decay_gate"):
            decay = linear(linear(x, self.decay_down), self.decay_up)
        return (*(linear(x, w) for w in (self.q_proj, self.k_proj, self.v_proj)), decay, linear(x, self.beta_proj))

    def _constants(self):
        return jnp.stack([self.q_conv, self.k_conv, self.v_conv]), self.dt_bias, self.a_log

    def _axes(self, mesh, x):
        """The mesh axes of batch rows, tokens and heads."""
        sizes = {axes.BATCH: x.shape[0], axes.TOKENS: x.shape[1], axes.HEADS: self.config.num_heads}
        return (activation_axes(mesh, name, size) for name, size in sizes.items())

    def _heads(self, x):
        return x.reshape(*x.shape[:-1], self.config.num_heads, self.config.head_dim)


def _constant_specs(heads):
    return PartitionSpec(None, heads), PartitionSpec(heads), PartitionSpec(heads)


def _mix_chunk(config, implementation, seq_axis, tokens, constants, conv, state, lengths):
    """Convolutions, gates and the delta rule over a chunk, for some of the heads.

    Args:
      seq_axis: The mesh axis over which tokens are split, inside `shard_map`; None where they are whole.
      lengths: Real tokens of each whole row.
    Returns: Outputs per head, and the new conv and recurrent state.
    """
    (*qkv, z, beta, real), (taps, dt_bias, a_log) = tokens, constants
    dtype, real = z.dtype, real[..., None]

    def by_head(x):
        return x.reshape(*x.shape[:-1], -1, config.head_dim)

    with jax.named_scope("short_conv"):
        windows = conv.reshape(*conv.shape[:-2], -1)
        pairs = [_convolve(x, taps[i], windows[:, i], lengths, seq_axis) for i, x in enumerate(qkv)]
    q, k, v = (by_head(jax.nn.silu(y).astype(dtype)) for y, _ in pairs)
    q, k = l2_norm(q) * config.head_dim**-0.5, l2_norm(k)
    with jax.named_scope("decay_gate"):
        z, bound = by_head(z.astype(jnp.float32) + dt_bias), config.gate_lower_bound
        g = kda.softplus_gate(z, a_log) if bound is None else kda.bounded_gate(z, a_log, bound)
    beta = jnp.where(real, jax.nn.sigmoid(beta.astype(jnp.float32)), 0)
    k, g = (jnp.where(real[..., None], a, 0) for a in (k, g))
    if seq_axis is None:
        out, state = kda.kda_chunked(q, k, v, g, beta, state, implementation=implementation)
    else:
        out, state = kda_over_shards(q, k, v, g, beta, state, seq_axis, implementation=implementation)
    return out, jnp.stack([new for _, new in pairs], axis=1).reshape(conv.shape), state


def _convolve(x, taps, before, lengths, seq_axis):
    if seq_axis is None:
        return short_conv(x, taps, before, lengths)
    return short_conv_over_shards(x, taps, before, lengths, seq_axis)


def _mix_token(config, norm_eps, implementation, tokens, constants, out_norm, conv, state, layer, active):
    """One token of some of the heads, on the states of all L stacked layers. Returns outputs, conv and state."""
    batch = state.shape[1]
    out, new_state, new_conv = kda_decode(
        *tokens[:4],
        tokens[5],
        tokens[4],
        *constants,
        out_norm,
        state.reshape(-1, *state.shape[2:]),
        conv.reshape(-1, *conv.shape[2:]),
        jnp.where(active, layer * batch + jnp.arange(batch), -1),
        lower_bound=config.gate_lower_bound,
        norm_eps=norm_eps,
        implementation=implementation,
    )
    return out, new_conv.reshape(conv.shape), new_state.reshape(state.shape)
