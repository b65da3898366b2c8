"""Prefilling one row of a batch: the bits of a batch of one, other rows untouched, and nothing of the cache copied."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from maxmoe.config import load_config
from maxmoe.inference import steps
from maxmoe.model.cache import to_plain
from maxmoe.model.transformer import Transformer
from maxmoe.params import abstract_params
from tests.inference.random_weights import random_weights

ROOT = Path(__file__).resolve().parents[2]
MAX_LEN = 2048


def _model():
    """A KDA layer, and a full-attention layer whose rows have the real model's widths, so that they lie as there."""
    config = load_config(ROOT / "configs/tiny.py")
    mla = dataclasses.replace(config.mla, kv_lora_rank=512, qk_shared_head_dim=64)
    return Transformer(dataclasses.replace(config, num_layers=2, full_attention_layers=(1,), mla=mla))


def _row(cache, row):
    return [np.array(leaf[:, row]) for leaf in jax.tree.leaves(cache.stacks)]


def test_a_row_gets_the_bits_of_a_batch_of_one():
    model = _model()
    params = random_weights(model, jnp.float32)
    rng = np.random.default_rng(0)
    chunks = [(rng.integers(0, 256, (1, 16)).astype(np.int32), length) for length in (16, 16, 5)]
    alone = steps.init_cache(model, 1, 64)
    batch = jax.tree.map(lambda leaf: leaf + 1, steps.init_cache(model, 3, 64))  # something in every row
    batch = steps.clear_row_in_place(params, batch, 1)
    before = [_row(batch, row) for row in (0, 2)]
    for ids, length in chunks:
        wanted, alone = steps.prefill_in_place(model, params, ids, alone, np.array([length], np.int32))
        logits, batch = steps.prefill_row_in_place(model, params, ids, batch, length, 1)
        np.testing.assert_array_equal(logits, wanted)
    assert batch.lengths.tolist() == [1, 37, 1]
    for got, rows in zip((_row(batch, 0), _row(batch, 2)), before, strict=True):
        assert all(np.array_equal(*pair) for pair in zip(got, rows, strict=True))
    (kda, mla), (kda_alone, mla_alone) = (to_plain(cache).stacks[0] for cache in (batch, alone))
    for got, wanted in ((kda.conv, kda_alone.conv), (kda.state, kda_alone.state)):
        np.testing.assert_array_equal(got[:, 1], wanted[:, 0])
    for got, wanted in ((mla.rows, mla_alone.rows), (mla.index_keys, mla_alone.index_keys)):
        np.testing.assert_array_equal(got[:, 1, :37], wanted[:, 0, :37])


def test_no_part_of_the_cache_is_copied():
    """Temporaries are the same however many rows and tokens the batch has room for, but for scores of one chunk."""
    model = _model()
    params = abstract_params(model)

    def temporaries(batch):
        cache = jax.eval_shape(lambda: steps.init_cache(model, batch, MAX_LEN))
        ids, number = jax.ShapeDtypeStruct((1, 16), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        compiled = steps._prefill_row_donating.lower(model, params, ids, cache, number, number).compile()
        row = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.stacks)) // batch
        return compiled.memory_analysis().temp_size_in_bytes, row

    (few, row), (many, _) = temporaries(2), temporaries(6)
    assert many - few < row / 4  # a copy of the batch would add four rows
