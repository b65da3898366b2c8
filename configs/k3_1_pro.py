"""Kimi-K3.1-Pro at full size: K3, and in each full-attention layer an indexer that selects what a query sees.

Source: the release notes of public inference engines. The model's own configuration has not been seen; what
they do not say is taken to be as in K3, the epsilon of the indexer's key norm included.
"""

import dataclasses
from pathlib import Path

from maxmoe.config import IndexerConfig, load_config

_k3 = load_config(Path(__file__).with_name("k3.py"))

config = dataclasses.replace(_k3, indexer=IndexerConfig(num_heads=32, head_dim=128, top_k=2048, norm_eps=_k3.norm_eps))
