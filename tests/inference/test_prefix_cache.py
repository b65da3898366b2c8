"""The tree of prefixes on made-up caches: what goes in comes out in another slot, and what is found for which prompt.

What it does under an engine is tested with the serving loop.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.config import load_config
from maxmoe.inference.prefix_cache import PrefixCache
from maxmoe.model.cache import KDACache, MLACache, make_cache, to_plain

ROOT = Path(__file__).resolve().parents[2]
BLOCK, SLOTS, MAX_LEN = 8, 3, 20
PROMPT = np.arange(19, dtype=np.int32)


def _cache(wide=False):
    """Random state. Wide rows are laid out so that four lie together."""
    config = load_config(ROOT / "configs/tiny.py")
    if wide:
        config = dataclasses.replace(
            config, mla=dataclasses.replace(config.mla, kv_lora_rank=128, qk_shared_head_dim=64)
        )
    rng = np.random.default_rng(0)
    cache = make_cache(config, SLOTS, MAX_LEN, jnp.float32)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape).astype(leaf.dtype)), cache)


def _kept(cache, slot, num_tokens):
    """What one slot holds of so many tokens: KDA and conv state, rows and index keys."""
    entries = [entry for stack in to_plain(cache).stacks for entry in stack]
    state = [leaf[:, slot] for entry in entries if isinstance(entry, KDACache) for leaf in jax.tree.leaves(entry)]
    rest = [entry for entry in entries if not isinstance(entry, KDACache)]
    return state + [leaf[:, slot, :num_tokens] for leaf in jax.tree.leaves(rest)]


@pytest.mark.parametrize("wide", [False, True], ids=["plain rows", "grouped rows"])
def test_restore_puts_all_state_of_a_prefix_into_another_slot_and_nothing_elsewhere(wide):
    cache, prefixes = _cache(wide), PrefixCache(BLOCK, 2**30)
    grouped = [entry.rows.is_grouped for stack in cache.stacks for entry in stack if isinstance(entry, MLACache)]
    assert set(grouped) == {wide}
    for end in (8, 13):
        prefixes.insert("", PROMPT[:end], cache, 1)
    match = prefixes.match("", PROMPT)
    assert match.num_tokens == 13 and len(match.blocks) == 2
    before = [_kept(cache, slot, MAX_LEN) for slot in range(SLOTS)]
    wanted = _kept(cache, 1, 13)
    cache = prefixes.restore(match, cache, 2)
    assert int(cache.lengths[2]) == 13
    for got, want in zip(_kept(cache, 2, 13), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    for slot in (0, 1):
        for got, want in zip(_kept(cache, slot, MAX_LEN), before[slot], strict=True):
            np.testing.assert_array_equal(got, want)


def test_match_needs_state_after_the_last_token_and_leaves_one_token_to_compute():
    cache, prefixes = _cache(), PrefixCache(BLOCK, 2**30)
    assert prefixes.match("", PROMPT).num_tokens == 0
    prefixes.insert("", PROMPT[:8], cache, 0)
    prefixes.insert("", PROMPT[:16], cache, 0)
    other = np.where(np.arange(19) < 12, PROMPT, 99).astype(np.int32)
    cases = [(PROMPT, 16), (PROMPT[:17], 16), (PROMPT[:16], 8), (PROMPT[:9], 8), (PROMPT[:8], 0), (other, 8)]
    for prompt, num_tokens in cases:
        assert prefixes.match("", prompt).num_tokens == num_tokens
    assert prefixes.match("salt", PROMPT).num_tokens == 0
    prefixes.insert("", PROMPT[:11], cache, 0)  # a prompt that ended within a block
    assert prefixes.match("", other).num_tokens == 11
    assert prefixes.match("", PROMPT[:11]).num_tokens == 8
    stats = prefixes.stats
    assert stats.num_hit_tokens == 16 + 16 + 8 + 8 + 0 + 8 + 11 + 8
    assert stats.num_queried_tokens == 19 + 19 + 17 + 16 + 9 + 8 + 19 + 19 + 19 + 11
    assert stats.hit_rate == stats.num_hit_tokens / stats.num_queried_tokens


def test_state_goes_by_age_of_use_and_takes_the_rows_that_only_it_needed():
    cache, prefixes = _cache(), PrefixCache(BLOCK, 2**30)
    for end in (8, 16):
        prefixes.insert("", PROMPT[:end], cache, 0)
    prefixes.insert("salt", PROMPT[:8], cache, 0)
    whole = prefixes.stats.num_bytes
    assert prefixes.match("", PROMPT[:9]).num_tokens == 8  # used last
    prefixes.max_bytes = whole - 1
    prefixes.insert("salt", PROMPT[:8], cache, 0)
    assert prefixes.match("", PROMPT).num_tokens == 8  # the state at 16 went, and its rows
    assert prefixes.match("salt", PROMPT).num_tokens == 8
    prefixes.max_bytes = 0
    prefixes.insert("", PROMPT[:8], cache, 0)
    assert (prefixes.stats.num_bytes, prefixes.stats.num_states, prefixes.stats.num_evictions) == (0, 0, 3)
    assert prefixes._roots == {}


def test_insert_keeps_nothing_behind_a_gap_or_beyond_the_cache():
    cache, prefixes = _cache(), PrefixCache(BLOCK, 2**30)
    prefixes.insert("", PROMPT[:16], cache, 0)  # the block before it is not there
    prefixes.insert("", PROMPT[:8], cache, 0)
    prefixes.insert("", PROMPT[:16], cache, 0)
    prefixes.insert("", PROMPT[:18], cache, 0)  # its block would end at 24
    assert prefixes.stats.num_states == 2


def test_rows_come_back_for_a_state_that_was_read_anew_below_them():
    """The state at 8 and its rows are in the host's memory when the state at 16 is kept; then both are found."""
    cache, prefixes = _cache(), PrefixCache(BLOCK, 2**30, 2**30)
    prefixes.insert("", PROMPT[:8], cache, 1)
    prefixes.max_bytes = 0
    prefixes._shrink()
    assert prefixes.stats.num_states == 0 and prefixes.stats.num_host_states == 1
    prefixes.max_bytes = 2**30
    prefixes.insert("", PROMPT[:16], cache, 1)
    for prompt, num_tokens, num_returns in ((PROMPT, 16, 0), (PROMPT[:9], 8, 1)):
        match = prefixes.match("", prompt)
        assert match.num_tokens == num_tokens and prefixes.stats.num_returns == num_returns
        restored = prefixes.restore(match, _cache(), 2)
        for got, want in zip(_kept(restored, 2, num_tokens), _kept(cache, 1, num_tokens), strict=True):
            np.testing.assert_array_equal(got, want)
    assert prefixes.stats.num_host_bytes == 0
