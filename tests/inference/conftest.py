"""The model of the engine's tests."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import pytest

from maxmoe.config import load_config
from maxmoe.model.transformer import Transformer
from tests.inference.random_weights import random_weights

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model():
    """Two layers: the tiny model's dense KDA layer, and a full-attention layer with indexer and experts."""
    config = load_config(ROOT / "configs/tiny.py")
    return Transformer(dataclasses.replace(config, num_layers=2, full_attention_layers=(1,)))


@pytest.fixture(scope="module")
def params(model):
    return random_weights(model, jnp.float32)
