"""What one sync cost, and whether engines and trainer agree right after it. Pure.

The canary shows the latter: fixed tokens that engine and trainer score with the same weights. They
differ by numerical mismatch alone: there is no staleness and no sampling in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from async_grpo.types import CanaryRow, PublishReport, WeightsAck, WeightsSnapshot


class Bound(NamedTuple):
    """The differences, in nats, that rounding explains."""

    largest: float  # of any token
    mean: float  # over all tokens


# In float32, log-probabilities were seen to differ by 1e-6 (4 layers) to 1.5e-5 (30 layers) in the
# mean and by less than 1e-4 at most, while an update at a learning rate of 1e-6 moves them by 2e-5
# to 2e-4 in the mean. In bfloat16 they differ by 0.02 in the mean and 0.2 at most, whether an
# update was missed or not: there `Readback` finds a missed update, and the canary a different
# computation.
BOUNDS = {"float64": Bound(1e-3, 1e-5), "float32": Bound(1e-3, 2e-5)}
LOW_PRECISION_BOUND = Bound(0.7, 0.05)
# A policy that guesses uniformly over any vocabulary scores its prompts higher than this. Below it,
# logits are so large that rounding alone moves log-probabilities by nats.
COLLAPSED_NATS = -20.0
# The probe of an adapter moves log-probabilities by nats; a wrong adapter differs by as much.
PROBE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A finished sync in numbers; every field is a metric of that name."""

    sync_batches: int
    sync_seconds: float
    sync_pause_seconds: float
    sync_bytes: int
    recomputed_tokens: int
    kept_tokens: int
    canary_max: float | None  # None: no engine has scored a canary
    canary_mean: float | None
    canary_routing_mismatch: float | None = None  # None: of a dense model, or unknown
    merge_loss: float | None = None  # None: no adapter was merged, or it changes nothing yet


def summarise_sync(
    snapshot: WeightsSnapshot, report: PublishReport, *, seconds: float
) -> SyncReport:
    """Sums and maxima over the generation workers that loaded `snapshot`.

    `seconds`: from the announcement to the last acknowledgement. `sync_bytes` is 0 when every
    worker had the same weights under an earlier version.
    """
    received = max((ack.received_bytes for ack in report.acks), default=0) or snapshot.size_bytes
    differences = np.concatenate(
        [canary_differences(snapshot.canary, ack.canary) for ack in _replayed(snapshot, report)]
        or [np.zeros(0)]
    )
    found = (routing_mismatch(snapshot.canary, ack) for ack in report.acks)
    shares = [share for share in found if share is not None]
    return SyncReport(
        sync_batches=snapshot.version.batches,
        sync_seconds=seconds,
        sync_pause_seconds=max((ack.pause_seconds for ack in report.acks), default=0.0),
        sync_bytes=0 if snapshot.unchanged_since else received,
        recomputed_tokens=sum(ack.recomputed_tokens for ack in report.acks),
        kept_tokens=sum(ack.kept_tokens for ack in report.acks),
        canary_max=float(differences.max()) if differences.size else None,
        canary_mean=float(differences.mean()) if differences.size else None,
        canary_routing_mismatch=max(shares, default=None),
        merge_loss=snapshot.merge_loss,
    )


def sync_complaints(snapshot: WeightsSnapshot, report: PublishReport) -> tuple[str, ...]:
    """A sentence for each generation worker whose canary failed, or differs beyond rounding."""
    problems = [
        f"worker {ack.worker_id}: {ack.canary_problem}" for ack in report.acks if ack.canary_problem
    ]
    for ack in _replayed(snapshot, report):
        complaint = canary_complaint(snapshot.canary, ack.canary, dtype=ack.dtype)
        if complaint:
            share = routing_mismatch(snapshot.canary, ack)
            why = f"; {share:.2%} of its choices of experts are others" if share else ""
            problems.append(
                f"worker {ack.worker_id}: after weights {ack.version}, {complaint}{why}"
            )
    return tuple(problems)


def probe_complaints(
    snapshot: WeightsSnapshot, report: PublishReport, before: Sequence[CanaryRow]
) -> list[str]:
    """A sentence for each generation worker that does not compute with the probe of an adapter.

    `before`: the trainer's scores of the canary without it. Samples of the numbers are compared in
    the worker; here, whether what it was sent has the effect that it has in the trainer.
    """
    own = [row.logprobs for row in before]
    effect = canary_differences(snapshot.canary, own).mean() if own else 0.0
    found = [
        f"worker {ack.worker_id}: {ack.canary_problem or 'it has scored no canary'}"
        for ack in report.acks
        if own and len(ack.canary) != len(own)
    ]
    for ack in _replayed(snapshot, report):
        off_by = canary_differences(snapshot.canary, ack.canary).mean()
        if not off_by <= PROBE_SHARE * effect:
            found.append(
                f"worker {ack.worker_id}: log-probabilities of fixed tokens differ from the "
                f"trainer's by {off_by:.3g} nats in the mean, where the probe moves them by "
                f"{effect:.3g}"
            )
    return found


def _replayed(snapshot: WeightsSnapshot, report: PublishReport) -> Iterator[WeightsAck]:
    """Acknowledgements with a score for each row; after a mere renaming there are none."""
    return (ack for ack in report.acks if len(ack.canary) == len(snapshot.canary) > 0)


def routing_mismatch(rows: Sequence[CanaryRow], ack: WeightsAck) -> float | None:
    """The share of a worker's choices of experts for the canary that are not the trainer's."""
    differing = total = 0
    for row, found in zip(rows, ack.canary_experts):  # noqa: B905 (none where unknown)
        for layer, own in row.experts.items():
            chosen = found[:, layer]
            differing += int((chosen[:, :, None] != own[:, None, :]).all(-1).sum())
            total += chosen.size
    return differing / total if total else None


def canary_differences(
    rows: Sequence[CanaryRow], found: Sequence[NDArray[np.float32]]
) -> NDArray[np.float64]:
    """|engine - trainer| of each of the K tokens of `rows`, [K] nats; inf where not finite."""
    with np.errstate(invalid="ignore"):
        parts = [
            np.abs(row.logprobs.astype(np.float64) - logprobs)
            for row, logprobs in zip(rows, found, strict=True)
        ]
    differences = np.concatenate(parts) if parts else np.zeros(0)
    return np.where(np.isfinite(differences), differences, np.inf)


def canary_complaint(
    rows: Sequence[CanaryRow], found: Sequence[NDArray[np.float32]], *, dtype: str
) -> str:
    """What is wrong with an engine of `dtype` whose scores of `rows` are `found`; "": nothing."""
    differences = canary_differences(rows, found)
    bound = canary_bound(dtype, *(row.dtype for row in rows))
    if not differences.size or (
        differences.max() <= bound.largest and differences.mean() <= bound.mean
    ):
        return ""
    fact = (
        f"log-probabilities of {len(differences)} fixed tokens differ from the trainer's by up to "
        f"{differences.max():.3g} nats (mean {differences.mean():.3g}) with the same weights"
    )
    mean = float(np.concatenate([row.logprobs for row in rows]).mean())
    if mean < COLLAPSED_NATS:
        return (
            f"{fact}, which says nothing of the worker: to the trainer itself they have {mean:.3g} "
            "nats a token, worse than guessing: the policy has collapsed; lower --learning-rate "
            "and start again from an earlier checkpoint"
        )
    return (
        f"{fact}, where rounding explains {bound.largest:g} (mean {bound.mean:g}): it does "
        "not serve what was sent, or computes it differently; give worker and "
        "trainer the same model folder and --dtype, or restart it"
    )


def canary_bound(*dtypes: str) -> Bound:
    """The bound for an engine and a trainer that compute in these dtypes.

    >>> canary_bound("float32", "float32")
    Bound(largest=0.001, mean=2e-05)
    >>> canary_bound("float32", "bfloat16")
    Bound(largest=0.7, mean=0.05)
    """
    return max(BOUNDS.get(dtype, LOW_PRECISION_BOUND) for dtype in dtypes)
