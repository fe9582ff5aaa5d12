"""Each rank trained exactly what it was sent of a gradient step, or the run ends before the update.

Denominators come from the batcher (`EndOfStep`), sums from the ranks: a sample that is lost or
trained twice in between would change the gradient and nothing else. Collective, once a step.
"""

from __future__ import annotations

import math

import torch.distributed as dist

from async_grpo.training.meters import Collectives
from async_grpo.types import (
    EndOfStep,
    Minibatch,
    PackedMinibatch,
    RowKey,
    Tally,
    digest_of,
)
from async_grpo.util.errors import AuditError

TOLERANCE = 1e-6  # of the weights, which are float32 where they are trained


class Audit:
    """Counts what this rank trains of the current step."""

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
