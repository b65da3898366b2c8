"""Spellings of the published `config.json`: which keys there are, and what each may say.

Source: the published configuration of Kimi-K3, quoted whole; for K3.1 see `DSA_ALIASES`.
"""

from maxmoe.config import MXFP4_GROUP

ARCHITECTURES = (
    "KimiK3ForConditionalGeneration",
    "KimiK31ForConditionalGeneration",
    "KimiLinearForCausalLM",
)

# Keys that decide nothing here: identity, training and generation defaults, and quantization_config.ignore,
# which is wrong in the published file (tensors are told apart by name).
INERT = frozenset(
    """architectures auto_map dtype torch_dtype model_type transformers_version initializer_range use_cache
    use_grouped_topk ignore_index image_placeholder media_placeholder_token_id _attn_implementation _name_or_path
    add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label label2id
    is_decoder is_encoder_decoder length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores prefix problem_type pruned_heads
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript
    typical_p use_bfloat16""".split()
)

# Switches of the published code that the family never flips: another value is another model.
FIXED = {
    "hidden_act": "situ",
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
FIXED_VISION = {
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "init_pos_emb_time": 4,
    "linear_bias": False,
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
}
FIXED_WEIGHTS = {
    "group_size": MXFP4_GROUP,
    "num_bits": 4,
    "scale_dtype": "torch.uint8",
    "strategy": "group",
    "symmetric": True,
    "type": "float",
}

# K3.1's own config.json has not been seen; these are the spellings that related models use.
DSA_ALIASES = {
    "num_heads": ("index_n_heads", "n_heads", "num_heads"),
    "head_dim": ("index_head_dim", "head_dim"),
    "top_k": ("index_topk", "topk", "top_k"),
    "layers": ("dsa_layers", "layers", "full_attn_layers"),
    "norm_eps": ("index_norm_eps", "norm_eps", "layer_norm_eps", "eps"),
}

# Field of ModelConfig or of one of its parts -> published key.
MODEL_FIELDS = {
    "vocab_size": "vocab_size",
    "model_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_dense_layers": "first_k_dense_replace",
    "dense_dim": "intermediate_size",
    "attn_res_block_size": "attn_res_block_size",
    "norm_eps": "rms_norm_eps",
    "max_len": "max_position_embeddings",
    "bos_id": "bos_token_id",
    "eos_id": "eos_token_id",
    "pad_id": "pad_token_id",
}
MLA_FIELDS = {
    "num_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_shared_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
MOE_FIELDS = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_token",
    "num_shared_experts": "num_shared_experts",
    "expert_dim": "moe_intermediate_size",
    "latent_dim": "routed_expert_hidden_size",
    "routed_scale": "routed_scaling_factor",
}
SITU_FIELDS = {"gate_beta": "activation_situ_beta", "linear_beta": "activation_situ_linear_beta"}
KDA_FIELDS = {"num_heads": "num_heads", "head_dim": "head_dim", "conv_width": "short_conv_kernel_size"}
VISION_FIELDS = {
    "num_layers": "vt_num_hidden_layers",
    "model_dim": "vt_hidden_size",
    "qkv_dim": "qkv_hidden_size",
    "mlp_dim": "vt_intermediate_size",
    "num_heads": "vt_num_attention_heads",
    "patch_size": "patch_size",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
}
FLOATS = ("norm_eps", "routed_scale", "gate_beta", "linear_beta")
