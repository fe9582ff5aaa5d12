from collections import Counter

import numpy as np
import pytest
import torch
from adapted_models import adapted
from oracle import make_sample, tiny_config, tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from async_grpo.batching.packing import attention_ratio
from async_grpo.model.attention import PACKED
from async_grpo.model.collate import collate
from async_grpo.model.policy import (
    ModelSize,
    PolicyModel,
    read_size,
    size_of,
    trained_parameters,
    training_flops,
)

LAYER = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48  # queries and output, keys and values, MLP
NORMS = 2 * (2 * 32 + 2 * 8) + 32
HEAD = 64 * 32


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_that_a_token_is_multiplied_by(tied, tmp_path):
    tiny_model(tied=tied).save_pretrained(tmp_path)
    size = read_size(str(tmp_path))
    assert size.num_parameters == 2 * LAYER + NORMS + HEAD
    assert size.num_layers == 2


def test_attention_is_as_wide_as_its_heads_not_as_the_model(tmp_path):
    model = tiny_model(tied=True)
    config = tiny_config(tied=True)
    config.head_dim = 24
    model.save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    assert read_size(str(tmp_path)).attention_width == 4 * 24


def test_another_architecture_has_a_size_too(tmp_path):
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=3, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    size = read_size(str(tmp_path))
    assert (size.num_layers, size.attention_width) == (3, 32)
    ratio = attention_ratio(
        num_parameters=size.num_parameters,
        num_layers=size.num_layers,
        attention_width=size.attention_width,
    )
    assert 12 * 32 < ratio < 12 * 32 + 100  # 12 times the width, and a head of 64 rows


def counted(work):
    """FLOPs by operator, as torch counts what is really computed; attention by plain products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    counts = Counter({str(op): n for op, n in counter.get_flop_counts()["Global"].items()})
    pairs = counts.pop("aten.bmm")  # of all tokens with all; causality needs half of them
    return sum(counts.values()) + pairs / 2


def test_a_minibatch_is_counted_as_torch_counts_it():
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=500, tie_word_embeddings=True,
    )  # fmt: skip
    config._attn_implementation = PACKED
    policy = PolicyModel(Qwen3ForCausalLM(config)).train()
    rng = np.random.default_rng(0)
    lengths = ((300, 200), (40, 700), (100, 60))
    samples = [
        make_sample(rng.integers(500, size=prompt), rng.integers(500, size=output), ordinal=i)
        for i, (prompt, output) in enumerate(lengths)
    ]
    packed = collate(samples, aggregation="token-mean", share_prompts=True)
    found = []

    def forward():
        scored = policy(packed, temperature=1.0, chunk_size=128)
        found.append(scored.logprobs.sum() + scored.entropy.sum())

    once = counted(forward)
    both = once + counted(found[0].backward)
    own = training_flops(size_of(policy.model), packed)
    assert 3 * once == pytest.approx(own, rel=0.01)
    # The head's logits are computed twice, and torch does not see `addmm_`, which is as large.
    assert both == pytest.approx(own, rel=0.01)


def test_a_frozen_parameter_costs_four_and_a_trained_one_six():
    config = Qwen3Config(
        hidden_size=96, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=500, tie_word_embeddings=True,
    )  # fmt: skip
    config._attn_implementation = PACKED
    policy = adapted(Qwen3ForCausalLM(config), lora_rank=8).train()
    ids = np.random.default_rng(0).integers(500, size=900)
    packed = collate([make_sample(ids[:300], ids[300:])], aggregation="token-mean")
    size, found = size_of(policy.model), []
    assert size.frozen_parameters == size_of(Qwen3ForCausalLM(config)).num_parameters
    assert size.num_parameters - size.frozen_parameters == sum(
        each.numel() for _, each in trained_parameters(policy)
    )

    def forward():
        found.append(policy(packed, temperature=1.0, chunk_size=128).logprobs.sum())

    both = counted(forward) + counted(found[0].backward)
    again = 2 * size.frozen_head * 600  # the logits, computed twice
    first = 2 * 96 * (128 + 64 + 64) * 899  # nothing below the first layer's projections trains
    assert both - again + first == pytest.approx(training_flops(size, packed), rel=0.005)


def test_a_shared_prompt_is_counted_once_and_a_filler_not_at_all():
    size = ModelSize(1000, 300, num_layers=3, attention_width=8, windows=(4,))
    alone, first = ([make_sample([1, 2, 3], [4, 5])] for _ in range(2))
    second = [make_sample([1, 2, 3], [6, 5])]
    one = collate(alone, aggregation="sample-mean")
    both = collate(first + second, aggregation="sample-mean", share_prompts=True)
    # 3 prompt tokens and one more are read (the last is only predicted): 1 + 2 + 3 + 4 pairs.
    assert training_flops(size, one) == 6 * (700 * 4 + 300 * 2) + 12 * 8 * 3 * 10
    assert training_flops(size, both) == 6 * (700 * 5 + 300 * 4) + 12 * 8 * 3 * 14
    assert training_flops(size, collate([], aggregation="sample-mean")) == 0


def test_a_window_bounds_what_its_layers_attend_to():
    packed = collate([make_sample([1, 2, 3], [4] * 8)], aggregation="sample-mean")  # reads 10
    size = ModelSize(0, 0, num_layers=3, attention_width=1, windows=(4,))
    assert training_flops(size, packed) == 12 * (2 * 55 + (1 + 2 + 3 + 7 * 4))
