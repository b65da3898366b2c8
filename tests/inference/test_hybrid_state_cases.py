"""Faults of other engines with hybrid state, as small cases: what a prefix, a slot or a preemption must give.

A shared prefix counts as far as both kinds of state exist; a slot shows nothing of its last tenant; a preempted answer
goes on as if nothing had been. Chunks are of 64 tokens, as in the reports.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.inference.engine import Engine
from maxmoe.inference.sampling_params import SamplingParams
from maxmoe.model.cache import KDACache
from tests.inference import test_serving_loop as plain

CHUNK, SLOTS, MAX_LEN = 64, 1, 192
TEN = SamplingParams(temperature=0.0, max_tokens=10)
A = [(37 * i) % 256 for i in range(128)]
B = [*A[:100], *((11 * i) % 256 for i in range(40))]


def _make(**settings):
    whole = plain._engine()
    return Engine(whole.model, whole.params, max_batch=SLOTS, max_len=MAX_LEN, prefill_chunk=CHUNK, **settings)


@functools.cache
def _cached_engine():
    return _make(prefix_cache_bytes=2**30)


@functools.cache
def _cold(prompt, params=TEN):
    """The steps of a prompt that finds nothing."""
    return _run(_engine_without_prefixes(), list(prompt), params).steps


@functools.cache
def _engine_without_prefixes():
    return _make()


def _run(engine, prompt, params=TEN):
    request = engine.submit(prompt, params)
    plain._drain(engine)
    return request


@pytest.fixture
def engine():
    """One slot and a prefix cache that holds nothing."""
    _cached_engine().prefixes.clear()
    return _cached_engine()


def test_a_prefix_counts_up_to_the_last_length_that_has_both_kinds_of_state(engine):
    """States after 64 and 128 tokens; B shares 100 of them."""
    assert _run(engine, A).num_cached == 0
    warm = _run(engine, B)
    assert warm.num_cached == 64 and warm.steps == _cold(tuple(B))


def test_rows_without_a_state_are_no_hit(engine):
    """The state after 64 tokens is gone, the rows are still there for the state after 128."""
    _run(engine, A)
    prefixes = engine.prefixes
    oldest = next(iter(prefixes._states))
    del prefixes._states[oldest]
    prefixes._evict(oldest, to_host=False)
    assert oldest.state is None and oldest.rows
    request = _run(engine, B)
    assert request.num_cached == 0 and request.steps == _cold(tuple(B))


def test_the_state_of_a_boundary_is_the_one_after_it(engine):
    """130 tokens: what is kept at 128 is the state after 128 tokens, and that after 130 in its place would be seen."""
    prompt = [(7 * i) % 256 for i in range(130)]
    longer = [*prompt[:128], *((5 * i) % 256 for i in range(20))]
    _run(engine, prompt)
    warm = _run(engine, longer)
    assert warm.num_cached == 128 and warm.steps == _cold(tuple(longer))
    engine.prefixes.clear()
    _run(engine, prompt)
    after_64, after_128, after_130 = engine.prefixes._states
    assert after_130.parent is after_128 and after_128.parent is after_64
    after_128.state = after_130.state
    wrong = _run(engine, longer)
    assert wrong.num_cached == 128 and wrong.steps != _cold(tuple(longer))


def test_of_2800_matching_tokens_2560_can_be_used():
    """Chunks of 512: the worked number of the family's report. And a whole number of chunks leaves its last one out."""
    whole = plain._engine()
    sizes = {"max_batch": 1, "max_len": 3072, "prefill_chunk": 512}
    engine = Engine(whole.model, whole.params, **sizes, prefix_cache_bytes=2**30)
    once = SamplingParams(temperature=0.0, max_tokens=1)
    prompt = np.random.default_rng(0).integers(0, 256, 2900).tolist()
    _run(engine, prompt, once)
    other = [*prompt[:2800], *((prompt[i] + 1) % 256 for i in range(2800, 2900))]
    assert _run(engine, other, once).num_cached == 2560
    assert _run(engine, prompt[:2560], once).num_cached == 2048


def _tenants(engine):
    """What a slot may hold when the next request comes: NaN, another's state, conv state alone."""
    state = engine._serving.cache

    def only_conv(kept):
        return kept.replace(state=jnp.zeros_like(kept.state)) if isinstance(kept, KDACache) else kept

    stacks = tuple(tuple(map(only_conv, stack)) for stack in state.stacks)
    return {"NaN": plain._poisoned(state, 0), "another's": state, "conv alone": state.replace(stacks=stacks)}


@pytest.mark.parametrize("tenant", ["NaN", "another's", "conv alone"])
def test_a_slot_shows_nothing_of_its_last_tenant(tenant):
    engine = _engine_without_prefixes()
    wanted = _cold(tuple(B))
    _run(engine, A)
    engine._serving.cache = _tenants(engine)[tenant]
    assert _run(engine, B).steps == wanted


def test_a_slot_shows_nothing_of_a_request_that_was_given_up_while_it_was_read():
    engine = _engine_without_prefixes()
    wanted = _cold(tuple(B))
    given_up = engine.submit(A, TEN)
    engine.step()
    assert engine._serving.is_reading
    engine.cancel(given_up)
    assert _run(engine, B).steps == wanted


@pytest.mark.parametrize("breaks", [(10,), (4, 10), (1, 2, 19)])
def test_a_preempted_answer_goes_on(breaks):
    """20 tokens of prompt and 20 of answer, preempted once or more: no token twice, log-probabilities the same."""
    prompt, params = A[:20], SamplingParams(temperature=0.0, max_tokens=20)
    engine = _engine_without_prefixes()
    wanted = _cold(tuple(prompt), params)
    request = engine.submit(prompt, params)
    for count in breaks:
        while len(request.steps) < count:
            engine.step()
        engine._serving.preempt(request)
    plain._drain(engine)
    assert request.num_preemptions == len(breaks) and len(request.steps) == len(wanted)
    assert [step.token_id for step in request.steps] == [step.token_id for step in wanted]
    got, want = ([step.logprob for step in steps] for steps in (request.steps, wanted))
    np.testing.assert_allclose(got, want, rtol=0, atol=plain.LOGPROB_TOLERANCE)


def test_every_part_of_a_prefix_is_kept(engine):
    _run(engine, A)
    match = engine.prefixes.match("", np.array([*A, 1, 2, 3], np.int32))
    assert match.num_tokens == 128
    leaves = jax.tree_util.tree_leaves_with_path((match.state, match.blocks))
    for part in ("conv", "state", "latent", "shared", "index_keys"):
        held = [np.asarray(leaf) for path, leaf in leaves if part in jax.tree_util.keystr(path)]
        assert held and all(np.any(array) and not np.any(np.isnan(array)) for array in held), part
