"""What ranks hold leaves their device for the engines' turn, and comes back to the bit."""

import numpy as np
import pytest
import torch
from learners import gradient_step
from oracle import random_samples, tiny_model
from ranks import run_ranks

from async_grpo.config.train_config import TrainConfig
from async_grpo.model.collate import collate
from async_grpo.model.policy import PolicyModel
from async_grpo.model.weight_files import local_part
from async_grpo.training.fsdp import Parked, local_shards, reshard, shard
from async_grpo.training.ranks import make_mesh

CONFIG = TrainConfig(
    model_name_or_path="m", data_path="d", batch_size=8, train_minibatch_size=4,
    ratio_mode="decoupled", learning_rate=3e-2, allow_high_learning_rate=True, loss_chunksize=5,
)  # fmt: skip
STRATEGIES = (
    {},
    {"fsdp_sharding_strategy": "SHARD_GRAD_OP"},
    {"fsdp_sharding_strategy": "ZERO1"},
    {"offload": "optimizer"},
)


def trained(rank, *, parks, strategy, num_ranks=2):
    """(weights and moments after four steps, bytes that stayed while they were parked)."""
    config, model = CONFIG.but(**strategy), tiny_model(tied=True)
    policy = PolicyModel(model)
    if num_ranks > 1:
        mesh = make_mesh("cpu", num_ranks=num_ranks, shard_ranks=config.memory.shard_ranks)
        gathers = config.memory.fsdp_sharding_strategy == "SHARD_GRAD_OP"
        shard(policy, mesh, keep_gathered=gathers)
    step, left = gradient_step(policy, config), []
    samples = random_samples(np.random.default_rng(5), 16, model=tiny_model(tied=True))
    for number in range(4):
        if parks:
            reshard(policy)
            storages = [each.untyped_storage() for each in step.held]
            parked = Parked(step.held)
            left.append(sum(storage.nbytes() for storage in storages))
            parked.restore()
        own = samples[4 * number :][:4][rank::num_ranks]
        for part in (own[:1], own[1:]):
            step.accumulate(collate(part, aggregation="sample-mean"))
        assert not step.finish(4).skipped
    moments = [value for state in step.optimizer.state.values() for value in state.values()]
    return [*local_shards(policy), *map(local_part, moments)], left


def both_ways(rank, *, strategy):
    return [trained(rank, parks=parks, strategy=strategy) for parks in (False, True)]


def check(stayed, parked):
    (plain, _), (again, left) = stayed, parked
    assert left == [0] * 4
    assert len(plain) == len(again) > 0
    assert all(map(torch.equal, plain, again))


def test_a_rank_that_parks_between_its_steps_trains_the_same_bits():
    check(*(trained(0, parks=parks, strategy={}, num_ranks=1) for parks in (False, True)))


@pytest.mark.integration
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: "-".join(s.values()) or "full")
def test_shards_and_moments_are_parked_whatever_the_strategy(tmp_path, strategy):
    for rank in run_ranks(both_ways, num_ranks=2, folder=tmp_path, strategy=strategy):
        check(*rank)
