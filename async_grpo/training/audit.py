"""What a rank's minibatches come to, compared with what it was sent, and with a replay of them.

Denominators come from the batcher (`EndOfStep`), sums from the ranks: a sample that is lost or
trained twice in between would change the gradient and nothing else. So each rank trained exactly
what it was sent of a gradient step, or the run ends before the update.

Digests are sums of integers, the bits of the numbers, made on the device: they depend on no order,
and cost one reading.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from async_grpo.training.meters import Collectives
from async_grpo.types import EndOfStep, Minibatch, PackedMinibatch, RowKey, Tally, digest_of
from async_grpo.util.errors import AuditError

DIGESTS = 1 << 64
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
TOLERANCE = 1e-6  # of the weights, which are float32 where they are trained


class Audit:
    """Counts what this rank trains of the current step; collective at its end."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.discard()

    def trained(self, minibatch: Minibatch, packed: PackedMinibatch) -> None:
        """Add a minibatch, as it is packed for the model."""
        self._keys += [part.key for sample in minibatch.samples for part in sample.parts()]
        self._weight += float(packed.weights.double().sum())

    def discard(self) -> None:
        """Forget the unfinished step."""
        self._keys: list[RowKey] = []
        self._weight = 0.0

    def end_step(
        self,
        end: EndOfStep,
        *,
        step: int,
        backpropagated: tuple[int, int],
        by_tokens: bool = False,
    ) -> None:
        """Compare all ranks' sums with what was sent and with D, and forget them.

        `backpropagated`: (samples, tokens) as the gradient step itself has counted them.
        `by_tokens`: D counts tokens.
        Raises `AuditError` on every rank, with the first rank that differs.
        """
        digest = digest_of(self._keys, incarnation=end.incarnation)
        own = Tally(*backpropagated, digest, self._weight)
        self.discard()
        with self._collectives.agreeing():
            found = _all_ranks(own)
        if len(end.sent) != len(found):
            raise AuditError(
                f"gradient step {step} must be sent to {len(found)} ranks, its end tells of "
                f"{len(end.sent)}: trainer and controller must be of the same release"
            )
        for rank, (trained, sent) in enumerate(zip(found, end.sent, strict=True)):
            if not _is_same(trained, sent):
                raise AuditError(
                    f"in gradient step {step} rank {rank} must train what it was sent, "
                    f"{_in_words(sent)}, but trained {_in_words(trained)}: the step is not taken; "
                    "go on from the last checkpoint, and report this error, which is a bug"
                )
        counted = sum(tally.num_tokens if by_tokens else tally.num_samples for tally in found)
        divisor = end.num_tokens if by_tokens else end.num_samples
        if counted > divisor:
            raise AuditError(
                f"the divisor of gradient step {step} must count all that was trained, {counted}, "
                f"it is {divisor}: the step is not taken; go on from the last checkpoint, and "
                "report this error, which is a bug"
            )


def _all_ranks(own: Tally) -> list[Tally]:
    if not dist.is_initialized():
        return [own]
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def _is_same(trained: Tally, sent: Tally) -> bool:
    same_weight = math.isclose(trained.weight, sent.weight, rel_tol=TOLERANCE)
    return trained[:3] == sent[:3] and same_weight


def _in_words(tally: Tally) -> str:
    return (
        f"{tally.num_samples} samples with {tally.num_tokens} tokens and weight "
        f"{tally.weight:.9g} (digest {tally.digest:016x})"
    )


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one minibatch on its rank."""

    loss: float  # plain sum, before the division by D
    weight: float  # Σ w_i m_it
    num_tokens: int  # unmasked
    gradients: int  # digest of this rank's summed gradients after it; 0: they are not reduced yet


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
