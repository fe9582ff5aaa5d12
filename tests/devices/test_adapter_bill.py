"""The bill of a rank that trains an adapter, against what a real model of it holds."""

import numpy as np
import pytest
import torch
from adapted_models import adapted
from oracle import make_sample
from torch.optim import AdamW
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_grpo.devices.bill import Training, layer_token_bytes, trainer_bill
from async_grpo.model.attention import PACKED
from async_grpo.model.collate import collate
from async_grpo.model.policy import PolicyModel, model_shape, trained_parameters

TOKENS = 256


def model(*, layers=3):
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=300, tie_word_embeddings=True,
    )  # fmt: skip
    config._attn_implementation = PACKED
    return Qwen3ForCausalLM(config)


def policy_of(kind, **options):
    if kind == "all":
        return PolicyModel(model(**options)).train()
    return adapted(model(**options), lora_rank=8, **kind).train()


KINDS = ["all", {}, {"lora_targets": "q_proj,v_proj", "modules_to_save": "norm"}]


def forward(policy):
    ids = np.random.default_rng(0).integers(300, size=TOKENS)
    packed = collate([make_sample(ids[:200], ids[200:])], aggregation="sample-mean")
    return policy(packed, temperature=1.0, chunk_size=64).logprobs.sum()


def line(bill, name):
    return sum(each.num_bytes for each in bill.lines if each.name == name)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_states_are_those_of_what_trains_and_the_rest_is_held_once(kind):
    policy = policy_of(kind)
    optimizer = AdamW([each for _, each in trained_parameters(policy)])
    forward(policy).backward()
    optimizer.step()
    held = {
        "the frozen model": [p for p in policy.parameters() if not p.requires_grad],
        "master weights": [p for p in policy.parameters() if p.requires_grad],
        "gradients": [p.grad for p in policy.parameters() if p.grad is not None],
        "AdamW's moments": [
            each for state in optimizer.state.values() for each in state.values() if each.ndim
        ],
    }
    bill = trainer_bill(model_shape(policy), Training(num_tokens=TOKENS))
    for name, tensors in held.items():
        assert line(bill, name) == sum(each.nbytes for each in tensors), name


def saved_bytes(policy):
    """Bytes of what autograd keeps of a forward pass, besides parameters."""
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(policy)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("kind", ["all", {}], ids=str)
def test_a_layer_keeps_as_much_of_each_token_as_is_billed(kind):
    few, many = (policy_of(kind, layers=number) for number in (2, 6))
    measured = (saved_bytes(many) - saved_bytes(few)) / 4 / TOKENS
    assert layer_token_bytes(model_shape(few), 4) == pytest.approx(measured, rel=0.05)


def test_adapters_of_some_layers_keep_no_more_than_is_billed():
    few, many = (policy_of(KINDS[2], layers=number) for number in (2, 6))
    measured = (saved_bytes(many) - saved_bytes(few)) / 4 / TOKENS
    assert measured < layer_token_bytes(model_shape(few), 4)


def test_the_first_policy_is_kept_of_what_trains_and_gathered_is_all():
    policy = policy_of({})
    shape = model_shape(policy)
    two = Training(shard_ranks=2, keeps_first_policy=True, keeps_gathered=True, compute_bytes=2)
    bill, trained = trainer_bill(shape, two), sum(p.numel() for _, p in trained_parameters(policy))
    assert line(bill, "the first policy") == 4 * trained / 2
    assert line(bill, "gathered layers") == 2 * sum(
        p.numel() for layer in policy.layers for p in layer.parameters()
    )
