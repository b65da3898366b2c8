"""What one more token costs after 8,192 to 1,048,576 others: the indexer's choice, and everything else.

    python tools/bench_context.py
    python tools/bench_context.py --contexts 8192,65536 --repeats 9 --json context.json

The step is timed as it is, and with the choice of tokens given, in turns; the difference is what scoring and choosing
cost, which must grow with the context. The rest should not: recurrent states have one size, and attention reads the
chosen tokens only. Caches hold random values. Figures are medians; compare them only within one run.
"""

import dataclasses
import json
import statistics
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
from absl import app, flags

import maxmoe as mm
from maxmoe.config import load_config
from maxmoe.model import mla_layer

FLAGS = flags.FLAGS
flags.DEFINE_string("config", "configs/tiny.py", "The model's configuration; its weights are random.")
flags.DEFINE_list(
    "contexts", ["8192", "32768", "131072", "524288", "1048576"], "Tokens in the cache, one after another."
)
flags.DEFINE_integer("repeats", 15, "Steps that a median is taken over.", lower_bound=1)
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of weights, activations and cache.")
flags.DEFINE_string("json", None, "File for the figures.")


def main(argv):
    """Measures each context and prints a table."""
    del argv
    contexts = [int(text) for text in FLAGS.contexts]
    config = dataclasses.replace(load_config(FLAGS.config), max_len=max(contexts))
    model = mm.Transformer(config)
    params = jax.tree.map(
        lambda leaf: leaf.astype(FLAGS.dtype) if leaf.dtype == jnp.bfloat16 else leaf, mm.init_params(model)
    )
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {FLAGS.config}, {FLAGS.dtype}, batch 1")
    print("|    context | step, ms | choosing, ms | the rest, ms | the rest, of the first |\n|---|---|---|---|---|")
    rows = []
    for context in contexts:
        whole, rest = (1e3 * seconds for seconds in measure(model, params, context))
        rows.append({"context": context, "step_ms": whole, "choosing_ms": whole - rest, "rest_ms": rest})
        ratio = rest / rows[0]["rest_ms"]
        print(f"| {context:10,} | {whole:8.2f} | {whole - rest:12.2f} | {rest:12.2f} | {ratio:22.2f} |", flush=True)
    if FLAGS.json:
        facts = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "config": FLAGS.config}
        Path(FLAGS.json).write_text(json.dumps(facts | {"dtype": FLAGS.dtype, "rows": rows}, indent=1) + "\n")


def measure(model, params, context):
    """Median seconds of the step, and of the step that is told which tokens to attend to."""

    def given(q, keys, layer, head_weights, positions, top_k, implementation=None):
        del layer, head_weights, implementation
        spread = jnp.arange(top_k, dtype=jnp.int32) * (keys.shape[3] // top_k)
        return jnp.broadcast_to(spread, (*q.shape[:2], top_k)) + 0 * positions[..., None]

    def step():  # a function of its own each time, for JAX keeps what it traced by function
        return jax.jit(lambda p, t, c: model.apply({"params": p}, t, c, method="decode"), donate_argnums=2)

    token, state = jnp.zeros(1, jnp.int32), {}
    cache = _filled_cache(model, context)
    for name, choice in (("whole", mla_layer.select_tokens), ("rest", given)):
        with mock.patch.object(mla_layer, "select_tokens", choice):
            compiled = step()
            cache = _rewound(jax.block_until_ready(compiled(params, token, cache)[1]), context)
            state[name] = compiled, []
    for _ in range(FLAGS.repeats):
        for compiled, seconds in state.values():
            for is_timed in (False, True):  # the first finds the processor's caches full of the other's data
                began = time.perf_counter()
                _, cache = jax.block_until_ready(compiled(params, token, cache))
                if is_timed:
                    seconds.append(time.perf_counter() - began)
                cache = _rewound(cache, context)
    return tuple(statistics.median(seconds) for _, seconds in state.values())


def _rewound(cache, context):
    """The cache as if its last token had not been; every step then does the same work."""
    return cache.replace(lengths=jnp.full(1, context - 1, jnp.int32))


def _filled_cache(model, context):
    @jax.jit
    def fill():
        leaves, tree = jax.tree.flatten(mm.init_cache(model, 1, context, FLAGS.dtype))
        keys = jax.random.split(jax.random.key(0), len(leaves))
        filled = [
            jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype) for key, x in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, filled)

    return _rewound(fill(), context)


if __name__ == "__main__":
    app.run(main)
