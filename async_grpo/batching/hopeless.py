"""When a run in which nothing works is ended: its failures, in a row and of whole batches. Pure."""

from __future__ import annotations

from async_grpo.batching.grading import UNGRADED, nothing_graded
from async_grpo.batching.leased_work import SlotFailed
from async_grpo.errors import WorkerError

MAX_SEQUENTIAL_FAILURES = 32


class Hopeless:
    """Hears how slots end, and raises `WorkerError` where there is no hope left."""

    def __init__(self, *, graded: int | None = None) -> None:
        """`graded`: a batch that may have had a graded group before the run went on."""
        # By whether slots are given: where all that is sampled fails, given ones hide nothing.
        self._failures_in_a_row = [0, 0]
        # By open batch: why it has no graded group so far; None: it has one.
        self._ungraded: dict[int, SlotFailed | None] = {}
        if graded is not None:
            self._ungraded[graded] = None

    def sampled(self, batch: int) -> None:
        """A group of this batch was graded."""
        self._failures_in_a_row[False] = 0
        self._ungraded[batch] = None

    def given(self) -> None:
        """A slot of given pairs has ended well."""
        self._failures_in_a_row[True] = 0

    def failed(self, batch: int, failure: SlotFailed, *, is_given: bool) -> None:
        """A slot was dropped."""
        if failure.stage in UNGRADED:
            self._ungraded.setdefault(batch, failure)
        self._failures_in_a_row[is_given] += 1
        if self._failures_in_a_row[is_given] >= MAX_SEQUENTIAL_FAILURES:
            raise WorkerError(
                f"{MAX_SEQUENTIAL_FAILURES} questions in a row failed, the last: {failure}"
            )

    def settled(self, batch: int) -> None:
        """All slots of a batch have ended: it is about to be counted as trained."""
        failure = self._ungraded.pop(batch, None)
        if failure is not None:
            raise WorkerError(nothing_graded(f"batch {batch + 1}", failure))
