"""Speed of serving on this machine: throughput, time to first token and time per output token, under open traffic.

    python tools/bench_engine.py                                      the tiny model, three rates, two mixes of lengths
    python tools/bench_engine.py --rate 5 --rate 50 --mix 512:64 --max_batch 32
    python tools/bench_engine.py --prefix_cache_mib 256 --shared_tokens 64

Requests come at random times of a given mean rate, whether the engine keeps up or not; `inf` submits all at once.
Weights are random, prompts too, all greedy. Each figure is the median over repeats, which take turns, so that a slow
minute of the machine meets all of them; compare figures only within one table.
"""

import math
import statistics
import time

import jax
import numpy as np
from absl import app, flags

import maxmoe as mm
from maxmoe.inference.request import Request

FLAGS = flags.FLAGS
flags.DEFINE_string("config", "configs/tiny.py", "Model configuration to measure.")
flags.DEFINE_multi_string("rate", ["4", "16", "inf"], "Requests per second; inf for all at once.")
flags.DEFINE_multi_string("mix", ["32:32", "8-200:4-60"], "PROMPT:ANSWER tokens; A-B for any number between them.")
flags.DEFINE_integer("requests", 24, "Per cell of the table and repeat.", lower_bound=2)
flags.DEFINE_integer("repeats", 3, "Repeats that the median is taken over.", lower_bound=1)
flags.DEFINE_integer("max_batch", 8, "Slots.", lower_bound=1)
flags.DEFINE_integer("prefill_chunk", 64, "In tokens.", lower_bound=1)
flags.DEFINE_integer("prefix_cache_mib", 0, "Size of the prefix cache; 0 for none.", lower_bound=0)
flags.DEFINE_integer("shared_tokens", 0, "That all prompts begin with, in addition to their own.", lower_bound=0)

_HEADER = ("prompt:answer", "requests/s", "tokens/s", "first token s", "(90%)", "per token ms", "(90%)", "cached")


def main(argv):
    """Measures every rate with every mix, and prints a table."""
    del argv
    config = mm.load_config(FLAGS.config)
    model = mm.Transformer(config)
    mixes = {text: _parse_mix(text) for text in FLAGS.mix}
    rates = {text: float(text) for text in FLAGS.rate}
    if min(rates.values()) <= 0:
        raise app.UsageError(f"--rate={FLAGS.rate}: each must be above 0")
    longest = FLAGS.shared_tokens + max(prompt[1] + answer[1] for prompt, answer in mixes.values())
    engine = mm.Engine(
        model,
        mm.init_params(model),
        max_batch=FLAGS.max_batch,
        max_len=longest,
        prefill_chunk=FLAGS.prefill_chunk,
        max_waiting=FLAGS.requests,
        prefix_cache_bytes=FLAGS.prefix_cache_mib * 2**20,
    )
    start = time.perf_counter()
    engine.warm_up(lambda program, done, total: print(f"compiling {done + 1} of {total}: {program}", flush=True))
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; compiled in {time.perf_counter() - start:.1f} s")
    cells = {(mix, rate): [] for mix in mixes for rate in rates}
    for repeat in range(FLAGS.repeats):
        for (mix, rate), results in cells.items():
            rng = np.random.default_rng(repeat)
            results.append(measure(engine, rng, *mixes[mix], rates[rate]))
    _print_table(cells)


def measure(engine, rng, prompt_range, answer_range, rate) -> tuple[float, ...]:
    """Serves requests that come at random times. Returns the figures of one row of the table."""
    shared = np.arange(FLAGS.shared_tokens) % 251
    jobs = []
    for _ in range(FLAGS.requests):
        prompt = np.concatenate([shared, rng.integers(0, 256, rng.integers(*prompt_range, endpoint=True))])
        jobs.append((prompt, int(rng.integers(*answer_range, endpoint=True))))
    waits = np.zeros(len(jobs)) if math.isinf(rate) else rng.exponential(1 / rate, len(jobs))
    begin = time.perf_counter()
    arrivals = begin + np.cumsum(waits)
    requests: list[Request] = []
    while len(requests) < len(jobs) or engine.has_work:
        while len(requests) < len(jobs) and arrivals[len(requests)] <= time.perf_counter():
            prompt, max_tokens = jobs[len(requests)]
            requests.append(engine.submit(prompt, mm.SamplingParams(temperature=0.0, max_tokens=max_tokens)))
        if engine.has_work:
            engine.step()
        else:
            time.sleep(max(arrivals[len(requests)] - time.perf_counter(), 0))
    elapsed = time.perf_counter() - begin
    # From when a request was to come, not from when the loop had time to submit it.
    first = [request.first_token_s - arrival for request, arrival in zip(requests, arrivals, strict=True)]
    later = [(r.ended_s - r.first_token_s) / (len(r.steps) - 1) for r in requests if len(r.steps) > 1]
    return (
        sum(len(request.steps) for request in requests) / elapsed,
        *np.percentile(first, (50, 90)),
        *(1000 * np.percentile(later, (50, 90)) if later else (math.nan, math.nan)),
        sum(request.num_cached for request in requests) / sum(request.prompt.size for request in requests),
    )


def _parse_mix(text):
    """'8-200:32' as ((8, 200), (32, 32))."""
    try:
        prompt, answer = (tuple(int(part) for part in side.split("-")) for side in text.split(":"))
        prompt, answer = ((side[0], side[-1]) for side in (prompt, answer))
    except ValueError as error:
        raise app.UsageError(f"--mix={text}: give PROMPT:ANSWER, such as 512:64 or 8-200:4-60") from error
    if not (1 <= prompt[0] <= prompt[1] and 1 <= answer[0] <= answer[1]):
        raise app.UsageError(f"--mix={text}: lengths must be at least 1, the smaller first")
    return prompt, answer


def _print_table(cells):
    print(f"{FLAGS.requests} requests, median of {FLAGS.repeats}, {FLAGS.max_batch} slots")
    print("".join(f"{name:>15}" for name in _HEADER))
    for (mix, rate), results in cells.items():
        tokens, first, first90, later, later90, cached = map(statistics.median, zip(*results, strict=True))
        figures = f"{tokens:.1f}", f"{first:.3f}", f"{first90:.3f}", f"{later:.1f}", f"{later90:.1f}", f"{cached:.0%}"
        print("".join(f"{text:>15}" for text in (mix, rate, *figures)))


if __name__ == "__main__":
    app.run(main)
