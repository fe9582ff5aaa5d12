"""Which questions may start: the staleness window over the endless order of ordinals. Pure.

Batch b is the slots [b*B, (b+1)*B); gradient step j of it is M of them. With `max_staleness` S,
slots of batch b may start when b - S batches have been completed and their weights published.

    S = 1, B = 4, 2 batches published:  batches 0..3 may have started, ordinals 0..15
"""

from __future__ import annotations

from typing import NamedTuple

from async_grpo.types import WeightsVersion


class StepKey(NamedTuple):
    """One gradient step of the run; keys compare in training order."""

    batch: int
    step_in_batch: int


FIRST_STEP = StepKey(0, 0)


class AdmissionWindow:
    """Hands out ordinals in order, never further ahead than the staleness window allows."""

    def __init__(
        self,
        batch_size: int,
        *,
        questions_per_step: int,
        max_staleness: int,
        num_batches: int,
        incarnation: int = 0,
        first: StepKey = FIRST_STEP,
    ) -> None:
        """`num_batches` is the length of the run, which begins or goes on with step `first`."""
        self._batch_size = batch_size
        self._questions_per_step = questions_per_step
        self.max_staleness = max_staleness  # of batches that start from now on
        self._num_batches = num_batches
        self._incarnation = incarnation
        self.batches_published = first.batch  # completed ones whose weights are out
        self.next_ordinal = self.ordinals_of(first).start  # the first slot that has not started
        self._started: dict[int, int] = {}  # by batch: the staleness under which it started

    def start(self) -> range:
        """Ordinals that may start now, in order; each is handed out once.

        >>> window = AdmissionWindow(4, questions_per_step=2, max_staleness=1, num_batches=9)
        >>> window.start(), window.start()
        (range(0, 8), range(8, 8))
        >>> window.batch_published(1)
        >>> window.start(), window.step_of(9), window.oldest_weights(9)
        (range(8, 12), StepKey(batch=2, step_in_batch=0), WeightsVersion(incarnation=0, batches=1))
        """
        num_open = min(self.batches_published + self.max_staleness + 1, self._num_batches)
        first = self.next_ordinal
        self.next_ordinal = max(first, num_open * self._batch_size)
        for batch in range(first // self._batch_size, num_open):
            self._started.setdefault(batch, self.max_staleness)
        return range(first, self.next_ordinal)

    def batch_published(self, batches_completed: int) -> None:
        """Weights with `batches_completed` batches in them are out: the window moves."""
        most = self.next_ordinal // self._batch_size
        if not self.batches_published <= batches_completed <= most:
            raise ValueError(
                f"completed batches must be in {self.batches_published}..{most} (those already "
                f"published, those fully started), got {batches_completed}"
            )
        self.batches_published = batches_completed
        for batch in [batch for batch in self._started if batch < batches_completed]:
            del self._started[batch]

    def step_of(self, ordinal: int) -> StepKey:
        batch, slot = divmod(ordinal, self._batch_size)
        return StepKey(batch, slot // self._questions_per_step)

    def ordinals_of(self, step: StepKey) -> range:
        """The slots whose samples make up one gradient step."""
        first = step.batch * self._batch_size + step.step_in_batch * self._questions_per_step
        return range(first, first + self._questions_per_step)

    def oldest_weights(self, ordinal: int) -> WeightsVersion:
        """The oldest weights that may sample this slot: what its lease asks for."""
        batch = ordinal // self._batch_size
        return WeightsVersion(self._incarnation, max(0, batch - self.staleness_of(batch)))

    def staleness_of(self, batch: int) -> int:
        """The lag that samples of a batch may have: what --max-staleness was when it started."""
        return self._started.get(batch, self.max_staleness)
