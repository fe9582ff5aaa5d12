"""How many samples are in each stage of the pipeline, and for how long none is. Pure.

A generator that has nothing to do waits for the staleness window; how long it does is the price of
a small window, or of a straggler at its edge.
"""

from __future__ import annotations

from collections import Counter

STAGES = ("generating", "verifying", "in_reference")
NOTHING = {"pipeline_seconds": 0.0} | {
    f"{stage}_{kind}": 0.0 for stage in STAGES for kind in ("idle_seconds", "seconds")
}


class StageClock:
    """Counts, and integrals of them since they were last taken. The clock is the caller's."""

    def __init__(self, now_s: float) -> None:
        self.counts = Counter(dict.fromkeys(STAGES, 0))
        self._changed_s = now_s
        self._sums = dict(NOTHING)

    def add(self, stage: str, num_samples: int, *, now_s: float) -> None:
        """Samples enter a stage, or leave it (negative)."""
        self._advance(now_s)
        self.counts[stage] += num_samples

    def take(self, now_s: float) -> dict[str, float]:
        """Seconds since the last call, and of these, for each stage: idle ones, sample-seconds.

        >>> clock = StageClock(0.0)
        >>> clock.add("generating", 8, now_s=1.0)
        >>> clock.add("generating", -8, now_s=3.0)
        >>> sums = clock.take(4.0)
        >>> sums["pipeline_seconds"], sums["generating_idle_seconds"], sums["generating_seconds"]
        (4.0, 2.0, 16.0)
        """
        self._advance(now_s)
        sums, self._sums = self._sums, dict(NOTHING)
        return sums

    def _advance(self, now_s: float) -> None:
        elapsed_s = now_s - self._changed_s
        self._changed_s = now_s
        self._sums["pipeline_seconds"] += elapsed_s
        for stage, count in self.counts.items():
            self._sums[f"{stage}_seconds"] += elapsed_s * count
            if not count:
                self._sums[f"{stage}_idle_seconds"] += elapsed_s
