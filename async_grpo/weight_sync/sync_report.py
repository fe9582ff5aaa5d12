"""What one sync cost, and how well engines and trainer agree right after it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from async_grpo.types import (
    PublishReport,
    WeightsAck,
    WeightsSnapshot,
    canary_complaint,
    canary_differences,
)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Facts of a finished sync; every field is a metric of that name."""

    sync_batches: int
    sync_seconds: float
    sync_pause_seconds: float
    sync_bytes: int
    recomputed_tokens: int
    kept_tokens: int
    canary_max: float | None  # None: no engine has replayed a canary
    canary_mean: float | None


def summarise_sync(
    snapshot: WeightsSnapshot, report: PublishReport, *, seconds: float
) -> SyncReport:
    """Sums and maxima over the generation workers that loaded `snapshot`.

    `seconds`: from the announcement to the last acknowledgement. Nothing travels when every worker
    had the same weights under an earlier name.
    """
    received = max((ack.received_bytes for ack in report.acks), default=0) or snapshot.size_bytes
    differences = np.concatenate(
        [canary_differences(snapshot.canary, ack.canary) for ack in _replayed(snapshot, report)]
        or [np.zeros(0)]
    )
    return SyncReport(
        sync_batches=snapshot.version.batches,
        sync_seconds=seconds,
        sync_pause_seconds=max((ack.pause_seconds for ack in report.acks), default=0.0),
        sync_bytes=0 if snapshot.unchanged_since else received,
        recomputed_tokens=sum(ack.recomputed_tokens for ack in report.acks),
        kept_tokens=sum(ack.kept_tokens for ack in report.acks),
        canary_max=float(differences.max()) if differences.size else None,
        canary_mean=float(differences.mean()) if differences.size else None,
    )


def sync_complaints(snapshot: WeightsSnapshot, report: PublishReport) -> tuple[str, ...]:
    """One sentence a generation worker whose canary failed, or is beyond what rounding explains."""
    problems = [
        f"worker {ack.worker_id}: {ack.canary_problem}" for ack in report.acks if ack.canary_problem
    ]
    for ack in _replayed(snapshot, report):
        complaint = canary_complaint(snapshot.canary, ack.canary, dtype=ack.dtype)
        if complaint:
            problems.append(f"worker {ack.worker_id}: after weights {ack.version}, {complaint}")
    return tuple(problems)


def _replayed(snapshot: WeightsSnapshot, report: PublishReport) -> Iterator[WeightsAck]:
    """Acknowledgements with a score for each row; a worker that only renamed has none."""
    return (ack for ack in report.acks if len(ack.canary) == len(snapshot.canary) > 0)
