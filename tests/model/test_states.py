"""Layers that carry a state along a row see each of its sequences alone."""

import logging

import numpy as np
import pytest
import torch
from model_families import SIZES, STATEFUL, family_config, family_model
from test_families import TEMPERATURE, alone, pairs_of
from transformers import AutoModelForCausalLM

from async_grpo.model.attention import PACKED
from async_grpo.model.collate import collate_pairs
from async_grpo.model.loading import check_packing, load_policy, small_model
from async_grpo.model.policy import PolicyModel, model_shape, size_of
from async_grpo.util.errors import UnfitModel

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def scores(policy, pairs):
    packed = collate_pairs(pairs, share_prompts=policy.shares_prompts)
    return policy(packed, temperature=TEMPERATURE, chunk_size=64).logprobs


def one_at_a_time(family, **options):
    policy = PolicyModel(family_model(family, attention=PACKED, **options))
    assert policy.see_sequences_alone()
    return policy


@pytest.mark.parametrize("family", STATEFUL)
def test_other_tokens_of_a_neighbour_change_no_bit(family):
    policy = one_at_a_time(family, dtype=torch.float32)
    (prompt, output), *others = pairs_of()
    before = scores(policy, [(prompt, output), *others])
    changed = (output + 1) % SIZES["vocab_size"]
    after = scores(policy, [(prompt, changed), *others])
    count = len(output)
    assert torch.equal(before[count:], after[count:])
    assert not torch.equal(before[:count], after[:count])


def test_sequences_of_one_length_go_through_a_mixer_as_one_batch():
    policy, seen = PolicyModel(family_model("lfm2", attention=PACKED)), []
    (_, mixer), *_ = policy._mixers
    forward = mixer.forward
    mixer.forward = lambda states, **kwargs: seen.append(states.shape) or forward(states, **kwargs)
    policy.see_sequences_alone()
    scores(policy, pairs_of())
    assert sorted(tuple(shape[:2]) for shape in seen) == [(2, 8), (2, 11)]


def test_without_that_a_neighbour_leaks():
    """So the tests above can fail."""
    (prompt, output), *others = pairs_of()
    policy = PolicyModel(family_model("lfm2", attention=PACKED, dtype=torch.float32))
    assert not policy.shares_prompts
    changed = (output + 1) % SIZES["vocab_size"]
    before, after = (scores(policy, [(prompt, o), *others]) for o in (output, changed))
    assert (before[len(output) :] - after[len(output) :]).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1", "qwen3_5_text"])
def test_a_backward_pass_that_computes_layers_again_has_the_sum_of_sequences_alone(family):
    """Two minibatches are forward before the first one goes back: each layer keeps its own row."""
    twin, policy = family_model(family, attention="eager"), one_at_a_time(family)
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    minibatches = [pairs_of(0), pairs_of(1)[:2]]
    sum(scores(policy, pairs).sin().sum() for pairs in minibatches[::-1]).backward()
    for prompt, output in [pair for pairs in minibatches for pair in pairs]:
        alone(twin, prompt, output)[0].sin().sum().backward()
    for own, other in zip(policy.model.parameters(), twin.parameters(), strict=True):
        assert (own.grad - other.grad).norm() <= 1e-4 * other.grad.norm()


def test_it_is_told_once_and_what_is_loaded_does_so(tmp_path, caplog):
    family_model("lfm2", attention="eager", dtype=torch.float32).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        policy = load_policy(str(tmp_path), attention=PACKED, dtype=torch.float32)
    said = [record.message for record in caplog.records if "carry a state" in record.message]
    assert said == [
        f"layers of {tmp_path} (lfm2) carry a state: they are given each sequence apart"
    ]
    assert policy.shares_prompts
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    expected = torch.cat([alone(model, *pair)[0] for pair in pairs_of()])
    np.testing.assert_allclose(scores(policy, pairs_of()).detach(), expected.detach(), atol=1e-5)


def test_time_steps_of_nemotron_h_have_no_lower_bound_as_in_the_engine(tmp_path):
    model = family_model("nemotron_h", attention="eager", dtype=torch.float32, pad_token_id=0)
    model.save_pretrained(tmp_path)
    bounds = [layer.mixer.time_step_limit for layer in mixers(model)]
    assert all(lowest == 1e-3 for lowest, _ in bounds)
    policy = load_policy(str(tmp_path), attention=PACKED, dtype=torch.float32)
    assert all(layer.mixer.time_step_limit[0] < 1e-20 for layer in mixers(policy.model))


def mixers(model):
    return [layer for layer in model.model.layers if hasattr(layer.mixer, "time_step_limit")]


def test_a_state_whose_layers_are_not_told_of_borders_is_refused():
    with pytest.raises(UnfitModel, match=r"packed row must score as separate .* \(mamba\)"):
        check_packing(family_config("mamba", state_size=8), "/m")


def test_the_probe_has_a_layer_of_each_kind_by_numbers_of_layers():
    changes = {"num_hidden_layers": 12, "attn_layer_indices": [5, 9]}
    layers = small_model(family_config("bamba", **changes)).model.layers
    assert [hasattr(layer, "mamba") for layer in layers] == [True, True, False]


@pytest.mark.parametrize(("family", "layers"), [("mamba2", 0), ("lfm2", 2), ("falcon_h1", 4)])
def test_flops_are_of_layers_that_attend(family, layers):
    policy = one_at_a_time(family)
    assert size_of(policy.model).num_layers == layers
    assert size_of(policy.model).has_states
    assert model_shape(policy).num_layers == 4
