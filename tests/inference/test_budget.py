"""The thinking budget against a plain reference that looks at the whole stream each time."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from maxmoe.inference.budget import ThinkingMarkers, follow, forced_ids, start_thinking
from maxmoe.inference.sampling_params import SamplingParams

K3 = ThinkingMarkers((163587, 39964, 163589), (163588, 39964, 163589))
SMALL = ThinkingMarkers((1, 2), (3, 3, 4))  # a part of the closing marker can begin it again
LENGTH = 24


def _channels(markers, stream):
    """The side of each id of a stream: t(hinking), a(nswer), m(arker), or p(ending): a marker that has begun."""
    sides, thinking, start = [], False, 0
    for end in range(1, len(stream) + 1):
        sides.append("t" if thinking else "a")
        awaited = list(markers.close_ids if thinking else markers.open_ids)
        if end - len(awaited) >= start and stream[end - len(awaited) : end] == awaited:
            sides[end - len(awaited) :] = "m" * len(awaited)
            thinking, start = not thinking, end
    awaited = list(markers.close_ids if thinking else markers.open_ids)
    sizes = [n for n in range(1, len(awaited)) if len(stream) - n >= start and stream[-n:] == awaited[:n]]
    if sizes:
        sides[len(stream) - max(sizes) :] = "p" * max(sizes)
    return sides, thinking, max(sizes, default=0)


def _reference(markers, budget, prompt, wanted):
    """The stream that comes of what a model wants to say, and its sides; no thinking exceeds the budget."""
    stream, first = list(prompt), len(prompt)
    sides, thinking, _ = _channels(markers, stream)
    if thinking:
        first = max(i + 1 for i, side in enumerate(sides) if side == "m")
    limit = None if budget is None else max(budget, len(prompt) - first)
    for token in wanted:
        sides, thinking, pending = _channels(markers, stream)
        spent = sum(side in "tp" for side in sides[first:])
        must = thinking and budget is not None and spent >= budget
        stream.append(markers.close_ids[pending] if must else token)
    sides, _, _ = _channels(markers, stream)
    assert limit is None or sides[first:].count("t") <= limit
    return stream[len(prompt) :], sides[len(prompt) :]


@jax.jit
def _stream(budgets, state, wanted):
    def step(state, token):
        forced = forced_ids(budgets, state)
        token = jnp.where(forced >= 0, forced, token)
        state = follow(budgets, state, token)
        return state, (token, forced, *state.counts())

    return jax.lax.scan(step, state, wanted.T)[1]


def _run(markers, budgets, prompts, wanted):
    params = [SamplingParams(thinking_token_budget=budget) for budget in budgets]
    arrays = [np.array(prompt, np.int32) for prompt in prompts]
    start = start_thinking(markers, params, arrays, [None] * len(arrays))
    tokens, forced, thinking, answer = (np.array(array).T for array in _stream(*start, jnp.asarray(wanted)))
    return tokens, forced, thinking, answer


tokens = st.sampled_from([1, 2, 2, 3, 3, 3, 4, 5])


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    rows=st.lists(
        st.tuples(
            st.none() | st.integers(0, 6),
            st.lists(tokens, max_size=8),
            st.lists(tokens, min_size=LENGTH, max_size=LENGTH),
        ),
        min_size=4,
        max_size=4,
    )
)
def test_rows_equal_the_reference(rows):
    budgets, prompts, wanted = zip(*rows, strict=True)
    streams, _, thinking, answer = _run(SMALL, budgets, prompts, wanted)
    for row, (budget, prompt, wishes) in enumerate(rows):
        expected, sides = _reference(SMALL, budget, prompt, wishes)
        assert streams[row].tolist() == expected
        if not _channels(SMALL, prompt)[2]:  # a marker that the prompt has begun is counted when it breaks
            assert thinking[row, -1] == sides.count("t") and answer[row, -1] == sides.count("a")


def _k3(wanted, budget, prompt=K3.open_ids):
    """Ids of one row under the family's markers, counts at the end, and the forced ids."""
    padded, forced, thinking, answer = _run(K3, [budget], [prompt], [wanted])
    return padded[0].tolist(), (int(thinking[0, -1]), int(answer[0, -1])), forced[0].tolist()


OPEN, CLOSE = list(K3.open_ids), list(K3.close_ids)


def test_budget_zero_closes_at_once():
    assert _k3([7, 7, 7, 8, 9], 0)[:2] == ([*CLOSE, 8, 9], (0, 2))


def test_budget_one_thinks_one_token():
    assert _k3([7, 7, 7, 7, 8], 1)[:2] == ([7, *CLOSE, 8], (1, 1))


def test_thinking_that_ends_exactly_at_the_budget_is_left_alone():
    wanted = [7, 7, *CLOSE, 8]
    assert _k3(wanted, 2)[:2] == (wanted, (2, 1)) == _k3(wanted, None)[:2]
    assert _k3(wanted, 3) == (wanted, (2, 1), [-1, -1, -1, *CLOSE[1:], -1])


def test_marker_that_has_begun_is_completed_and_not_begun_again():
    # The second token of three is the marker's first: budget 2 is reached inside the marker.
    assert _k3([7, CLOSE[0], 7, 7, 8], 2)[:2] == ([7, *CLOSE, 8], (1, 1))
    assert _k3([7, CLOSE[0], CLOSE[1], 7, 8], 3)[:2] == ([7, *CLOSE, 8], (1, 1))


def test_broken_marker_counts_as_thinking():
    # Its first id came, and then something else: two tokens of thinking.
    assert _k3([CLOSE[0], 7, 7, 7, 7, 8], 3)[:2] == ([CLOSE[0], 7, 7, *CLOSE], (3, 0))


def test_thinking_that_is_opened_again_is_closed_at_once():
    wanted = [7, 7, 7, 7, 0, 0, 0, *OPEN, 7, 7, 7, 8]
    stream, counts, _ = _k3(wanted, 4)
    assert stream == [7, 7, 7, 7, *CLOSE, *OPEN, *CLOSE, 8] and counts == (4, 1)


def test_only_a_thinking_that_the_prompt_leaves_open_counts():
    prompt = [*OPEN, 7, 7, 7, *CLOSE, 9, *OPEN, 7]
    assert _k3([7, 7, 7, 7, 8], 2, prompt)[:2] == ([7, *CLOSE, 8], (1, 1))
    assert _k3([7, 7, 7, 7], 2, prompt[:9])[:2] == ([7, 7, 7, 7], (0, 4))


def test_prompt_may_end_inside_a_marker():
    assert _k3([OPEN[2], 7, 7, 7, 7], 1, [9, *OPEN[:2]])[:2] == ([OPEN[2], 7, *CLOSE], (1, 0))
    assert _k3([7, 7, 8], 1, [*OPEN, 7, CLOSE[0]])[:2] == ([*CLOSE[1:], 8], (0, 1))


def test_marker_that_the_limit_cuts_is_neither_thought_nor_answer():
    assert _k3([7, *CLOSE[:2]], None)[1] == (1, 0)
    assert _k3([7, *OPEN[:1]], None, [5])[1] == (0, 1)


def test_single_ids_are_markers_too():
    markers = ThinkingMarkers((6,), (7,))
    streams, _, thinking, answer = _run(markers, [2, 0], [[6], [5]], [[1, 1, 1, 1], [6, 1, 1, 1]])
    assert streams.tolist() == [[1, 1, 7, 1], [6, 7, 1, 1]]
    assert thinking[:, -1].tolist() == [2, 0] and answer[:, -1].tolist() == [1, 2]


def test_negative_token_changes_nothing():
    budgets, state = start_thinking(SMALL, [SamplingParams()], [np.array([1, 2, 3])], [None])
    after = follow(budgets, state, jnp.array([-1]))
    assert [array.tolist() for array in after] == [array.tolist() for array in state]


@pytest.mark.parametrize(
    ("open_ids", "close_ids", "says"),
    [
        ((), (1,), "open_ids"),
        ((1,), (-1,), "close_ids"),
        ((1, 2), (2, 3), "overlap"),
        ((1, 2, 3), (2,), "overlap"),
        ((4,), (4,), "overlap"),
    ],
)
def test_markers_refuse(open_ids, close_ids, says):
    with pytest.raises(ValueError, match=says):
        ThinkingMarkers(open_ids, close_ids)
