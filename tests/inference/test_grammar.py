"""Grammars in the engine: answers match, thinking and neighbours do not notice, what is too much fails alone."""

import functools
import json
import threading
import types

import jax
import pytest

from maxmoe.chat.tokenizer import ByteTokenizer, StreamDecoder
from maxmoe.inference.answer_error import AnswerError
from maxmoe.inference.budget import ThinkingMarkers
from maxmoe.inference.engine import Engine
from maxmoe.inference.grammar import Grammars
from maxmoe.inference.sampling_params import SamplingParams
from tests.inference import test_serving_loop as plain

pytest.importorskip("llguidance", reason="grammars need llguidance: pip install 'maxmoe[grammar]'")

TOKENIZER = ByteTokenizer(512)
MARKERS = ThinkingMarkers((259, 116, 261), (260, 116, 261))
NUMBER = 'start: "n=" /[1-9][0-9]{2}/'
POINT = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}


@functools.cache
def _grammars():
    return Grammars(TOKENIZER, TOKENIZER.end_of_msg_id)


def _make(**settings):
    whole = plain._engine()
    sizes = {"max_batch": plain.SLOTS, "max_len": plain.MAX_LEN, "prefill_chunk": plain.CHUNK}
    text = {"detokenizer": lambda: StreamDecoder(TOKENIZER), "thinking": MARKERS}
    return Engine(whole.model, whole.params, **sizes, **text, grammars=_grammars(), **settings)


@functools.cache
def _engine():
    engine = _make()
    engine.warm_up()
    return engine


def test_answers_match_and_neighbours_do_not_notice():
    compiled = []
    plain._alone()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None
    )
    _engine()
    compiled.clear()
    lark = f"start: %json {json.dumps(POINT)}"
    asked = [
        SamplingParams(temperature=t, seed=3, max_tokens=30, grammar=g) for t in (0.0, 2.0) for g in (NUMBER, lark)
    ]
    requests = [_engine().submit(*job) for job in plain.JOBS]
    bound = [_engine().submit([65, 66, 67], params) for params in asked]
    plain._drain(_engine())
    assert compiled == []
    for request, wanted in zip(requests, plain._alone(), strict=True):
        assert [step.token_id for step in request.steps] == [step.token_id for step in wanted]
    for params, request in zip(asked, bound, strict=True):
        answer = request.completion()
        assert answer.finish_reason == "stop" or params.grammar == lark, answer
        if params.grammar == NUMBER:
            assert answer.text[:2] == "n=" and 100 <= int(answer.text[2:]) <= 999
        elif answer.finish_reason == "stop":
            assert list(json.loads(answer.text)) == ["x"]
        # What is told of a token is the model's own opinion of it, not that within the grammar.
        assert all(logprob < 0 for logprob in answer.logprobs)


def test_a_grammar_begins_behind_thinking():
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=40, thinking_token_budget=6, grammar=NUMBER)
    answer = _engine().generate([[1, *MARKERS.open_ids, 7]], params)[0]
    closed = next(i for i in range(len(answer.ids)) if tuple(answer.ids[i : i + 3]) == MARKERS.close_ids)
    assert 0 < closed <= 6 and answer.num_thinking_tokens == closed
    assert TOKENIZER.decode(answer.ids[closed + 3 :])[:2] == "n=" and answer.finish_reason == "stop"
    assert not TOKENIZER.decode(answer.ids[:closed]).startswith("n")


def test_a_grammar_survives_preemption_and_drafts():
    class Anything:
        def extend(self, ids):
            pass

        def propose(self, max_tokens):
            return [110] * max_tokens

    engine = _make(drafter=Anything, num_draft_tokens=3)
    params = SamplingParams(temperature=0.0, max_tokens=12, grammar=NUMBER)
    wanted = _engine().generate([[65, 66]], params)[0]
    request = engine.submit([65, 66], params)
    other = engine.submit(*plain.JOBS[2])
    while len(request.steps) < 2:
        engine.step()
    engine._serving.preempt(request)
    plain._drain(engine)
    assert request.completion().ids == wanted.ids
    assert [s.token_id for s in other.steps] == [s.token_id for s in plain._alone()[2]]


@pytest.mark.parametrize(
    ("grammar", "says"),
    [("start: /(/", "grammar:"), ("nothing", "grammar:"), ('start: %json {"type": "no such type"}', "grammar:")],
)
def test_wrong_grammars_are_refused_at_once(grammar, says):
    with pytest.raises(ValueError, match=says):
        _engine().submit([65], SamplingParams(grammar=grammar))
    assert not _engine().has_work


def test_a_grammar_that_takes_too_long_is_refused_and_keeps_no_other_waiting(monkeypatch):
    grammars, done = Grammars(TOKENIZER, TOKENIZER.end_of_msg_id, compile_seconds=0.2), threading.Event()
    library = grammars._library

    class Stuck:
        grammar_from_lark = library.LLMatcher.grammar_from_lark

        def __init__(self, *args, **named):
            done.wait()

    with monkeypatch.context() as patched:
        slow = types.SimpleNamespace(LLMatcher=Stuck, LLParserLimits=library.LLParserLimits)
        patched.setattr(grammars, "_library", slow)
        with pytest.raises(ValueError, match=r"longer than 0.2 s; make it smaller"):
            grammars.matcher(NUMBER)
    grammars._seconds = 60
    assert grammars.matcher(NUMBER).words.sum() > 0
    assert (grammars.stats.num_refused, grammars.stats.num_compiled) == (1, 1)
    done.set()


def test_a_grammar_that_explodes_fails_when_it_does():
    matcher = _grammars().matcher("start: /((((a{1,100}){1,100}){1,100}){1,100})/")
    with pytest.raises(ValueError, match="cannot be followed"):
        for _ in range(200):
            matcher.accept(97)


def test_an_answer_whose_grammar_cannot_go_on_fails_alone(monkeypatch):
    request = _engine().submit([65, 66], SamplingParams(temperature=0.0, max_tokens=12, grammar=NUMBER))
    other = _engine().submit(*plain.JOBS[0])

    def refuse(token_id):
        raise ValueError("the grammar cannot be followed: too many states")

    monkeypatch.setattr(request.matcher, "accept", refuse)
    plain._drain(_engine())
    assert request.status == "failed" and other.status == "finished"
    with pytest.raises(AnswerError, match="token 1 of its answer: the grammar cannot be followed"):
        request.completion()


def test_compiled_grammars_are_kept():
    stats = _grammars().stats
    _grammars().matcher('start: "kept"')
    before = stats.num_compiled, stats.num_cached
    _grammars().matcher('start: "kept"')
    assert (stats.num_compiled, stats.num_cached) == (before[0], before[1] + 1)


def test_engines_without_grammars_say_so():
    with pytest.raises(ValueError, match="needs an engine that was given grammars"):
        plain._engine().submit([65], SamplingParams(grammar=NUMBER))
