"""What a rank's minibatches come to, compared with what it was sent, and with a replay of them.

Denominators come from the batcher (`EndOfStep`), sums from the ranks: a sample that is lost or
trained twice in between would change the gradient and nothing else. So each rank trained exactly
what it was sent of a gradient step, or the run ends before the update.

Digests are sums of integers, the bits of the numbers, made on the device: they depend on no order,
and cost one reading.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from async_grpo.training.meters import Collectives
from async_grpo.types import EndOfStep, Tally
from async_grpo.util.errors import AuditError

DIGESTS = 1 << 64
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
TOLERANCE = 1e-6  # of the weights, which are float32 where they are trained


def audit_step(
    end: EndOfStep, own: Tally, *, step: int, collectives: Collectives, by_tokens: bool = False
) -> None:
    """Compare what each rank has trained of a step with what it was sent and with D; collective.

    `own`: of this rank. `by_tokens`: D counts tokens.
    Raises `AuditError` on every rank, with the first rank that differs.
    """
    with collectives.agreeing():
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
