"""The n-gram drafter: what it proposes, by definition, and what a token costs."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from maxmoe.inference.drafting import NgramDrafter


def _by_definition(ids, min_match, max_match, count):
    for match in range(max_match, min_match - 1, -1):
        for end in range(len(ids) - 1, match - 1, -1):
            if match < len(ids) and ids[end - match : end] == ids[-match:]:
                following = ids[end:]
                return [following[i % len(following)] for i in range(count)]
    return []


def _continuations(ids, min_match, max_match, count):
    """Of every place where the last tokens stood before."""
    for match in range(max_match, min_match - 1, -1):
        for end in range(match, len(ids)):
            if ids[end - match : end] == ids[-match:]:
                yield [ids[end:][i % len(ids[end:])] for i in range(count)]


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    groups=st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=8),
    lengths=st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
    count=st.integers(0, 7),
)
def test_propose_tells_what_followed_somewhere(groups, lengths, count):
    drafter, ids = NgramDrafter(*lengths), []
    for group in groups:
        drafter.extend(group)
        ids += group
        proposed = drafter.propose(count).tolist()
        assert proposed == [] or proposed in _continuations(ids, *lengths, count)
        assert drafter.propose(count).tolist() == proposed


def test_propose_nearly_always_equals_the_definition():
    """The rest are places whose hashes collide; a table is at most full."""
    rng, right = np.random.default_rng(0), 0
    for _ in range(400):
        ids = rng.integers(0, 4, rng.integers(1, 200)).tolist()
        drafter = NgramDrafter(2, 4)
        drafter.extend(ids)
        right += drafter.propose(5).tolist() == _by_definition(ids, 2, 4, 5)
    assert right > 0.9 * 400


def test_tables_grow_with_the_sequence():
    ids = np.random.default_rng(0).integers(0, 163_840, 5000)
    drafter, one_by_one = NgramDrafter(), NgramDrafter()
    drafter.extend(ids)
    for token in ids.tolist():
        one_by_one.extend([token])
    for place in (10, 1000, 4000):
        for grown in (drafter, one_by_one):
            grown.extend(ids[place : place + 4])
            assert grown.propose(5).tolist() == ids[place + 4 : place + 9].tolist()
    assert sum(table.nbytes for table in drafter._tables.values()) <= 4 * 3 * 4 * 5012  # bytes a place, four a token


def test_extend_touches_one_entry_per_length():
    drafter = NgramDrafter(2, 4)
    drafter.extend(list(range(1000)) * 3)
    before = {match: table.copy() for match, table in drafter._tables.items()}
    drafter.extend([7])
    assert all((before[match] != table).sum() == 1 for match, table in drafter._tables.items())


def test_propose_goes_round_a_short_period():
    drafter = NgramDrafter()
    drafter.extend([9, 5, 6, 5, 6])
    assert drafter.propose(5).tolist() == [5, 6, 5, 6, 5]


@pytest.mark.parametrize("lengths", [(0, 2), (3, 2)])
def test_refuses_lengths(lengths):
    with pytest.raises(ValueError, match="1 <= min_match <= max_match"):
        NgramDrafter(*lengths)
