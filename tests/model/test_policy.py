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
from async_grpo.model.collate import collate_pairs, split_by_row
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
    for pair, got in zip(pairs, split_by_row(scored.logprobs, packed), strict=True):
        expected = oracle_logprobs(twin, make_sample(*pair), temperature=temperature)
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 1000),
)
def test_shared_prompts_change_neither_log_probabilities_nor_gradients(shape, seed):
    """Against separate float64 forwards; in any order, so that a group's samples lie apart too."""
    rng = np.random.default_rng(seed)
    model = tiny_model(tied=True, dtype=torch.float64)
    prompts = [rng.integers(VOCAB_SIZE, size=p, dtype=np.int32) for p, _ in shape]
    pairs = [
        (prompt, rng.integers(VOCAB_SIZE, size=length, dtype=np.int32))
        for prompt, (_, lengths) in zip(prompts, shape, strict=True)
        for length in lengths
    ]
    pairs = [pairs[index] for index in rng.permutation(len(pairs))]
    policy, twin = PolicyModel(model), oracle_twin(model)
    scored = policy(
        collate_pairs(pairs, share_prompts=policy.shares_prompts), temperature=0.8, chunk_size=4
    ).logprobs
    expected = torch.cat(
        [oracle_logprobs(twin, make_sample(*pair), temperature=0.8) for pair in pairs]
    )
    torch.testing.assert_close(scored, expected, rtol=1e-11, atol=1e-11)
    for values in (scored, expected):
        values.sin().sum().backward()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-11)


def test_shared_prompts_give_the_same_bits_again():
    """With several threads too: gradients of a prompt are added in a fixed order."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(VOCAB_SIZE, size=40, dtype=np.int32) for _ in range(6)]
    pairs = [
        (prompt, rng.integers(VOCAB_SIZE, size=30, dtype=np.int32))
        for prompt in prompts
        for _ in range(8)
    ]
    policy = PolicyModel(tiny_model(tied=True))
    packed = collate_pairs(pairs, share_prompts=True)
    num_threads, gradients = torch.get_num_threads(), []
    torch.set_num_threads(2)
    for _ in range(3):
        policy.zero_grad()
        policy(packed, temperature=1.0, chunk_size=64).logprobs.sum().backward()
        gradients.append([parameter.grad.clone() for parameter in policy.parameters()])
    torch.set_num_threads(num_threads)
    for again in gradients[1:]:
        assert all(torch.equal(*pair) for pair in zip(gradients[0], again, strict=True))


def test_keys_and_values_of_more_whole_tokens_than_are_billed_are_gathered_again():
    """The same bits; what is kept for the backward pass is then of the row's own tokens."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(VOCAB_SIZE, size=60, dtype=np.int32)
    pairs = [(prompt, rng.integers(VOCAB_SIZE, size=6, dtype=np.int32)) for _ in range(20)]
    policy, found = PolicyModel(tiny_model(tied=True)), []
    packed = collate_pairs(pairs, share_prompts=True)
    num_whole = len(packed.repeat_index)
    assert num_whole > 6 * len(packed.input_ids)
    for policy.gathered_tokens in (num_whole, num_whole - 1):
        policy.zero_grad()
        kept = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = policy(packed, temperature=1.0, chunk_size=64).logprobs.sum()
        loss.backward()
        found.append((sum(kept.values()), [each.grad.clone() for each in policy.parameters()]))
    (most, first), (least, again) = found
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    config = policy.model.config
    width = 2 * config.num_key_value_heads * config.head_dim
    assert most - least >= 0.9 * config.num_hidden_layers * num_whole * width * 4


def test_other_attention_refuses_shared_prompts():
    model = tiny_model(tied=True)
    model.set_attn_implementation("sdpa")
    policy, prompt = PolicyModel(model), np.arange(3, dtype=np.int32)
    assert not policy.shares_prompts
    packed = collate_pairs([(prompt, prompt), (prompt, prompt + 1)], share_prompts=True)
    with pytest.raises(ValueError, match="shared with packed attention only"):
        policy(packed, temperature=1.0, chunk_size=4)


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
