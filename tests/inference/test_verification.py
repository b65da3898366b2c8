"""Verification: certain drafts change no token, drawn ones no distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.inference.budget import ThinkingMarkers
from maxmoe.inference.next_token import lay_out, next_tokens
from maxmoe.inference.sampling import draw_scores, seed_words, stack_settings
from maxmoe.inference.sampling_params import SamplingParams
from maxmoe.inference.verification import verify_certain, verify_drawn

VOCAB, WIDTH = 13, 8
MARKERS = ThinkingMarkers((1, 2), (3, 3, 4))
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.8, frequency_penalty=0.5, min_tokens=9, stop_ids=(5,)),
    SamplingParams(thinking_token_budget=2, presence_penalty=1.0),
]
PROMPTS = [np.array(ids, np.int32) for ids in ([1, 2, 5], [7], [8, 8, 9], [6, 1, 2])]
TABLE = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 2  # logits after each token


def _start(params=PARAMS):
    stop_ids = [frozenset(p.stop_ids) for p in params]
    return jax.device_put(lay_out(params, PROMPTS, list(range(4)), stop_ids, VOCAB, MARKERS))


def _without_drafts(count):
    rows, progress = _start()
    tokens, answers = np.array([prompt[-1] for prompt in PROMPTS]), []
    for _ in range(count):
        chosen, progress = next_tokens(jnp.asarray(TABLE[tokens]), rows, progress)
        tokens = np.array(chosen.tokens)
        answers.append(jax.device_get(chosen))
    return [[int(step.tokens[row]) for step in answers] for row in range(4)], answers


def test_verify_certain_gives_the_tokens_of_no_draft():
    """Drafts of 0 to 8 tokens that hold in part, with penalties, bans and a budget with a marker of several ids."""
    expected, steps = _without_drafts(40)
    rows, progress = _start()
    answers, rng, lengths = [[] for _ in PROMPTS], np.random.default_rng(1), set()
    while min(map(len, answers)) < 30:
        draft = rng.integers(0, VOCAB, (4, WIDTH)).astype(np.int32)
        num_drafted = rng.integers(0, WIDTH + 1, 4)
        for row, answer in enumerate(answers):
            right = expected[row][len(answer) :][: int(rng.integers(0, WIDTH + 1))]
            draft[row, : len(right)] = right
        last = [[(answer or prompt.tolist())[-1]] for answer, prompt in zip(answers, PROMPTS, strict=True)]
        logits = TABLE[np.concatenate([last, draft], axis=1)]
        chosen, taken, progress = verify_certain(logits, draft, num_drafted, rows, progress)
        for row, answer in enumerate(answers):
            count = int(taken[row].sum())
            assert taken[row, :count].all() and 1 <= count <= num_drafted[row] + 1
            lengths.add(count)
            thought = [np.array(part)[row, count - 1] for part in chosen.thought.state]
            answer += chosen.tokens[row, :count].tolist()
            same = steps[len(answer) - 1].thought if len(answer) <= 40 else None
            assert same is None or thought == [part[row] for part in same.state]
            np.testing.assert_array_equal(progress.positions[row], PROMPTS[row].size + len(answer))
    assert all(answer[:30] == right[:30] for answer, right in zip(answers, expected, strict=True))
    assert {1, WIDTH + 1} <= lengths
    assert any(MARKERS.close_ids == tuple(expected[3][i : i + 3]) for i in range(30))


def test_verify_certain_stops_at_broken_logits():
    rows, progress = _start()
    logits = np.zeros((4, 3, VOCAB), np.float32)
    logits[:, :, 6] = 90.0
    logits[1, 1, 0] = np.nan
    draft = np.full((4, 2), 6, np.int32)
    chosen, taken, progress = verify_certain(logits, draft, np.full(4, 2), rows, progress)
    assert chosen.tokens[1, :2].tolist() == [6, -1] and taken.tolist()[:2] == [[True] * 3, [True, True, False]]
    assert progress.positions.tolist()[:2] == [6, 2]


SETTINGS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.5, top_k=4),
    SamplingParams(top_p=0.6),
]


CRITICAL = (0, 15.14, 18.42, 21.11, 23.51, 25.74)  # of chi-square at 1e-4, by degrees of freedom


def _deviates(chosen, probs):
    """Whether tokens are not drawn from probs, by Pearson's chi-square; wrong about those that are 1 time in 10,000."""
    expected = np.array(probs, np.float64) * chosen.size
    counts = np.bincount(chosen, minlength=expected.size)
    possible = expected > 0
    statistic = np.sum((counts - expected)[possible] ** 2 / expected[possible])
    return bool(counts[~possible].any() or statistic > CRITICAL[possible.sum() - 1] + 1e-6)


def _drawn(params, model, drafter, rows, num_drafted=1, seed=0, told=None):
    """Tokens of many rows, each with a draft from the drafter's own noise; `told` is what the drafter says it is."""
    width = drafter.shape[0]
    draft = jax.random.categorical(jax.random.key(seed), jnp.log(drafter), axis=-1, shape=(rows, width))
    logits = jnp.broadcast_to(model, (rows, *model.shape))
    logprobs = jnp.broadcast_to(jnp.log(drafter if told is None else told), (rows, *drafter.shape))
    settings, words = stack_settings([params] * rows), seed_words(range(rows))
    counts, positions = np.full(rows, num_drafted), np.zeros(rows, np.int32)
    tokens, taken = verify_drawn(logits, draft, logprobs, counts, settings, words, positions)
    return np.array(tokens), np.array(taken), np.array(draft)


@pytest.mark.parametrize("params", SETTINGS)
def test_verify_drawn_leaves_the_distribution(params):
    """Chi-square of the first and of the second token, the latter where the first was accepted.

    Six tests at a false-alarm rate of 1e-4 each, with seeds that are fixed: 0.06 % for all, once and not per run.
    """
    rng = np.random.default_rng(5)
    vocab, rows = 6, 8192
    model = rng.normal(size=(2, vocab)).astype(np.float32)
    drafter = rng.dirichlet(np.ones(vocab), size=1).astype(np.float32)
    tokens, taken, draft = _drawn(params, model, drafter, rows)
    scores = draw_scores(jnp.asarray(model), stack_settings([params] * 2))
    for place, chosen in enumerate((tokens[:, 0], tokens[taken[:, 1], 1])):
        assert not _deviates(chosen, jax.nn.softmax(scores[place])), (place, np.bincount(chosen))
    # A drafter that is not what it says changes the distribution, and that is seen.
    lied, _, _ = _drawn(params, model, drafter, rows, told=np.full((1, vocab), 1 / vocab, np.float32))
    assert _deviates(lied[:, 0], jax.nn.softmax(scores[0]))
    # Accepted as often as the theory says: the sum of min(p, q).
    rate = float(np.minimum(jax.nn.softmax(scores[0]), drafter[0]).sum())
    assert taken[:, 1].mean() == pytest.approx(rate, abs=4 * np.sqrt(rate * (1 - rate) / rows))
    assert np.array_equal(tokens[taken[:, 1], 0], draft[taken[:, 1], 0])


def test_verify_drawn_greedy_is_greedy():
    rng = np.random.default_rng(2)
    model = rng.normal(size=(4, VOCAB)).astype(np.float32)
    drafter = np.array(jax.nn.softmax(3 * model[:3]))
    tokens, taken, draft = _drawn(SamplingParams(temperature=0.0), model, drafter, 256, num_drafted=3)
    best = model.argmax(axis=-1)
    right = np.cumprod(draft == best[:3], axis=1).sum(axis=1)
    assert np.array_equal(taken.sum(axis=1), right + 1) and set(right) == {0, 1, 2, 3}
    assert all(np.array_equal(row[mask], best[mask]) for row, mask in zip(tokens, taken, strict=True))


def test_verify_drawn_of_the_models_own_draft_accepts_everything():
    model = np.random.default_rng(3).normal(size=(4, VOCAB)).astype(np.float32)
    drafter = np.array(jax.nn.softmax(model[:3]))
    _, taken, _ = _drawn(SamplingParams(), model, drafter, 512, num_drafted=3)
    assert taken.mean() > 0.999  # p and q are rounded apart by 1e-7


def test_verify_drawn_ignores_what_stands_beyond_the_draft():
    model = np.random.default_rng(4).normal(size=(3, VOCAB)).astype(np.float32)
    drafter = np.full((2, VOCAB), 1 / VOCAB, np.float32)
    tokens, taken, _ = _drawn(SamplingParams(), model, drafter, 64, num_drafted=0)
    other, _, _ = _drawn(SamplingParams(), model, drafter, 64, num_drafted=0, seed=9)
    assert taken.tolist() == [[True, False, False]] * 64 and np.array_equal(tokens[:, 0], other[:, 0])
