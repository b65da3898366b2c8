"""Kimi-K3 at full size: 2.78 trillion weights, 104 billion of them at work per token.

Source: the published configuration of Kimi-K3; a test holds this file equal to it.
"""

from maxmoe.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig, SituConfig, VisionConfig

config = ModelConfig(
    vocab_size=163_840,
    model_dim=7168,
    num_layers=93,
    full_attention_layers=(*range(3, 92, 4), 92),  # every fourth, and the last one too
    num_dense_layers=1,
    dense_dim=33_792,
    attn_res_block_size=12,
    norm_eps=1e-5,
    max_len=1_048_576,
    bos_id=163_584,
    eos_id=163_586,
    pad_id=163_839,
    kda=KDAConfig(num_heads=96, head_dim=128, conv_width=4, gate_lower_bound=-5.0),
    mla=MLAConfig(
        num_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_shared_head_dim=64,
        v_head_dim=128,
    ),
    moe=MoEConfig(
        num_experts=896,
        top_k=16,
        num_shared_experts=2,
        expert_dim=3072,
        latent_dim=3584,
        routed_scale=1.0,
    ),
    situ=SituConfig(gate_beta=4.0, linear_beta=25.0),
    vision=VisionConfig(
        num_layers=27,
        model_dim=1024,
        qkv_dim=1536,
        mlp_dim=4096,
        num_heads=12,
        patch_size=14,
        pos_emb_height=64,
        pos_emb_width=64,
        merge_height=2,
        merge_width=2,
        norm_eps=1e-5,
    ),
)
