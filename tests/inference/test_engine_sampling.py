"""What the engine makes of the fields of a request: by itself and beside other requests."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.chat.tokenizer import ByteTokenizer, StreamDecoder
from maxmoe.inference.answer_error import AnswerError
from maxmoe.inference.budget import ThinkingMarkers
from maxmoe.inference.engine import Engine
from maxmoe.inference.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPT, OTHER = list(range(40, 53)), [3, 7]
OPEN, CLOSE = (259, 116, 261), (260, 116, 261)  # <|open|>t<|sep|> and <|close|>t<|sep|>


@pytest.fixture(scope="module")
def engine(model, params):
    return Engine(
        model,
        params,
        max_batch=2,
        prefill_chunk=16,
        detokenizer=lambda: StreamDecoder(ByteTokenizer(512)),
        thinking=ThinkingMarkers(OPEN, CLOSE),
    )


@pytest.fixture(scope="module")
def plain(engine):
    return engine.generate([PROMPT], GREEDY)[0]


def test_plain_answer_tells_text_and_counts(plain):
    assert plain.text == ByteTokenizer(512).decode(plain.ids)
    assert (plain.num_thinking_tokens, plain.num_answer_tokens, plain.budget_forced) == (0, 12, False)
    assert plain.top_logprobs == [()] * 12 and plain.stop_string is None


def test_penalties_and_biases_beside_a_row_without(engine, plain):
    first = plain.ids[0]
    asked = dataclasses.replace(
        GREEDY, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=5.0, logit_bias={first: -100.0}
    )
    alone = engine.generate([PROMPT], asked)[0]
    left, right = engine.generate([PROMPT, PROMPT], [GREEDY, asked])
    assert left.ids == plain.ids and right.ids == alone.ids
    assert first not in alone.ids and len(set(alone.ids)) == 12  # so strong that nothing comes twice
    biased = engine.generate([PROMPT], dataclasses.replace(GREEDY, logit_bias={500: 100.0}, max_tokens=3))[0]
    assert biased.ids == [500] * 3


def test_top_logprobs(engine, plain):
    left, right = engine.generate([PROMPT, OTHER], [dataclasses.replace(GREEDY, top_logprobs=3), GREEDY])
    assert left.ids == plain.ids and right.top_logprobs == [()] * 12
    for token, logprob, top in zip(left.ids, left.logprobs, left.top_logprobs, strict=True):
        assert len(top) == 3 and top[0] == (token, logprob) and top[0][1] > top[1][1] > top[2][1]


def test_min_tokens_bans_stop_ids(engine, plain):
    stop = plain.ids[2]
    early = engine.generate([PROMPT], dataclasses.replace(GREEDY, stop_ids=(stop,)))[0]
    later = engine.generate([PROMPT], dataclasses.replace(GREEDY, stop_ids=(stop,), min_tokens=6))[0]
    assert len(early.ids) <= 2 and len(later.ids) >= 6 and stop not in later.ids[:6]


def test_stop_string_across_tokens(engine, plain):
    text = plain.text
    stop = text[4:7]
    left, right = engine.generate([PROMPT, PROMPT], [dataclasses.replace(GREEDY, stop=(stop,)), GREEDY])
    assert left.text == text[: text.index(stop)] and left.stop_string == stop and left.finish_reason == "stop"
    assert left.ids == plain.ids[: len(left.ids)] and left.stop_id is None
    assert stop in ByteTokenizer(512).decode(left.ids) and right.text == text
    streamed = list(engine.stream(PROMPT, dataclasses.replace(GREEDY, stop=(stop,))))
    assert "".join(step.text for step in streamed) == left.text and streamed[-1].stop_string == stop


def test_interrupted_run_gives_what_it_holds_back(engine, plain):
    run = engine.stream(PROMPT, dataclasses.replace(GREEDY, stop=(plain.text[0:2] + "\0\0",)))
    passed = "".join(step.text for step in itertools.islice(run, 2))
    assert passed + run.finish_text() == ByteTokenizer(512).decode(plain.ids[:2])


def test_budget_closes_thinking(engine):
    prompt = [*PROMPT, *OPEN]
    free = engine.generate([prompt], GREEDY)[0]
    limited = dataclasses.replace(GREEDY, thinking_token_budget=4)
    left, right = engine.generate([prompt, PROMPT], [limited, limited])
    assert free.num_thinking_tokens == 12 and free.num_answer_tokens == 0 and not free.budget_forced
    assert left.ids[:7] == [*free.ids[:4], *CLOSE] and left.budget_forced
    assert (left.num_thinking_tokens, left.num_answer_tokens) == (4, len(left.ids) - 7) and len(left.ids) > 7
    assert right.num_thinking_tokens == 0 and not right.budget_forced  # it does not think at all
    late = engine.generate([prompt], dataclasses.replace(GREEDY, thinking_token_budget=8))[0]
    assert (late.num_thinking_tokens, late.num_answer_tokens, len(late.ids)) == (8, 1, 12)  # three are the marker
    assert late.finish_reason == "length" and late.budget_forced
    none = engine.generate([prompt], dataclasses.replace(GREEDY, thinking_token_budget=0, max_tokens=3))[0]
    assert none.ids == list(CLOSE) and (none.num_thinking_tokens, none.num_answer_tokens) == (0, 0)


def test_stop_id_is_counted_nowhere(engine):
    prompt = [*PROMPT, *OPEN]
    limited = dataclasses.replace(GREEDY, thinking_token_budget=1, stop_ids=(CLOSE[2],))
    answer = engine.generate([prompt], limited)[0]
    assert answer.stop_id == CLOSE[2] and len(answer.ids) == 3
    assert answer.text == ByteTokenizer(512).decode(answer.ids)
    assert (answer.num_thinking_tokens, answer.num_answer_tokens) == (1, 0)


def test_broken_logits_fail_alone(model, params, engine, plain):
    table = params["embedding"].at[200, 0].set(jnp.nan)
    broken = Engine(model, params | {"embedding": table}, max_batch=2, prefill_chunk=16)
    with pytest.raises(AnswerError, match="prompt 1: the logits for position 3 hold a NaN") as caught:
        broken.generate([PROMPT, [1, 200, 2], OTHER], dataclasses.replace(GREEDY, presence_penalty=0.5))
    first, second, third = caught.value.completions
    beside = engine.generate([PROMPT, OTHER], dataclasses.replace(GREEDY, presence_penalty=0.5))
    assert second is None and [first.ids, third.ids] == [answer.ids for answer in beside]
    assert np.all(np.isfinite(first.logprobs)) and len(first.ids) == 12


def test_refuses_what_the_engine_was_not_made_for(model, params):
    bare = Engine(model, params, max_batch=1)
    for asked, says in (({"stop": ("a",)}, "detokenizer"), ({"thinking_token_budget": 1}, "thinking=ThinkingMarkers")):
        with pytest.raises(ValueError, match=says):
            bare.generate([PROMPT], dataclasses.replace(GREEDY, **asked))
    with pytest.raises(ValueError, match="bias id 512 is outside the vocabulary"):
        bare.generate([PROMPT], dataclasses.replace(GREEDY, logit_bias={512: 1.0}))
    with pytest.raises(ValueError, match="marker id 512 is outside the vocabulary of 512"):
        Engine(model, params, thinking=ThinkingMarkers((512,), (1,)))
