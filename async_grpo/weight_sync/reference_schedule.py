"""Which weights the moving reference loads, and when. Pure.

With `--num-batches-per-ref-model-update N` and staleness S, batch b is scored by the reference of
version N * floor(max(0, b - S) / N). Version v, a multiple of N, is first needed by batch v + S;
every batch before that needs an older one, so v is due when v + S batches are completed.

    S = 1, N = 2    batches completed   0  1  2  3  4  5
                    due                 0  -  -  2  -  4
"""

from __future__ import annotations

from async_grpo.config.sampling_options import SamplingOptions
from async_grpo.types import WeightsSnapshot


class ReferenceSchedule:
    """Keeps the snapshots that the reference will need until they are due."""

    def __init__(self, sampling: SamplingOptions) -> None:
        self._sampling = sampling
        self._kept: dict[int, WeightsSnapshot] = {}  # by batches; their bytes live as long
        self._served: WeightsSnapshot | None = None

    def completed(self, snapshot: WeightsSnapshot) -> WeightsSnapshot | None:
        """Take the weights after one more batch; returns what the reference loads now, if anything.

        >>> from async_grpo.types import WeightsVersion
        >>> options = {"num_batches_per_ref_model_update": 2, "max_staleness": 1}
        >>> schedule = ReferenceSchedule(SamplingOptions(**options))
        >>> snapshots = [WeightsSnapshot(WeightsVersion(0, batches), ()) for batches in range(6)]
        >>> due = [schedule.completed(snapshot) for snapshot in snapshots]
        >>> [str(snapshot.version) if snapshot else "-" for snapshot in due]
        ['0.0', '-', '-', '0.2', '-', '0.4']
        """
        batches = snapshot.version.batches
        if batches % self._sampling.num_batches_per_ref_model_update == 0:
            self._kept[batches] = snapshot
        due = self._sampling.reference_of(batches)
        if self._served is not None and self._served.version.batches == due:
            return None
        self._served = self._kept[due]
        self._kept = {kept: weights for kept, weights in self._kept.items() if kept > due}
        return self._served

    def restore(self, snapshot: WeightsSnapshot) -> None:
        """Take back a snapshot of `to_save`, or version 0, before a resumed run's `completed`."""
        self._kept[snapshot.version.batches] = snapshot

    def to_save(self, batches: int) -> tuple[WeightsSnapshot, ...]:
        """The snapshots that a run resumed after `batches` needs beside model folder and policy."""
        held = ([self._served] if self._served else []) + list(self._kept.values())
        return tuple(weights for weights in held if 0 < weights.version.batches < batches)
