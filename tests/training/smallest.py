"""The smallest model with every kind of layer, and batches for it: compiling is what takes time here."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import maxmoe as mm
from maxmoe.training.step import Batch

_CONFIG = Path(__file__).parents[2] / "configs/tiny.py"
_CHANGES = """
    num_layers=3 full_attention_layers=(2,) attn_res_block_size=2 model_dim=32 dense_dim=32 vocab_size=64
    bos_id=1 eos_id=2 pad_id=3 kda.num_heads=2 kda.head_dim=8 mla.num_heads=2 mla.q_lora_rank=16 mla.kv_lora_rank=16
    mla.qk_nope_head_dim=8 mla.v_head_dim=8 moe.num_experts=8 moe.top_k=2 moe.latent_dim=64 indexer.num_heads=2
    indexer.head_dim=8 indexer.top_k=8
"""


def smallest_model(scan_layers=None):
    """(KDA, dense), (KDA, experts), (MLA with indexer, experts)."""
    return mm.Transformer(mm.load_config(_CONFIG).override(*_CHANGES.split()), scan_layers)


def two_layers():
    """(KDA, dense), (MLA with indexer, experts): both mixers and both FFNs, and two thirds to compile."""
    changes = *_CHANGES.split(), "num_layers=2", "full_attention_layers=(1,)"
    return mm.Transformer(mm.load_config(_CONFIG).override(*changes))


def float32_params(model, seed=0):
    """Random weights, all floats in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, mm.init_params(model, seed))


def random_batch(model, rows, num_tokens=24, seed=0):
    """Rows of unequal length, and not all of their tokens trained."""
    rng = np.random.default_rng(seed)
    return Batch(
        ids=jnp.asarray(rng.integers(0, model.config.vocab_size, (rows, num_tokens)), jnp.int32),
        lengths=jnp.asarray(rng.integers(num_tokens // 2, num_tokens + 1, rows), jnp.int32),
        mask=jnp.asarray(rng.random((rows, num_tokens)) < 0.8),
    )
