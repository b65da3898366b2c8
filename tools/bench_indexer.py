"""Speed of the indexer's exact top-k on this machine, beside `jax.lax.top_k` of the same scores.

    python tools/bench_indexer.py
    python tools/bench_indexer.py --keys 131072 --rows 8 --rounds 50

The two run in turns, in an order that changes from round to round, and the medians and quartiles of their times are
printed in milliseconds. Other work on the machine shows as a wide spread.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from maxmoe.ops.indexer import select_topk

_KEYS = flags.DEFINE_integer("keys", 1_048_576, "Scores in a row.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", 1, "Rows of scores.", lower_bound=1)
_TOP_K = flags.DEFINE_integer("top_k", 2048, "Scores to choose.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 31, "Times that each is run.", lower_bound=1)


def main(argv):
    """Prints a line per kind of scores."""
    del argv
    for kind, scores in _scores(_ROWS.value, _KEYS.value).items():
        seconds = bench_select_topk(scores, _TOP_K.value, _ROUNDS.value)
        quartiles = {name: np.percentile(1e3 * np.array(s), [25, 50, 75]) for name, s in seconds.items()}
        figures = ", ".join(f"{name} {q[1]:7.2f} ms ({q[0]:.2f} to {q[2]:.2f})" for name, q in quartiles.items())
        print(f"{kind:8s} {figures}, ratio {quartiles['select_topk'][1] / quartiles['lax.top_k'][1]:.2f}", flush=True)


def bench_select_topk(scores, top_k, rounds):
    """Seconds of each run of `select_topk`, all scores valid, and of `lax.top_k`, which gives the same indices."""
    valid = jnp.ones(scores.shape, bool)
    runs = {
        "select_topk": functools.partial(jax.jit(select_topk, static_argnums=1), scores, top_k, valid),
        "lax.top_k": functools.partial(jax.jit(lambda x: jax.lax.top_k(x, top_k)[1]), scores),
    }
    chosen = [np.asarray(run()) for run in runs.values()]
    if not np.array_equal(*chosen):
        raise RuntimeError("select_topk and lax.top_k disagree")
    seconds = {name: [] for name in runs}
    for n in range(rounds):
        for name in sorted(runs, reverse=bool(n % 2)):
            began = time.perf_counter()
            jax.block_until_ready(runs[name]())
            seconds[name].append(time.perf_counter() - began)
    return seconds


def _scores(rows, num_keys):
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((rows, num_keys), np.float32)
    kinds = {
        "normal": normal,
        "relu": np.maximum(normal - 1, 0),  # most are exact zeros
        "rising": np.broadcast_to(np.arange(num_keys, dtype=np.float32), normal.shape),
        "equal": np.zeros_like(normal),
    }
    return {kind: jnp.asarray(np.squeeze(scores, 0) if rows == 1 else scores) for kind, scores in kinds.items()}


if __name__ == "__main__":
    app.run(main)
