"""What ranks do in `test_from_nothing.py`: a supervised run, or the sentence that refuses it."""

import logging

import torch
import torch.distributed as dist

from async_grpo.config.train_config import TrainConfig
from async_grpo.run.loop import train_sft
from async_grpo.training.ranks import Ranks, make_mesh
from async_grpo.util.errors import AsyncGrpoError


def trained(rank, *, lives):
    """The error of each run of these options, one after the other; empty where there is none."""
    logging.disable(logging.WARNING)
    num_ranks = dist.get_world_size()
    errors = []
    for options in lives:
        mesh = make_mesh("cpu", num_ranks=num_ranks, shard_ranks=0)
        try:
            train_sft(TrainConfig(**options), Ranks(rank, num_ranks, torch.device("cpu"), mesh))
            errors.append("")
        except AsyncGrpoError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors
