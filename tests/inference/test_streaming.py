"""Streamed answers against resident ones, and what is read for them.

Both engines must agree bit for bit, log-probabilities included: barriers in the model keep the compiler from fusing
across the parts that streaming compiles on their own. On the CPU, jax before 0.12 rounds products and sums of a kernel
once in one program and twice in another; there the tokens agree, and log-probabilities but for that rounding.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxmoe as mm
from maxmoe.inference.engine import Engine
from maxmoe.inference.sampling_params import SamplingParams
from maxmoe.inference.streaming import StreamingEngine, list_layers
from maxmoe.model.stacks import FFN
from tests.inference.random_weights import random_weights
from tests.inference.tree_source import TreeSource

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 16
TOP_K, NUM_EXPERTS = 3, 8  # of the golden models, and of one in their widths
NUM_LAYERS, NUM_MOE_LAYERS = 5, 4  # of the latter
EXPERT_BYTES = 3 * (64 * 32 // 2 + 64 * 32 // 32)
LARGE, SMALL = 2**30, 4 * EXPERT_BYTES  # every expert; four of the eight that a chunk of one layer needs

GREEDY = SamplingParams(temperature=0.0, seed=1, max_tokens=6)
SAMPLED = SamplingParams(temperature=1.5, top_p=0.95, seed=5, max_tokens=6)
SHORT, LONG = [300, 7], [(37 * i) % 256 + 3 for i in range(37)]  # one chunk, mostly padding; three chunks


@functools.cache
def _load(name):
    """The model, its weights as published, and the resident engine, in float32.

    "short" has an indexer, a dense layer of its own and twice the same two layers; compiling it takes half the time.
    """
    if name == "short":
        config = mm.load_config(ROOT / "tests/golden/tiny_k31")
        config = dataclasses.replace(
            config, num_layers=NUM_LAYERS, full_attention_layers=(0, 2, 4), attn_res_block_size=2
        )
        model = mm.Transformer(config)
        published = random_weights(model)
    else:
        model = mm.Transformer(mm.load_config(ROOT / "tests/golden" / name))
        published = mm.load_params(ROOT / "tests/golden" / name, model)
    widened = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, published)
    return model, published, Engine(model, widened, max_batch=4, prefill_chunk=CHUNK)


def _stream_engine(name="short", expert_cache_bytes=LARGE, source_of=TreeSource, **settings):
    model, published, _ = _load(name)
    source = source_of(published, model.config)
    settings = {"max_batch": 4, "prefill_chunk": CHUNK, "dtype": "float32", **settings}
    return StreamingEngine(model, source, expert_cache_bytes=expert_cache_bytes, **settings), source


def _content(completions):
    """What was said, without how long it took."""
    return [dataclasses.replace(completion, first_token_s=0.0) for completion in completions]


def _assert_same(got, wanted):
    got, wanted = _content(got), _content(wanted)
    if jax.__version_info__ < (0, 12):
        _assert_close(got, wanted)
    else:
        assert got == wanted


def _assert_close(got, wanted):
    got, wanted = _content(got), _content(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        # float32 sums in another order; logits of size 3.
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-5)
    got = [dataclasses.replace(ours, logprobs=theirs.logprobs) for ours, theirs in zip(got, wanted, strict=True)]
    assert got == wanted


@pytest.mark.parametrize("expert_cache_bytes", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("name", ["tiny_k3", "tiny_k31"])
def test_streaming_gives_the_resident_answers_bit_for_bit(name, expert_cache_bytes):
    resident = _load(name)[2]
    engine, _ = _stream_engine(name, expert_cache_bytes)
    for params in (GREEDY, SAMPLED):
        wanted = resident.generate([LONG], params)
        _assert_same(engine.generate([LONG], params), wanted)
    assert sum(leaf.nbytes for leaf in engine._experts.weights) <= expert_cache_bytes
    most = 8 * NUM_EXPERTS  # of eight layers
    if expert_cache_bytes == LARGE:
        assert engine.stats.expert_misses <= most and engine.stats.hit_rate > 0.5
    else:
        assert engine.stats.expert_misses > 4 * most


@pytest.mark.parametrize("prompts", [(SHORT, LONG), (LONG, SHORT, [9] * 20)], ids=["2", "3 of 4"])
def test_streaming_batches_give_the_resident_answers(prompts):
    """Rows end at different steps, and three prompts leave a row of the batch without one.

    One engine reads all rows at once and the other row by row, which may round differently.
    """
    every = [dataclasses.replace(GREEDY, max_tokens=3), SAMPLED, GREEDY][: len(prompts)]
    wanted = _load("short")[2].generate(prompts, every)
    engine, _ = _stream_engine(expert_cache_bytes=SMALL)
    _assert_close(engine.generate(prompts, every), wanted)


def test_streaming_in_bfloat16_gives_the_resident_answers_bit_for_bit():
    model, published, _ = _load("short")
    wanted = Engine(model, published, max_batch=1, prefill_chunk=CHUNK).generate([LONG], GREEDY)
    engine, _ = _stream_engine(dtype=None)
    assert engine.cache_dtype == jnp.bfloat16
    _assert_same(engine.generate([LONG], GREEDY), wanted)


def test_stream_gives_the_answer_of_generate():
    engine, _ = _stream_engine(expert_cache_bytes=SMALL)
    completion = engine.generate([SHORT], GREEDY)[0]
    steps = [(step.token_id, step.logprob) for step in engine.stream(SHORT, GREEDY)]
    assert steps[: len(completion.ids)] == list(zip(completion.ids, completion.logprobs, strict=True))


def test_streaming_reads_the_experts_of_real_tokens_only():
    model, _, resident = _load("short")
    prompt = LONG[:3]
    _, state = jax.jit(lambda params, ids: model.apply({"params": params}, ids, mutable=["intermediates"]))(
        resident.params, jnp.array([prompt])
    )
    wanted = set()
    for at in list_layers(model.config):
        if at.module.kind.ffn is FFN.MOE:
            stack = state["intermediates"][f"stacks_{at.stack}"]
            ids = stack[f"superblocks_{at.superblock}"][f"layers_{at.place}"]["ffn"]["experts"][0]
            wanted |= {(f"layer_{at.depth:03d}", expert) for expert in np.unique(ids).tolist()}
    engine, source = _stream_engine()
    engine.generate([prompt], dataclasses.replace(GREEDY, max_tokens=1))
    assert sorted(source.experts_read()) == sorted(wanted)  # each once
    assert len(wanted) < NUM_EXPERTS * NUM_MOE_LAYERS  # some were left unread
    assert engine.stats.expert_bytes == len(wanted) * EXPERT_BYTES
    assert all(isinstance(index[0], int) for _, name, index in source.reads if name.startswith("experts/"))


def test_streaming_reads_nothing_for_rows_that_have_ended_or_never_began():
    once = dataclasses.replace(GREEDY, max_tokens=1)
    engine, _ = _stream_engine()

    def lookups(every):
        before = engine.stats.expert_hits + engine.stats.expert_misses
        engine.generate([SHORT, LONG, SHORT], every)
        return engine.stats.expert_hits + engine.stats.expert_misses - before

    steps = 4
    longer = dataclasses.replace(GREEDY, max_tokens=1 + steps)
    assert lookups([once, longer, once]) - lookups(once) == steps * NUM_MOE_LAYERS * TOP_K


def test_streaming_reads_each_dense_weight_once_a_pass():
    engine, source = _stream_engine()
    tokens = len(list(engine.stream(LONG, GREEDY)))
    engine.close()
    passes = 3 + tokens - 1  # chunks of the prompt, and a step for each token that another follows
    dense = [(group, name) for group, name, _ in source.reads if not name.startswith("experts/")]
    for group, name in set(dense):
        count = dense.count((group, name))
        if group == "layer_000":
            assert count in (passes, passes + 1), name  # read ahead, though not used any more
        else:
            assert count == (1 if group == "top" else passes), (group, name)


def test_streaming_holds_two_layers_of_dense_weights():
    engine, source = _stream_engine()
    engine._dense.take(2)
    engine._dense.take(3)
    engine.close()  # what has not begun of the next layer is not read any more
    read = {group for group, _, _ in source.reads}
    assert {"top", "layer_002", "layer_003"} <= read <= {"top", "layer_002", "layer_003", "layer_004"}


def test_streaming_decode_compiles_nothing_after_its_first_step():
    engine, _ = _stream_engine(expert_cache_bytes=SMALL)
    steps = engine.stream(LONG, dataclasses.replace(GREEDY, max_tokens=12))
    next(steps), next(steps)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None
    )
    misses = engine.stats.expert_misses
    list(steps)
    assert compiled == [] and engine.stats.expert_misses > misses


@pytest.mark.parametrize(
    "failing", [("layer_003", "mixer/q_proj"), ("layer_000", "ffn/up"), ("layer_002", "experts/down_scale")]
)
def test_errors_of_the_source_reach_the_caller_and_pass(failing):
    engine, source = _stream_engine()
    wanted = _load("short")[2].generate([SHORT], GREEDY)
    for _ in range(2):
        source.failing = {failing}
        with pytest.raises(OSError, match=f"gave up on {failing[0]} {failing[1]}"):
            engine.generate([SHORT], GREEDY)
    source.failing = set()
    _assert_same(engine.generate([SHORT], GREEDY), wanted)


def test_streaming_refuses_a_cache_below_one_token():
    with pytest.raises(ValueError, match=f"needs 3: give at least {3 * EXPERT_BYTES} bytes"):
        _stream_engine(expert_cache_bytes=3 * EXPERT_BYTES - 1)


def test_streaming_refuses_weights_of_another_model():
    class Narrow(TreeSource):
        def read(self, group, name, index=()):
            array = super().read(group, name, index)
            return array[:-1] if (group, name) == ("layer_003", "mixer_norm") else array

    engine, _ = _stream_engine(source_of=Narrow)
    with pytest.raises(ValueError, match=r"layer_003: mixer_norm is bfloat16 \(63,\); this model needs .*\(64,\)"):
        engine.generate([SHORT], GREEDY)


def test_layers_of_the_full_model_share_few_programs():
    config = mm.load_config(ROOT / "configs/k3.py")
    layers = list_layers(config)
    assert [at.depth for at in layers] == list(range(config.num_layers))
    assert len({at.module for at in layers}) == 4  # dense KDA; KDA where a block may begin, or not; full attention
