"""A learner without a process group, and minibatches for it: one healthy, one empty, one bad."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from oracle import oracle_twin, random_samples, tiny_model

from async_grpo.config.train_config import TrainConfig
from async_grpo.model.policy import PolicyModel
from async_grpo.training.learner import Learner
from async_grpo.types import Episode, Minibatch


def make_learner(folder, **options):
    """One process, the tiny model, rank 3 by name; two steps a batch of two questions each."""
    small = {"batch_size": 4, "train_minibatch_size": 2, "loss_chunksize": 8, "trackers": ""}
    penalty = {"kl_coefficient": 0.1, "kl_estimator": "k2"}
    paths = {"model_name_or_path": "m", "data_path": "d", "output_dir": str(folder)}
    config = TrainConfig(**(small | penalty | paths | options))
    ranks = SimpleNamespace(rank=3, world_size=4, device=torch.device("cpu"))
    return Learner(PolicyModel(tiny_model(tied=True)), config, ranks)


def make_minibatches():
    """A healthy one, a filler, and one whose reference holds a token impossible."""
    good = random_samples(np.random.default_rng(0), 3, model=oracle_twin(tiny_model(tied=True)))
    good = [
        replace(s, episode=Episode((replace(row, loss_mask=row.loss_mask | True),)))
        for s in good
        for row in s.episode.rows
    ]
    impossible = good[2].scores["reference"].copy()
    impossible[0] = -np.inf
    bad = replace(good[2], scores={"reference": impossible})
    return [Minibatch(0, tuple(good[:2])), Minibatch(1, ()), Minibatch(2, (bad,))]
