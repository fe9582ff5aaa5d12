"""The decoupled ratio compares with the policy at the start of the batch, after steps of it too."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from learners import gradient_step
from oracle import oracle_gradient, oracle_logprobs, random_samples, relative_difference, tiny_model
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.train_config import TrainConfig
from async_grpo.model.collate import collate
from async_grpo.model.policy import PolicyModel, hf_named_parameters
from async_grpo.training.fsdp import reshard, shard
from async_grpo.training.step import BatchStart, EarlierPolicy

CONFIG = TrainConfig(
    model_name_or_path="m",
    data_path="d",
    batch_size=8,
    train_minibatch_size=4,
    ratio_mode="decoupled",
    importance_correction="truncate",
    learning_rate=3e-2,
    allow_high_learning_rate=True,
    loss_chunksize=5,
)


def equip(policy, config=CONFIG):
    return gradient_step(policy, config)


def gradients(policy):
    return {name: p.grad.clone() for name, p in policy.model.named_parameters()}


def pack(samples, dtype=torch.float64):
    return collate(samples, aggregation="sample-mean", dtype=dtype)


def test_only_several_decoupled_steps_keep_a_copy():
    assert find_algorithm(CONFIG).uses_old_policy
    one_step = {"model_name_or_path": "m", "data_path": "d", "ratio_mode": "decoupled"}
    assert not find_algorithm(TrainConfig(**one_step)).uses_old_policy
    behaviour = one_step | {"ratio_mode": "behaviour", "batch_size": 8, "train_minibatch_size": 4}
    assert not find_algorithm(TrainConfig(**behaviour)).uses_old_policy


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_gradient_of_a_later_step_is_the_oracle_s_against_the_start_of_the_batch(steps_before):
    start = tiny_model(tied=True, dtype=torch.float64)
    model = copy.deepcopy(start)
    step = equip(PolicyModel(model))
    rng = np.random.default_rng(1)
    samples = random_samples(rng, 4 * (steps_before + 1), model=start)
    for index in range(steps_before):
        step.accumulate(pack(samples[4 * index : 4 * index + 4]))
        assert not step.finish(4).skipped
    last = samples[4 * steps_before :]

    for part in (last[:1], [], last[1:]):
        step.accumulate(pack(part))

    begun = [oracle_logprobs(start, s, temperature=1.0).detach().numpy() for s in last]
    expected = oracle_gradient(model, last, CONFIG, start_logprobs=begun if steps_before else None)
    got = {name: p.grad for name, p in model.named_parameters()}
    assert relative_difference(got, {name: 4 * value for name, value in expected.items()}) < 1e-12


def test_the_next_batch_starts_from_the_policy_of_its_own_first_step():
    model = tiny_model(tied=False, dtype=torch.float64)
    step = equip(PolicyModel(model))
    samples = random_samples(np.random.default_rng(2), 12, model=model)
    for index in range(2):
        if index == 1:
            step.begin_batch()
            begun_from = copy.deepcopy(model)
        step.accumulate(pack(samples[4 * index : 4 * index + 4]))
        step.finish(4)
    step.accumulate(pack(samples[8:]))

    begun = [oracle_logprobs(begun_from, s, temperature=1.0).detach().numpy() for s in samples[8:]]
    expected = oracle_gradient(model, samples[8:], CONFIG, start_logprobs=begun)
    got = {name: p.grad for name, p in model.named_parameters()}
    assert relative_difference(got, {name: 4 * value for name, value in expected.items()}) < 1e-12


def test_weights_that_were_kept_score_as_before_whatever_moves():
    model = tiny_model(tied=True, dtype=torch.float64)
    policy = PolicyModel(model)
    samples = random_samples(np.random.default_rng(3), 2, model=model)
    packed, setting = pack(samples), {"temperature": 1.0, "chunk_size": 5}
    earlier, before = EarlierPolicy(policy), policy(packed, **setting).logprobs
    earlier.keep()
    with torch.no_grad():
        model.model.norm.weight += 0.5
    moved = policy(packed, **setting).logprobs
    assert torch.equal(earlier.logprobs(packed, **setting), before)
    assert torch.equal(policy(packed, **setting).logprobs, moved)


def whole(policy):
    reshard(policy)
    return [parameter.full_tensor() for _, parameter in hf_named_parameters(policy)]


def sharded_scenario(rank):
    """Parameters before and after a scoring, and the scores against those of the beginning."""
    model = tiny_model(tied=True)
    policy = shard(PolicyModel(model), init_device_mesh("cpu", (dist.get_world_size(),)))
    batch_start = BatchStart(policy)
    samples = random_samples(np.random.default_rng(4), 4, model=tiny_model(tied=True))
    packed = pack([samples[:1], samples[1:]][rank], torch.float32)
    setting = {"temperature": 1.0, "chunk_size": 5}
    at_start = policy(packed, **setting).logprobs.detach().clone()
    for _ in range(2):
        batch_start.before_update()  # its second call changes nothing
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.to_local().mul_(1.3)
    moved = policy(packed, **setting).logprobs.detach().clone()
    before = whole(policy)
    scored = batch_start.logprobs(packed, **setting)
    after = whole(policy)
    policy(packed, **setting)  # gathers the live weights, which must not serve the next scoring
    scored_again = batch_start.logprobs(packed, **setting)
    again = policy(packed, **setting).logprobs.detach()
    return {
        "scored": torch.equal(scored, at_start) and torch.equal(scored_again, at_start),
        "restored": all(map(torch.equal, before, after)),
        "live": torch.equal(again, moved) and not torch.allclose(moved, at_start),
    }


def two_steps(rank, *, defer):
    """The parameters after two decoupled steps of two minibatches each."""
    policy = shard(PolicyModel(tiny_model(tied=True)), init_device_mesh("cpu", (2,)))
    step = equip(policy, CONFIG.but(defer_gradient_sync=defer))
    samples = random_samples(np.random.default_rng(5), 8, model=tiny_model(tied=True))
    for first in (0, 4):
        for part in (samples[first + rank : first + rank + 1], samples[first + 2 + rank :][:1]):
            step.accumulate(pack(part, torch.float32))
        assert not step.finish(4).skipped
    return {str(index): value for index, value in enumerate(whole(policy))}


def both_ways(rank):
    return [two_steps(rank, defer=defer) for defer in (False, True)]


@pytest.mark.integration
def test_gradients_that_stay_on_their_rank_survive_the_scoring_of_the_start(tmp_path):
    (now, later), _ = run_ranks(both_ways, num_ranks=2, folder=tmp_path)
    assert relative_difference(later, {name: value.double() for name, value in now.items()}) < 1e-5


@pytest.mark.integration
def test_shards_are_exchanged_and_restored_bitwise_on_two_ranks(tmp_path):
    everything = {"scored": True, "restored": True, "live": True}
    assert run_ranks(sharded_scenario, num_ranks=2, folder=tmp_path) == [everything] * 2
