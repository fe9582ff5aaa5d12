"""When the moving reference gets which weights. Pure.

With `--num-batches-per-ref-model-update N` and staleness S, batch b is scored by the reference of
version N * floor(max(0, b - S) / N). Version v, a multiple of N, is first needed by batch v + S;
every batch before that needs an older one, so v is due when v + S batches are completed.

    S = 1, N = 2    batches completed   0  1  2  3  4  5
                    due                 0  -  -  2  -  4
"""

from __future__ import annotations

from async_grpo.types import WeightsSnapshot


class ReferenceSchedule:
    """Keeps the snapshots that the reference will need, until they are due."""

    def __init__(self, *, period: int, max_staleness: int) -> None:
        """`period`: batches between versions of the reference, N."""
        self._period = period
        self._max_staleness = max_staleness
        self._kept: dict[int, WeightsSnapshot] = {}  # by batches; their bytes live as long

    def completed(self, snapshot: WeightsSnapshot) -> WeightsSnapshot | None:
        """The weights after one more batch are `snapshot`; returns what the reference loads now.

        >>> from async_grpo.types import WeightsVersion
        >>> schedule = ReferenceSchedule(period=2, max_staleness=1)
        >>> snapshots = [WeightsSnapshot(WeightsVersion(0, batches), ()) for batches in range(6)]
        >>> due = [schedule.completed(snapshot) for snapshot in snapshots]
        >>> [str(snapshot.version) if snapshot else "-" for snapshot in due]
        ['0.0', '-', '-', '0.2', '-', '0.4']
        """
        batches = snapshot.version.batches
        if batches == 0:
            return snapshot
        if batches % self._period == 0:
            self._kept[batches] = snapshot
        return self._kept.pop(batches - self._max_staleness, None)
