"""What gloo ranks do in `test_states_on_ranks.py`."""

import torch
import torch.distributed as dist
from fsdp_scenarios import equip
from model_families import family_model
from oracle import random_samples
from torch.distributed.device_mesh import init_device_mesh

from async_grpo.model.attention import PACKED
from async_grpo.model.collate import collate
from async_grpo.model.policy import PolicyModel
from async_grpo.training.fsdp import shard


def samples_of(family):
    import numpy as np

    twin = family_model(family, attention="eager")
    return random_samples(np.random.default_rng(1), 5, model=twin)


def uneven_step(rank, *, family):
    """The gradient of a step in which ranks have 3, 1, 1 and no sequences a minibatch."""
    policy = PolicyModel(family_model(family, attention=PACKED))
    assert policy.see_sequences_alone()
    world = dist.get_world_size()
    shard(policy, init_device_mesh("cpu", (world,)), activation_checkpointing=True)
    step, _, gradients = equip(policy)
    samples = samples_of(family)
    rounds = [[samples[:3], samples[3:4]], [samples[4:], []]]
    for parts in rounds if world == 2 else [[samples], [[]]]:
        packed = collate(
            parts[rank],
            aggregation="sample-mean",
            scores={"reference": 0},
            share_prompts=policy.shares_prompts,
            dtype=torch.float64,
        )
        step.accumulate(packed)
    step.finish(len(samples))
    return gradients[0]
