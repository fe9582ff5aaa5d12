"""A learner without a process group, and minibatches for it: one healthy, one empty, one bad."""

from dataclasses import replace

import numpy as np
import torch
from oracle import oracle_twin, random_samples, tiny_model

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.train import TrainConfig
from async_grpo.model.policy import PolicyModel
from async_grpo.training.learner import Learner
from async_grpo.training.replay import Replay
from async_grpo.training.schedule import Scheduler
from async_grpo.training.step import GradientStep, make_optimizer
from async_grpo.types import Episode, Minibatch


def make_learner(folder, **options):
    """One process, the tiny model, rank 3 by name; two steps a batch of two questions each."""
    config = TrainConfig(
        model_name_or_path="m",
        data_path="d",
        output_dir=str(folder),
        batch_size=4,
        train_minibatch_size=2,
        trackers="",
        **({"kl_coefficient": 0.1, "kl_estimator": "k2"} | options),
    )
    policy = PolicyModel(tiny_model(tied=True))
    algorithm = find_algorithm(config)
    optimizer = make_optimizer(policy, config)
    step = GradientStep(
        policy,
        optimizer=optimizer,
        scheduler=Scheduler(optimizer, config, samples_per_slot=algorithm.samples_per_slot),
        algorithm=algorithm,
        chunk_size=8,
        max_grad_norm=1.0,
    )
    replay = Replay(str(folder), rank=3)
    return Learner(config, algorithm, torch.device("cpu"), policy, step, replay)


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
