"""What a run makes of work that fails: it waits for a server that is away, excludes a question that
kills workers, or ends.

consumes:     that an episode waits for a server, for as long as it does; deaths; how slots end
produces:     a gate for groups of the type of questions whose server is away; questions in
              quarantine; sentences for people; the error that ends a run in which nothing works
waits for:    nothing
unblocked by: the end of each wait, or its deadline

A worker that dies takes all its requests along, and says not which of them did it. A slot that was
there at two deaths is on probation: slots on probation are sampled one at a time, so that the next
death tells. A further one there, and its question is quarantined for the rest of the run.

    deaths   0, 1: ordinary   2: on probation   3: quarantined

With one such question, exactly that one is quarantined: it was there at every death that its
neighbours saw, so that none of them is on probation before it, and none beside it. Deaths of
another cause count too: a slot must meet three of them to be quarantined for nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from async_grpo.config.roles import ENVIRONMENT
from async_grpo.environments.base import FailureClass
from async_grpo.types import OutageRequest, Problem
from async_grpo.util.errors import DeadlineError, WorkerError

logger = logging.getLogger(__name__)
QUARANTINE = "quarantine"  # the stage that loses a question which kills workers
VERIFICATION = "verification"  # the stage that loses what cannot be graded
# A batch of which no group comes to a grade for one of these ends the run.
UNGRADED = (VERIFICATION, f"{ENVIRONMENT}: {FailureClass.ENVIRONMENT}")
PROBATION_DEATHS = 2
QUARANTINE_DEATHS = 3
MAX_CAUSES = 50  # kept; what fails in ever new ways is known often enough by then
SHOWN_INTERVAL_S = 1.0  # an answer to others takes a problem away from the screen
MAX_SEQUENTIAL_FAILURES = 32
# Of one type among several, that a run ends at: of a rare type few groups may fail by chance.
MAX_FAILED_BATCHES, LEAST_FAILED_GROUPS = 3, 8


class SlotFailed(WorkerError):
    """A group that could not be finished; `stage` says where it was lost."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage

    def __reduce__(self) -> tuple[type[SlotFailed], tuple[str, str]]:
        return type(self), (self.stage, str(self))


class WorkProgress:
    """What has moved, and what is in the way: shared by the stages of a pipeline."""

    def __init__(self) -> None:
        self.answers = 0  # good ones, of workers
        self.failures: dict[str, str] = {}  # why groups were dropped: the first of each kind
        self.problem: Problem | None = None  # why work is being tried again; empty when all is well

    @property
    def reason(self) -> str:
        """Of the problem, for people."""
        return self.problem.reason if self.problem else ""

    def failed(self, kind: str, sentence: str) -> None:
        if len(self.failures) < MAX_CAUSES:
            self.failures.setdefault(kind, sentence)

    def moved(self) -> None:
        self.answers += 1
        self.problem = None


class Quarantine:
    """Deaths by slot, kept while the slot is open; and the questions excluded by their index."""

    def __init__(self, questions: Iterable[int] = ()) -> None:
        self._deaths: dict[Hashable, int] = {}
        self._questions = set(questions)

    def __contains__(self, question: int) -> bool:
        return question in self._questions

    @property
    def questions(self) -> tuple[int, ...]:
        """Indices of the questions that are not asked any more, in order."""
        return tuple(sorted(self._questions))

    def died(self, slot: Hashable, *, weight: int = 1) -> bool:
        """A worker died while it had `slot`'s request; whether that was once too often.

        `weight`: 2 for episodes, which are played again once: alone, so that a neighbour's death
        is not theirs.

        >>> quarantine = Quarantine()
        >>> quarantine.died("a"), quarantine.is_on_probation("a")
        (False, False)
        >>> quarantine.died("a"), quarantine.is_on_probation("a")
        (False, True)
        >>> quarantine.died("a")
        True
        """
        self._deaths[slot] = self._deaths.get(slot, 0) + weight
        return self._deaths[slot] >= QUARANTINE_DEATHS

    def is_on_probation(self, slot: Hashable) -> bool:
        """Whether the slot must be sampled while no other suspect is."""
        return self._deaths.get(slot, 0) >= PROBATION_DEATHS

    def forget(self, slot: Hashable) -> None:
        """The slot is finished, or failed."""
        self._deaths.pop(slot, None)

    def exclude(self, question: int) -> None:
        """This question is asked no more."""
        self._questions.add(question)


class Outages:
    """Servers that are away, by type of question: nothing of it starts or is trained meanwhile.

    An episode trained without what it did not need would be a selection.
    """

    def __init__(self, *, timeout_s: float, progress: WorkProgress) -> None:
        self.sentences: dict[str, str] = {}  # of the first outage of each type, for people
        self._timeout_s = timeout_s
        self._progress = progress
        self._open = Counter[str | None]()  # None: what belongs to no type never stands still
        self._ended = asyncio.Event()

    def is_open(self, dataset_type: str | None) -> bool:
        return self._open[dataset_type] > 0

    async def over(self, dataset_type: str | None) -> None:
        """Wait until no server of that type is away."""
        while self._open[dataset_type]:
            self._ended.clear()
            await self._ended.wait()

    @contextmanager
    def opened(self, outage: OutageRequest) -> Iterator[None]:
        """The type of questions stands still."""
        if not self._open[outage.dataset_type]:
            self._warn(outage)
        self._open[outage.dataset_type] += 1
        try:
            yield
        finally:
            self._open[outage.dataset_type] -= 1
            self._ended.set()

    async def last(self, outage: OutageRequest) -> NoReturn:
        """Until this is cancelled; raises `DeadlineError` when it has lasted for too long."""
        clock = asyncio.get_running_loop().time
        ends = clock() + self._timeout_s
        with self.opened(outage):
            while clock() < ends:
                self._progress.problem = Problem(ENVIRONMENT, outage.why)
                await asyncio.sleep(SHOWN_INTERVAL_S)
        raise DeadlineError(
            f"a server that episodes need must be back within --stall-timeout-s "
            f"{self._timeout_s:g}: {outage.why}; once it is, the same command goes on from the "
            "last checkpoint, or begins again"
        )

    def _warn(self, outage: OutageRequest) -> None:
        whose = f" of type {outage.dataset_type}" if outage.dataset_type else ""
        sentence = (
            f"a server is away, no question{whose} is begun or trained meanwhile; it is asked "
            f"again for up to --stall-timeout-s {self._timeout_s:g}: {outage.why}"
        )
        logger.warning("%s", sentence)
        self.sentences.setdefault(outage.dataset_type, sentence)


class FailureLimits:
    """Counts how slots end; raises `WorkerError` once nothing works any more."""

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


def nothing_graded(of: str, failure: SlotFailed) -> str:
    """Why a run ends that has nothing to learn from."""
    return (
        f"at least one sample must be graded, but none of {of} could be: {failure}; once that is "
        "mended, the same command goes on from the last checkpoint, or begins again"
    )
