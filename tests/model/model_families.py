"""Tiny models of families whose logits, attention or residuals are scaled, capped, windowed."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    pad_token_id=None, bos_token_id=1, eos_token_id=1,
)  # fmt: skip
ALTERNATE = ["sliding_attention", "full_attention"] * 2
FAMILIES = {
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
    "phi3": {},
    "mistral": {"sliding_window": 4},
    "olmo2": {},
    "qwen3": {},
}  # fmt: skip


def family_config(family, **changes):
    return AutoConfig.for_model(family, **(SIZES | FAMILIES[family] | changes))


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
