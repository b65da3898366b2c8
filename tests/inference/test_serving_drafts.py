"""Serving with drafts: good, bad and missing guesses change no token, whatever else happens to a request."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.inference.drafting import NgramDrafter
from maxmoe.inference.engine import Engine
from maxmoe.inference.model_drafter import ModelDrafter
from maxmoe.inference.sampling_params import SamplingParams
from maxmoe.inference.warm_up import Program
from tests.inference import test_serving_loop as plain

JOBS, SLOTS, NUM_DRAFT = plain.JOBS, plain.SLOTS, 3


class _Sometimes:
    """Knows the answers of all jobs, and gets every third token of them wrong."""

    def __init__(self):
        self._ids = []

    def extend(self, ids):
        self._ids += np.asarray(ids).tolist()

    def propose(self, max_tokens):
        for (prompt, _), steps in zip(JOBS, plain._alone(), strict=True):
            whole = [*prompt, *(step.token_id for step in steps)]
            if whole[: len(self._ids)] == self._ids:
                right = whole[len(self._ids) :][:max_tokens]
                first = len(self._ids)
                return np.array([t if (first + i) % 3 else t + 1 for i, t in enumerate(right)], np.int32)
        return np.zeros(0, np.int32)


@functools.cache
def _engine():
    whole = plain._engine()
    sizes = {"max_batch": SLOTS, "max_len": plain.MAX_LEN, "prefill_chunk": plain.CHUNK}
    engine = Engine(whole.model, whole.params, **sizes, drafter=_Sometimes, num_draft_tokens=NUM_DRAFT)
    engine.warm_up()
    return engine


def _same(request, wanted):
    assert [(s.token_id, s.finish_reason) for s in request.steps] == [(s.token_id, s.finish_reason) for s in wanted]
    got, wanted = ([step.logprob for step in some] for some in (request.steps, wanted))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=plain.LOGPROB_TOLERANCE)


def test_drafts_change_no_token_whoever_else_is_there():
    """Greedy and drawn answers, cancelled and preempted neighbours, free slots full of NaN."""
    before = _engine()._serving.drafts.stats.num_accepted
    requests = [(job, _engine().submit(*JOBS[job])) for job in (0, 1, 2, 3, 4, 2, 0, 1)]
    cancelled = _engine().submit(*JOBS[2])
    for number in range(200):
        plain._poison_free_slots(set(), _engine())
        _engine().step()
        running = list(_engine()._serving.scheduler.running.values())
        if number in (3, 7, 12) and running:
            _engine()._serving.preempt(running[number % len(running)])
        if number == 9:
            _engine().cancel(cancelled)
        if not _engine().has_work:
            break
    assert sum(request.num_preemptions for _, request in requests) >= 2
    for job, request in requests:
        _same(request, plain._alone()[job])
    stats = _engine()._serving.drafts.stats
    assert before < stats.num_accepted < stats.num_drafted and 0 < stats.acceptance < 1


def test_programs_with_drafts_are_listed_and_traffic_compiles_none():
    _engine()
    plain._alone()
    assert _engine().compilations()[-2:] == [
        Program("verify", SLOTS, NUM_DRAFT + 1),
        Program("verify", SLOTS, NUM_DRAFT + 1, extras=True),
    ]
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None
    )
    asks = [SamplingParams(temperature=0.0, top_logprobs=3), SamplingParams(min_tokens=3, logit_bias={5: 2.0})]
    requests = [_engine().submit(*job) for job in JOBS] + [_engine().submit([1, 2, 3], ask) for ask in asks]
    plain._drain(_engine())
    assert compiled == [] and all(request.status == "finished" for request in requests)
    assert [len(step.top_logprobs) for step in requests[-2].steps] == [3] * len(requests[-2].steps)


def test_a_stream_with_drafts_hands_over_exactly_what_it_said():
    """After each number of steps, whatever draft the last one came from."""
    prompt, params = JOBS[2]
    wanted = plain._alone()[2]
    for count in range(1, len(wanted)):
        run = _engine().stream(prompt, params)
        said = [next(run) for _ in range(count)]
        session = run.session()
        assert said == run.steps[:count] and int(session.cache.lengths[0]) == len(prompt) + len(run.steps)
        rest = list(
            _engine().resume(session, [], SamplingParams(temperature=0.0, max_tokens=len(wanted) - len(run.steps)))
        )
        assert [step.token_id for step in [*run.steps, *rest]] == [step.token_id for step in wanted]


def test_ngram_drafts_speed_up_what_repeats_itself():
    whole = plain._engine()
    engine = Engine(whole.model, whole.params, max_batch=1, max_len=256, drafter=NgramDrafter)
    params = SamplingParams(temperature=0.0, max_tokens=60, logit_bias={7: 100.0, 9: 99.0}, frequency_penalty=0.5)
    alone = Engine(whole.model, whole.params, max_batch=1, max_len=256).generate([[5, 6] * 8], params)[0]
    request = engine.submit([5, 6] * 8, params)
    num_iterations = 0
    while engine.has_work:
        engine.step()
        num_iterations += 1
    assert request.completion().ids == alone.ids and set(alone.ids) == {7, 9}
    assert num_iterations < 30 and engine.draft_stats.acceptance > 0.3


def test_a_model_drafts_for_itself_without_a_miss():
    whole = plain._engine()

    def drafter():
        return ModelDrafter(whole.model, whole.params, max_len=96, num_tokens=NUM_DRAFT)

    sizes = {"max_batch": 1, "max_len": 96, "prefill_chunk": plain.CHUNK}
    engine = Engine(whole.model, whole.params, **sizes, drafter=drafter, num_draft_tokens=NUM_DRAFT)
    request = engine.submit(*JOBS[2])
    plain._drain(engine)
    _same(request, plain._alone()[2])
    assert engine.draft_stats.acceptance == 1.0
    with pytest.raises(ValueError, match="more than max_len=96"):
        drafter().extend(range(97))


def test_engine_refuses_drafts_of_no_tokens():
    whole = plain._engine()
    with pytest.raises(ValueError, match="num_draft_tokens=0"):
        Engine(whole.model, whole.params, drafter=NgramDrafter, num_draft_tokens=0)


def test_broken_logits_behind_a_draft_end_their_request_alone():
    whole = plain._engine()
    table = whole.params["embedding"].at[200, 0].set(jnp.nan)
    sizes = {"max_batch": SLOTS, "max_len": plain.MAX_LEN, "prefill_chunk": plain.CHUNK}
    broken = Engine(whole.model, whole.params | {"embedding": table}, **sizes, drafter=_Sometimes, num_draft_tokens=3)
    requests = [broken.submit(*JOBS[0]), broken.submit([1, 200, 2], plain.GREEDY), broken.submit(*JOBS[4])]
    plain._drain(broken)
    assert [request.status for request in requests] == ["finished", "failed", "finished"]
    _same(requests[0], plain._alone()[0])
    _same(requests[2], plain._alone()[4])
