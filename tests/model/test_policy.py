"""The policy scores a packed row as separate sequences, under the checkpoint's names."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import VOCAB_SIZE, make_sample, oracle_logprobs, oracle_twin, tiny_config, tiny_model
from tensor_watchers import LargestTensor
from transformers import Qwen3ForCausalLM

from async_grpo.model.attention import PACKED
from async_grpo.model.collate import collate_pairs, split_by_sample
from async_grpo.model.policy import PolicyModel, hf_named_parameters


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    temperature=st.sampled_from([1.0, 0.6]),
    seed=st.integers(0, 1000),
)
def test_packed_log_probabilities_equal_separate_forwards(lengths, temperature, seed):
    rng = np.random.default_rng(seed)
    model = tiny_model(tied=True, dtype=torch.float64)
    pairs = [
        (rng.integers(VOCAB_SIZE, size=p, dtype=np.int32), rng.integers(64, size=n, dtype=np.int32))
        for p, n in lengths
    ]
    packed = collate_pairs(pairs)
    scored = PolicyModel(model)(packed, temperature=temperature, chunk_size=4)
    twin = oracle_twin(model)
    for pair, got in zip(pairs, split_by_sample(scored.logprobs, packed), strict=True):
        expected = oracle_logprobs(twin, make_sample(*pair), temperature=temperature)
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("tied", [True, False])
def test_names_are_the_checkpoint_s_own(tied, tmp_path):
    from safetensors import safe_open

    model = tiny_model(tied=tied)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    named = dict(hf_named_parameters(PolicyModel(model)))
    assert named.keys() == stored.keys()
    assert ("lm_head.weight" in named) is not tied
    assert all(torch.equal(named[name], stored[name]) for name in stored)


@pytest.mark.parametrize("tied", [True, False])
def test_no_tensor_of_tokens_by_vocabulary_lives_in_a_whole_training_pass(tied):
    chunk_size, vocab_size, num_tokens = 8, 2000, 300
    config = tiny_config(tied=tied)
    config.vocab_size = vocab_size
    policy = PolicyModel(Qwen3ForCausalLM._from_config(config, attn_implementation=PACKED))
    rng = np.random.default_rng(0)
    rows = rng.integers(vocab_size, size=(6, num_tokens // 6), dtype=np.int32)
    packed = collate_pairs([(row[:1], row) for row in rows])
    with LargestTensor() as largest:
        scored = policy(packed, temperature=0.7, chunk_size=chunk_size)
        (scored.logprobs.sum() + scored.entropy.sum()).backward()
    assert len(scored.logprobs) == num_tokens
    head = vocab_size * config.hidden_size
    assert largest.num_elements == max(chunk_size * vocab_size, head) < num_tokens * vocab_size / 9


def test_layers_are_the_decoder_layers_in_order():
    model = tiny_model(tied=True)
    assert PolicyModel(model).layers == list(model.model.layers)
