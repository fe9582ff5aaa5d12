"""Tiny folders of models that also take images, as transformers saves them."""

import torch
from model_families import ALTERNATE, LINEAR, SIZES
from transformers import AutoConfig, AutoModelForImageTextToText

IMAGE, BEGINS = 60, 61  # ids that stand for an image
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 2, "image_size": 56, "patch_size": 14}  # fmt: skip
OF_QWEN = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
           "out_hidden_size": 32}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16}  # fmt: skip
# (text_config, vision_config, more); files name the text model by two ways, with and without head.
TOWERS = {
    "gemma3": (
        {"sliding_window": 4, "layer_types": ALTERNATE}, VISION,
        {"mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": BEGINS},
    ),
    "gemma4": (
        {"sliding_window": 4, "layer_types": ALTERNATE, "vocab_size_per_layer_input": 64,
         "hidden_size_per_layer_input": 8, "global_head_dim": 16},
        VISION | {"num_key_value_heads": 2, "head_dim": 16}, {"image_token_id": IMAGE},
    ),
    "llava": (
        {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"},
        {"image_token_index": IMAGE, "tie_word_embeddings": False},
    ),
    "mistral3": (
        {"model_type": "mistral", "sliding_window": 4}, VISION | {"model_type": "pixtral"},
        {"image_token_index": IMAGE, "tie_word_embeddings": False},
    ),
    "smolvlm": ({"model_type": "llama"}, VISION, {"image_token_id": IMAGE, "pad_token_id": 0}),
    "qwen3_5": (LINEAR, OF_QWEN, {"image_token_id": IMAGE}),
    "qwen3_5_moe": (LINEAR | EXPERTS, OF_QWEN, {"image_token_id": IMAGE}),
}  # fmt: skip


WRONG = {"aya_vision": ({"model_type": "cohere2", "logit_scale": 0.25}, VISION, {})}


def save_tower(kind, folder, **sizes):
    """Save a random model; returns it, in float64. `sizes`: of its text model."""
    text, vision, more = (TOWERS | WRONG)[kind]
    config = AutoConfig.for_model(
        kind, text_config=SIZES | {"pad_token_id": 0} | text | sizes, vision_config=vision, **more
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # steep, and no two that are equal
            parameter.add_(torch.randn_like(parameter), alpha=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model.double()
