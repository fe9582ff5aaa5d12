"""What two gloo ranks do in the tests of meters: hold memory, and be late."""

import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from oracle import make_sample, sent, tiny_model
from torch.distributed.device_mesh import init_device_mesh

from async_grpo.config.train import TrainConfig
from async_grpo.model.policy import PolicyModel
from async_grpo.training.fsdp import shard
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Ranks
from async_grpo.types import EndOfStep, Minibatch

SAMPLES = [[make_sample([5, 6], [7, 8, 9], ordinal=rank)] for rank in range(2)]
HELD_BYTES = 300 << 20
HELD_S, LATE_S = 1.0, 1.5


def steps_with_meters(rank, *, output_dir):
    """Meters of a plain step, of one after memory was held, and of one for which rank 1 is late."""
    Path(output_dir, f"pid{rank}").write_text(str(os.getpid()))
    mesh = init_device_mesh("cpu", (2,))
    config = TrainConfig(model_name_or_path="m", data_path="d", output_dir=output_dir)
    policy = shard(PolicyModel(tiny_model(tied=True)), mesh)
    learner = Learner(policy, config, Ranks(rank, 2, torch.device("cpu"), mesh), peak=0.25)
    plain = _step(learner, rank, 0)
    held = np.ones((HELD_BYTES if rank else 0,), np.uint8)
    time.sleep(HELD_S)
    del held
    after_holding = _step(learner, rank, 1)
    delays = [[], []]
    late = _step(learner, rank, 2, delays=delays)
    return {"plain": plain, "held": after_holding, "late": late, "stamps": delays}


def _step(learner, rank, batch, *, delays=None):
    _meet(rank, delays and delays[0])
    learner.accumulate(Minibatch(0, tuple(SAMPLES[rank])))
    _meet(rank, delays and delays[1])
    end = EndOfStep(batch, 0, True, num_samples=2, num_tokens=6, sent=sent(*SAMPLES))
    result = learner.update(end)
    assert not result.skipped
    return result.meters


def _meet(rank, stamps):
    """All ranks begin at once, but for one that is to be late; when they did, by one clock."""
    if stamps is None:
        return
    dist.barrier()
    if rank:
        time.sleep(LATE_S)
    stamps.append(time.monotonic())
