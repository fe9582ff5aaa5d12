"""Worked examples of the loss: a few tokens in, plain numbers out."""

import math
from dataclasses import replace

import torch
from oracle import loss_with, make_config, make_sample

from async_grpo.model.collate import collate

LOG2 = math.log(2)


def make_outputs(*samples, **options):
    """(packed samples, options); a sample is the keywords of `make_sample`, by its behaviour."""
    config = make_config(**options)
    made = [make_sample([1], [2] * len(sample["behaviour"]), **sample) for sample in samples]
    packed = collate(
        made,
        aggregation=config.objective.aggregation,
        constant_length=config.objective.constant_length_samples,
        dtype=torch.float64,
    )
    return packed, config


def evaluate(logprobs, outputs, *, old=None):
    """Loss, gradient by log-probability, gradient by entropy: plain numbers."""
    packed, objective = outputs
    lp = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    entropy = torch.full_like(lp, 0.5, requires_grad=True)
    if old is not None:
        given = torch.tensor(old, dtype=torch.float64)
        packed = replace(packed, scores={**packed.scores, "old": given})
    loss = loss_with(objective, lp, entropy, packed).loss
    gradients = torch.autograd.grad(loss, (lp, entropy), allow_unused=True, materialize_grads=True)
    return loss.item(), *(gradient.tolist() for gradient in gradients)
