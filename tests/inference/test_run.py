"""Runs and sessions of an engine: what is taken in the middle of an answer goes on with the same tokens and bits."""

import dataclasses
import functools
import os
import signal
import threading
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxmoe as mm
from maxmoe.inference.engine import Engine
from maxmoe.inference.interrupts import interrupts_wait
from maxmoe.inference.sampling_params import SamplingParams
from maxmoe.params import PACKED, SCALE, abstract_params

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [(37 * i + 18) % 256 for i in range(30)]
BEFORE, TOTAL = 7, 24  # tokens of an answer until it is interrupted, and in all
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOTAL)
SAMPLED = SamplingParams(temperature=1.3, top_p=0.9, seed=2**40 + 3, max_tokens=TOTAL)
REST = TOTAL - BEFORE


@functools.cache
def _model():
    """Two layers: the tiny model's dense KDA layer, and a full-attention layer with indexer and experts."""
    config = mm.load_config(ROOT / "configs/tiny.py")
    return mm.Transformer(dataclasses.replace(config, num_layers=2, full_attention_layers=(1,)))


@functools.cache
def _params():
    """Float32 weights far larger than a new model's, so that tokens are told apart clearly."""
    rng = np.random.default_rng(0)

    def fill(path, leaf):
        name = path[-1].key
        if name.endswith(PACKED):
            return jnp.asarray(rng.integers(0, 256, leaf.shape, np.uint8))
        if name.endswith(SCALE):
            return jnp.full(leaf.shape, 124, jnp.uint8)  # 2^-3
        return jnp.asarray(("norm" in name) + 0.2 * rng.normal(size=leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(fill, nn.unbox(abstract_params(_model())))


def _engine(kind=Engine):
    return kind(_model(), _params(), max_batch=1, max_len=300, prefill_chunk=16)


@functools.cache
def _whole(params):
    steps = list(_engine().stream(PROMPT, params))
    assert len(steps) == TOTAL  # choose another prompt or seed where an answer ends early
    return steps


def _interrupted(kind=Engine):
    run = _engine(kind).stream(PROMPT, SAMPLED)
    for _ in range(BEFORE):
        next(run)
    return run.session()


@pytest.fixture(scope="module")
def session():
    """A session in the middle of an answer. Nothing may continue it."""
    return _interrupted()


@pytest.fixture
def ctrl_c():
    """Python's own handler, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _bits(session):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((session.cache, session.logits))]


def test_resume_grows_the_cache_where_the_answer_needs_it(session):
    long = dataclasses.replace(SAMPLED, max_tokens=300 - 37)
    run = _engine().resume(session.fork(1, [SAMPLED.seed])[0], [], long)
    steps = [next(run) for _ in range(REST)]
    assert [step.token_id for step in steps] == [s.token_id for s in _whole(SAMPLED)[BEFORE:]]
    assert run.session().cache.max_len == 300


def test_session_of_a_whole_answer_goes_on_as_a_longer_one():
    run = _engine().stream(PROMPT, dataclasses.replace(SAMPLED, max_tokens=BEFORE))
    steps = list(run)
    session = run.session()
    assert session.token_ids[0].tolist() == PROMPT + [step.token_id for step in steps]
    steps[-1] = steps[-1]._replace(finish_reason=None)
    more = list(_engine().resume(session, [], dataclasses.replace(SAMPLED, max_tokens=REST)))
    assert steps + more == _whole(SAMPLED)


@pytest.mark.parametrize("place", range(1, 10, 3))
def test_session_after_an_interrupt_holds_the_steps_of_its_run(place, monkeypatch):
    wanted = _whole(SAMPLED)
    run, get, calls = _engine().stream(PROMPT, SAMPLED), jax.device_get, []

    def interrupt(values):
        calls.append(1)
        if len(calls) == place:
            raise KeyboardInterrupt
        return get(values)

    monkeypatch.setattr(jax, "device_get", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(run)
    session = run.session()
    assert list(run) == [] and run.steps == wanted[:place]
    assert session.token_ids[0].tolist() == PROMPT + [step.token_id for step in run.steps]
    more = list(_engine().resume(session, [], dataclasses.replace(SAMPLED, max_tokens=TOTAL - place)))
    assert more == wanted[place:]


def test_session_of_an_engine_that_does_not_run_ahead_is_the_same(session, monkeypatch):
    assert Engine.runs_ahead
    monkeypatch.setattr(Engine, "runs_ahead", False)
    assert _bits(_interrupted()) == _bits(session)


def test_new_tokens_follow_the_stop_id():
    answer = [step.token_id for step in _whole(GREEDY)]
    stop = answer[4]
    run = _engine().stream(PROMPT, dataclasses.replace(GREEDY, stop_ids=(stop,)))
    steps = list(run)
    assert steps[-1].finish_reason == "stop"
    ids = PROMPT + [step.token_id for step in steps]
    session = run.session()
    assert session.token_ids[0].tolist() == ids
    follow = [3, 1, 4]
    more = list(_engine().resume(session, follow, GREEDY))
    wanted = list(_engine().stream(ids + follow, GREEDY))
    assert [step.token_id for step in more] == [step.token_id for step in wanted]
    # Chunks and steps sum in different orders.
    np.testing.assert_allclose([s.logprob for s in more], [s.logprob for s in wanted], rtol=0, atol=1e-4)


def test_state_is_handed_over_once():
    run = _engine().stream(PROMPT, GREEDY)
    with pytest.raises(RuntimeError, match="before its prompt was read"):
        run.session()
    next(run)
    session = run.session()
    with pytest.raises(RuntimeError, match="already"):
        run.session()
    assert next(run, None) is None
    list(_engine().resume(session, [], GREEDY))
    for use in (lambda: session.fork(2), lambda: _engine().resume(session, [], GREEDY)):
        with pytest.raises(ValueError, match="continued already"):
            use()


def test_forks_diverge_by_seed_and_do_not_touch_each_other(session):
    original = session
    before, rest = _bits(original), dataclasses.replace(SAMPLED, seed=None, max_tokens=REST)
    forks = original.fork(4, [SAMPLED.seed, 5, 6, 5])
    answers = []
    for fork in forks:
        answers.append([step.token_id for step in _engine().resume(fork, [], rest)])
        assert _bits(original) == before
    assert answers[0] == [step.token_id for step in _whole(SAMPLED)[BEFORE:]]
    assert answers[1] == answers[3] and len(set(map(tuple, answers))) == 3
    assert len({fork.seeds for fork in original.fork(3)}) == 3


def test_ctrl_c_waits_for_the_step(session, ctrl_c):
    """It arrives when the old state has given its memory away and the new one is not in place."""

    class Interrupted(Engine):
        def decode_token(self, token, cache, active):
            out = super().decode_token(token, cache, active)
            if int(out[1].lengths[0]) == len(PROMPT) + BEFORE:
                os.kill(os.getpid(), signal.SIGINT)
            return out

    run = _engine(Interrupted).stream(PROMPT, SAMPLED)
    with pytest.raises(KeyboardInterrupt):
        list(run)
    assert len(run.steps) == BEFORE - 1
    assert _bits(run.session()) == _bits(session) and run.steps == _whole(SAMPLED)[:BEFORE]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait(ctrl_c):
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
        signal.raise_signal(signal.SIGINT)
        reached.append(2)
    assert reached == [1]


def test_interrupts_are_left_alone_in_other_threads(ctrl_c):
    seen = []

    def work():
        with interrupts_wait():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_resume_refuses_and_leaves_the_session_as_it_is(session):
    before = _bits(session)
    bfloat16 = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), session.cache)
    for given, ids, params, message in (
        (session, [], dataclasses.replace(GREEDY, max_tokens=264), "max_len is 300"),
        (session, [512], GREEDY, "outside the vocabulary"),
        (session, [1.5], GREEDY, "must be a sequence of token ids"),
        (dataclasses.replace(session, token_ids=session.token_ids * 2), [], GREEDY, "only one can be continued"),
        (dataclasses.replace(session, cache=bfloat16), [], GREEDY, "session's cache_dtype=bfloat16, not float32"),
    ):
        with pytest.raises(ValueError, match=message):
            _engine().resume(given, ids, params)
    assert _bits(session) == before
