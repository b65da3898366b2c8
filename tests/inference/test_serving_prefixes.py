"""Serving with a prefix cache: what was read once is not read again, and no answer changes by a bit."""

import functools

import jax
import numpy as np
import pytest

from maxmoe.inference.engine import Engine
from tests.inference import test_serving_loop as plain

LONG, END = plain.JOBS[2][0], plain.JOBS[4][0]  # 70 and 33 tokens: over four chunks of 16, and one more than two
PREFIX_CASES = [
    ("the same again", LONG, LONG, 64),
    ("a whole number of chunks, of which the last must be computed", LONG[:32], LONG[:32], 16),
    ("one more than a whole number of chunks", LONG[:32], LONG[:33], 32),
    ("40 tokens alike, but state at 32", LONG[:48], [*LONG[:40], 1, 2, 3], 32),
    ("within the first chunk", LONG[:48], [*LONG[:9], 1, 2, 3], 0),
]


@functools.cache
def _prefix_engine(num_bytes=2**30):
    whole = plain._engine()
    sizes = {"max_batch": plain.SLOTS, "max_len": plain.MAX_LEN, "prefill_chunk": plain.CHUNK}
    return Engine(whole.model, whole.params, **sizes, prefix_cache_bytes=num_bytes)


def _answer(prompt, salt="", engine=None):
    """Serves a prompt in a slot that held NaN."""
    engine = _prefix_engine() if engine is None else engine
    plain._poison_free_slots(set(), engine)
    request = engine.submit(prompt, plain.GREEDY, cache_salt=salt)
    plain._drain(engine)
    return request


@pytest.mark.parametrize(
    ("first", "second", "num_cached"), [case[1:] for case in PREFIX_CASES], ids=[c[0] for c in PREFIX_CASES]
)
def test_a_prefix_of_whole_chunks_changes_no_bit(first, second, num_cached):
    cold = plain._serve([(second, plain.GREEDY)])[0]
    _prefix_engine().prefixes.clear()
    assert _answer(first).num_cached == 0
    warm = _answer(second)
    assert warm.num_cached == num_cached == _prefix_engine().prefixes.stats.num_hit_tokens
    assert warm.steps == cold.steps
    assert _answer(second, "other salt").num_cached == 0


def test_a_conversation_goes_on_from_the_end_of_its_last_prompt():
    _prefix_engine().prefixes.clear()
    _answer(END)
    longer = [*END, 9, 8, 7, 6]
    warm, cold = _answer(longer), plain._serve([(longer, plain.GREEDY)])[0]
    assert warm.num_cached == len(END)
    assert [step.token_id for step in warm.steps] == [step.token_id for step in cold.steps]
    got, wanted = ([step.logprob for step in request.steps] for request in (warm, cold))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=plain.LOGPROB_TOLERANCE)  # the chunks were others
    again = _answer(longer)
    assert again.num_cached == len(END) and again.steps == warm.steps


def test_a_small_prefix_cache_lets_the_oldest_go_and_changes_no_answer():
    _prefix_engine().prefixes.clear()
    _answer(LONG)
    stats = _prefix_engine().prefixes.stats
    small = _prefix_engine(stats.num_bytes // 2)
    cold = plain._serve([(LONG, plain.GREEDY)])[0]
    for _ in range(2):
        for prompt in (LONG, END):
            request = _answer(prompt, engine=small)
            assert small.prefixes.stats.num_bytes <= stats.num_bytes // 2
            if prompt is LONG:
                assert request.steps == cold.steps
    assert small.prefixes.stats.num_evictions > 0
    small.prefixes.clear()
    assert small.prefixes.stats.num_bytes == 0 and small.prefixes._roots == {}


def test_prefixes_come_back_from_the_hosts_memory_bit_for_bit_and_compile_nothing():
    """All that is kept is moved off the device before the prompt comes again."""
    whole = plain._engine()
    sizes = {"max_batch": plain.SLOTS, "max_len": plain.MAX_LEN, "prefill_chunk": plain.CHUNK}
    engine = Engine(whole.model, whole.params, **sizes, prefix_cache_bytes=2**20, host_prefix_cache_bytes=2**20)
    engine.warm_up()
    cold = plain._serve([(LONG, plain.GREEDY)])[0]
    _answer(LONG, engine=engine)
    stats, prefixes = engine.prefixes.stats, engine.prefixes
    held = stats.num_bytes
    prefixes.max_bytes = 0
    prefixes._shrink()
    prefixes.max_bytes = 2**20
    assert (stats.num_bytes, stats.num_states) == (0, 0)
    assert (stats.num_host_bytes, stats.num_host_states) == (held, 5)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None
    )
    warm = _answer(LONG, engine=engine)
    assert warm.num_cached == stats.num_host_hit_tokens == 64 and warm.steps == cold.steps and compiled == []
    assert stats.num_returns == 1 and stats.num_states > 0
    again = _answer(LONG, engine=engine)  # from the device by now
    assert again.num_cached == 64 == stats.num_host_hit_tokens and again.steps == cold.steps
    prefixes.max_host_bytes = held // 2
    prefixes._shrink()
    assert 0 < stats.num_host_bytes <= held // 2
    prefixes.clear()
    assert prefixes._roots == {} and prefixes.stats.num_host_bytes == 0


def test_a_prefix_cache_is_warmed_up_too():
    engine = _prefix_engine()
    engine.warm_up()
    assert engine.prefixes.stats.num_states == 0
    plain._poison_free_slots(set(), engine)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None
    )
    assert [_answer(LONG).num_cached for _ in range(2)] == [0, 64]
    assert compiled == []


def test_engine_refuses_prefix_sizes_that_mean_nothing():
    engine = plain._engine()
    with pytest.raises(ValueError, match="prefix_cache_bytes=-1"):
        Engine(engine.model, engine.params, prefix_cache_bytes=-1)
    with pytest.raises(ValueError, match="host_prefix_cache_bytes=1 must be at least 0, and needs prefix_cache_bytes"):
        Engine(engine.model, engine.params, host_prefix_cache_bytes=1)
    with pytest.raises(ValueError, match="prefill_chunk=30 must be a multiple of 4"):
        Engine(engine.model, engine.params, prefix_cache_bytes=1, prefill_chunk=30)
