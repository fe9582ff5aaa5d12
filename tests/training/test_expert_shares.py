"""The balancing loss of a step knows the step before: a constant that a checkpoint has."""

import numpy as np
import pytest
import torch
from learners import gradient_step
from oracle import make_config, make_row, sample_of_rows
from test_experts import EXPERTS, LAYERS, gradients, model_of

from async_grpo.model.collate import collate
from async_grpo.model.policy import PolicyModel
from async_grpo.training.learner import check_dense
from async_grpo.util.errors import ConfigError


def packed(seed, advantage=0.5):
    rng = np.random.default_rng(seed)
    rows = [
        make_row(rng.integers(48, size=3).tolist(), rng.integers(48, size=n).tolist())
        for n in (4, 6)
    ]
    samples = [sample_of_rows([row], advantage=advantage) for row in rows]
    return collate(samples, aggregation="sample-mean", dtype=torch.float64)


def make_step(coefficient=0.1, **options):
    policy = PolicyModel(model_of("qwen3_moe"))
    return policy, gradient_step(policy, make_config(balance_coefficient=coefficient, **options))


def test_a_step_leaves_the_shares_of_its_choices_to_the_next_one():
    policy, step = make_step()
    before = torch.tensor(step.expert_shares)
    assert torch.equal(before, torch.full((LAYERS, EXPERTS), 1 / EXPERTS))
    step.accumulate(packed(0))
    choices = policy.routing._choices.clone()
    result = step.finish(2)
    after = torch.tensor(step.expert_shares, dtype=torch.float64)
    assert torch.equal(after, choices / choices.sum(-1, keepdim=True))
    assert not torch.allclose(after, before.double())
    loads = (after.amax(-1) * EXPERTS).mean()
    assert result.metrics["expert_load_max"] == pytest.approx(loads.item())
    assert result.metrics["dead_experts"] == (choices == 0).double().mean()
    # With equal shares the loss is α a weight of each layer and token: 2 samples of weight 1.
    assert result.metrics["balance_loss_sum"] == pytest.approx(0.1 * LAYERS * 2)


def test_shares_of_a_checkpoint_give_the_gradient_of_the_run_that_wrote_it():
    _, first = make_step()
    first.accumulate(packed(0))
    first.finish(2)
    policies = [first._policy]
    other, second = make_step()
    other.load_state_dict(first._policy.state_dict())
    second.expert_shares = first.expert_shares
    policies.append(other)
    for step in (first, second):
        step.accumulate(packed(1))
    was, now = (gradients(policy.model) for policy in policies)
    assert all(torch.equal(was[name], now[name]) for name in was)
    forgetful, third = make_step()
    forgetful.load_state_dict(first._policy.state_dict())
    third.accumulate(packed(1))
    assert any(
        not torch.equal(was[name], gradient)
        for name, gradient in gradients(forgetful.model).items()
    )


def test_a_step_that_is_skipped_leaves_the_shares_as_they_were():
    _, step = make_step()
    before = step.expert_shares
    step.accumulate(packed(0, advantage=float("nan")))
    assert step.finish(2).skipped
    assert step.expert_shares == before


def test_without_the_loss_a_mixture_trains_as_it_did():
    gradient = []
    for coefficient in (0.0, 0.1):
        policy, step = make_step(coefficient)
        step.accumulate(packed(0))
        gradient.append(gradients(policy.model))
    plain, balanced = gradient
    routers = [name for name in plain if name.endswith("gate.weight")]
    assert all(not torch.equal(plain[name], balanced[name]) for name in routers)


@pytest.mark.parametrize("options", [{"balance_coefficient": 0.1}, {"routing_replay": "on"}])
def test_options_of_mixtures_are_refused_for_a_dense_model(options):
    with pytest.raises(ConfigError, match="mixture of experts"):
        check_dense(make_config(**options))
    check_dense(make_config())
