"""A learner without a process group, minibatches for it (one healthy, one empty, one bad), and the
steps that a recorder makes of them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from oracle import oracle_twin, random_samples, tiny_model

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.train_config import TrainConfig
from async_grpo.model.collate import collate
from async_grpo.model.policy import PolicyModel
from async_grpo.training.learner import Learner
from async_grpo.training.minibatch_codec import without_too_large
from async_grpo.training.minibatch_log import Trained, TrainedStep, bit_sums
from async_grpo.training.recorder import writers_of
from async_grpo.training.schedule import Clocks
from async_grpo.training.step import NON_FINITE, GradientStep, StepResult
from async_grpo.types import EndOfStep, Episode, Minibatch


def make_learner(folder, **options):
    """One process, the tiny model, rank 3 by name; two steps a batch of two questions each."""
    small = {"batch_size": 4, "train_minibatch_size": 2, "loss_chunksize": 8, "trackers": ""}
    penalty = {"kl_coefficient": 0.1, "kl_estimator": "k2"}
    paths = {"model_name_or_path": "m", "data_path": "d", "output_dir": str(folder)}
    config = TrainConfig(**(small | penalty | paths | options))
    ranks = SimpleNamespace(rank=3, world_size=4, device=torch.device("cpu"))
    learner = Learner(PolicyModel(tiny_model(tied=True)), config, ranks)
    writers = writers_of(config.recording, ranks, first=0, options=config.options())
    learner.recorder.begin(*writers)
    return learner


def trained_step(*minibatches, batch=0, number=1, suspects=(), loss=0.1, num_tokens=3):
    """One step a batch, as whoever writes it is handed it."""
    kept = []
    for minibatch in minibatches:
        small, left_out = without_too_large(minibatch)
        packed = collate(minibatch.samples, aggregation="sample-mean")
        gradients = bit_sums([torch.tensor([1.0, batch])])
        weight, count = packed.weights.double().sum(), packed.target_ids.numel()
        own = torch.tensor(loss if minibatch.samples else 0.1)
        kept.append(Trained(small, left_out, count, weight, own, gradients, None))
    end = EndOfStep(batch, 0, True, num_samples=1, num_tokens=num_tokens)
    skipped = NON_FINITE if suspects else ""
    result = StepResult(skipped, 0.1, 1e-6, 1, Clocks(1, 2, 3), suspects=suspects)
    return TrainedStep(number, end, kept, result, digest=batch)


def gradient_step(policy, config):
    """The step of a run with these options."""
    return GradientStep(
        policy, find_algorithm(config), options=config.optimizer, batching=config.batching,
        memory=config.memory,
    )  # fmt: skip


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
