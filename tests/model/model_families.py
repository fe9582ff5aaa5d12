"""Tiny models of families that scale, cap or window, and of those whose layers carry a state."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    pad_token_id=None, bos_token_id=1, eos_token_id=1,
)  # fmt: skip
ALTERNATE = ["sliding_attention", "full_attention"] * 2
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
STATEFUL = {
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.3},
    "granitemoehybrid": MAMBA | {
        "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0, "logits_scaling": 6.0,
        "shared_intermediate_size": 48,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_dim": 32},
    "mamba2": {"num_heads": 8, "n_groups": 1, "state_size": 16, "expand": 2},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mamba_num_heads": 8,
        "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 16, "num_local_experts": 1,
    },
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR | {"num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]},
}  # fmt: skip
FAMILIES = STATEFUL | {
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 3.0, "sliding_window": 4, "layer_types": ALTERNATE},
    "gemma2": {
        "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "sliding_window": 4,
        "query_pre_attn_scalar": 16, "layer_types": ALTERNATE,
    },
    "gemma3_text": {
        "final_logit_softcapping": 2.5, "sliding_window": 4, "query_pre_attn_scalar": 16,
        "layer_types": ALTERNATE,
    },
    "granite": {
        "logits_scaling": 6.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4,
        "embedding_multiplier": 5.0,
    },
    "deepseek_v3": {
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
        "v_head_dim": 6, "first_k_dense_replace": 4, "num_key_value_heads": 4,
    },
    "gemma4_text": {
        "final_logit_softcapping": 2.5, "sliding_window": 4, "layer_types": ALTERNATE,
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8, "global_head_dim": 16, "num_experts": None,
    },
    "glm": {"partial_rotary_factor": 0.5},
    "granite_swa": {"logits_scaling": 6.0, "sliding_window": 4, "layer_types": ALTERNATE},
    "minicpm3": {
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "num_key_value_heads": 4,
    },
    "phi3": {},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "mistral": {"sliding_window": 4},
    "olmo2": {},
    "qwen3": {},
}  # fmt: skip


def family_config(family, **changes):
    return AutoConfig.for_model(family, **(SIZES | FAMILIES.get(family, {}) | changes))


def family_model(family, *, attention, dtype=torch.float64, **changes):
    """Matrices keep the variance of what they multiply, so that caps, scales and windows count."""
    torch.manual_seed(0)
    config = family_config(family, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=2 * parameter.shape[-1] ** -0.5)
    return model.eval()
