"""A model of K3.1's shape that fits anywhere: nine layers with every kind of layer, two megabytes as published.

Its vocabulary is the 256 bytes and then the family's 256 special slots, so that it needs no vocabulary file.
`tools/make_demo_checkpoint.py` makes the checkpoint that comes with maxmoe from it.
"""

from maxmoe.config import IndexerConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig, SituConfig

_FIRST_SPECIAL = 256

config = ModelConfig(
    vocab_size=512,
    model_dim=128,
    num_layers=9,
    full_attention_layers=(3, 7, 8),
    num_dense_layers=1,
    dense_dim=256,
    attn_res_block_size=4,
    norm_eps=1e-5,
    max_len=8192,
    bos_id=_FIRST_SPECIAL,
    eos_id=_FIRST_SPECIAL + 2,
    pad_id=_FIRST_SPECIAL + 255,
    kda=KDAConfig(num_heads=4, head_dim=16, conv_width=4, gate_lower_bound=-5.0),
    mla=MLAConfig(
        num_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_shared_head_dim=8,
        v_head_dim=16,
    ),
    moe=MoEConfig(
        num_experts=16,
        top_k=4,
        num_shared_experts=2,
        expert_dim=32,
        latent_dim=64,
        routed_scale=1.0,
    ),
    situ=SituConfig(gate_beta=4.0, linear_beta=25.0),
    indexer=IndexerConfig(num_heads=4, head_dim=16, top_k=64, norm_eps=1e-5),
)
