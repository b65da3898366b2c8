"""Prompts that begin alike are read once: a tree of prefixes, with both kinds of state.

A prefix can be taken up where latent rows and index keys of all its tokens are kept, and KDA and conv state after its
last one. Rows are kept by blocks, each a node of the tree; state is kept at the end of blocks, and where a prompt ended
within one. Nodes are found by their tokens, not by a hash of them, below a root per salt: what one salt has brought in
is never found with another. Arrays are never written again, so that a match stays whole whatever is evicted after it.

State is what is evicted, the least recently used first: from the device to the host's memory, and from there for good.
Rows follow: to the host when no state at or below them is left on the device, away when none is left at all, for
without one they cannot be taken up.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from maxmoe.model.cache import Cache, KDACache, MLACache, constrain_cache


class Match(NamedTuple):
    """The longest prefix that can be taken up.

    Attributes:
      num_tokens: Its length; 0 where there is none.
      blocks: Rows of each block from the first token on.
      state: After the last token.
    """

    num_tokens: int
    blocks: tuple[tuple, ...] = ()
    state: tuple = ()


@dataclasses.dataclass
class PrefixStats:
    """What the cache did.

    Attributes:
      num_queried_tokens, num_hit_tokens: Of prompts that were looked up, and of those found.
      num_host_hit_tokens: Of those found, how many with a state from the host's memory.
      num_bytes: Held on the device now; num_states: snapshots of KDA and conv state among it.
      num_host_bytes, num_host_states: The same in the host's memory.
      num_evictions: Snapshots that have left the device, for the host or for good.
      num_returns: Snapshots that have come back from the host.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_host_hit_tokens: int = 0
    num_bytes: int = 0
    num_states: int = 0
    num_host_bytes: int = 0
    num_host_states: int = 0
    num_evictions: int = 0
    num_returns: int = 0

    @property
    def hit_rate(self) -> float:
        """Hit tokens per queried token; 0 before the first query."""
        return self.num_hit_tokens / max(self.num_queried_tokens, 1)


@dataclasses.dataclass(eq=False)
class _Node:
    """The tokens of one block, or of its beginning where a prompt ended there.

    Attributes:
      state: After the last of them; None where it is not kept.
      num_on_device: States on the device, here and below.
    """

    parent: "_Node | None"
    tokens: bytes
    rows: "tuple | _OnHost" = ()
    state: "tuple | _OnHost | None" = None
    children: dict[bytes, "_Node"] = dataclasses.field(default_factory=dict)
    num_on_device: int = 0

    def path(self) -> "Iterator[_Node]":
        """From here up to the child of the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class _OnHost:
    """Arrays in the host's memory, which `bring_back` lays where they were."""

    def __init__(self, arrays: tuple):
        self._shardings = jax.tree.map(lambda leaf: leaf.sharding, arrays)
        self._arrays = jax.device_get(arrays)
        self.num_bytes = _num_bytes(self._arrays)

    def bring_back(self) -> tuple:
        """The same arrays on the device."""

        def put(array, sharding):
            # Given its own device, an array would be tied to it, and meet no program that was compiled before.
            tied = not isinstance(sharding, jax.sharding.SingleDeviceSharding)
            return jax.device_put(array, sharding if tied else None)

        return jax.tree.map(put, self._arrays, self._shardings)


class PrefixCache:
    """Keeps the state of prefixes up to a number of bytes."""

    def __init__(self, block: int, max_bytes: int, max_host_bytes: int = 0):
        """Empty.

        Args:
          block: In tokens; prefills must stop at each multiple of it.
          max_bytes: On the device.
          max_host_bytes: In the host's memory, for what has to leave the device.
        """
        self.block, self.max_bytes, self.max_host_bytes = block, max_bytes, max_host_bytes
        self.stats = PrefixStats()
        self._roots: dict[str, _Node] = {}
        self._states: collections.OrderedDict[_Node, None] = collections.OrderedDict()  # least recently used first
        self._host_states: collections.OrderedDict[_Node, None] = collections.OrderedDict()  # likewise

    def match(self, salt: str, prompt: Int[np.ndarray, "T"]) -> Match:
        """Finds the longest prefix whose state is kept, short of the last token, whose logits must be computed."""
        self.stats.num_queried_tokens += prompt.size
        node, best, at, found = self._roots.get(salt), None, 0, 0
        while node is not None:
            if node.state is not None:
                best, found = node, at
            ids = prompt[at : min(at + self.block, prompt.size - 1)].tobytes()
            whole = len(ids) == self.block * prompt.itemsize
            ended = [key for key in node.children if ids.startswith(key) and not (whole and key == ids)]
            if ended:  # prompts that ended within this block
                key = max(ended, key=len)
                best, found = node.children[key], at + len(key) // prompt.itemsize
            node, at = node.children.get(ids) if whole else None, at + self.block
        if best is None:
            return Match(0)
        self.stats.num_hit_tokens += found
        if best in self._host_states:
            self.stats.num_host_hit_tokens += found
            self._bring_back(best)
        self._bring_back_rows(best)
        self._states.move_to_end(best)
        blocks = [node.rows for node in best.path()]
        match = Match(found, tuple(reversed(blocks)), best.state)
        self._shrink()
        return match

    def insert(self, salt: str, prefix: Int[np.ndarray, "T"], cache: Cache, slot: int) -> None:
        """Keeps the state of a slot that holds exactly `prefix`: at a multiple of the block, or at a prompt's end.

        Nothing is kept where an earlier block has been evicted, or the cache ends within the last block.
        """
        start = (prefix.size - 1) // self.block * self.block
        if cache.max_len is not None and start + self.block > cache.max_len:
            return
        node = root = self._roots.get(salt) or _Node(None, b"")
        for first in range(0, start, self.block):
            node = node.children.get(prefix[first : first + self.block].tobytes())
            if node is None:
                return
        key = prefix[start:].tobytes()
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = _Node(node, key, _read_rows(cache, slot, start, self.block))
            self.stats.num_bytes += _num_bytes(child.rows)
            self._roots[salt] = root
        if child not in self._states:
            self._let_go_of_host_state(child)
            child.state = _read_state(cache, slot)
            self.stats.num_bytes += _num_bytes(child.state)
            self.stats.num_states += 1
            for above in child.path():
                above.num_on_device += 1
        self._states[child] = None
        self._states.move_to_end(child)
        self._shrink()

    def restore(self, match: Match, cache: Cache, slot: int) -> Cache:
        """The batch with a matched prefix in one slot; `cache` is used up."""
        for number, rows in enumerate(match.blocks):
            cache = _write_rows(cache, rows, np.int32(slot), np.int32(number * self.block))
        return _write_state(cache, match.state, np.int32(slot), np.int32(match.num_tokens))

    def clear(self) -> None:
        """Lets everything go, and counts from zero."""
        while self._host_states:
            self._drop(next(iter(self._host_states)))
        while self._states:
            self._evict(self._states.popitem(last=False)[0], to_host=False)
        self.stats = PrefixStats()

    def _shrink(self) -> None:
        """Moves and drops what is beyond the limits."""
        while self.stats.num_bytes > self.max_bytes:
            self._evict(self._states.popitem(last=False)[0], to_host=self.max_host_bytes > 0)
        while self.stats.num_host_bytes > self.max_host_bytes:
            self._drop(next(iter(self._host_states)))

    def _evict(self, node: _Node, *, to_host: bool) -> None:
        """Takes a node's state off the device, and the rows that no state there needs any more."""
        self.stats.num_bytes -= _num_bytes(node.state)
        self.stats.num_states -= 1
        self.stats.num_evictions += 1
        node.state = _OnHost(node.state) if to_host else None
        if to_host:
            self._host_states[node] = None
            self.stats.num_host_states += 1
            self.stats.num_host_bytes += node.state.num_bytes
        for above in node.path():
            above.num_on_device -= 1
        self._prune(node)
        for above in node.path():
            if (
                above.num_on_device == 0
                and not isinstance(above.rows, _OnHost)
                and above.tokens in above.parent.children
            ):
                self.stats.num_bytes -= _num_bytes(above.rows)
                above.rows = _OnHost(above.rows)
                self.stats.num_host_bytes += above.rows.num_bytes

    def _bring_back(self, node: _Node) -> None:
        """Lays a state in the host's memory on the device again."""
        state = node.state.bring_back()
        self._let_go_of_host_state(node)
        node.state, self._states[node] = state, None
        self.stats.num_bytes += _num_bytes(state)
        self.stats.num_states += 1
        self.stats.num_returns += 1
        for above in node.path():
            above.num_on_device += 1

    def _bring_back_rows(self, node: _Node) -> None:
        """Lays the rows that a state goes with on the device again, where they have left it."""
        for above in node.path():
            if isinstance(above.rows, _OnHost):
                self.stats.num_host_bytes -= above.rows.num_bytes
                above.rows = above.rows.bring_back()
                self.stats.num_bytes += _num_bytes(above.rows)

    def _drop(self, node: _Node) -> None:
        """Lets a state in the host's memory go, and the rows that no state needs any more."""
        self._let_go_of_host_state(node)
        self._prune(node)

    def _let_go_of_host_state(self, node: _Node) -> None:
        if node in self._host_states:
            del self._host_states[node]
            self.stats.num_host_bytes -= node.state.num_bytes
            self.stats.num_host_states -= 1
            node.state = None

    def _prune(self, node: _Node) -> None:
        """Takes out nodes that lead to no state, from here up."""
        while node.parent is not None and not node.children and node.state is None:
            if isinstance(node.rows, _OnHost):
                self.stats.num_host_bytes -= node.rows.num_bytes
            else:
                self.stats.num_bytes -= _num_bytes(node.rows)
            del node.parent.children[node.tokens]
            node = node.parent
        if node.parent is None and not node.children:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not node}


def _num_bytes(arrays) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def _entries(cache: Cache, kind: type) -> tuple:
    return tuple(kept for stack in cache.stacks for kept in stack if isinstance(kept, kind))


def _with_entries(cache: Cache, new: tuple) -> Cache:
    """The cache with its entries of one kind replaced, in order."""
    kind, rest = type(new[0]), iter(new)
    stacks = tuple(tuple(next(rest) if isinstance(kept, kind) else kept for kept in stack) for stack in cache.stacks)
    return cache.replace(stacks=stacks)


def _places(entry: MLACache):
    """Of each array with a place per token: its axis of tokens, and how many tokens share a place of it."""
    rows = type(entry.rows)(*((2, entry.num_slots // part.shape[2]) for part in entry.rows))
    return entry.replace(rows=rows, index_keys=None if entry.index_keys is None else (3, 1))


def _map_places(function, entry: MLACache, *others: MLACache) -> MLACache:
    places = jax.tree.leaves(_places(entry), is_leaf=lambda leaf: type(leaf) is tuple)
    leaves = zip(*(jax.tree.leaves(each) for each in (entry, *others)), strict=True)
    new = [function(*arrays, *place) for arrays, place in zip(leaves, places, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(entry), new)


@functools.partial(jax.jit, static_argnums=3)
def _read_rows(cache, slot, start, block):
    def read(leaf, axis, group):
        leaf = jax.lax.dynamic_slice_in_dim(leaf, slot, 1, 1)
        return jax.lax.dynamic_slice_in_dim(leaf, start // group, block // group, axis)

    return tuple(_map_places(read, entry) for entry in _entries(cache, MLACache))


@functools.partial(jax.jit, donate_argnums=0)
def _write_rows(cache, rows, slot, start):
    def write(leaf, new, axis, group):
        begin = [0] * leaf.ndim
        begin[1], begin[axis] = slot, start // group
        return jax.lax.dynamic_update_slice(leaf, new, begin)

    old = _entries(cache, MLACache)
    new = tuple(_map_places(write, entry, given) for entry, given in zip(old, rows, strict=True))
    return constrain_cache(_with_entries(cache, new) if new else cache)


@jax.jit
def _read_state(cache, slot):
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, slot, 1, 1), _entries(cache, KDACache))


@functools.partial(jax.jit, donate_argnums=0)
def _write_state(cache, state, slot, length):
    def write(leaf, new):
        return jax.lax.dynamic_update_slice_in_dim(leaf, new, slot, 1)

    new = jax.tree.map(write, _entries(cache, KDACache), state)
    cache = _with_entries(cache, new) if new else cache
    return constrain_cache(cache.replace(lengths=jnp.asarray(cache.lengths).at[slot].set(length)))
