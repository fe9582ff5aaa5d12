"""When a run in which nothing works is ended: its failures, in a row and of whole batches. Pure."""

from __future__ import annotations

from async_grpo.batching.grading import UNGRADED, nothing_graded
from async_grpo.batching.leased_work import SlotFailed
from async_grpo.util.errors import WorkerError

MAX_SEQUENTIAL_FAILURES = 32
# Of one type among several, that a run ends at: of a rare type few groups may fail by chance.
MAX_FAILED_BATCHES, LEAST_FAILED_GROUPS = 3, 8


class Hopeless:
    """Hears how slots end, and raises `WorkerError` where there is no hope left."""

    def __init__(self, *, graded: int | None = None) -> None:
        """`graded`: a batch that may have had a graded group before the run went on."""
        # By whether slots are given: where all that is sampled fails, given ones hide nothing.
        self._failures_in_a_row = [0, 0]
        # By open batch: the types of its graded groups, and (type, why) of those that failed.
        self._graded: dict[int, set[str]] = {} if graded is None else {graded: {""}}
        self._failed: dict[int, list[tuple[str, SlotFailed]]] = {}
        # By type: the failures of the latest batches, in all of which no group was graded.
        self._dead: dict[str, list[list[SlotFailed]]] = {}

    def sampled(self, batch: int, *, dataset_type: str = "") -> None:
        """A group of this batch was graded."""
        self._failures_in_a_row[False] = 0
        self._graded.setdefault(batch, set()).add(dataset_type)

    def given(self) -> None:
        """A slot of given pairs has ended well."""
        self._failures_in_a_row[True] = 0

    def failed(
        self, batch: int, failure: SlotFailed, *, is_given: bool, dataset_type: str = ""
    ) -> None:
        """A slot was dropped; it has no type where there is only one, or its pairs are given."""
        self._failed.setdefault(batch, []).append((dataset_type, failure))
        self._failures_in_a_row[is_given] += 1
        if self._failures_in_a_row[is_given] >= MAX_SEQUENTIAL_FAILURES:
            raise WorkerError(
                f"{MAX_SEQUENTIAL_FAILURES} questions in a row failed, the last: {failure}"
            )

    def settled(self, batch: int) -> None:
        """All slots of a batch have ended: it is about to be counted as trained."""
        graded, failed = self._graded.pop(batch, set()), self._failed.pop(batch, [])
        ungraded = [failure for _, failure in failed if failure.stage in UNGRADED]
        if ungraded and not graded:
            raise WorkerError(nothing_graded(f"batch {batch + 1}", ungraded[0]))
        for kind in graded:
            self._dead.pop(kind, None)
        for kind in {kind for kind, _ in failed} - graded - {""}:
            dead = self._dead.setdefault(kind, [])
            dead.append([failure for other, failure in failed if other == kind])
            num_groups = sum(map(len, dead))
            if len(dead) >= MAX_FAILED_BATCHES and num_groups >= LEAST_FAILED_GROUPS:
                of = f"the {num_groups} groups of type {kind!r} in {len(dead)} batches in a row"
                raise WorkerError(nothing_graded(of, dead[-1][-1]))
