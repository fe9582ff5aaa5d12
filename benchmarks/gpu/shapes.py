"""Models as shapes, and how much arithmetic one packed row costs.

A gradient step is counted as what the mathematics needs, three times its forward pass: two FLOPs a
multiply-add, every weight of a decoder layer for every token, the head's weights for every scored
token alone, attention for the pairs that causality leaves. The embedding is a look-up. What is
computed again, by activation checkpointing or by the chunks of the head, is not counted: so both
lower the utilisation, as they should.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from async_grpo.model.policy import PolicyModel


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder of Qwen2.5's architecture."""

    name: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int
    is_tied: bool

    @property
    def head_size(self) -> int:
        return self.hidden // self.num_heads

    @property
    def layer_weights(self) -> int:
        """Weights of all decoder layers that multiply, without biases and norms."""
        key_value = 2 * self.hidden * self.num_kv_heads * self.head_size
        attention = 2 * self.hidden**2 + key_value
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    def config(self) -> Qwen2Config:
        return Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=131_072,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=self.is_tied,
            use_cache=False,
        )


QWEN_05B = Shape("0.5B", 896, 4864, 24, 14, 2, 151_936, is_tied=True)
QWEN_15B = Shape("1.5B", 1536, 8960, 28, 12, 2, 151_936, is_tied=True)
QWEN_7B = Shape("7B", 3584, 18_944, 28, 28, 4, 152_064, is_tied=False)
TOY = Shape("toy", 64, 96, 2, 4, 2, 512, is_tied=True)


def random_policy(
    shape: Shape, *, device: torch.device, dtype: torch.dtype, attention: str, seed: int = 0
) -> PolicyModel:
    """A policy made on the device itself: no file, no copy from the host."""
    torch.manual_seed(seed)
    with device:
        model = Qwen2ForCausalLM._from_config(
            shape.config(), attn_implementation=attention, dtype=dtype
        )
    return PolicyModel(model)


def attention_flops(shape: Shape, segments: Sequence[int]) -> float:
    """Forward, one layer: two products for every pair that causality leaves.

    >>> attention_flops(TOY, [1]) == 2 * 2 * TOY.hidden
    True
    """
    pairs = sum(length * (length + 1) // 2 for length in segments)
    return 4.0 * shape.num_heads * shape.head_size * pairs


def step_flops(shape: Shape, segments: Sequence[int], *, num_scored: int) -> float:
    """Forward and backward of one packed row.

    >>> row = [2048] * 8  # a 1.5B model: 6 FLOPs a weight and token, a tenth more for attention
    >>> round(step_flops(QWEN_15B, row, num_scored=16_384) / (6 * 1.54e9 * 16_384), 2)
    1.06
    """
    products = 2.0 * (shape.layer_weights * sum(segments) + shape.head_weights * num_scored)
    return 3.0 * (products + shape.num_layers * attention_flops(shape, segments))
