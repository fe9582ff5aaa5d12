import pytest
from oracle import tiny_config, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel

from async_grpo.batching.packing import attention_ratio
from async_grpo.model.size import read_size

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
