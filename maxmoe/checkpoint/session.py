"""A conversation's whole state, saved and loaded: it goes on as if it had never stopped, on another mesh too.

What a session holds is complete: latent rows, index keys, KDA and conv state, every token, the logits after the
last one, and the seed of the draws. Noise depends on seed and position alone, so the next token is the one that
an uninterrupted run would draw, and it is drawn once.

Rows beyond a conversation's length are no state and are not written. The manifest of the arrays comes last, in one
step, so that an interrupted save is no save: see `array_store`.
"""

import dataclasses
import functools
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from etils import epath
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from maxmoe import axes
from maxmoe.checkpoint.array_store import save_arrays
from maxmoe.checkpoint.safetensors_header import CheckpointError
from maxmoe.checkpoint.sources import OrbaxSource, SafetensorsSource
from maxmoe.checkpoint.stored_arrays import StoredArrays, Verify
from maxmoe.config import ModelConfig
from maxmoe.model.cache import Cache, MLACache, from_plain, make_cache, to_plain
from maxmoe.model.transformer import Transformer
from maxmoe.sharding import activation_spec

_FORMAT = "maxmoe session 1"
_GROWING = ("rows", "index_keys")  # arrays of the cache with one entry per token, on axis 2
_BLOCK = 256  # tokens; stored rows are filled up to a multiple of it, so that they divide into chunks well
_MAX_SEED = 2**63 - 1
_SHOWN = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """Conversations after their last token, ready for the next one; usually a single one.

    A cache is large, so continuing a session takes its memory: a session can be saved any number of times, and
    continued once. Fork it to continue it more often.

    Attributes:
      cache: State after `token_ids`.
      token_ids: Every token of each row, prompts and answers, in order.
      logits: After each row's last token, float32.
      seeds: Of each row's draws. The position of the next token is the number of tokens.
      sampling: Settings that the answers were drawn with, JSON; whoever continues may choose others.
      meta: JSON values of the caller, kept as they are.
    """

    cache: Cache
    token_ids: tuple[Int[np.ndarray, "T"], ...]
    logits: Float[Array, "B V"]
    seeds: tuple[int, ...]
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest row."""
        return max(ids.size for ids in self.token_ids)

    @property
    def cache_dtype(self) -> np.dtype | None:
        """Of what the cache keeps per token; None if a model has neither rows nor conv state."""
        return _kept_dtype(_named(self.cache))

    def check_usable(self) -> None:
        """Raises: ValueError if something has continued this session and taken its memory."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves((self.cache, self.logits))):
            raise ValueError(
                "this session has been continued already, which took the memory of its cache; fork it first to "
                "continue it more than once"
            )

    def fork(self, n: int, seeds: Sequence[int] | None = None) -> list["Session"]:
        """Makes n independent sessions that share nothing which is ever written; this one stays as it is.

        Each needs the memory of one more cache.

        Args:
          seeds: One per fork, 0..2**63-1; None draws them from the operating system.
        Raises: ValueError for n below 1, another number of seeds, more than one row, or a session that is used up.
        """
        if n < 1:
            raise ValueError(f"fork(n={n}): must be at least 1")
        if len(self.token_ids) != 1:
            raise ValueError(f"fork: this session has {len(self.token_ids)} rows; only one conversation can be forked")
        seeds = [secrets.randbelow(_MAX_SEED + 1) for _ in range(n)] if seeds is None else list(seeds)
        if len(seeds) != n or any(not 0 <= seed <= _MAX_SEED for seed in seeds):
            raise ValueError(f"fork: seeds={seeds}: give {n}, each in 0..2**63-1, or None for fresh ones")
        self.check_usable()
        return [
            dataclasses.replace(
                self,
                cache=jax.tree.map(jnp.copy, self.cache),
                token_ids=(self.token_ids[0].copy(),),
                seeds=(int(seed),),
                sampling=dict(self.sampling),
                meta=dict(self.meta),
            )
            for seed in seeds
        ]


def grow_cache(cache: Cache, max_len: int) -> Cache:
    """The same state with room for `max_len` tokens per row. The given cache where it has as much already."""
    if cache.max_len is None or cache.max_len >= max_len:
        return cache
    entries = [entry for stack in cache.stacks for entry in stack if isinstance(entry, MLACache)]
    plain = _map_growing(lambda leaf: _padded(leaf, max_len), _to_plain(cache))
    return _from_plain(plain, entries[0].rows.latent_dim)


# ---- Which model ----------------------------------------------------------------------------------------------------


def fingerprint(config: ModelConfig, weights_fingerprint: str | None = None) -> str:
    """Tells models apart: SHA-256 of every field of the configuration and of what stands for the weights."""
    text = json.dumps([dataclasses.asdict(config), weights_fingerprint], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint_weights(source: SafetensorsSource | OrbaxSource) -> str:
    """Tells the weights of checkpoints apart: XXH3 of every weight's name, shape, dtype, first and last row.

    The same for a published folder and what it was converted to. It notices other weights, such as after training;
    not every change of a single value. Reads about a thousandth of a large checkpoint.
    """
    digest = xxhash.xxh3_128()
    for (group, name), info in sorted(source.weights.items()):
        digest.update(f"{group}/{name} {info.shape} {info.dtype}".encode())
        for place in (0, -1):
            index = tuple(place % size for size in info.shape[:-1])
            digest.update(np.ascontiguousarray(source.read(group, name, index)).tobytes())
    return digest.hexdigest()


def _check_model(folder, meta, config, weights_fingerprint):
    if meta["fingerprint"] == fingerprint(config, weights_fingerprint):
        return
    saved, given = _flat(meta["config"]), _flat(json.loads(json.dumps(dataclasses.asdict(config))))
    differing = [
        f"{name}: {saved.get(name, 'absent')} in the session, {given.get(name, 'absent')} here"
        for name in sorted(saved.keys() | given.keys())
        if saved.get(name, "absent") != given.get(name, "absent")
    ]
    if not differing:
        wanted, kind = meta["weights_fingerprint"], "weights_fingerprint"
        raise ValueError(
            f"{folder} is a session of other weights: its {kind} is {wanted}, the given one {weights_fingerprint}. "
            "Load the weights that the session was made with"
        )
    shown = differing[:_SHOWN] + ([f"... and {len(differing) - _SHOWN} more"] if len(differing) > _SHOWN else [])
    raise ValueError(
        f"{folder} is a session of another model; load the model that it was made with. Its configuration differs:\n  "
        + "\n  ".join(shown)
    )


def _flat(value, name=""):
    if not isinstance(value, dict):
        return {name: value}
    parts = [_flat(part, f"{name}.{key}" if name else key) for key, part in value.items()]
    return {key: item for part in parts for key, item in part.items()}


# ---- Saving ---------------------------------------------------------------------------------------------------------


def save_session(
    folder: epath.PathLike, session: Session, model: Transformer, *, weights_fingerprint: str | None = None
) -> None:
    """Writes a session, whole or not at all; returns when it is written, and the session may be continued.

    What is written does not depend on the cache's capacity. Devices need room for a copy of the rows in use.

    Args:
      folder: A new folder, on a disk or in a bucket. Its manifest lies beside it: move both.
      weights_fingerprint: Whatever tells the weights apart, such as `fingerprint_weights` gives; then it must be
        given again to load.
    Raises:
      ValueError: A place that is taken, a session that is used up, or one of another model.
      TypeError: `meta` that is no JSON.
    """
    session.check_usable()
    wanted = _cache_shapes(model.config, session.cache)
    found = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), session.cache)
    lengths = np.asarray(session.cache.lengths)
    sizes = [ids.size for ids in session.token_ids]
    if found != wanted or session.logits.shape != (len(sizes), model.config.vocab_size):
        raise ValueError("save_session: the session's cache or logits do not have the shapes of this model's")
    if lengths.tolist() != sizes or min(sizes) < 1 or len(session.seeds) != len(sizes):
        raise ValueError(
            f"save_session: the cache holds {lengths.tolist()} tokens, token_ids {sizes}, and there are "
            f"{len(session.seeds)} seeds; all must agree, and no row may be empty"
        )
    kept = _to_plain(session.cache)
    arrays = _named(_map_growing(lambda leaf: _padded(leaf, _stored_len(session.num_tokens)), kept))
    arrays |= {"token_ids": np.concatenate(session.token_ids).astype(np.int32), "logits": session.logits}
    meta = {
        "format": _FORMAT,
        "config": dataclasses.asdict(model.config),
        "weights_fingerprint": weights_fingerprint,
        "fingerprint": fingerprint(model.config, weights_fingerprint),
        "lengths": sizes,
        "max_len": session.cache.max_len,
        "seeds": [int(seed) for seed in session.seeds],
        "sampling": dict(session.sampling),
        "meta": dict(session.meta),
    }
    json.dumps(meta)  # what is no JSON shows before anything is written
    save_arrays(folder, arrays, meta)


def _cache_shapes(config, cache):
    """The shapes of a cache with the rows, capacity and dtype of a given one, in a given model."""
    dtype = _kept_dtype(_named(cache))
    return jax.eval_shape(functools.partial(make_cache, config, cache.batch_size, cache.max_len or 1, dtype))


def _stored_len(num_tokens):
    return num_tokens if num_tokens <= _BLOCK else -(-num_tokens // _BLOCK) * _BLOCK


def _named(cache) -> dict[str, Any]:
    """The arrays of a cache by name: lengths, stacks/0/1/conv, and so on."""
    leaves = jax.tree_util.tree_leaves_with_path(cache)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _kind(name):
    return name.rpartition("/")[2]


_to_plain = jax.jit(to_plain)
_from_plain = jax.jit(from_plain, static_argnums=1)


def _map_growing(function, cache):
    def each(path, leaf):
        return function(leaf) if _kind(jax.tree_util.keystr(path, simple=True, separator="/")) in _GROWING else leaf

    return jax.tree_util.tree_map_with_path(each, cache)


@functools.partial(jax.jit, static_argnums=1)
def _padded(leaf: Float[Array, "L B S D"], size: int) -> Float[Array, "L B N D"]:
    """Cuts the axis of tokens, or fills it up with zeros."""
    leaf = leaf[:, :, :size]
    return jnp.pad(leaf, ((0, 0), (0, 0), (0, size - leaf.shape[2]), (0, 0)))


# ---- Loading --------------------------------------------------------------------------------------------------------


def load_session(
    folder: epath.PathLike,
    model: Transformer,
    *,
    max_len: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    verify: Verify = "full",
    weights_fingerprint: str | None = None,
) -> Session:
    """Loads what `save_session` wrote, with the same bits.

    Args:
      max_len: Tokens per row that the cache has room for; None for as many as it had.
      mesh: Where the state goes: heads of KDA states over the axis 'tensor', tokens over 'seq', where they divide;
        a process reads the parts of its own devices. None for the first device.
      verify: Check every stored chunk, one in sixteen, or none.
      weights_fingerprint: The one that was given to `save_session`.
    Raises:
      ValueError: A session of another model, with the fields that differ, or of other weights; a max_len that is
        too small.
      CheckpointError: Not a session, an interrupted save, a missing array, or damage, with the array's name.
    """
    stored = StoredArrays(folder, verify)
    meta = stored.meta
    if meta.get("format") != _FORMAT:
        raise CheckpointError(f"{folder} is not a session: format {meta.get('format')!r}, wanted is {_FORMAT!r}")
    _check_model(folder, meta, model.config, weights_fingerprint)
    sizes = meta["lengths"]
    max_len = meta["max_len"] if max_len is None else max_len
    if max_len is not None and max_len < max(sizes):
        raise ValueError(
            f"load_session: max_len={max_len}, and the session holds {max(sizes)} tokens; give at least that"
        )
    shapes = _wanted_shapes(stored, model.config, len(sizes), max_len or max(sizes))
    _check_arrays(folder, stored, shapes, sizes)
    leaves = [_read(stored, name, leaf, mesh) for name, leaf in _named(shapes).items()]
    plain = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    cache = _from_plain(plain, model.config.mla.kv_lora_rank)
    if np.asarray(cache.lengths).tolist() != sizes:
        raise CheckpointError(f"{folder}: the cache holds {cache.lengths} tokens and the manifest says {sizes}")
    logits = jax.ShapeDtypeStruct((len(sizes), model.config.vocab_size), jnp.float32)
    return Session(
        cache=cache,
        token_ids=tuple(np.split(stored.read("token_ids"), np.cumsum(sizes)[:-1])),
        logits=_read(stored, "logits", logits, mesh),
        seeds=tuple(meta["seeds"]),
        sampling=meta["sampling"],
        meta=meta["meta"],
    )


def _wanted_shapes(stored, config, batch, max_len) -> Cache:
    """Shapes of the cache that is loaded."""
    dtype = _kept_dtype(stored.arrays)
    return jax.eval_shape(lambda: to_plain(make_cache(config, batch, max_len, dtype)))


def _kept_dtype(arrays) -> np.dtype | None:
    return next((np.dtype(a.dtype) for name, a in arrays.items() if _kind(name) in (*_GROWING, "conv")), None)


def _check_arrays(folder, stored, shapes, sizes):
    """Every array of the model must be there, whole, and no other."""
    vocab_shape = (len(sizes), stored.meta["config"]["vocab_size"])
    wanted = {"token_ids": ((sum(sizes),), np.dtype(np.int32)), "logits": (vocab_shape, np.dtype(np.float32))}
    for name, leaf in _named(shapes).items():
        shape = leaf.shape
        if _kind(name) in _GROWING:
            shape = (*shape[:2], _stored_len(max(sizes)), *shape[3:])
        wanted[name] = (shape, np.dtype(leaf.dtype))
    problems = [f"{name} is missing" for name in wanted.keys() - stored.arrays.keys()]
    problems += [f"{name} belongs to no layer" for name in stored.arrays.keys() - wanted.keys()]
    for name in wanted.keys() & stored.arrays.keys():
        info = stored.arrays[name]
        if (info.shape, info.dtype) != wanted[name]:
            shape, dtype = wanted[name]
            problems.append(f"{name} is {info.dtype} {list(info.shape)}; wanted is {dtype} {list(shape)}")
    if problems:
        problems.sort()
        raise CheckpointError(
            f"{folder} is not a whole session; restore it from a copy:\n  " + "\n  ".join(problems[:_SHOWN]),
            tuple(problems),
        )


def _read(stored, name, leaf, mesh) -> jax.Array:
    """Places an array on its devices, zeros where rows are not in use; each device's part is read alone, once."""
    sizes = stored.arrays[name].shape
    parts: dict[tuple, np.ndarray] = {}

    def part(index):
        box = [slice(*axis.indices(size)[:2]) for axis, size in zip(index, leaf.shape, strict=True)]
        key = tuple((axis.start, axis.stop) for axis in box)
        if key not in parts:
            parts[key] = np.zeros([stop - start for start, stop in key], leaf.dtype)
            kept = tuple(
                slice(min(start, size), min(stop, size)) for (start, stop), size in zip(key, sizes, strict=True)
            )
            parts[key][tuple(slice(0, axis.stop - axis.start) for axis in kept)] = stored.read(name, kept)
        return parts[key]

    if mesh is None:  # not committed to a device, like the arrays that the steps of inference make
        return jnp.asarray(part(tuple(slice(None) for _ in leaf.shape)))
    return jax.make_array_from_callback(leaf.shape, _sharding(name, leaf.shape, mesh), part)


def _sharding(name, shape, mesh):
    names = {
        "conv": (None, axes.BATCH, None, None, axes.HEADS, None),
        "state": (None, axes.BATCH, axes.HEADS, None, None),
        "rows": (None, axes.BATCH, axes.SLOTS, None),
        "index_keys": (None, axes.BATCH, axes.SLOTS, None),
    }.get(_kind(name), (None,) * len(shape))
    return NamedSharding(mesh, activation_spec(mesh, names, shape))
