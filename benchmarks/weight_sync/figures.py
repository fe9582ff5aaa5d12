"""What updates amount to: figures with their goals, and a table of the time by phase."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from async_grpo.weight_sync.buckets import BUCKET_BYTES
from async_grpo.weight_sync.gather import NUM_HOST_BUFFERS
from async_grpo.weight_sync.sync_report import BOUNDS
from benchmarks import results
from benchmarks.alternation import ratios
from benchmarks.results import Figure, median
from benchmarks.weight_sync.run import Sync

GOAL_PAUSE_S = 0.1  # beyond the copy itself
GOAL_STAGED_COPIES = 1.0
GOAL_BUFFERS = 1.2
BUFFERS_BYTES = NUM_HOST_BUFFERS * BUCKET_BYTES
LARGE_BYTES = 64 << 20
GIB = 2**30


def phases(sync: Sync) -> dict[str, float]:
    """Seconds of one update by what was done, in the order in which it passes."""
    timed = sync.load.phases
    serving = {
        "begin": timed["begin"],
        "fetch from the store": timed["fetch"],
        "verify and copy to the engine": timed["stage"],
        "map": timed["map"],
        "pause": timed["pause"],
        "load": timed["load"],
        "resume": timed["resume"],
    }
    trainer = {
        "gather": sync.gathering,
        "check, hash and put": max(sync.collecting - sync.gathering, 0.0),
    }
    return trainer | serving | {"canary": max(sync.serving - sum(serving.values()), 0.0)}


def show_phases(syncs: Sequence[Sync]) -> str:
    """Medians, as seconds and as bytes a second."""
    each = [phases(sync) for sync in syncs]
    rows = []
    for name in each[0]:
        seconds = statistics.median(phase[name] for phase in each)
        rate = syncs[0].size_bytes / seconds / GIB if seconds else 0.0
        rows.append((name, f"{seconds:.4f}", f"{rate:.2f}"))
    return results.table(("phase", "s", "GiB/s"), rows)


def gap_around(gaps: NDArray[np.float64], *, began_at: float, ended_at: float) -> float:
    """The longest wait of a request for its next token that overlaps [began_at, ended_at].

    >>> gaps = np.array([[1.0, 1.0], [4.0, 3.0], [4.2, 0.5], [9.0, 4.5]])
    >>> gap_around(gaps, began_at=2.0, ended_at=3.0)
    3.0
    """
    made_at, waited = gaps.T
    return float(waited[(made_at >= began_at) & (made_at - waited <= ended_at)].max())


def figures_of(title: str, syncs: Sequence[Sync]) -> list[Figure]:
    """The medians over the updates of one model."""
    figures = [*_times(title, syncs), *_pauses(title, syncs), *_memory(title, syncs)]
    canary = [sync.canary_max for sync in syncs if sync.canary_max is not None]
    if canary:
        name = f"{title}, canary, engine - trainer"
        figures.append(median(name, canary, "nats", goal=BOUNDS["float32"].largest))
    return figures


def _times(title: str, syncs: Sequence[Sync]) -> list[Figure]:
    copying = [sync.copying for sync in syncs]
    whole = [sync.collecting + sync.serving for sync in syncs]
    rates = [sync.size_bytes / seconds / GIB for sync, seconds in zip(syncs, whole, strict=True)]
    plain = [sync.size_bytes / seconds / GIB for sync, seconds in zip(syncs, copying, strict=True)]
    blocked = [sync.gathering for sync in syncs]
    return [
        median(f"{title}, plain copy", plain, "GiB/s", better="higher"),
        median(f"{title}, sync", rates, "GiB/s", better="higher"),
        median(f"{title}, sync / plain copy", ratios(whole, by=copying), "x"),
        median(f"{title}, trainer stands still", blocked, "s"),
        median(f"{title}, trainer stands still / plain copy", ratios(blocked, by=copying), "x"),
    ]


def _pauses(title: str, syncs: Sequence[Sync]) -> list[Figure]:
    """Requests wait for the pause, then for all of their caches to be computed again."""
    loads, copying = [sync.load for sync in syncs], [sync.copying for sync in syncs]
    pauses = [load.ack.pause_seconds for load in loads]
    usual = [float(np.median(load.gaps[:, 1])) for load in loads]
    seen = [gap_around(load.gaps, began_at=load.began_at, ended_at=load.ended_at) for load in loads]
    beyond = [pause - copy for pause, copy in zip(pauses, copying, strict=True)]
    seen_beyond = [gap - own - copy for gap, own, copy in zip(seen, usual, copying, strict=True)]
    recomputed = [float(load.ack.recomputed_tokens) for load in loads]
    return [
        median(f"{title}, pause of the engine", pauses, "s"),
        median(f"{title}, pause beyond a plain copy", beyond, "s", goal=GOAL_PAUSE_S),
        median(f"{title}, tokens recomputed", recomputed, "tokens"),
        median(f"{title}, usual wait for a token", usual, "s"),
        median(f"{title}, longest wait for a token", seen, "s"),
        median(
            f"{title}, longest wait beyond a usual one and a plain copy",
            seen_beyond,
            "s",
            goal=GOAL_PAUSE_S,
        ),
    ]


def _memory(title: str, syncs: Sequence[Sync]) -> list[Figure]:
    """Goals only where a model is more than what Python itself takes and gives back."""
    size, peaks = syncs[0].size_bytes, [sync.peaks for sync in syncs]
    is_large = size >= LARGE_BYTES

    def of(*roles: str, by: float) -> list[float]:
        return [sum(peak.get(role, 0) for role in roles) / by for peak in peaks]

    engine = of("worker", "worker, shared", by=size)
    store = of("object store, shared", by=size)
    trainer = of("trainer", by=min(BUFFERS_BYTES, size))
    copies, buffers = (GOAL_STAGED_COPIES, GOAL_BUFFERS) if is_large else (None, None)
    return [
        median(f"{title}, worker and engine hold more", engine, "models", goal=copies),
        median(f"{title}, object store holds more", store, "models"),
        median(f"{title}, trainer holds more", trainer, "of its buffers", goal=buffers),
        median(f"{title}, all hold more at once", of("total", by=size), "models"),
    ]
