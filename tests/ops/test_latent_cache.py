"""Latent rows of stacked layers: what is written is read, in every layout, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxmoe.ops.latent_cache import LatentRows, as_pages, empty_rows, gather_rows, read_rows, write_rows
from pallas_kernels.mla_pages_tpu import unpack_pages
from tests.ops.closeness import assert_close, assert_same_bits
from tests.ops.quick_jit import quick_jit

LAYERS, BATCH, TOKENS = 3, 2, 5
# Both parts as kernels want them; shared parts of single rows; slots that are no groups; the tiny model's widths.
SIZES = pytest.mark.parametrize(
    "num_slots, latent_dim, shared_dim", [(12, 256, 64), (9, 128, 64), (8, 130, 64), (9, 7, 2)]
)


def _random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _random_rows(num_slots, latent_dim, shared_dim):
    """The rows, and their values as [L, B, S, R + r]."""
    rows = empty_rows(LAYERS, BATCH, num_slots, latent_dim, shared_dim, jnp.float32)
    rows = LatentRows(*(_random(i, *part.shape) for i, part in enumerate(rows)))
    return rows, np.stack([read_rows(rows, layer) for layer in range(LAYERS)])


def _slots(num_slots):
    """In no order, the first and the last among them, and the traps: those that count from the end, or overflow."""
    return jnp.asarray([[3, -1, num_slots - 1, 0, num_slots], [-num_slots, 5, 2, 2**31 - 1, -(2**31)]], jnp.int32)


def test_empty_rows_have_the_shapes_that_kernels_fetch_from():
    shapes = {
        (12, 512, 64): ((3, 2, 12, 4, 128), (3, 2, 3, 2, 128)),
        (13, 512, 64): ((3, 2, 13, 4, 128), (3, 2, 13, 1, 64)),
        (12, 512, 32): ((3, 2, 12, 4, 128), (3, 2, 12, 1, 32)),
        (12, 500, 64): ((3, 2, 12, 1, 500), (3, 2, 3, 2, 128)),
    }
    for (num_slots, latent_dim, shared_dim), expected in shapes.items():
        rows = empty_rows(LAYERS, BATCH, num_slots, latent_dim, shared_dim, jnp.bfloat16)
        assert tuple(part.shape for part in rows) == expected
        assert {part.dtype for part in rows} == {jnp.dtype(jnp.bfloat16)}
        assert not any(np.asarray(part, np.float32).any() for part in rows)
        assert (rows.num_slots, rows.latent_dim, rows.shared_dim) == (num_slots, latent_dim, shared_dim)
    with pytest.raises(ValueError, match=r"are \(3, 2, 0, 7\), shared dim 2: each must be at least 1"):
        empty_rows(LAYERS, BATCH, 0, 7, 2, jnp.float32)


@SIZES
@pytest.mark.parametrize("traced", [False, True])
def test_write_rows_changes_the_slots_named_and_no_others(num_slots, latent_dim, shared_dim, traced):
    rows, expected = _random_rows(num_slots, latent_dim, shared_dim)
    slots, new = _slots(num_slots), _random(7, BATCH, TOKENS, latent_dim + shared_dim)
    for b, t in np.ndindex(BATCH, TOKENS):
        if 0 <= slots[b, t] < num_slots:
            expected[1, b, slots[b, t]] = new[b, t]
    given = quick_jit(write_rows)(rows, jnp.int32(1), slots, new) if traced else write_rows(rows, 1, slots, new)
    for layer in range(LAYERS):
        assert_same_bits(read_rows(given, layer), expected[layer], f"layer {layer}")


def test_write_rows_rounds_to_the_type_of_the_cache():
    rows, new = empty_rows(1, 1, 8, 128, 64, jnp.bfloat16), _random(1, 1, 1, 192)
    given = write_rows(rows, 0, jnp.asarray([[6]]), new)
    assert_same_bits(read_rows(given, 0)[0, 6], new[0, 0].astype(jnp.bfloat16))


@SIZES
def test_gather_rows_reads_single_rows(num_slots, latent_dim, shared_dim):
    rows, values = _random_rows(num_slots, latent_dim, shared_dim)
    slots = np.asarray([[[0, num_slots - 1, 3], [5, 6, 7]], [[1, 2, 2], [4, 3, 0]]], np.int32)
    given = jnp.concatenate(quick_jit(gather_rows)(rows, jnp.int32(2), slots), axis=-1)
    assert_same_bits(given, values[2, np.arange(BATCH)[:, None, None], slots])


@SIZES
def test_write_rows_gradients_reach_what_stays_and_what_is_written(num_slots, latent_dim, shared_dim):
    rows, _ = _random_rows(num_slots, latent_dim, shared_dim)
    slots, new = _slots(num_slots), _random(7, BATCH, TOKENS, latent_dim + shared_dim)
    factors = np.array(_random(8, BATCH, num_slots, latent_dim + shared_dim))

    def loss(rows, new):
        return jnp.sum(factors * read_rows(write_rows(rows, 1, slots, new), 1))

    kept, written = quick_jit(jax.grad(loss, (0, 1)))(rows, new)
    expected = np.zeros(new.shape, np.float32)
    for b, t in np.ndindex(BATCH, TOKENS):
        if 0 <= slots[b, t] < num_slots:
            expected[b, t] = factors[b, slots[b, t]]
            factors[b, slots[b, t]] = 0
    assert_same_bits(written, expected, "new")
    assert_close(read_rows(kept, 1), factors, label="rows")  # equal, but for the sign of zeros
    assert not np.asarray(read_rows(kept, 0)).any()


@pytest.mark.parametrize("num_slots, page_size", [(12, 4), (16, 16), (40, 8)])
def test_as_pages_names_the_pages_of_a_layer(num_slots, page_size):
    rows, values = _random_rows(num_slots, 256, 64)
    latent, shared, table = quick_jit(as_pages)(rows, jnp.int32(1))
    assert latent.shape[1] == page_size and table.dtype == jnp.int32
    pool = unpack_pages(latent, shared)
    assert_same_bits(pool[table].reshape(values[1].shape), values[1])
