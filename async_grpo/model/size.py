"""How much arithmetic and memory a model takes, from its shapes alone: no weights are read.

A pass forward and backward is counted as PaLM does (Chowdhery et al. 2022, appendix B): 6 FLOPs a
parameter and token that meet, that is 2 forward and 4 backward, and 12 a pair of tokens, layer and
element of attention. What is computed again, by activation checkpointing or by the chunks of the
head, is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_grpo.devices.bill import ModelShape
from async_grpo.model.folder import read_config
from async_grpo.model.policy import PolicyModel
from async_grpo.types import PackedMinibatch


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the cost of a forward pass depends on."""

    num_parameters: int  # that a token is multiplied by: with the output layer, no embedding
    head_parameters: int  # of these, the output layer's, which only scored tokens meet
    num_layers: int
    attention_width: int  # heads * head size
    windows: tuple[int, ...] = ()  # of the layers in which a token sees so many at most


def read_size(path: str) -> ModelSize:
    """The size of the model in a folder that `check_model_folder` has passed."""
    config = read_config(Path(path))
    with torch.device("meta"):  # shapes without memory
        return size_of(AutoModelForCausalLM.from_config(config))


def size_of(model: PreTrainedModel) -> ModelSize:
    """The size of a model, sharded or not."""
    config = model.config
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    body = [p for p in model.parameters() if p is not embedding and p is not output]
    num_layers, num_heads = config.num_hidden_layers, config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
    return ModelSize(
        num_parameters=sum(p.numel() for p in body) + output.numel(),
        head_parameters=output.numel(),
        num_layers=num_layers,
        attention_width=num_heads * head_size,
        windows=(window,) * kinds.count("sliding_attention") if window else (),
    )


def training_flops(size: ModelSize, packed: PackedMinibatch) -> float:
    """What the mathematics needs to train a minibatch once; a filler needs nothing.

    A prompt that several samples share is counted once, as it lies in the row once.
    """
    if not packed.num_rows:
        return 0.0
    seen = packed.position_ids + 1  # [T] tokens that each attends to, itself included
    pairs = (size.num_layers - len(size.windows)) * int(seen.sum())
    pairs += sum(int(seen.clamp(max=window).sum()) for window in size.windows)
    products = (size.num_parameters - size.head_parameters) * seen.numel()
    products += size.head_parameters * packed.target_ids.numel()
    return 6.0 * products + 12.0 * size.attention_width * pairs


def model_shape(policy: PolicyModel) -> ModelShape:
    """What the bill of memory knows of a policy, which needs no memory for that."""
    config = policy.model.config
    num_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    layers = [sum(p.numel() for p in layer.parameters()) for layer in policy.layers]
    total = sum(p.numel() for p in policy.parameters())
    names = [name for name, _ in policy.layers[0].named_modules()]
    return ModelShape(
        num_parameters=total,
        layer_parameters=max(layers),
        root_parameters=total - sum(layers),
        num_layers=len(layers),
        hidden=config.hidden_size,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        query_width=num_heads * head_size,
        key_width=(getattr(config, "num_key_value_heads", None) or num_heads) * head_size,
        num_heads=num_heads,
        vocab_size=config.vocab_size,
        norms_heads=any(name.endswith("q_norm") for name in names),
    )
