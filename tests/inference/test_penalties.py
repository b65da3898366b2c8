"""Penalties, biases and bans against their definition, token by token."""

import jax.numpy as jnp
import numpy as np

from maxmoe.inference import penalties
from maxmoe.inference.sampling_params import SamplingParams

VOCAB = 11
PLAIN = SamplingParams()


def _adjusted(logits, params, prompts, answers, stop_ids=frozenset()):
    """The logits after each row's answer, by the functions that sampling uses; float32."""
    nothing = [np.zeros(0, np.int32)] * len(prompts)
    counts = penalties.count_all([np.array(prompt) for prompt in prompts], nothing, VOCAB)
    for tokens in zip(*answers, strict=True):
        counts = penalties.count_tokens(penalties.TokenCounts(*map(jnp.asarray, counts)), jnp.array(tokens))
    lengths = [len(prompt) for prompt in prompts]
    positions = jnp.array(
        [len(prompt) + sum(t >= 0 for t in row) for prompt, row in zip(prompts, answers, strict=True)]
    )
    extras = penalties.stack_extras(params, [stop_ids] * len(params), lengths, VOCAB)
    return np.array(penalties.adjust(jnp.asarray(logits), positions, extras, counts))


def _by_definition(logits, params, prompt, answer, stop_ids=frozenset()):
    result = []
    for token, logit in enumerate(logits.tolist()):
        logit += dict(params.logit_bias).get(token, 0.0)
        if token in prompt or token in answer:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * answer.count(token)
        logit -= params.presence_penalty * (token in answer)
        early = len(answer) < params.min_tokens and token in stop_ids
        result.append(-np.inf if early else logit)
    return result


def test_adjust_equals_the_definition_row_by_row():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, VOCAB)).astype(np.float32)
    params = [
        SamplingParams(repetition_penalty=1.7, logit_bias={3: 50.0, 10: -100}),
        SamplingParams(presence_penalty=-1.5, frequency_penalty=0.75),
        SamplingParams(repetition_penalty=0.5, presence_penalty=2, frequency_penalty=-2, min_tokens=6),
        PLAIN,
        SamplingParams(logit_bias={i: i / 2 for i in range(5)}, min_tokens=3),
    ]
    prompts = [[1, 2, 2], [5], [0, 10, 3], [4, 4], [7, 8, 9, 10]]
    answers = [rng.integers(0, VOCAB, 5).tolist() for _ in params]
    answers[1] = [3, 3, 3, 0, 5]
    stop_ids = frozenset({0, 6})
    expected = [_by_definition(*row, stop_ids) for row in zip(logits, params, prompts, answers, strict=True)]
    # float32 logits of size 100 are rounded to 8e-6, after four operations.
    np.testing.assert_allclose(_adjusted(logits, params, prompts, answers, stop_ids), expected, rtol=0, atol=3e-5)


def test_counts_tell_prompt_from_answer():
    """Presence and frequency look at the answer alone, repetition at both; a negative token is none."""
    params = [SamplingParams(presence_penalty=1.0, repetition_penalty=2.0)]
    logits = np.full((1, VOCAB), 4.0, np.float32)
    adjusted = _adjusted(logits, params, [[1, 2]], [[2, -1, 3]])
    assert adjusted[0, :5].tolist() == [4, 2, 1, 1, 4] and adjusted[0, VOCAB - 1] == 4


def test_counts_of_an_answer_at_once_are_those_of_its_tokens():
    prompts, answers = [np.array([1]), np.array([2])], [np.array([3, 3, 1]), np.zeros(0, np.int32)]
    at_once = penalties.count_all(prompts, answers, VOCAB)
    counts = penalties.count_all(prompts, [answers[1]] * 2, VOCAB)
    for token in answers[0]:
        counts = penalties.count_tokens(penalties.TokenCounts(*map(jnp.asarray, counts)), jnp.array([token, -1]))
    assert all(np.array_equal(left, right) for left, right in zip(at_once, counts, strict=True))


def test_min_tokens_ends_where_it_says():
    params, logits = [SamplingParams(min_tokens=2)], np.zeros((1, VOCAB), np.float32)
    for answer, banned in (([[]], True), ([[1]], True), ([[1, 1]], False), ([[1, 1, 1]], False)):
        assert (_adjusted(logits, params, [[9]], answer, frozenset({4}))[0, 4] == -np.inf) == banned


def test_adjust_keeps_nan_and_bans_infinity():
    logits = np.array([[np.nan, np.inf, 1.0] + [0.0] * (VOCAB - 3)], np.float32)
    params = [SamplingParams(min_tokens=1, repetition_penalty=2.0, logit_bias={1: -100.0})]
    adjusted = _adjusted(logits, params, [[0, 1]], [[]], frozenset({0, 1}))
    assert np.isnan(adjusted[0, 0]) and adjusted[0, 1] == -np.inf


def test_extras_that_nobody_asks_for_are_not_there():
    rows = [PLAIN, SamplingParams(temperature=0.0, top_k=3, stop_ids=(3,), max_tokens=9)]
    assert penalties.stack_extras(rows, [frozenset()] * 2, [1, 1], VOCAB) is None
    assert (
        penalties.stack_extras([*rows, SamplingParams(top_logprobs=1)], [frozenset()] * 3, [1, 1, 1], VOCAB) is not None
    )


def test_what_a_grammar_does_not_allow_is_banned():
    params, logits = (
        [SamplingParams(grammar="start: /a/"), PLAIN],
        np.arange(2 * VOCAB, dtype=np.float32).reshape(2, -1),
    )
    logits[0, 3] = np.nan
    extras = penalties.stack_extras(params, [frozenset()] * 2, [1, 1], VOCAB)
    extras.allowed[0] = 1 << 2 | 1 << 10
    counts = penalties.count_all([np.array([1])] * 2, [np.zeros(0, np.int32)] * 2, VOCAB)
    adjusted = np.array(penalties.adjust(jnp.asarray(logits), jnp.array([1, 1]), extras, counts))
    assert np.flatnonzero(adjusted[0] > -np.inf).tolist() == [2, 10] and np.isnan(adjusted[0, 3])
    assert np.array_equal(adjusted[1], logits[1])
