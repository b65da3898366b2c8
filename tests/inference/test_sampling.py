"""Sampling: what is kept, what is drawn, which log-probability is told, and that rows do not meet."""

import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from maxmoe.inference import sampling
from maxmoe.inference.sampling import draw, row_keys, seed_words, stack_settings, token_logprobs
from maxmoe.inference.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
FULL_VOCAB = 163_840


def _sample(logits, params, seeds=None, positions=None):
    """Samples a batch; row b has seed b at position 0 where nothing else is said. Tokens and logprobs as lists."""
    logits = jnp.asarray(logits, jnp.float32)
    rows = logits.shape[0]
    params = [params] * rows if isinstance(params, SamplingParams) else params
    words = seed_words(range(rows) if seeds is None else seeds)
    keys = row_keys(words, np.zeros(rows, np.int32) if positions is None else np.asarray(positions, np.int32))
    settings = stack_settings(params)
    tokens = draw(logits, settings, keys)
    logprobs = token_logprobs(logits, settings, tokens)
    assert tokens.dtype == jnp.int32 and logprobs.dtype == jnp.float32
    return tokens.tolist(), logprobs.tolist()


def _kept(logits, params):
    """The ids that the filters keep, by sampling's own function."""
    scaled = jnp.asarray(logits, jnp.float32) / np.float32(params.temperature)
    settings = stack_settings([params])
    return set(np.flatnonzero(sampling._kept((scaled - scaled.max())[None], settings)[0]).tolist())


def _kept_by_definition(logits, params):
    """The same by the definition, in float64, one filter after the other; and the nearest call of top_p."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = {i: math.exp((logits[i] - max(logits)) / params.temperature) for i in order}
    kept = order[: params.top_k] if params.top_k else order
    total, before, by_mass, margin = sum(weight[i] for i in kept), 0.0, [], 1.0
    for i in kept:
        margin = min(margin, abs(before / total - params.top_p)) if params.top_p < 1 else margin
        if params.top_p == 1 or not by_mass or before / total < params.top_p:
            by_mass.append(i)
        before += weight[i]
    margin = min([margin, *(abs(weight[i] - params.min_p) for i in by_mass if params.min_p > 0)])
    return {i for i in by_mass if weight[i] >= params.min_p or i == by_mass[0]}, margin


def test_sample_logprob_is_of_the_distribution_at_temperature():
    _, logprobs = _sample(np.tile([2.0, 0.0], (8, 1)), SamplingParams(temperature=0.5))
    tokens, _ = _sample(np.tile([2.0, 0.0], (8, 1)), SamplingParams(temperature=0.5))
    # log(1 + e^-4) and 4 more; float32 resolves 5e-7 at 4.
    expected = [(-0.01814996, -4.01814996)[token] for token in tokens]
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=5e-7)
    assert 0 in tokens


def test_sample_greedy_logprob_is_at_temperature_one():
    tokens, (logprob,) = _sample([[2.0, 0.0]], GREEDY)
    assert tokens == [0] and logprob == pytest.approx(-0.12692805, abs=1e-7)  # log(1 + e^-2), one float32 step


def test_sample_logprob_ignores_the_filters():
    params = SamplingParams(temperature=0.5, top_k=1)
    assert _sample([[2.0, 0.0]], params)[1][0] == pytest.approx(-0.01814996, abs=1e-7)


def test_filters_see_probabilities_at_temperature():
    logits = np.log([0.5, 0.3, 0.2])
    assert _kept(logits, SamplingParams(temperature=0.5, top_p=0.6)) == {0}
    assert _kept(logits, SamplingParams(temperature=1.0, top_p=0.6)) == {0, 1}


def test_top_p_counts_the_mass_that_top_k_leaves():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    # Of 0.7 the first has 0.57: enough for 0.5, which of 1 it would not be.
    assert _kept(logits, SamplingParams(top_k=2, top_p=0.5)) == {0}
    assert _kept(logits, SamplingParams(top_p=0.5)) == {0, 1}


def test_min_p_is_relative_to_the_likeliest():
    logits = np.log([0.5, 0.3, 0.2])
    assert _kept(logits, SamplingParams(min_p=0.5)) == {0, 1}
    assert _kept(logits, SamplingParams(min_p=1.0)) == {0}


def test_filters_keep_the_lower_ids_of_a_tie():
    assert _kept([1.0, 2.0, 2.0, 2.0], SamplingParams(top_k=2)) == {1, 2}
    assert _kept([0.0, 0.0, 0.0, 0.0], SamplingParams(top_p=0.5)) == {0, 1}
    assert _kept([1.0, 2.0, 2.0, 2.0], SamplingParams(min_p=1.0)) == {1, 2, 3}


@hypothesis.settings(max_examples=150)
@hypothesis.given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=7, max_size=7),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 9),
    min_p=st.floats(0.0, 1.0),
)
def test_kept_equals_the_definition(logits, temperature, top_p, top_k, min_p):
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    expected, margin = _kept_by_definition(logits, params)
    hypothesis.assume(margin > 1e-5)  # closer calls than float32 sums of seven terms can decide
    assert _kept(logits, params) == expected


def test_draw_draws_only_what_is_kept_and_all_of_it():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    tokens, _ = _sample(np.tile(logits, (256, 1)), SamplingParams(top_p=0.85))
    assert set(tokens) == {0, 1, 2}  # the rarest is missed by 256 draws with probability 1e-28


def test_draw_draws_in_proportion():
    probs = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    num_draws, temperature = 8192, 2.0
    logits = np.tile(temperature * np.log(probs), (num_draws, 1))
    tokens, _ = _sample(logits, SamplingParams(temperature=temperature))
    counts = np.bincount(tokens, minlength=5)
    sigma = np.sqrt(num_draws * probs * (1 - probs))
    assert np.all(np.abs(counts - num_draws * probs) < 4 * sigma), counts  # fixed seeds: this cannot flicker


def test_draw_a_row_does_not_depend_on_its_batch():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 33))
    params = [
        GREEDY,
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.5, top_p=0.7),
        SamplingParams(top_k=5),
        SamplingParams(min_p=0.2),
    ]
    seeds, positions = [9, 2**40, 9, 2**63 - 1, 0], [0, 5, 77, 1, 2]
    together = _sample(logits, params, seeds, positions)
    for row in range(5):
        alone = _sample(logits[row : row + 1], params[row], seeds[row : row + 1], positions[row : row + 1])
        assert alone[0][0] == together[0][row]
        assert alone[1][0] == pytest.approx(together[1][row], abs=1e-6)  # a sum of 33 terms may be reordered


def test_filters_that_keep_all_draw_the_same_token_as_none():
    logits = np.random.default_rng(1).normal(size=(64, 33))
    plain = _sample(logits, SamplingParams())[0]
    assert _sample(logits, SamplingParams(top_k=33))[0] == plain
    assert _sample(logits, SamplingParams(min_p=1e-30))[0] == plain


def test_draw_depends_on_seed_and_position():
    logits = np.zeros((1, 4096))
    params = SamplingParams()
    first = _sample(logits, params, [5], [3])
    assert _sample(logits, params, [5], [3]) == first
    # All 63 bits of a seed count.
    others = [([6], [3]), ([5], [4]), ([5 + 2**32], [3]), ([5 + 2**62], [3])]
    assert len({first[0][0], *(_sample(logits, params, *other)[0][0] for other in others)}) == 5


def test_draw_greedy_takes_the_lowest_id_of_a_tie():
    assert _sample([[0.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0]], GREEDY)[0] == [1, 0]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5, top_k=3, min_p=0.1)])
def test_draw_marks_rows_without_a_distribution(params):
    nan, inf = np.nan, np.inf
    logits = [[nan, 1, 2], [1, 2, nan], [-inf, -inf, -inf], [inf, nan, 0], [0, 9e9, -inf]]
    tokens, logprobs = _sample(logits, params)
    assert tokens == [-1, -1, -1, -1, 1]
    assert [math.isnan(logprob) for logprob in logprobs] == [True] * 4 + [False] and logprobs[4] == 0


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.99)])
def test_draw_plus_infinity_is_certain(params):
    tokens, logprobs = _sample([[0, np.inf, 5], [np.inf, 0, np.inf]] * 16, params)
    assert set(tokens[::2]) == {1} and logprobs[0] == 0
    assert set(tokens[1::2]) == ({0} if params == GREEDY else {0, 2})
    assert logprobs[1] == pytest.approx(-math.log(2), abs=1e-7)  # one float32 step


@pytest.mark.parametrize("temperature", [1e-3, 1e-38, 1e-45])
def test_draw_at_tiny_temperature_is_greedy_and_finite(temperature):
    tokens, logprobs = _sample([[1.0, 1.5, -700.0]] * 8, SamplingParams(temperature=temperature))
    assert tokens == [1] * 8 and all(math.isfinite(logprob) for logprob in logprobs)


def test_draw_large_logits_do_not_overflow():
    tokens, logprobs = _sample([[3e38, -3e38]], SamplingParams(temperature=0.01))
    assert tokens == [0] and logprobs == [0.0]


def _primitives(jaxpr, inside_cond=False):
    """(name, whether a condition guards it) of every operation in a program."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, inside_cond
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _primitives(inner, inside_cond or equation.primitive.name == "cond")


def test_draw_sorts_once_and_only_under_a_condition():
    settings = stack_settings([GREEDY] * 2)
    keys = row_keys(seed_words([1, 2]), np.zeros(2, np.int32))
    program = jax.make_jaxpr(draw)(jnp.zeros((2, FULL_VOCAB)), settings, keys)
    operations = list(_primitives(program.jaxpr))
    assert [guarded for name, guarded in operations if name == "sort"] == [True]
    assert all(guarded for name, guarded in operations if name.startswith("random_bits"))


def test_draw_full_vocabulary():
    logits = np.random.default_rng(0).normal(size=(1, FULL_VOCAB))
    greedy = int(np.argmax(logits.astype(np.float32)))
    assert _sample(logits, SamplingParams(top_k=1))[0] == [greedy]
    nucleus = set(np.argsort(-logits[0])[: FULL_VOCAB // 2].tolist())  # 0.84 of the mass, for normal logits
    assert set(_sample(logits, SamplingParams(top_p=0.5))[0]) <= nucleus
