"""The compiled steps of inference: whole sequences, a chunk of prompt, one token.

Each runs on the mesh that the weights lie on, and is compiled once per model, mesh and shape. `decode_step` leaves
its argument usable, so that a cache can be kept and continued twice; `decode_step_in_place` gives the cache's memory
to the result. Ids that lie on the host are checked against the vocabulary.
"""

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from maxmoe.model.cache import Cache, cache_shardings, clear_row, make_cache
from maxmoe.model.transformer import Transformer
from maxmoe.step_jit import StepJit


def init_cache(
    model: Transformer,
    batch: int,
    max_len: int,
    dtype: jnp.dtype = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
) -> Cache:
    """An empty cache for `batch` sequences of at most `max_len` tokens, prompt and answer together.

    Args:
      mesh: Where it is to lie, as `cache_shardings` says; None for one device.
      dtype: Of what is kept per token. float32 holds the rows of any model exactly; bfloat16 halves them, and
        is exact for a model whose weights were loaded in bfloat16.
    """
    make = functools.partial(make_cache, model.config, batch, max_len, jnp.dtype(dtype))
    if mesh is None:
        return make()
    return jax.jit(make, out_shardings=cache_shardings(mesh, jax.eval_shape(make)))()


def forward(model: Transformer, params: dict, ids: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Float32 logits after every token of whole sequences, without a cache."""
    ids = _check_ids(model, ids, 2, "ids")
    num_tokens = ids.shape[1]
    with on_mesh_of(params) as mesh:
        # Padding stands behind the real tokens, so that none of them sees it.
        ids = jnp.pad(ids, ((0, 0), (0, -num_tokens % mesh.shape.get("seq", 1))))
        return _forward(model, params, ids)[:, :num_tokens]


def prefill(
    model: Transformer,
    params: dict,
    ids: Int[Array, "B T"],
    cache: Cache,
    lengths: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Appends tokens to every row of a cache.

    Args:
      ids: A chunk per row, padded at the end where rows are unequal; what the padding holds does not matter.
      lengths: Real tokens of each row's chunk, 0..T; T for all where None. A row of length 0 is left as it
        is, and its logits mean nothing.
    Returns: Logits after each row's last real token, and the new cache. `cache` itself stays valid.
    Raises: ValueError if a row would outgrow the cache, before anything is computed.
    """
    if np.ndim(ids) != 2:
        raise ValueError(f"ids must be integers of rank 2; got shape {np.shape(ids)}")
    batch, num_tokens = np.shape(ids)
    lengths = np.full(batch, num_tokens, np.int32) if lengths is None else np.asarray(lengths, np.int32)
    if batch != cache.batch_size or lengths.shape != (batch,):
        raise ValueError(
            f"prefill: ids has {batch} rows, lengths {lengths.shape}, the cache {cache.batch_size}; they must agree"
        )
    if num_tokens == 0 or lengths.min() < 0 or lengths.max() > num_tokens:
        raise ValueError(f"prefill: lengths={lengths.tolist()} must lie in 0..{num_tokens}, the width of ids, >= 1")
    ids = _check_ids(model, ids, 2, "ids", lengths)
    used = np.asarray(cache.lengths)
    if cache.max_len is not None and (used + lengths).max() > cache.max_len:
        raise ValueError(
            f"prefill: rows hold {used.tolist()} tokens and {lengths.tolist()} more do not fit into "
            f"max_len={cache.max_len}; make the cache larger or the prompt shorter"
        )
    with on_mesh_of(params) as mesh:
        ids = jnp.pad(ids, ((0, 0), (0, -num_tokens % mesh.shape.get("seq", 1))))
        return _prefill(model, params, ids, cache, jnp.asarray(lengths))


def decode_step(
    model: Transformer, params: dict, token: Int[Array, "B"], cache: Cache
) -> tuple[Float[Array, "B V"], Cache]:
    """Appends one token to every row. Returns logits after it, and the new cache; `cache` stays valid.

    A row whose cache was already full gets NaN logits, for its token could not be kept.
    """
    with on_mesh_of(params):
        return _decode(model, params, _check_ids(model, token, 1, "token"), cache)


@contextlib.contextmanager
def on_mesh_of(params: dict) -> Iterator[jax.sharding.Mesh | jax.sharding.AbstractMesh]:
    """Sets the mesh that weights lie on, for what is traced inside; under a caller's jit, the caller's mesh stays."""
    leaf = params["embedding"]
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1:
        with jax.set_mesh(sharding.mesh):
            yield sharding.mesh
    else:
        yield jax.sharding.get_abstract_mesh()


def _check_ids(model, ids, rank, name, lengths=None):
    """Device arrays are taken on trust, for looking at them would make the host wait."""
    on_device = isinstance(ids, jax.Array)
    ids = ids if on_device else np.asarray(ids)
    if ids.ndim != rank or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers of rank {rank}; got {ids.dtype} of shape {ids.shape}")
    if not on_device:
        if lengths is not None:  # padding may hold anything
            ids = np.where(np.arange(ids.shape[1]) < np.reshape(lengths, (-1, 1)), ids, 0)
        vocab_size = model.config.vocab_size
        if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
            raise ValueError(f"{name} holds {ids.min()}..{ids.max()}; token ids run from 0 to {vocab_size - 1}")
    return jnp.asarray(ids, jnp.int32)


@functools.partial(StepJit, static_argnums=0)
def _forward(model, params, ids):
    return model.apply({"params": params}, ids)


@functools.partial(StepJit, static_argnums=0)
def _prefill(model, params, ids, cache, lengths):
    return model.apply({"params": params}, ids, cache, lengths, method="prefill")


def _decode_body(model, params, token, cache, active=None):
    return model.apply({"params": params}, token, cache, active, method="decode")


def _prefill_row(model, params, ids, cache, length, row):
    return model.apply({"params": params}, ids, cache, length, row, method="prefill_row")


_decode = functools.partial(StepJit, static_argnums=0)(_decode_body)
_decode_donating = functools.partial(StepJit, static_argnums=0, donate_argnums=3)(_decode_body)
_prefill_row_donating = functools.partial(StepJit, static_argnums=0, donate_argnums=3)(_prefill_row)
_clear_row_donating = functools.partial(jax.jit, donate_argnums=0)(clear_row)
_prefill_donating = functools.partial(StepJit, static_argnums=0, donate_argnums=3)(_prefill.__wrapped__)


def prefill_in_place(
    model: Transformer, params: dict, ids: Int[Array, "B T"], cache: Cache, lengths: Int[Array, "B"]
) -> tuple[Float[Array, "B V"], Cache]:
    """`prefill` without its checks; the cache is used up."""
    with on_mesh_of(params):
        return _prefill_donating(model, params, ids, cache, lengths)


def prefill_row_in_place(
    model: Transformer, params: dict, ids: Int[Array, "1 T"], cache: Cache, length: int, row: int
) -> tuple[Float[Array, "1 V"], Cache]:
    """Appends `length` tokens to one row of a batch, which no other row has a part in. The cache is used up."""
    with on_mesh_of(params):
        return _prefill_row_donating(model, params, ids, cache, np.int32(length), np.int32(row))


def decode_step_in_place(
    model: Transformer,
    params: dict,
    token: Int[Array, "B"],
    cache: Cache,
    active: Bool[Array, "B"] | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """`decode_step` without its checks; the cache is used up. Rows that are not `active` are left as they are."""
    with on_mesh_of(params):
        return _decode_donating(model, params, token, cache, active)


def clear_row_in_place(params: dict, cache: Cache, row: int) -> Cache:
    """Readies one row of a batch for another sequence; the cache is used up."""
    with on_mesh_of(params):
        return _clear_row_donating(cache, np.int32(row))
