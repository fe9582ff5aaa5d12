"""How much arithmetic a model does for a token, from its config alone: no weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from async_grpo.model.folder import read_config


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the cost of a forward pass depends on."""

    num_parameters: int  # that a token is multiplied by: with the output layer, no embedding
    num_layers: int
    attention_width: int  # heads * head size


def read_size(path: str) -> ModelSize:
    """The size of the model in a folder that `check_model_folder` has passed."""
    config = read_config(Path(path))
    with torch.device("meta"):  # shapes without memory
        model = AutoModelForCausalLM.from_config(config)
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    body = [p for p in model.parameters() if p is not embedding and p is not output]
    num_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return ModelSize(
        num_parameters=sum(p.numel() for p in body) + output.numel(),
        num_layers=config.num_hidden_layers,
        attention_width=num_heads * head_size,
    )
