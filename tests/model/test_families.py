"""Families that scale, cap or window: what is trained is what transformers computes."""

import numpy as np
import pytest
import torch
from model_families import FAMILIES, SIZES, STATEFUL, family_config, family_model

from async_grpo.model.attention import PACKED
from async_grpo.model.collate import collate_pairs
from async_grpo.model.lm_head import UNCHANGED, rescaling_of
from async_grpo.model.loading import check_packing
from async_grpo.model.policy import PolicyModel
from async_grpo.util.errors import UnfitModel

TEMPERATURE = 0.8
# Transformers' norms and plain attention take float32 inside, whatever the model's type is.
EXACT = {"rtol": 2e-5, "atol": 2e-6}


def pairs_of(seed=0):
    """(prompt, output) of three questions; of the first two outputs, one prompt."""
    rng = np.random.default_rng(seed)
    draw = lambda size: rng.integers(SIZES["vocab_size"], size=size, dtype=np.int32)  # noqa: E731
    shared = draw(5)
    return [(shared, draw(7)), (shared, draw(4)), (draw(3), draw(9)), (draw(8), draw(1))]


def alone(model, prompt, output):
    """Log-probabilities and entropy of one output by transformers' own forward, head included."""
    ids = torch.from_numpy(np.concatenate([prompt, output])).long()
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits.double() / TEMPERATURE).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, ids[len(prompt) :, None]).squeeze(-1), entropy


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_has_log_probabilities_and_gradients_of_sequences_alone(family):
    twin, policy = (
        family_model(family, attention="eager"),
        PolicyModel(family_model(family, attention=PACKED)),
    )
    assert policy.see_sequences_alone() == (family in STATEFUL)
    pairs = pairs_of()
    packed = collate_pairs(pairs, share_prompts=policy.shares_prompts)
    scored = policy(packed, temperature=TEMPERATURE, chunk_size=4)
    expected = [torch.cat(parts) for parts in zip(*(alone(twin, *p) for p in pairs), strict=True)]
    for own, other in zip((scored.logprobs, scored.entropy), expected, strict=True):
        torch.testing.assert_close(own, other, **EXACT)
    for logprobs, entropy in ((scored.logprobs, scored.entropy), expected):
        (logprobs.sin().sum() + entropy.square().sum()).backward()
    for own, other in zip(policy.model.parameters(), twin.parameters(), strict=True):
        tolerance = 1e-4 if family in {*STATEFUL, "minicpm3"} else 1e-5  # more in float32
        assert (own.grad - other.grad).norm() <= tolerance * other.grad.norm()


@pytest.mark.parametrize("family", ["cohere", "cohere2", "gemma2", "gemma3_text", "granite"])
def test_scales_and_caps_count_in_these_tests(family):
    """Without its rescaling, a family's log-probabilities are others."""
    policy = PolicyModel(family_model(family, attention=PACKED))
    packed = collate_pairs(pairs_of())
    right = policy(packed, temperature=1.0, chunk_size=64).logprobs
    policy._rescaling = UNCHANGED
    wrong = policy(packed, temperature=1.0, chunk_size=64).logprobs
    assert (right - wrong).abs().max() > 0.3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_lets_each_family_pass(family, dtype):
    assert check_packing(family_config(family), family, dtype=dtype) == (family in STATEFUL)


def test_factors_that_are_divisors_elsewhere_are_refused_by_name():
    config = family_config("mistral")
    config.name_or_path, config.model_type, config.logits_scaling = "/models/x", "unheard_of", 8.0
    with pytest.raises(UnfitModel, match=r"/models/x \(unheard_of\) sets logits_scaling=8.0: use"):
        rescaling_of(config)


@pytest.mark.parametrize("value", [None, 1, 1.0])
def test_neutral_factors_are_taken_of_any_family(value):
    config = family_config("mistral")
    config.logits_scaling = value
    assert rescaling_of(config) == UNCHANGED
