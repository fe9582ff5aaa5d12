"""A random batch as padding libraries see it, and what `grpo_loss.py` makes of the same batch.

Legend: B samples, T positions; a position is padding, a hole (read, not trained), or trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from oracle import loss_with, make_sample
from torch import Tensor

from async_grpo.config.train_config import TrainConfig
from async_grpo.model.collate import collate

TOLERANCE = {"rtol": 1e-12, "atol": 1e-14}


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch:
    logprobs: Tensor  # [B, T] float64, as all below
    entropies: Tensor  # [B, T]
    old: Tensor  # [B, T] policy at the start of the batch
    behaviour: Tensor  # [B, T] what the engine recorded; float32 values
    reference: Tensor  # [B, T] float32 values
    is_output: Tensor  # [B, T] int64, 0: padding
    is_own: Tensor  # [B, T] int64, 0: a hole, such as a tool's answer
    advantages: Tensor  # [B]

    @property
    def is_trained(self) -> Tensor:
        return self.is_output * self.is_own

    @property
    def num_tokens(self) -> Tensor:
        return self.is_trained.sum()

    def moved_to(self, logprobs: Tensor) -> PaddedBatch:
        """The same differences around other log-probabilities [B, T]."""
        shift = logprobs - self.logprobs
        near = {
            name: (getattr(self, name) + shift).float().double()
            for name in ("old", "behaviour", "reference")
        }
        return replace(self, logprobs=logprobs, **near)


def padded_batch(seed: int, *, count: int = 6, longest: int = 9, spread: float = 0.4):
    """Outputs of 1 to `longest` tokens with at least one trained; ratios e^±`spread` wide."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, size=(count, 1))
    own = rng.random((count, longest)) < 0.8
    own[:, 0] = True
    logprobs = -rng.exponential(1.5, (count, longest))

    def around(width: float) -> Tensor:
        near = logprobs + rng.normal(0, width, logprobs.shape)
        return torch.from_numpy(near.astype(np.float32).astype(np.float64))

    return PaddedBatch(
        logprobs=torch.from_numpy(logprobs),
        entropies=torch.from_numpy(rng.exponential(1.0, logprobs.shape)),
        old=around(spread),
        behaviour=around(spread),
        reference=around(0.5),
        is_output=torch.from_numpy(np.arange(longest) < lengths).long(),
        is_own=torch.from_numpy(own).long(),
        advantages=torch.from_numpy(rng.normal(size=count)),
    )


def leaves(batch: PaddedBatch) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies that collect gradients."""
    return batch.logprobs.clone().requires_grad_(), batch.entropies.clone().requires_grad_()


def ours(batch: PaddedBatch, config: TrainConfig, *, old: Tensor | None = None):
    """Loss over D, and its gradient by log-probability and by entropy, each [B, T]."""
    logprobs, entropies = leaves(batch)
    trained = batch.is_trained.bool()
    packed = pack(batch, config)
    if old is not None:
        packed = replace(packed, scores={**packed.scores, "old": old[trained]})
    result = loss_with(config, logprobs[trained], entropies[trained], packed)
    divisor = (
        batch.num_tokens if config.objective.aggregation == "token-mean" else len(batch.advantages)
    )
    return with_gradients(result.loss / divisor, logprobs, entropies)


def pack(batch: PaddedBatch, config: TrainConfig, *, dtype: torch.dtype = torch.float64):
    """The trained positions, row after row."""
    return collate(
        [_sample(batch, row) for row in range(len(batch.advantages))],
        aggregation=config.objective.aggregation,
        constant_length=config.objective.constant_length_samples,
        dtype=dtype,
    )


def with_gradients(loss: Tensor, logprobs: Tensor, entropies: Tensor):
    gradients = torch.autograd.grad(
        loss, (logprobs, entropies), allow_unused=True, materialize_grads=True
    )
    return loss.detach(), *gradients


def assert_same(got, expected) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


def differs(got, expected) -> bool:
    """By more than rounding, somewhere in the gradient."""
    return bool((got[1] - expected[1]).abs().max() > 1e-3)


def _sample(batch: PaddedBatch, row: int):
    length = int(batch.is_output[row].sum())
    return make_sample(
        [1],
        [2] * length,
        mask=batch.is_own[row, :length].bool().numpy(),
        behaviour=batch.behaviour[row, :length].numpy(),
        reference=batch.reference[row, :length].numpy(),
        advantage=float(batch.advantages[row]),
        ordinal=row,
    )
