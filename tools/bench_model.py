"""Speed of the plain path on this machine: prefill, decode, compile time, peak memory, and KDA chunked or not.

    python tools/bench_model.py                                   tiny and mid
    python tools/bench_model.py --config my/config.json --repeats 9

Weights are random. Figures are medians over repeats, with the best in brackets; compare them only with others of
the same machine and minute.
"""

import resource
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import maxmoe as mm
from maxmoe.config import load_config
from maxmoe.inference import steps
from maxmoe.model.cache import KDACache, Spans
from maxmoe.model.kda_layer import KDALayer
from maxmoe.ops import kda
from maxmoe.params import count_weights

FLAGS = flags.FLAGS
flags.DEFINE_multi_string(
    "config", ["configs/tiny.py", "tests/golden/mid_config.json"], "Model configurations to measure."
)
flags.DEFINE_integer("prompt_tokens", 512, "Tokens of the prefill.", lower_bound=1)
flags.DEFINE_integer("decode_tokens", 32, "Decode steps per repeat, batch 1.", lower_bound=1)
flags.DEFINE_integer("repeats", 5, "Repeats that the median is taken over.", lower_bound=1)
flags.DEFINE_integer("kda_tokens", 4096, "Tokens of the KDA comparison; 0 leaves it out.", lower_bound=0)
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of weights and activations.")


def main(argv):
    """Measures each configuration and prints a few lines on it."""
    del argv
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {FLAGS.dtype}, median of {FLAGS.repeats} (best)")
    for source in FLAGS.config:
        config = load_config(source)
        print(f"\n{source}")
        bench_model(config)
        if FLAGS.kda_tokens:
            bench_kda(config)


def bench_model(config):
    """Prefill and decode of one sequence."""
    model = mm.Transformer(config)
    params = jax.tree.map(
        lambda leaf: leaf.astype(FLAGS.dtype) if leaf.dtype == jnp.bfloat16 else leaf, mm.init_params(model)
    )
    num_tokens, new_tokens = FLAGS.prompt_tokens, FLAGS.decode_tokens
    ids = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (1, num_tokens)), jnp.int32)
    empty = mm.init_cache(model, 1, num_tokens + new_tokens + 1, FLAGS.dtype)

    compile_prefill, (logits, cache) = _timed(lambda: mm.prefill(model, params, ids, empty))
    token = jnp.argmax(logits, axis=-1)
    compile_decode, _ = _timed(lambda: mm.decode_step(model, params, token, cache))
    prefill = [_timed(lambda: mm.prefill(model, params, ids, empty))[0] for _ in range(FLAGS.repeats)]

    def decode():
        step_cache = jax.tree.map(jnp.copy, cache)
        for _ in range(new_tokens):
            logits, step_cache = steps.decode_step_in_place(model, params, token, step_cache)
        return logits

    decode()
    per_run = [_timed(decode)[0] for _ in range(FLAGS.repeats)]
    print(f"  weights          {count_weights(params) / 1e6:.1f} M")
    print(f"  prefill          {_rates(num_tokens, prefill)} tokens/s, {num_tokens} tokens")
    print(f"  decode           {_rates(new_tokens, per_run)} tokens/s, batch 1")
    print(f"  compile          prefill {compile_prefill:.1f} s, decode {compile_decode:.1f} s (less where cached)")
    print(
        f"  peak memory      {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of the process so far"
    )


def bench_kda(config):
    """The KDA layer, and KDA alone, over one long sequence: in chunks against one token at a time."""
    num_tokens, c = FLAGS.kda_tokens, config.kda
    layer = KDALayer(c, config.model_dim, config.norm_eps)
    x = jax.random.normal(jax.random.key(0), (1, num_tokens, config.model_dim), FLAGS.dtype)
    state_shape = (1, 1, c.num_heads, c.head_dim, c.head_dim)
    cache = KDACache(
        conv=jnp.zeros((1, 1, 3, c.conv_width - 1, c.inner_dim), FLAGS.dtype), state=jnp.zeros(state_shape)
    )
    spans = Spans(start=jnp.zeros(1, jnp.int32), lengths=jnp.full(1, num_tokens, jnp.int32))
    variables = layer.init(jax.random.key(1), x, cache, 0, spans, method="prefill")
    one = Spans(start=spans.start, lengths=jnp.ones(1, jnp.int32))

    def in_chunks(x):
        return layer.apply(variables, x, cache, 0, spans, method="prefill")[0]

    def one_by_one(x):
        def step(cache, token):
            out, cache = layer.apply(variables, token[:, None], cache, 0, one, method="decode")
            return cache, out[:, 0]

        return jnp.swapaxes(jax.lax.scan(step, cache, jnp.swapaxes(x, 0, 1))[1], 0, 1)

    _compare("KDA layer", in_chunks, one_by_one, x)

    shape = (1, num_tokens, c.num_heads, c.head_dim)
    q, k, v, z = (jax.random.normal(jax.random.key(i), shape) for i in range(4))
    q, k = (a / jnp.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    arguments = (
        q,
        k,
        v,
        kda.bounded_gate(z, jnp.zeros(c.num_heads), -5.0),
        jax.nn.sigmoid(z[..., 0]),
        cache.state[0],
    )
    _compare("KDA op alone", lambda *a: kda.kda_chunked(*a)[0], lambda *a: kda.kda_recurrent(*a)[0], *arguments)


def _compare(what, chunked, stepped, *arguments):
    """Times two forms of the same function in turns, and prints their ratio and how far their results differ."""
    chunked, stepped = jax.jit(chunked), jax.jit(stepped)
    difference = jnp.max(jnp.abs(chunked(*arguments) - stepped(*arguments)))
    pairs = [
        (_timed(lambda: chunked(*arguments))[0], _timed(lambda: stepped(*arguments))[0]) for _ in range(FLAGS.repeats)
    ]
    fast, slow = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    print(
        f"  {what:16s} {FLAGS.kda_tokens} tokens in chunks {1e3 * fast:.0f} ms, one by one {1e3 * slow:.0f} ms: "
        f"{ratio:.1f}x, max difference {difference:.1e}"
    )


def _timed(run):
    began = time.perf_counter()
    result = jax.block_until_ready(run())
    return time.perf_counter() - began, result


def _rates(count, seconds):
    return f"{count / statistics.median(seconds):.0f} ({count / min(seconds):.0f})"


if __name__ == "__main__":
    app.run(main)
