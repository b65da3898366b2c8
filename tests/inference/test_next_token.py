"""The step from logits to tokens: rows do not meet, forced ids win, and what nobody asks for costs nothing."""

import jax
import jax.numpy as jnp
import numpy as np

from maxmoe.inference.budget import ThinkingMarkers, ThinkingState
from maxmoe.inference.next_token import NOTHING_SAID, Said, choose, lay_out, next_tokens
from maxmoe.inference.sampling_params import SamplingParams

VOCAB = 29
MARKERS = ThinkingMarkers((1, 2), (3, 3, 4))
TABLE = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 2  # logits after each token
PARAMS = [
    SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias={4: 2.0, 28: -100}),
    SamplingParams(temperature=0.8, top_k=9, presence_penalty=1.0, frequency_penalty=0.3),
    SamplingParams(thinking_token_budget=3, min_tokens=8, stop_ids=(5, 6)),
    SamplingParams(temperature=0.0),
]
PROMPTS = [np.array(ids, np.int32) for ids in ([9, 8], [7, 7, 7], [1, 2, 11], [10])]


def _lay_out(numbers, markers=MARKERS, said=None):
    params, prompts = [PARAMS[i] for i in numbers], [PROMPTS[i] for i in numbers]
    stop_ids = [frozenset({0, *p.stop_ids}) for p in params]
    return lay_out(params, prompts, [10 + i for i in numbers], stop_ids, VOCAB, markers, said)


def _answers(numbers, count=12, markers=MARKERS, said=None):
    rows, progress = jax.device_put(_lay_out(numbers, markers, said))
    before = [PROMPTS[i] for i in numbers]
    before = before if said is None else [np.append(ids, row.ids) for ids, row in zip(before, said, strict=True)]
    tokens, answers = np.array([ids[-1] for ids in before]), []
    for _ in range(count):
        chosen, progress = next_tokens(jnp.asarray(TABLE[tokens]), rows, progress)
        tokens = np.array(chosen.tokens)
        answers.append(tokens.tolist())
    return np.array(answers).T.tolist()


def test_a_row_does_not_depend_on_its_batch():
    together = _answers([0, 1, 2, 3])
    assert _answers([2, 0]) == [together[2], together[0]]
    assert _answers([1], markers=None) == [together[1]]


def test_answers_go_on_after_a_break_and_while_others_wait():
    """Three rows say five tokens while the fourth waits; then all are laid out anew, and go on."""
    whole = _answers([0, 1, 2, 3])
    rows, progress = jax.device_put(_lay_out([0, 1, 2, 3]))
    tokens, said, active = np.array([prompt[-1] for prompt in PROMPTS]), [], np.array([True, True, True, False])
    for _ in range(5):
        chosen, progress = next_tokens(jnp.asarray(TABLE[tokens]), rows, progress, active=active)
        tokens = np.where(active, chosen.tokens, tokens)
        said.append(tokens)
        state = jax.device_get(chosen.thought.state)
    assert progress.positions.tolist() == [7, 8, 8, 1]
    reached = [ThinkingState(*(column[row] for column in state)) for row in range(3)]
    answers = [*map(Said, np.array(said).T[:3], reached), NOTHING_SAID]
    assert [answer.ids.tolist() for answer in answers] == [row[:5] for row in whole[:3]] + [[]]
    assert _answers([0, 1, 2, 3], 7, said=answers) == [row[5:] for row in whole[:3]] + [whole[3][:7]]


def test_the_rows_do_what_they_ask():
    penalised, _, thinking, plain = _answers([0, 1, 2, 3])
    assert 28 not in penalised and penalised != plain
    assert thinking[2:5] == [3, 3, 4]  # one token of the prompt and two more are thought
    assert not {0, 5, 6} & set(thinking[:8])


def test_logprobs_are_the_models_own():
    rows, progress = jax.device_put(_lay_out([0, 2]))
    logits = jnp.asarray(TABLE[[8, 11]])
    chosen, _ = next_tokens(logits, rows, progress)
    own = np.array(jax.nn.log_softmax(logits))
    # Sums of 29 terms may be ordered otherwise.
    np.testing.assert_allclose(chosen.logprobs, own[[0, 1], chosen.tokens], rtol=0, atol=2e-6)
    ids, logprobs = chosen.top
    assert ids.tolist() == np.argsort(-own, kind="stable")[:, :20].tolist()
    np.testing.assert_allclose(logprobs, -np.sort(-own)[:, :20], rtol=0, atol=2e-6)


def test_forced_tokens_have_logprobs_and_are_told():
    params = [SamplingParams(temperature=0.0, thinking_token_budget=0)] * 3
    prompts = [np.array([1, 2], np.int32)] * 3
    start = lay_out(params, prompts, [0, 0, 0], [frozenset()] * 3, VOCAB, MARKERS)
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, 3] = logits[1, 7] = 5.0  # one says the marker by itself
    logits[2] = np.nan
    chosen, _ = next_tokens(logits, *jax.device_put(start))
    assert chosen.tokens.tolist() == [3, 3, -1] and chosen.thought.forced.tolist() == [False, True, False]
    expected = jax.nn.log_softmax(logits[:2])[:, 3]
    np.testing.assert_allclose(chosen.logprobs[:2], expected, rtol=0, atol=2e-6)


def _shapes(jaxpr):
    """Of the outputs of every operation in a program."""
    for equation in jaxpr.eqns:
        yield from (output.aval.shape for output in equation.outvars)
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _shapes(inner)


def _wide(params, markers=None):
    """How many operations of the step have an output as large as the vocabulary."""
    prompts = [np.array([1, 2], np.int32)] * 2
    start = lay_out(params, prompts, [0, 1], [frozenset({0})] * 2, VOCAB, markers)
    program = jax.make_jaxpr(choose)(jnp.zeros((2, VOCAB)), *jax.device_put(start))
    return sum(VOCAB in shape for shape in _shapes(program.jaxpr))


def test_what_nobody_asks_for_costs_nothing():
    plain = [SamplingParams()] * 2
    rows, progress = _lay_out([3], markers=None)
    assert progress.counts is rows.extras is rows.budgets is None
    without = _wide(plain)
    assert _wide(plain, MARKERS) == without  # thinking is counted without looking at the vocabulary
    assert _wide([SamplingParams(thinking_token_budget=1), SamplingParams()], MARKERS) == without
    assert _wide([SamplingParams(presence_penalty=1.0), SamplingParams()]) > without


def test_a_step_is_one_of_two_programs():
    """Whatever rows ask for, shapes are those of no extras or of all."""
    asked = [{"presence_penalty": 1.0}, {"logit_bias": {3: 1.0}}, {"min_tokens": 2, "stop_ids": (5, 6)}]
    asked += [{"top_logprobs": 2}, {"logit_bias": dict.fromkeys(range(VOCAB), 1.0)}, {"repetition_penalty": 2.0}]
    asked += [{}, {"temperature": 0.3, "top_k": 4}, {"thinking_token_budget": 4}]
    shapes = set()
    for fields in asked:
        params = [SamplingParams(**fields), SamplingParams()]
        start = lay_out(params, PROMPTS[:2], [0, 1], [frozenset({0, *p.stop_ids}) for p in params], VOCAB, MARKERS)
        shapes.add((jax.tree.structure(start), *((x.shape, x.dtype) for x in jax.tree.leaves(start))))
    assert len(shapes) == 2
