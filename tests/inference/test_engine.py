"""The engine: answers that do not depend on batching, when they end, what is refused, how much is compiled.

Where answers are compared across shapes, rounding differs by 1e-6 or so while the two largest logits of the model
below are further apart than that, so that tokens must be equal and log-probabilities nearly so.
"""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from maxmoe.inference import steps
from maxmoe.inference.answer import Step
from maxmoe.inference.answer_error import AnswerError
from maxmoe.inference.engine import Engine
from maxmoe.inference.sampling_params import SamplingParams

CHUNK = 16
LOGPROB_TOLERANCE = 1e-4  # float32 logits of size 10 after a hundred rounded steps

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SHORT, MIDDLE, LONG = [300, 7], list(range(40, 53)), [(37 * i) % 256 for i in range(70)]
"""Shorter than the convolution's window of 4; within a chunk; over four chunks, and over the index's top_k of 64."""


@pytest.fixture(scope="module")
def engine(model, params):
    return Engine(model, params, max_batch=4, prefill_chunk=CHUNK)


@pytest.fixture(scope="module")
def alone(engine):
    """Greedy answers of the three prompts, one at a time."""
    return [engine.generate([prompt], GREEDY)[0] for prompt in (SHORT, MIDDLE, LONG)]


def _same(left, right):
    assert left.ids == right.ids
    np.testing.assert_allclose(left.logprobs, right.logprobs, rtol=0, atol=LOGPROB_TOLERANCE)


def test_chunks_and_steps_equal_one_forward_over_everything(model, params, alone):
    ids = LONG + alone[2].ids
    logits = steps.forward(model, params, np.array([ids]))[0, len(LONG) - 1 : -1]
    assert jnp.argmax(logits, axis=-1).tolist() == alone[2].ids
    chosen = jax.nn.log_softmax(logits)[jnp.arange(12), jnp.array(alone[2].ids)]
    np.testing.assert_allclose(alone[2].logprobs, chosen, rtol=0, atol=LOGPROB_TOLERANCE)


def test_generate_greedy_does_not_depend_on_the_batch(engine, alone):
    for batch, rows in (((SHORT, MIDDLE, LONG), (0, 1, 2)), ((LONG, SHORT, LONG), (2, 0, 2))):
        for completion, row in zip(engine.generate(batch, GREEDY), rows, strict=True):
            _same(completion, alone[row])


def test_generate_greedy_rows_beside_sampled_ones(engine, alone):
    wild = SamplingParams(temperature=3.0, top_p=0.9, seed=1, max_tokens=20)
    mixed = engine.generate([LONG, SHORT, MIDDLE], [wild, GREEDY, wild])
    _same(mixed[1], alone[0])


def test_generate_more_prompts_than_max_batch(engine, alone):
    prompts = [SHORT, MIDDLE, LONG, SHORT, MIDDLE, LONG, SHORT]
    completions = engine.generate(prompts, GREEDY)
    assert [c.ids for c in completions] == [alone[i % 3].ids for i in range(7)]
    assert [c.num_prompt_tokens for c in completions] == [len(prompt) for prompt in prompts]


def test_generate_no_prompts(engine):
    assert engine.generate([], GREEDY) == []


def test_stream_equals_generate(engine, alone):
    streamed = list(engine.stream(LONG, GREEDY))
    assert [step.token_id for step in streamed] == alone[2].ids
    assert [step.logprob for step in streamed] == alone[2].logprobs  # the same programs: not a bit differs
    assert [step.finish_reason for step in streamed] == [None] * 11 + ["length"]


@hypothesis.settings(max_examples=10)
@hypothesis.given(count=st.integers(1, 12))
def test_max_tokens_cuts_the_answer(engine, alone, count):
    completion = engine.generate([MIDDLE], dataclasses.replace(GREEDY, max_tokens=count))[0]
    assert completion.ids == alone[1].ids[:count] and completion.finish_reason == "length"
    assert len(completion.logprobs) == count and completion.stop_id is None


def test_stop_ids_end_the_answer_and_are_left_out(engine, alone):
    full = alone[1]
    index = 4
    stop = full.ids[index]
    first = full.ids.index(stop)
    completion = engine.generate([MIDDLE], dataclasses.replace(GREEDY, stop_ids=(stop, 511)))[0]
    assert completion.ids == full.ids[:first] and completion.finish_reason == "stop"
    assert (completion.stop_id, completion.stop_logprob) == (stop, full.logprobs[first])
    streamed = list(engine.stream(MIDDLE, dataclasses.replace(GREEDY, stop_ids=(stop,))))
    assert streamed[-1] == Step(stop, full.logprobs[first], "stop") and len(streamed) == first + 1


def test_stop_on_the_last_allowed_token_is_a_stop(engine, alone):
    stop = alone[1].ids[0]
    params = dataclasses.replace(GREEDY, stop_ids=(stop,), max_tokens=1)
    completion = engine.generate([MIDDLE], params)[0]
    assert completion.ids == [] and completion.finish_reason == "stop"


def test_models_end_of_turn_always_stops(model, params, alone):
    eos, token = model.config.eos_id, alone[1].ids[3]
    head = params["lm_head"].at[jnp.array([eos, token])].set(params["lm_head"][jnp.array([token, eos])])
    swapped = Engine(model, params | {"lm_head": head}, max_batch=1, prefill_chunk=CHUNK)
    completion = swapped.generate([MIDDLE], GREEDY)[0]
    assert completion.finish_reason == "stop" and completion.stop_id == eos
    assert completion.ids == alone[1].ids[: alone[1].ids.index(token)]


def test_seeds_repeat_an_answer_in_any_batch(engine):
    hot = SamplingParams(temperature=2.0, top_p=0.95, max_tokens=10, seed=7)
    first = engine.generate([MIDDLE], hot)[0]
    assert first.seed == 7
    together = engine.generate([LONG, MIDDLE, SHORT], [dataclasses.replace(hot, seed=8), hot, GREEDY])
    _same(together[1], first)
    assert engine.generate([MIDDLE], dataclasses.replace(hot, seed=8))[0].ids != first.ids


def test_fresh_seeds_differ_and_are_told(engine):
    hot = SamplingParams(temperature=2.0, max_tokens=10)
    left, right, _ = engine.generate([MIDDLE, MIDDLE, SHORT], hot)
    assert left.seed != right.seed and left.ids != right.ids
    again = engine.generate([MIDDLE], dataclasses.replace(hot, seed=right.seed))[0]
    _same(again, right)


def test_full_rows_wait_for_the_others(engine, alone):
    full = SamplingParams(temperature=0.0, max_tokens=6)
    prompt = [(11 * i) % 256 for i in range(250)]  # with 6 tokens, all that the batch's cache has room for
    on_its_own = engine.generate([prompt], full)[0]
    longer = dataclasses.replace(GREEDY, max_tokens=30)
    together = engine.generate([prompt, MIDDLE, SHORT], [full, longer, GREEDY])
    _same(together[0], on_its_own)
    assert together[1].ids[:12] == alone[1].ids and len(together[1].ids) == 30


def test_broken_logits_name_prompt_and_position(model, params):
    table = params["embedding"].at[200, 0].set(jnp.nan)
    broken = Engine(model, params | {"embedding": table}, max_batch=4, prefill_chunk=CHUNK)
    with pytest.raises(AnswerError, match="prompt 1: the logits for position 3 hold a NaN"):
        broken.generate([SHORT, [1, 200, 2], MIDDLE], GREEDY)
    with pytest.raises(AnswerError, match="prompt 0: the logits for position 1"):
        list(broken.stream([200], GREEDY))


def test_shapes_come_from_short_lists(model, params):
    engine = Engine(model, params, max_batch=6, max_len=3000)
    assert engine.batch_sizes == (1, 2, 4, 6)
    assert engine.cache_lens == (256, 512, 1024, 2048, 3000)
    assert engine.prefill_widths == (16, 64, 256, 512)
    assert Engine(model, params, max_len=100).cache_lens == (100,)
    assert Engine(model, params).max_len == model.config.max_len < 32_768


def test_compilations_are_bounded_and_decoding_adds_none(engine):
    everything = [[1] * 3, [2] * 16, [3] * 33]
    engine.generate(everything, GREEDY)
    engine.generate(everything[:1], GREEDY)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None
    )
    counts = steps._prefill_donating._cache_size(), steps._decode_donating._cache_size()
    filtered = SamplingParams(temperature=1.3, top_p=0.8, top_k=7, min_p=0.01, seed=3, stop_ids=(4,), max_tokens=3)
    for length in (1, 2, 3, 15, 16, 17, 31, 32, 33, 100, 200):
        engine.generate([[9] * length], filtered)
        engine.generate([[9] * length, [8], [7] * 40, [6]], [filtered, GREEDY, filtered, GREEDY])
    assert counts == (steps._prefill_donating._cache_size(), steps._decode_donating._cache_size())
    assert compiled == []
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(77)).block_until_ready()
    assert compiled  # the listener hears compilations


REFUSED = [
    ([[]], GREEDY, "prompt 0 is empty.*bos_id=256"),
    ([[1], []], GREEDY, "prompt 1 is empty"),
    ([[1], [3, 512]], GREEDY, r"prompt 1: token, stop or bias id 512 .*0 to 511"),
    ([[-1]], GREEDY, "id -1 is outside"),
    ([[1]], SamplingParams(stop_ids=(600,)), "bias id 600 is outside"),
    ([[1.5]], GREEDY, "sequence of token ids"),
    ([1, 2], GREEDY, "prompt 0 must be a sequence of token ids; got 1"),
    (["ab"], GREEDY, "sequence of token ids"),
    (
        [[1] * 8190],
        SamplingParams(max_tokens=3),
        "8190 tokens, and max_tokens=3 more make 8193; max_len is 8192",
    ),
    ([[1], [2]], [GREEDY], "2 prompts and 1 SamplingParams"),
]


@pytest.mark.parametrize(("prompts", "params_of", "message"), REFUSED)
def test_generate_refuses_before_anything_runs(engine, monkeypatch, prompts, params_of, message):
    monkeypatch.setattr(Engine, "_loop", None)
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, params_of)


def test_stream_refuses_at_once(engine):
    with pytest.raises(ValueError, match="empty"):
        engine.stream([], GREEDY)


def test_engine_refuses_sizes_below_one(model, params):
    for name in ("max_batch", "max_len", "prefill_chunk"):
        with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
            Engine(model, params, **{name: 0})


def test_cache_has_the_dtype_of_activations(model, params):
    assert Engine(model, params).cache_dtype == jnp.float32
    assert Engine(model, params, cache_dtype=jnp.bfloat16).cache_dtype == jnp.bfloat16
    table = params["embedding"].astype(jnp.bfloat16)
    assert Engine(model, params | {"embedding": table}).cache_dtype == jnp.bfloat16


def test_generate_runs_in_bfloat16_with_several_rows(model, params):
    """Several rows take batched products, which a backend may lack in bfloat16."""
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf, params)
    answers = Engine(model, narrow, max_batch=4, prefill_chunk=CHUNK).generate([SHORT, MIDDLE, LONG], GREEDY)
    assert all(answer.finish_reason == "stop" or len(answer.ids) == GREEDY.max_tokens for answer in answers)
    assert all(np.all(np.isfinite(answer.logprobs)) for answer in answers)
