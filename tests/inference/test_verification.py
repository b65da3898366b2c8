"""Verification: drafts change no token of an answer, and state is that of the tokens that stand."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from maxmoe.config import load_config
from maxmoe.inference import steps
from maxmoe.inference.budget import ThinkingMarkers
from maxmoe.inference.next_token import lay_out, next_tokens
from maxmoe.inference.sampling_params import SamplingParams
from maxmoe.inference.verification import _verify, judge, verify_in_place
from maxmoe.model.transformer import Transformer
from maxmoe.params import abstract_params
from tests.inference.random_weights import random_weights

ROOT = Path(__file__).resolve().parents[2]
VOCAB, WIDTH = 13, 8
EVERY = np.ones(4, bool)
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


def test_judge_gives_the_tokens_of_no_draft():
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
        (chosen, num_taken), progress = judge(logits, draft, num_drafted, rows, progress, EVERY)
        for row, answer in enumerate(answers):
            count = int(num_taken[row])
            assert 1 <= count <= num_drafted[row] + 1
            lengths.add(count)
            thought = [np.array(part)[row, count - 1] for part in chosen.thought.state]
            answer += chosen.tokens[row, :count].tolist()
            same = steps[len(answer) - 1].thought if len(answer) <= 40 else None
            assert same is None or thought == [part[row] for part in same.state]
            np.testing.assert_array_equal(progress.positions[row], PROMPTS[row].size + len(answer))
    assert all(answer[:30] == right[:30] for answer, right in zip(answers, expected, strict=True))
    assert {1, WIDTH + 1} <= lengths
    assert any(MARKERS.close_ids == tuple(expected[3][i : i + 3]) for i in range(30))


def test_judge_stops_at_broken_logits():
    rows, progress = _start()
    logits = np.zeros((4, 3, VOCAB), np.float32)
    logits[:, :, 6] = 90.0
    logits[1, 1, 0] = np.nan
    draft = np.full((4, 2), 6, np.int32)
    (chosen, num_taken), progress = judge(logits, draft, np.full(4, 2), rows, progress, EVERY)
    assert chosen.tokens[1, :2].tolist() == [6, -1] and num_taken.tolist()[:2] == [3, 2]
    assert progress.positions.tolist()[:2] == [6, 2]


def _model(implementation=None):
    """A KDA layer, and a full-attention layer with indexer and experts."""
    config = load_config(ROOT / "configs/tiny.py")
    config = dataclasses.replace(config, num_layers=2, full_attention_layers=(1,))
    return Transformer(config, implementation=implementation)


def _greedy(num_rows, positions, vocab_size):
    params = [SamplingParams(temperature=0.0)] * num_rows
    prompts = [np.zeros(position, np.int32) for position in positions]
    return jax.device_put(lay_out(params, prompts, [0] * num_rows, [frozenset()] * num_rows, vocab_size))


def test_a_window_leaves_the_state_of_the_tokens_that_stand():
    """Rows that take 1, 3 and all 5 tokens of a window, and one that takes no part, beside decoding one by one."""
    model = _model()
    params = random_weights(model, jnp.float32)
    size = model.config.vocab_size
    prompts = np.random.default_rng(0).integers(0, 256, (4, 20)).astype(np.int32)
    logits, cache = steps.prefill(model, params, prompts, steps.init_cache(model, 4, 64))
    begun = jax.tree.map(jnp.copy, cache)
    tokens, caches = [np.argmax(logits, axis=-1)], [cache]
    for _ in range(5):
        logits, cache = steps.decode_step(model, params, jnp.asarray(tokens[-1], jnp.int32), cache)
        tokens.append(np.argmax(logits, axis=-1))
        caches.append(cache)
    window = np.stack(tokens[:5], axis=1).astype(np.int32)
    window[0, 1] = (window[0, 1] + 1) % size
    window[1, 3] = (window[1, 3] + 1) % size
    rows, progress = _greedy(4, [21] * 4, size)
    active, drafted = np.array([True, True, True, False]), np.array([4, 4, 4, 0])
    args = window, drafted, begun, rows, progress, active
    verdict, kept, progress = verify_in_place(model, params, *args)
    assert verdict.num_taken.tolist() == [1, 3, 5, 0] and kept.lengths.tolist() == [21, 23, 25, 20]
    assert progress.positions.tolist() == [22, 24, 26, 21]
    for row, count in enumerate([1, 3, 5, 0]):
        assert verdict.chosen.tokens[row, :count].tolist() == [column[row] for column in tokens[1 : count + 1]]
        (kda, mla), (kda_wanted, mla_wanted) = kept.stacks[0], caches[count].stacks[0]
        length = 20 + count
        pairs = [(kda.conv[:, row], kda_wanted.conv[:, row]), (kda.state[:, row], kda_wanted.state[:, row])]
        pairs += [(a[:, row, :length], b[:, row, :length]) for a, b in zip(mla.rows, mla_wanted.rows, strict=True)]
        pairs += [(mla.index_keys[:, row, :, :length], mla_wanted.index_keys[:, row, :, :length])]
        for got, wanted in pairs:  # float32 of size 10; sums of chunks are ordered otherwise than those of tokens
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 if count else 0)


def _sizes(jaxpr):
    """Of the outputs of every operation in a program, in values."""
    for equation in jaxpr.eqns:
        yield from (output.aval.size for output in equation.outvars if hasattr(output.aval, "size"))
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _sizes(inner)


def test_no_state_is_kept_for_each_token_of_a_window():
    """Nothing in the program is as large as a recurrent state for each of the 8 tokens of every row."""
    config = _model().config
    kda = dataclasses.replace(config.kda, head_dim=128)
    model = Transformer(dataclasses.replace(config, num_layers=1, full_attention_layers=(), kda=kda))
    params, num_rows = abstract_params(model), 4
    cache = jax.eval_shape(lambda: steps.init_cache(model, num_rows, 64))
    rows, progress = _greedy(num_rows, [1] * num_rows, config.vocab_size)
    ids = jax.ShapeDtypeStruct((num_rows, 8), jnp.int32)
    each, mask = jax.ShapeDtypeStruct((num_rows,), jnp.int32), jax.ShapeDtypeStruct((num_rows,), bool)
    args = params, ids, each, cache, rows, progress, mask
    program = jax.make_jaxpr(lambda *args: _verify.__wrapped__(model, *args))(*args)
    state = cache.stacks[0][0].state.size
    assert state in _sizes(program.jaxpr) and max(_sizes(program.jaxpr)) <= 2 * state
