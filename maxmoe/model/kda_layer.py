"""The KDA layer: projections, short convolutions, decay gate, delta rule, gated norm."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxmoe import axes
from maxmoe.config import KDAConfig
from maxmoe.model.cache import KDACache, Spans
from maxmoe.ops import kda
from maxmoe.ops.linear import linear
from maxmoe.ops.norm import gated_rms_norm, l2_norm
from maxmoe.ops.short_conv import short_conv
from maxmoe.params import declare, normal, ones, zeros


class KDALayer(nn.Module):
    """Token mixer with a constant-size state. The output gate is full rank."""

    config: KDAConfig
    model_dim: int
    norm_eps: float

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
        conv, state = cache.read(layer)
        (q, k, v, g, beta), conv = self._inputs(x, conv, spans.lengths)
        real = spans.real(x.shape[1])[..., None]
        k, g = (jnp.where(real[..., None], a, 0) for a in (k, g))
        out, state = kda.kda_chunked(q, k, v, g, jnp.where(real, beta, 0), state)
        return self._output(x, out), cache.write(layer, conv, state)

    def decode(
        self, x: Float[Array, "B 1 D"], cache: KDACache, layer: Int[Array, ""], spans: Spans
    ) -> tuple[Float[Array, "B 1 D"], KDACache]:
        """Mixes one token."""
        conv, state = cache.read(layer)
        inputs, conv = self._inputs(x, conv, spans.lengths)
        out, state = kda.kda_step(*(a[:, 0] for a in inputs), state)
        return self._output(x, out[:, None]), cache.write(layer, conv, state)

    def _inputs(self, x, conv, lengths):
        """q (scaled), k, v, log decay and beta per head, and the new conv state."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        weights = (self.q_conv, self.k_conv, self.v_conv)
        with jax.named_scope("short_conv"):
            pairs = [
                short_conv(linear(x, w), taps, conv[:, i], lengths)
                for i, (w, taps) in enumerate(zip(projections, weights, strict=True))
            ]
        q, k, v = (self._heads(jax.nn.silu(y).astype(x.dtype)) for y, _ in pairs)
        q, k = l2_norm(q) * self.config.head_dim**-0.5, l2_norm(k)
        with jax.named_scope("decay_gate"):
            z = linear(linear(x, self.decay_down), self.decay_up).astype(jnp.float32)
            z = self._heads(z + self.dt_bias)
            bound = self.config.gate_lower_bound
            g = kda.softplus_gate(z, self.a_log) if bound is None else kda.bounded_gate(z, self.a_log, bound)
        beta = jax.nn.sigmoid(linear(x, self.beta_proj).astype(jnp.float32))
        return (q, k, v, g, beta), jnp.stack([state for _, state in pairs], axis=1)

    def _output(self, x, out):
        gate = self._heads(linear(x, self.gate_proj))
        out = gated_rms_norm(out, gate, self.out_norm, self.norm_eps)
        return linear(out.reshape(*x.shape[:-1], -1), self.out_proj)

    def _heads(self, x):
        return x.reshape(*x.shape[:-1], self.config.num_heads, self.config.head_dim)
