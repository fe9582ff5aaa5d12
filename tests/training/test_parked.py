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
from async_grpo.training.fsdp import Parked, host_memory, local_shards, reshard, shard
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


def test_what_is_parked_again_lies_in_the_same_memory():
    tensors = [torch.randn(7), torch.randn(3, 5)]
    expected = [each.clone() for each in tensors]
    first = Parked(tensors)
    first.restore()
    again = Parked(tensors, into=first.memory)
    assert again.memory is first.memory
    again.restore()
    assert all(map(torch.equal, tensors, expected))
    assert Parked([torch.randn(8)], into=first.memory).memory is not first.memory


def test_memory_of_the_host_is_one_block_and_each_tensor_has_a_storage_of_its_own():
    """A storage of all would be copied whole by whoever writes one tensor, as DCP does."""
    like = [
        torch.empty(3, 5), torch.empty(0, 4), torch.empty((), dtype=torch.int64),
        torch.empty(7, dtype=torch.uint8), torch.empty(2, 2, dtype=torch.bfloat16),
    ]  # fmt: skip
    held = host_memory(like)
    filled = [each.fill_(number + 1).clone() for number, each in enumerate(held)]
    for each, value, form in zip(held, filled, like, strict=True):
        assert (each.shape, each.dtype) == (form.shape, form.dtype)
        assert torch.equal(each, value)  # nobody else's numbers lie there
        assert each.untyped_storage().nbytes() == form.nbytes
    places = [each.data_ptr() for each in held if each.numel()]
    assert all(place % 16 == 0 for place in places)
    assert max(places) - min(places) < 64 * len(like)
    assert host_memory([]) == []


@pytest.mark.integration
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: "-".join(s.values()) or "full")
def test_shards_and_moments_are_parked_whatever_the_strategy(tmp_path, strategy):
    for rank in run_ranks(both_ways, num_ranks=2, folder=tmp_path, strategy=strategy):
        check(*rank)
