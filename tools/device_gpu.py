r"""Checks and times the kernels for NVIDIA GPUs on one H200, beside flash-linear-attention, in under four minutes.

    python tools/device_gpu.py --out=results

Each kernel first meets the plain operation on a small input; one that differs is not timed. Without PyTorch and
flash-linear-attention their row is left out. A small run on any machine, which shows only that the script works:

    python tools/device_gpu.py --interpret --tokens=130 --heads=2 --experts=4 --batches=2 --keys=64 --hidden=64 \
        --latent=128 --top_k=32 --repeats=1 --out=results
"""

import dataclasses
import functools
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory beside JAX

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from maxmoe.ops import mxfp4
from maxmoe.ops.kda import kda_chunked
from maxmoe.ops.situ import situ_glu
from pallas_kernels.kda_chunk_gpu import kda_chunk_gpu
from pallas_kernels.mla_sparse_gpu import mla_sparse_gpu
from pallas_kernels.moe_experts_gpu import moe_experts_gpu
from pallas_kernels.tiling import MLA_SPARSE_H200

_OUT = flags.DEFINE_string("out", "device_gpu", "Folder for results.json.")
_INTERPRET = flags.DEFINE_bool("interpret", False, "Run the kernels by the interpreter; times then mean nothing.")
_BANDWIDTH = flags.DEFINE_float("bandwidth", 4.8e12, "Memory bandwidth of the GPU in bytes/s.", lower_bound=1)
_LIMIT = flags.DEFINE_float("limit_s", 220, "Seconds after which no further measurement starts.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 20, "Timed calls per measurement.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 8192, "Tokens of the KDA prefill.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 96, "Heads of KDA and of sparse attention.", lower_bound=1)
_BATCHES = flags.DEFINE_multi_integer("batches", [1, 8, 64], "Sequences of the decoding steps.", lower_bound=1)
_EXPERTS = flags.DEFINE_integer("experts", 896, "Routed experts.", lower_bound=1)
_CHOSEN = flags.DEFINE_integer("chosen", 16, "Experts per token, at most the experts there are.", lower_bound=1)
_LATENT = flags.DEFINE_integer("latent", 3584, "Width of the rows that experts read, a multiple of 64.", lower_bound=64)
_HIDDEN = flags.DEFINE_integer("hidden", 3072, "Hidden width of an expert, a multiple of 64.", lower_bound=64)
_KEYS = flags.DEFINE_integer("keys", 131072, "Cache rows per sequence, a multiple of 64.", lower_bound=64)
_TOP_K = flags.DEFINE_integer("top_k", 2048, "Rows that a query attends to.", lower_bound=1)

_BETAS = (4.0, 25.0)
_SCALE = 192**-0.5
_IN_A_ROW = 10  # calls that are timed together


@dataclasses.dataclass
class _Row:
    what: str
    median_ms: float | None = None
    spread_ms: float | None = None  # between the quartiles
    bytes_per_s: float | None = None
    share: float | None = None  # of the memory bandwidth
    error: float | None = None  # largest difference from the plain operation over the largest value
    note: str = ""


def main(argv):
    """Runs every measurement and writes the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    started, rows = time.monotonic(), []
    logging.info("device %s", jax.devices()[0].device_kind)
    for measure in (_kda, _fla, _experts, _sparse_attention):
        for row in measure(lambda: time.monotonic() - started < _LIMIT.value):
            logging.info("%s", row)
            rows.append(row)
    out = Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    result = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "interpreted": _INTERPRET.value,
        "seconds": time.monotonic() - started,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    (out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    print(_table(rows))


def _table(rows):
    lines = [f"{'what':58}{'median ms':>11}{'spread':>9}{'GB/s':>9}{'of peak':>9}{'error':>10}  note"]
    for row in rows:
        cells = (
            (row.median_ms, 11, ".3f"),
            (row.spread_ms, 9, ".3f"),
            (row.bytes_per_s and row.bytes_per_s / 1e9, 9, ".0f"),
        )
        cells += (row.share, 9, ".1%"), (row.error, 10, ".1e")
        text = "".join(f"{'-' if x is None else format(x, how):>{width}}" for x, width, how in cells)
        lines.append(f"{row.what:58}{text}  {row.note}")
    return "\n".join(lines)


def _time_ms(run, *arguments):
    """Median and distance of the quartiles, per call, over programs of several calls in a row.

    A call may take less time than its launch from Python. Zero times a result, added to one value of the first
    argument, makes each call wait for the one before, and none superfluous.
    """

    in_a_row_count = 1 if _INTERPRET.value else _IN_A_ROW

    @jax.jit
    def in_a_row(first, *others):
        def once(_, first):
            result = jax.tree.leaves(run(first, *others))[0]
            nothing = 0 * result[(0,) * result.ndim]
            return first.at[(0,) * first.ndim].add(nothing.astype(first.dtype))

        return jax.lax.fori_loop(0, in_a_row_count, once, first)

    for _ in range(2):
        jax.block_until_ready(in_a_row(*arguments))
    times = []
    for _ in range(_REPEATS.value):
        begin = time.perf_counter()
        jax.block_until_ready(in_a_row(*arguments))
        times.append(1e3 * (time.perf_counter() - begin) / in_a_row_count)
    return _median_and_spread(times)


def _median_and_spread(times):
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return statistics.median(times), quartiles[2] - quartiles[0]


def _measured(what, limit, error, moved, run, *arguments):
    """A row of the table: timed only where the small input came out right."""
    row = _Row(what, error=error)
    if not error < limit:
        row.note = f"WRONG: more than {limit} off the plain operation; not timed"
        return row
    row.median_ms, row.spread_ms = _time_ms(run, *arguments)
    if moved:
        row.bytes_per_s = 1e3 * moved / row.median_ms
        row.share = row.bytes_per_s / _BANDWIDTH.value
    return row


def _error(given, expected):
    given, expected = (np.asarray(x, np.float32) for x in (given, expected))
    difference = np.abs(given - expected).max() / max(np.abs(expected).max(), 1e-30)
    return float(difference) if np.isfinite(difference) else float("inf")


def _kda_inputs(num_tokens, heads):
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v, z = (jax.random.normal(key, (1, num_tokens, heads, 128), jnp.float32) for key in keys[:4])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -5 * jax.nn.sigmoid(z - 3)
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], (1, num_tokens, heads)))
    state = jax.random.normal(keys[5], (1, heads, 128, 128), jnp.float32)
    q, k, v = (x.astype(jnp.bfloat16) for x in (q * 128**-0.5, k, v))
    return q, k, v, g, beta, state


def _kda(_):
    run = jax.jit(functools.partial(kda_chunk_gpu, interpret=_INTERPRET.value))
    small = _kda_inputs(200, min(4, _HEADS.value))
    plain = kda_chunked(*(x.astype(jnp.float32) for x in small))
    error = max(_error(x, y) for x, y in zip(run(*small), plain, strict=True))
    what = f"KDA prefill T={_TOKENS.value} H={_HEADS.value}"
    yield _measured(what, 0.02, error, None, run, *_kda_inputs(_TOKENS.value, _HEADS.value))


def _fla(in_time):
    what = f"KDA prefill T={_TOKENS.value} H={_HEADS.value}, flash-linear-attention"
    try:
        import torch
        from fla.ops.kda import chunk_kda
    except ImportError as missing:
        yield _Row(what, note=f"left out: {missing}")
        return
    if not in_time():
        return
    names = ("q", "k", "v", "g", "beta", "initial_state")
    given = {
        name: torch.from_numpy(np.array(x, np.float32)).to("cuda", torch.bfloat16 if name in "qkv" else torch.float32)
        for name, x in zip(names, _kda_inputs(_TOKENS.value, _HEADS.value), strict=True)
    }

    def run():
        with torch.no_grad():
            return chunk_kda(**given, scale=1.0, output_final_state=True)

    times = []
    for count in range(_REPEATS.value + 3):
        begin = time.perf_counter()
        for _ in range(_IN_A_ROW):
            run()
        torch.cuda.synchronize()
        if count > 2:
            times.append(1e3 * (time.perf_counter() - begin) / _IN_A_ROW)
    median, spread = _median_and_spread(times)
    yield _Row(what, median_ms=median, spread_ms=spread, note="PyTorch, Triton")


def _expert_leaves(num_experts):
    """Weights of one layer. A few experts' worth is drawn, and repeated: time does not depend on values."""
    rng, drawn, leaves = np.random.default_rng(0), min(num_experts, 8), []
    for outputs, inner in ((_HIDDEN.value, _LATENT.value),) * 2 + ((_LATENT.value, _HIDDEN.value),):
        for low, high, width in ((0, 256, inner // 2), (117, 122, inner // 32)):
            leaf = jnp.asarray(rng.integers(low, high, (1, drawn, outputs, width), dtype=np.uint8))
            leaves.append(jnp.tile(leaf, (1, -(-num_experts // drawn), 1, 1))[:, :num_experts])
    return leaves


def _experts(in_time):
    def call(x, sizes, leaves):
        return moe_experts_gpu(x, sizes, leaves, 0, *_BETAS, interpret=_INTERPRET.value)

    run, leaves = jax.jit(call), _expert_leaves(_EXPERTS.value)
    few = [leaf[:, :4] for leaf in leaves]
    sizes = np.array([3, 0, 17, 1][: few[0].shape[1]], np.int32)
    x = jax.random.normal(jax.random.key(1), (int(sizes.sum()), _LATENT.value), jnp.bfloat16)
    expected, first = [], 0
    for expert, size in enumerate(sizes):
        gate, up, down = (mxfp4.dequantize(few[i][0, expert], few[i + 1][0, expert], x.dtype) for i in (0, 2, 4))
        rows = x[first : first + size]
        expected.append(situ_glu(rows @ gate.T, rows @ up.T, *_BETAS) @ down.T)
        first += size
    error = _error(run(x, sizes, few), jnp.concatenate(expected))
    bytes_each = sum(leaf.nbytes for leaf in leaves) // _EXPERTS.value
    rng, chosen = np.random.default_rng(1), min(_CHOSEN.value, _EXPERTS.value)
    for batch in _BATCHES.value:
        if not in_time():
            return
        ids = np.concatenate([rng.permutation(_EXPERTS.value)[:chosen] for _ in range(batch)])
        sizes = np.bincount(ids, minlength=_EXPERTS.value).astype(np.int32)
        x = jax.random.normal(jax.random.key(2), (ids.size, _LATENT.value), jnp.bfloat16)
        used = int((sizes > 0).sum())
        what = f"MXFP4 experts, decode B={batch}, {used} of {_EXPERTS.value} experts"
        yield _measured(what, 0.02, error, used * bytes_each, run, x, jnp.asarray(sizes), leaves)


def _attention_inputs(batch, num_keys, top_k):
    rng = np.random.default_rng(2)
    keys = jax.random.split(jax.random.key(3), 4)
    pages = num_keys // 64
    q, q_shared = (
        jax.random.normal(key, (batch, 1, _HEADS.value, width), jnp.bfloat16)
        for key, width in zip(keys[:2], (512, 64), strict=True)
    )
    latent = jax.random.normal(keys[2], (batch * pages, 64, 512), jnp.bfloat16)
    shared = jax.random.normal(keys[3], (batch * pages, 64, 64), jnp.bfloat16)
    table = jnp.asarray(rng.permutation(batch * pages).reshape(batch, pages), jnp.int32)
    indices = np.stack([rng.choice(num_keys, min(top_k, num_keys), replace=False) for _ in range(batch)])
    return q, q_shared, latent, shared, table, jnp.asarray(indices[:, None], jnp.int32)


def _plain_attention(q, q_shared, latent, shared, table, indices):
    batch, size = np.arange(q.shape[0])[:, None], latent.shape[1]
    where = table[batch, indices[:, 0] // size], indices[:, 0] % size
    rows, parts = latent[where], shared[where]
    f32 = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    scores = _SCALE * (f32("bqhr,bkr->bqhk", q, rows) + f32("bqhr,bkr->bqhk", q_shared, parts))
    context = f32("bqhk,bkr->bqhr", jax.nn.softmax(scores), rows.astype(jnp.float32))
    return context, jax.nn.logsumexp(scores, axis=-1)


def _sparse_attention(in_time):
    for heads in (MLA_SPARSE_H200.heads, (32, 16)):
        tiling = dataclasses.replace(MLA_SPARSE_H200, heads=heads)
        run = jax.jit(functools.partial(mla_sparse_gpu, scale=_SCALE, tiling=tiling, interpret=_INTERPRET.value))
        small = _attention_inputs(2, max(64, min(1024, _KEYS.value)), min(300, _TOP_K.value))
        error = max(_error(x, y) for x, y in zip(run(*small), _plain_attention(*small), strict=True))
        for batch in _BATCHES.value:
            if not in_time():
                return
            inputs = _attention_inputs(batch, _KEYS.value, _TOP_K.value)
            moved = inputs[5].size * (512 + 64) * 2
            what = f"sparse MLA, decode B={batch}, {sum(heads)} heads per program"
            yield _measured(what, 0.02, error, moved, run, *inputs)


if __name__ == "__main__":
    app.run(main)
