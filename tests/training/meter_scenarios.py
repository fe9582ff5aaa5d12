"""What two gloo ranks do in the tests of meters: hold memory, and be late."""

import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from oracle import make_sample, sent, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from async_grpo.config.train_config import TrainConfig
from async_grpo.model.policy import PolicyModel
from async_grpo.training.fsdp import shard
from async_grpo.training.learner import Learner
from async_grpo.training.meters import Timers
from async_grpo.training.ranks import Ranks
from async_grpo.types import EndOfStep, Minibatch

SAMPLES = [[make_sample([5, 6], [7, 8, 9], ordinal=rank)] for rank in range(2)]
HELD_BYTES = 300 << 20
HELD_S, LATE_S = 1.0, 1.0
ALL_GATHER, REDUCE_SCATTER = ((dist, "all_gather_single"),), ((dist, "reduce_scatter_single"),)
UPDATING = ((torch.optim.AdamW, "step"),)
AGREEING = ((dist, "all_gather_object"), (dist, "all_gather"), (DTensor, "full_tensor"))


class Stopwatch:
    """Times torch's own functions from outside."""

    def __init__(self, functions):
        self.seconds = 0.0
        for owner, name in functions:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function):
        def timed(*args, **options):
            started = time.monotonic()
            result = function(*args, **options)
            self.seconds += time.monotonic() - started
            return result

        return timed

    def take(self):
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def steps_with_meters(rank, *, output_dir):
    """A plain step, one after memory was held, and one for which rank 1 is late."""
    Path(output_dir, f"pid{rank}").write_text(str(os.getpid()))
    mesh = init_device_mesh("cpu", (2,))
    config = TrainConfig(model_name_or_path="m", data_path="d", output_dir=output_dir)
    policy = shard(PolicyModel(tiny_model(tied=True)), mesh)
    learner = Learner(policy, config, Ranks(rank, 2, torch.device("cpu"), mesh), peak=0.25)
    watches = [
        Stopwatch(functions) for functions in (ALL_GATHER, REDUCE_SCATTER, AGREEING, UPDATING)
    ]
    plain = _step(learner, rank, 0, watches)
    held = np.ones((HELD_BYTES if rank else 0,), np.uint8)
    time.sleep(HELD_S)
    del held
    after_holding = _step(learner, rank, 1, watches)
    late = _step(learner, rank, 2, watches, late_s=LATE_S)
    return {"plain": plain, "held": after_holding, "late": late}


def _step(learner, rank, batch, watches, *, late_s=0.0):
    """Meters of a step, and what this rank's own watches say at the moment when they are read."""
    timers, watched = learner.step.timers, []

    def take():
        watched.extend(watch.take() for watch in watches)
        return Timers.take(timers)

    timers.take = take
    for work in (lambda: learner.accumulate(Minibatch(0, tuple(SAMPLES[rank]))), dist.barrier):
        if rank:
            time.sleep(late_s)
        work()
    if rank:
        time.sleep(late_s)
    end = EndOfStep(batch, 0, True, num_samples=2, num_tokens=6, sent=sent(*SAMPLES))
    result = learner.update(end)
    assert not result.skipped
    return result.meters, watched
