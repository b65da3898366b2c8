"""The text model: embedding, stacks of superblocks, final residual mixture, head."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxmoe import axes
from maxmoe.config import ModelConfig
from maxmoe.model.block import Stack
from maxmoe.model.cache import (
    Cache,
    Spans,
    close_windows,
    constrain_cache,
    make_cache,
    one_row,
    open_windows,
    whole_batch,
)
from maxmoe.model.stacks import plan_stacks
from maxmoe.ops.attn_res import mix
from maxmoe.ops.linear import linear
from maxmoe.ops.norm import rms_norm
from maxmoe.params import declare, normal, ones
from maxmoe.sharding import constrain

MAX_UNROLLED_LAYERS = 16


class Transformer(nn.Module):
    """A model of the family. Weights live in a separate tree: `model.apply({"params": params}, ...)`.

    Activations have the dtype of the embedding table, so that the dtype given when loading decides it.

    `scan_layers` stacks the weights of equal superblocks and scans them: program size and compile time do not
    grow with depth, but a backend that cannot multiply by a slice in place, such as the CPU, copies each layer's
    weights before use. None unrolls models of up to 16 layers and scans deeper ones.

    `implementation` names what computes those ops that have kernels; None takes the best that can run, see
    `ops.dispatch`.
    """

    config: ModelConfig
    scan_layers: bool | None = None
    implementation: str | None = None

    def setup(self):
        c, d, bf16, vector = self.config, (self.config.model_dim,), jnp.bfloat16, (axes.NORM,)
        table = (c.vocab_size, c.model_dim)
        self.embedding = declare(self, "embedding", table, bf16, (axes.VOCAB, axes.EMBED), normal)
        self.final_res_norm = declare(self, "final_res_norm", d, bf16, vector, ones)
        self.final_res_proj = declare(self, "final_res_proj", d, bf16, vector, normal)
        self.final_norm = declare(self, "final_norm", d, bf16, vector, ones)
        self.lm_head = declare(self, "lm_head", table, bf16, (axes.VOCAB, axes.EMBED), normal)
        scan = c.num_layers > MAX_UNROLLED_LAYERS if self.scan_layers is None else self.scan_layers
        self.stacks = [Stack(c, plan, scan, self.implementation) for plan in plan_stacks(c)]

    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits after every token, in float32: a prefill of whole sequences whose cache is thrown away."""
        batch, num_tokens = ids.shape
        cache = make_cache(self.config, batch, num_tokens, self.embedding.dtype)
        spans = Spans(start=cache.lengths, lengths=jnp.full(batch, num_tokens, jnp.int32))
        hidden, _ = self._run("prefill", ids, cache, spans)
        return self._logits(hidden)

    def prefill(
        self, ids: Int[Array, "B T"], cache: Cache, lengths: Int[Array, "B"]
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Appends `lengths[b]` tokens to each row. Returns logits after each row's last one, and the cache."""
        hidden, cache = self._run("prefill", ids, cache, Spans(start=cache.lengths, lengths=lengths))
        return self._last_logits(hidden, lengths), cache

    def prefill_row(
        self, ids: Int[Array, "1 T"], cache: Cache, length: Int[Array, ""], row: Int[Array, ""]
    ) -> tuple[Float[Array, "1 V"], Cache]:
        """`prefill` of one row of a batch; the other rows have no part in it."""
        kept, lengths = one_row(cache, row), length[None]
        spans = Spans(start=kept.lengths, lengths=lengths, row=row, num_rows=cache.batch_size)
        hidden, kept = self._run("prefill", ids, kept, spans)
        return self._last_logits(hidden, lengths), whole_batch(cache, kept, row)

    def decode(
        self, token: Int[Array, "B"], cache: Cache, active: Bool[Array, "B"] | None = None
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Appends one token to each row. Returns the logits after it, and the cache.

        A row whose cache was already full gets NaN logits: its token could not be kept. Where `active` is given,
        the other rows are left as they are, and their logits mean nothing.
        """
        ones = jnp.ones_like(cache.lengths)
        spans = Spans(start=cache.lengths, lengths=ones if active is None else active.astype(ones.dtype))
        max_len = cache.max_len
        hidden, cache = self._run("decode", token[:, None], cache, spans)
        return self._kept_logits(hidden, spans, max_len), cache

    def read_window(
        self, ids: Int[Array, "B T"], cache: Cache, lengths: Int[Array, "B"]
    ) -> tuple[Float[Array, "B T V"], Cache]:
        """Logits after each of a few tokens per row, of which `keep_window` appends the first ones, or all.

        Returns: The logits, and a cache for `keep_window` alone.
        """
        spans = Spans(start=cache.lengths, lengths=lengths)
        opened = open_windows(self.config, cache, ids.shape[1], self.embedding.dtype)
        current, bank = self.begin(ids)
        stacks = []
        for stack, caches in zip(self.stacks, opened.stacks, strict=True):
            current, bank, caches = stack.read_window(current, bank, caches, spans)
            stacks.append(caches)
        return self._logits(self.final_hidden(current, bank)), opened.replace(stacks=tuple(stacks))

    def keep_window(self, cache: Cache, lengths: Int[Array, "B"]) -> Cache:
        """Appends the first `lengths[b]` tokens of what `read_window` read to each row."""
        spans = Spans(start=cache.lengths, lengths=lengths)
        stacks = tuple(
            stack.keep_window(caches, spans) for stack, caches in zip(self.stacks, cache.stacks, strict=True)
        )
        return constrain_cache(close_windows(Cache(lengths=spans.start + lengths, stacks=stacks)))

    def begin(self, ids: Int[Array, "B T"]) -> tuple[Float[Array, "B T D"], Float[Array, "A B T D"]]:
        """What the first layer is given: running sum and empty bank."""
        current = constrain(self.embedding[ids], axes.BATCH, axes.TOKENS, None)
        return current, jnp.zeros((self.config.num_attn_res_blocks, *current.shape), current.dtype)

    def end_prefill(
        self, current: Float[Array, "B T D"], bank: Float[Array, "A B T D"], spans: Spans
    ) -> Float[Array, "B V"]:
        """The logits of `prefill` from what the last layer gave."""
        return self._last_logits(self.final_hidden(current, bank), spans.lengths)

    def end_decode(
        self, current: Float[Array, "B 1 D"], bank: Float[Array, "A B 1 D"], spans: Spans, max_len: int | None
    ) -> Float[Array, "B V"]:
        """The logits of `decode` from what the last layer gave, for a cache of `max_len` tokens."""
        return self._kept_logits(self.final_hidden(current, bank), spans, max_len)

    def _run(self, method, ids, cache, spans):
        current, bank = self.begin(ids)
        new_stacks = []
        for stack, caches in zip(self.stacks, cache.stacks, strict=True):
            current, bank, caches = getattr(stack, method)(current, bank, caches, spans)
            new_stacks.append(caches)
        cache = Cache(lengths=spans.start + spans.lengths, stacks=tuple(new_stacks))
        return self.final_hidden(current, bank), cache if spans.row is not None else constrain_cache(cache)

    def final_hidden(self, current: Float[Array, "B T D"], bank: Float[Array, "A B T D"]) -> Float[Array, "B T D"]:
        """What the head is applied to, from what the last layer gave."""
        c = self.config
        entries = c.num_attn_res_blocks
        current = mix(current, bank, entries, self.final_res_norm, self.final_res_proj, c.norm_eps)
        return rms_norm(current, self.final_norm, c.norm_eps)

    def _last_logits(self, hidden, lengths):
        last = jnp.maximum(lengths - 1, 0)[:, None, None]
        return self._logits(jnp.take_along_axis(hidden, last, axis=1)[:, 0])

    def _kept_logits(self, hidden, spans, max_len):
        logits = self._logits(hidden[:, 0])
        if max_len is None:
            return logits
        return jnp.where((spans.start < max_len)[:, None], logits, jnp.nan)

    def _logits(self, hidden):
        return linear(hidden, self.lm_head).astype(jnp.float32)
