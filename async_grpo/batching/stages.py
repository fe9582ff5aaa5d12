"""How many samples are in each stage of the pipeline, and for how long none is. Pure.

A generator that has nothing to do waits for the staleness window; how long it does is the price of
a small window, or of a straggler at its edge.
"""

from __future__ import annotations

from collections import Counter

STAGES = ("generating", "verifying", "in_reference")


class StageClock:
    """Counts, and integrals of them since they were last taken. The clock is the caller's."""

    def __init__(self, now_s: float) -> None:
        self.counts = Counter(dict.fromkeys(STAGES, 0))
        self._changed_s = self._taken_s = now_s
        self._idle_s = dict.fromkeys(STAGES, 0.0)
        self._sample_s = dict.fromkeys(STAGES, 0.0)

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
        sums = {"pipeline_seconds": now_s - self._taken_s}
        for stage in STAGES:
            sums[f"{stage}_idle_seconds"] = self._idle_s[stage]
            sums[f"{stage}_seconds"] = self._sample_s[stage]
        self._taken_s = now_s
        self._idle_s = dict.fromkeys(STAGES, 0.0)
        self._sample_s = dict.fromkeys(STAGES, 0.0)
        return sums

    def _advance(self, now_s: float) -> None:
        elapsed_s = now_s - self._changed_s
        self._changed_s = now_s
        for stage, count in self.counts.items():
            self._sample_s[stage] += elapsed_s * count
            if not count:
                self._idle_s[stage] += elapsed_s
