"""Continuous batching: a request's answer is its own, whatever comes and goes beside it.

One engine serves all tests, so that it compiles once. In its batch of one shape, rows are rounded alike on the CPU
whoever stands beside them, so that log-probabilities must have the same bits; after a preemption, and in batches of
other shapes, sums are taken in another order, and only tokens are the same.
"""

import contextlib
import dataclasses
import functools
import time
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from maxmoe.config import load_config
from maxmoe.inference import steps
from maxmoe.inference.answer_error import AnswerError
from maxmoe.inference.engine import Engine
from maxmoe.inference.sampling_params import SamplingParams
from maxmoe.inference.scheduler import QueueFullError
from maxmoe.inference.warm_up import Program
from maxmoe.model.transformer import Transformer
from tests.inference.random_weights import random_weights

ROOT = Path(__file__).resolve().parents[2]
SLOTS, MAX_LEN, CHUNK = 3, 96, 16  # more tokens than the indexer's top_k of 64
LOGPROB_TOLERANCE = 1e-4  # float32 logits of size 10 after a hundred rounded steps

GREEDY = SamplingParams(temperature=0.0, max_tokens=7)
HOT = SamplingParams(temperature=1.5, top_p=0.9, seed=11, max_tokens=9)
JOBS = [
    ([300, 7], GREEDY),  # shorter than the convolution's window of 4
    (list(range(40, 53)), HOT),
    ([(37 * i) % 256 for i in range(70)], GREEDY),  # over four chunks
    ([5] * CHUNK, dataclasses.replace(HOT, seed=12, max_tokens=1)),
    ([(11 * i) % 256 for i in range(33)], dataclasses.replace(GREEDY, max_tokens=5)),
]


@functools.cache
def _engine():
    """Two layers: the tiny model's dense KDA layer, and a full-attention layer with indexer and experts."""
    config = load_config(ROOT / "configs/tiny.py")
    model = Transformer(dataclasses.replace(config, num_layers=2, full_attention_layers=(1,)))
    weights = random_weights(model, jnp.float32)
    engine = Engine(model, weights, max_batch=SLOTS, max_len=MAX_LEN, prefill_chunk=CHUNK, max_waiting=10)
    engine.warm_up()
    return engine


@functools.cache
def _alone():
    """The steps of each job, alone in the batch."""
    return [_serve([job])[0].steps for job in JOBS]


def _serve(jobs):
    requests = [_engine().submit(*job) for job in jobs]
    _drain()
    return requests


def _drain(engine=None):
    engine = _engine() if engine is None else engine
    while engine.has_work:
        engine.step()


@jax.jit
def _poisoned(cache, row):
    """NaN in everything that a row holds; its length stays."""
    stacks = jax.tree.map(lambda leaf: leaf.at[:, row].set(jnp.nan), cache.stacks)
    return cache.replace(stacks=stacks)


def _poison_free_slots(done, engine=None):
    """Poisons rows that nobody holds; `done` names those that have been."""
    loop = (_engine() if engine is None else engine)._serving
    free = set(range(SLOTS)) - loop.scheduler.running.keys()
    for slot in free - done:
        loop.cache = _poisoned(loop.cache, slot)
    return free


def _same(request, wanted):
    if request.num_preemptions == 0:
        assert request.steps == wanted
        return
    assert [(s.token_id, s.finish_reason) for s in request.steps] == [(s.token_id, s.finish_reason) for s in wanted]
    got, wanted = ([step.logprob for step in some] for some in (request.steps, wanted))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=LOGPROB_TOLERANCE)


class _Traffic(stateful.RuleBasedStateMachine):
    """Requests come, are cancelled and preempted at any time; free slots hold NaN."""

    def __init__(self):
        super().__init__()
        _alone()
        self.requests, self.poisoned = [], set()

    @stateful.rule(job=st.integers(0, len(JOBS) - 1), priority=st.integers(0, 2))
    def submit(self, job, priority):
        if len(_engine()._serving.scheduler.waiting) < 10:
            self.requests.append((job, _engine().submit(*JOBS[job], priority=priority)))

    @stateful.rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.poisoned = _poison_free_slots(self.poisoned)
            _engine().step()

    @stateful.rule(data=st.data())
    def cancel(self, data):
        if self.requests:
            _, request = data.draw(st.sampled_from(self.requests))
            ended = request.status if request.ended else "cancelled"
            _engine().cancel(request)
            assert request.status == ended and request.slot is None

    @stateful.rule(data=st.data())
    def preempt(self, data):
        running = list(_engine()._serving.scheduler.running.values())
        if running:
            _engine()._serving.preempt(data.draw(st.sampled_from(running)))

    @stateful.invariant()
    def slots_belong_to_those_that_run(self):
        scheduler = _engine()._serving.scheduler
        holding = {request.slot: request for _, request in self.requests if request.slot is not None}
        assert holding == scheduler.running
        assert all(request.status == "running" for request in holding.values())
        self.poisoned -= scheduler.running.keys()

    def teardown(self):
        _drain()
        assert not _engine()._serving.scheduler.running and not _engine()._serving.is_reading
        for job, request in self.requests:
            if request.status == "finished":
                _same(request, _alone()[job])
            else:
                assert request.status == "cancelled"
                got = [step.token_id for step in request.steps]
                assert got == [step.token_id for step in _alone()[job][: len(got)]]


_Traffic.TestCase.settings = hypothesis.settings(max_examples=12, stateful_step_count=20)
test_any_interleaving_gives_the_answers_of_requests_alone = _Traffic.TestCase


def test_programs_are_listed_and_traffic_compiles_none():
    engine = _engine()
    _alone()
    assert engine.compilations() == [
        Program("prefill", 1, 16),
        Program("decode", SLOTS, 1),
        Program("choose", SLOTS, 1),
        Program("choose", SLOTS, 1, extras=True),
    ]
    counts = [program._cache_size() for program in (steps._prefill_row_donating, steps._decode_donating)]
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None
    )
    _serve(JOBS + JOBS)
    engine.cancel(engine.submit(*JOBS[0]))
    assert compiled == []
    assert counts == [program._cache_size() for program in (steps._prefill_row_donating, steps._decode_donating)]
    jax.jit(lambda x: x * 3 + 2)(jnp.ones(77)).block_until_ready()
    assert compiled  # the listener hears compilations


def test_warm_up_tells_its_progress_and_waits_for_nobody():
    seen = []
    _engine().warm_up(lambda *args: seen.append(args))
    programs = _engine().compilations()
    assert seen == [(program, done, len(programs)) for done, program in enumerate(programs)]
    request = _engine().submit(*JOBS[0])
    with pytest.raises(RuntimeError, match="before the first submit"):
        _engine().warm_up()
    _engine().cancel(request)


def test_urgent_requests_take_the_slots_of_others_which_then_go_on():
    idle = [_engine().submit(*JOBS[4], priority=2) for _ in range(SLOTS)]
    for _ in range(5):
        _engine().step()
    said = [list(request.steps) for request in idle]
    assert any(said)
    urgent = _engine().submit(*JOBS[0], priority=0)
    _engine().step()
    assert urgent.status == "running" and idle[-1].status == "waiting"
    _drain()
    _same(urgent, _alone()[0])
    for request, before in zip(idle, said, strict=True):
        assert request.steps[: len(before)] == before  # not said twice
        _same(request, _alone()[4])
    assert [request.num_preemptions for request in idle] == [0, 0, 1]


def test_requests_expire_waiting_or_running():
    blocking = [_engine().submit(*JOBS[2]) for _ in range(SLOTS - 1)]
    running = _engine().submit(*JOBS[2], deadline=0.05)
    waiting = _engine().submit(*JOBS[0], deadline=0.05)
    _engine().step()
    assert (running.status, waiting.status) == ("running", "waiting")
    time.sleep(0.06)
    _engine().step()
    assert (running.status, waiting.status, running.slot) == ("expired", "expired", None)
    with pytest.raises(RuntimeError, match="is expired: only a finished one"):
        running.completion()
    _drain()
    for request in blocking:
        _same(request, _alone()[2])
    for deadline in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="positive number of seconds"):
            _engine().submit(*JOBS[0], deadline=deadline)


def test_short_requests_do_not_wait_for_a_long_prompt():
    """One chunk of the long prompt an iteration, and beside it the short ones, which come later, begin and end."""
    long = _engine().submit([(37 * i) % 256 for i in range(88)], GREEDY)  # six chunks
    _engine().step()
    short = [_engine().submit([9, number], GREEDY) for number in range(SLOTS - 1)]
    read = [_engine()._serving._unread[long.slot].num_read]
    while not all(request.steps for request in short):
        _engine().step()
        read.append(_engine()._serving._unread[long.slot].num_read)
    assert len(read) <= 3 and np.diff(read).tolist() == [CHUNK] * (len(read) - 1)
    _drain()
    assert long.status == "finished" and all(request.status == "finished" for request in short)


def test_a_full_queue_refuses_and_goes_on():
    requests = [_engine().submit(*JOBS[0]) for _ in range(10)]
    with pytest.raises(QueueFullError, match="10 requests wait already"):
        _engine().submit(*JOBS[0])
    _drain()
    for request in requests:
        _same(request, _alone()[0])


def test_broken_logits_end_their_request_and_no_other():
    engine = _engine()
    table = engine.params["embedding"].at[200, 0].set(jnp.nan)
    broken = Engine(
        engine.model, engine.params | {"embedding": table}, max_batch=SLOTS, max_len=MAX_LEN, prefill_chunk=CHUNK
    )
    requests = [broken.submit(*JOBS[0]), broken.submit([1, 200, 2], GREEDY), broken.submit(*JOBS[4])]
    while broken.has_work:
        broken.step()
    assert [request.status for request in requests] == ["finished", "failed", "finished"]
    with pytest.raises(AnswerError, match="position 3 hold a NaN"):
        requests[1].completion()
    after = broken.submit(*JOBS[0])  # in a slot of one that left NaN behind
    reused = broken.submit(*JOBS[0])
    while broken.has_work:
        broken.step()
    for request in (requests[0], after, reused):
        _same(request, _alone()[0])
    _same(requests[2], _alone()[4])
    assert broken.metrics.num_ended == {"finished": 4, "failed": 1}


def test_an_interrupt_before_the_host_has_a_token_loses_none(monkeypatch):
    get, calls = jax.device_get, []

    def interrupt(values):
        calls.append(1)
        if len(calls) % 3 == 1:
            raise KeyboardInterrupt
        return get(values)

    requests = [_engine().submit(*job) for job in JOBS]
    with monkeypatch.context() as patched:
        patched.setattr(jax, "device_get", interrupt)
        while _engine().has_work:
            with contextlib.suppress(KeyboardInterrupt):
                _engine().step()
    for request, wanted in zip(requests, _alone(), strict=True):
        _same(request, wanted)


def test_metrics_count_tokens_and_preemptions():
    before = dataclasses.replace(_engine().metrics)
    _serve(JOBS[:1])
    after = _engine().metrics
    assert after.num_prompt_tokens - before.num_prompt_tokens == 2
    assert after.num_generated_tokens - before.num_generated_tokens == len(_alone()[0])
    assert after.num_preemptions == before.num_preemptions
