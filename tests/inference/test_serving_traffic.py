"""Random interleavings of all that can happen to a request, with prefixes, drafts and evictions at once.

Whatever comes between, an answer is that of the request alone. At the end no slot is held, and the prefix cache's count
of its bytes is what lies in its tree.
"""

import functools

import hypothesis
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from maxmoe.inference.engine import Engine
from maxmoe.inference.prefix_cache import _num_bytes, _OnHost
from tests.inference import test_serving_drafts as drafts
from tests.inference import test_serving_loop as plain

JOBS, MAX_REQUESTS = plain.JOBS, 10


@functools.cache
def _engine():
    whole = plain._engine()
    sizes = {"max_batch": plain.SLOTS, "max_len": plain.MAX_LEN, "prefill_chunk": plain.CHUNK}
    engine = Engine(
        whole.model,
        whole.params,
        **sizes,
        prefix_cache_bytes=60_000,  # a few states
        host_prefix_cache_bytes=40_000,
        drafter=drafts._Sometimes,
        num_draft_tokens=drafts.NUM_DRAFT,
    )
    engine.warm_up()
    return engine


@functools.cache
def _alone(prompt, params):
    """The steps of a request that nothing happens to, in an engine without prefixes and drafts."""
    request = plain._engine().submit(list(prompt), params)
    plain._drain()
    return request.steps


def _held_bytes(prefixes):
    """What lies in the tree, on the device and in the host's memory."""
    todo, device, host = list(prefixes._roots.values()), 0, 0
    while todo:
        node = todo.pop()
        todo += node.children.values()
        for arrays in (node.rows, node.state or ()):
            if isinstance(arrays, _OnHost):
                host += arrays.num_bytes
            else:
                device += _num_bytes(arrays)
    return device, host


class _Traffic(stateful.RuleBasedStateMachine):
    """Requests and forks of requests come, are cancelled, preempted, saved and resumed; prefixes are evicted."""

    def __init__(self):
        super().__init__()
        self.requests = []

    def _submit(self, prompt, params, **settings):
        if len(_engine()._serving.scheduler.waiting) < MAX_REQUESTS:
            self.requests.append((tuple(prompt), params, _engine().submit(prompt, params, **settings)))

    @stateful.rule(job=st.integers(0, len(JOBS) - 1), priority=st.integers(0, 2), salt=st.sampled_from(["", "a"]))
    def submit(self, job, priority, salt):
        self._submit(*JOBS[job], priority=priority, cache_salt=salt)

    @stateful.rule(data=st.data(), keep=st.integers(1, 6), more=st.lists(st.integers(0, 255), max_size=3))
    def fork(self, data, keep, more):
        """A prompt that begins like an earlier one and what was said to it."""
        if self.requests:
            prompt, params, request = data.draw(st.sampled_from(self.requests))
            said = [step.token_id for step in request.steps[:keep]]
            whole = [*prompt, *said, *more]
            if len(whole) + params.max_tokens <= plain.MAX_LEN:
                self._submit(whole, params)

    @stateful.rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            plain._poison_free_slots(set(), _engine())
            _engine().step()

    @stateful.rule(data=st.data())
    def cancel(self, data):
        if self.requests:
            _engine().cancel(data.draw(st.sampled_from(self.requests))[2])

    @stateful.rule(data=st.data())
    def preempt(self, data):
        if running := list(_engine()._serving.scheduler.running.values()):
            _engine()._serving.preempt(data.draw(st.sampled_from(running)))

    @stateful.rule(count=st.integers(1, 3))
    def evict(self, count):
        """From the device, as when others need the room; what then does not fit into the host's memory goes."""
        prefixes = _engine().prefixes
        limit, prefixes.max_bytes = prefixes.max_bytes, prefixes.stats.num_bytes // (count + 1)
        prefixes._shrink()
        prefixes.max_bytes = limit

    @stateful.rule(job=st.sampled_from([1, 4]), count=st.integers(1, 4))
    def save_and_resume(self, job, count):
        """A session beside the traffic: what is left of an answer is said by another run."""
        prompt, params = JOBS[job]
        run = _engine().stream(prompt, params)
        for _ in range(count):
            next(run)
        session = run.session()
        wanted = [step.token_id for step in _alone(tuple(prompt), params)]
        left = len(wanted) - len(run.steps)
        rest = [] if not left else _engine().resume(session, [], plain.dataclasses.replace(params, max_tokens=left))
        assert [step.token_id for step in [*run.steps, *rest]] == wanted

    @stateful.invariant()
    def nothing_leaks(self):
        engine = _engine()
        prefixes, stats = engine.prefixes, engine.prefixes.stats
        assert (stats.num_bytes, stats.num_host_bytes) == _held_bytes(prefixes)
        assert stats.num_bytes <= prefixes.max_bytes and stats.num_host_bytes <= prefixes.max_host_bytes
        holding = {request.slot: request for _, _, request in self.requests if request.slot is not None}
        assert holding == engine._serving.scheduler.running

    def teardown(self):
        plain._drain(_engine())
        assert not _engine()._serving.scheduler.running and not _engine()._serving.is_reading
        for prompt, params, request in self.requests:
            wanted = _alone(prompt, params)
            got = [step.token_id for step in request.steps]
            assert request.status in ("finished", "cancelled")
            assert got == [step.token_id for step in wanted[: len(got)]]
            if request.status == "finished":
                assert len(got) == len(wanted)
                logprobs = [step.logprob for step in request.steps], [step.logprob for step in wanted]
                np.testing.assert_allclose(*logprobs, rtol=0, atol=plain.LOGPROB_TOLERANCE)
        _engine().prefixes.clear()
        assert _engine().prefixes.stats.num_bytes == 0 and _engine().prefixes._roots == {}


_Traffic.TestCase.settings = hypothesis.settings(max_examples=10, stateful_step_count=20)
test_any_interleaving_gives_the_answers_of_requests_alone = _Traffic.TestCase


@pytest.mark.slow
def test_thousands_of_interleavings():
    stateful.run_state_machine_as_test(_Traffic, settings=hypothesis.settings(max_examples=300, stateful_step_count=50))
