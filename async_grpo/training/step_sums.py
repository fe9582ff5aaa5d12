"""What a rank's minibatches come to, in numbers that are the same when they are trained again.

Digests are sums of integers, the bits of the numbers, made on the device: they depend on no order,
and cost one reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from async_grpo.training.step import StepResult
from async_grpo.types import EndOfStep, Minibatch, PackedMinibatch

DIGESTS = 1 << 64
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one minibatch on its rank."""

    loss: float  # plain sum, before the division by D
    weight: float  # Σ w_i m_it
    num_tokens: int  # unmasked
    gradients: int  # digest of this rank's summed gradients after it; 0: they are not reduced yet


class StepLog(Protocol):
    """Who hears of every minibatch and of every step's end; a learner has at most one."""

    def keep(
        self, minibatch: Minibatch, packed: PackedMinibatch, gradients: Sequence[Tensor]
    ) -> None:
        """A minibatch was back-propagated; what this rank's `gradients` are now."""
        ...

    def discard(self) -> None:
        """The step is not finished: all of it will come again."""
        ...

    def end_step(
        self, end: EndOfStep, result: StepResult, *, losses: Sequence[Tensor], digest: int
    ) -> None:
        """The step was taken, or skipped; `losses` are of its minibatches."""
        ...

    def take_lost(self) -> int:
        """How many minibatches could not be written since the last call."""
        ...


class StepSums:
    """Collects the sums of the current step's minibatches; nothing waits for the device."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, int, Tensor]] = []

    def keep(self, packed: PackedMinibatch, gradients: Sequence[Tensor]) -> None:
        """Add a minibatch, as it is packed for the model."""
        weight = packed.weights.double().sum()
        self._kept.append((weight, packed.target_ids.numel(), bit_sums(gradients)))

    def discard(self) -> None:
        """Forget the unfinished step."""
        self._kept = []

    def take(self, losses: Sequence[Tensor]) -> list[Sums]:
        """The sums of the step, whose minibatches had these losses; another one begins."""
        kept, self._kept = self._kept, []
        return [
            Sums(float(loss), float(weight), num_tokens, as_digest(bits))
            for (weight, num_tokens, bits), loss in zip(kept, losses, strict=True)
        ]


def weights_digest(shards: Iterable[Tensor]) -> int:
    """A number that changes with the bits of a rank's parameters.

    >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])
    >>> weights_digest([one]) == weights_digest([one.clone()])
    True
    >>> weights_digest([one]) == weights_digest([other])
    False
    >>> weights_digest([one, other]) == weights_digest([other, one])
    False
    """
    return as_digest(bit_sums(shards))


def bit_sums(tensors: Iterable[Tensor]) -> Tensor:
    """[K] int64, on their device: of each of K flat tensors the sum of its numbers' bits."""
    bits = (tensor.view(INTEGERS[tensor.element_size()]) for tensor in tensors)
    sums = [own.sum(dtype=torch.int64) for own in bits]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


def as_digest(sums: Tensor) -> int:
    """A polynomial of them: their order counts."""
    digest = 0
    for own in sums.tolist():
        digest = (digest * 0x9E3779B97F4A7C15 + own) % DIGESTS
    return digest
