"""How a run handles work that fails: it waits for a server that is away, asks verifiers again,
excludes a question that kills workers, or ends.

consumes:     waits of episodes for a server; verdicts; deaths of workers; how slots end
produces:     a gate that holds back questions of a type whose server is away; final verdicts;
              quarantined questions; sentences for people; the error that ends a hopeless run
waits for:    verifiers, and whatever a reward is connected to, up to the stall timeout
unblocked by: a server or connection that is back; verdicts; a deadline

A worker that dies takes all its requests along, and does not say which of them killed it. A slot
with a request at two deaths is on probation: slots on probation are sampled one at a time, so that
the next death identifies the cause. After a third death its question is quarantined for the run.

    deaths   0, 1: ordinary   2: on probation   3: quarantined

With one such question, exactly that one is quarantined: it was there at every death that its
neighbours saw, so that none of them is on probation before it, and none beside it. Deaths of
another cause count too: a slot must meet three of them to be quarantined wrongly.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from async_grpo.config.roles import ENVIRONMENT
from async_grpo.environments.base import FailureClass
from async_grpo.types import OutageRequest, Problem, Verdict, VerificationRequest
from async_grpo.util.errors import ConfigError, DeadlineError, WorkerError

logger = logging.getLogger(__name__)
Requests = tuple[VerificationRequest, ...]
Verdicts = tuple[Verdict, ...]
QUARANTINE = "quarantine"  # stage of a failure: the question kills workers
VERIFICATION = "verification"  # stage of a failure: an output cannot be graded
# A batch in which no group is graded, and one failed in one of these stages, ends the run.
UNGRADED = (VERIFICATION, f"{ENVIRONMENT}: {FailureClass.ENVIRONMENT}")
PROBATION_DEATHS = 2
QUARANTINE_DEATHS = 3
MAX_CAUSES = 50  # sentences that are kept, one for each kind of failure
SHOWN_INTERVAL_S = 1.0  # between two reports of a problem: any good answer clears it
MAX_SEQUENTIAL_FAILURES = 32
# The run ends when this much of one type among several fails: few groups may fail by chance.
MAX_FAILED_BATCHES, LEAST_FAILED_GROUPS = 3, 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0  # between tries: 0.25, 0.5, 1, ... 5, 5, 5


class SlotFailed(WorkerError):
    """A group could not be finished; `stage` says where it was lost."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage

    def __reduce__(self) -> tuple[type[SlotFailed], tuple[str, str]]:
        return type(self), (self.stage, str(self))


class WorkProgress:
    """Good answers, the current problem and past failures: shared by the stages of a pipeline."""

    def __init__(self) -> None:
        self.answers = 0  # good answers of workers
        self.failures: dict[str, str] = {}  # why groups were dropped: the first of each kind
        self.problem: Problem | None = None  # why work is tried again; None when all is well

    def failed(self, kind: str, sentence: str) -> None:
        """Keep the first sentence about each kind of failure."""
        if len(self.failures) < MAX_CAUSES:
            self.failures.setdefault(kind, sentence)

    def moved(self) -> None:
        """Count a good answer; it clears the problem."""
        self.answers += 1
        self.problem = None


class Quarantine:
    """Deaths by slot, kept while the slot is open; and the questions that are excluded."""

    def __init__(self, questions: Iterable[int] = ()) -> None:
        self.questions = set(questions)  # indices of those that are not asked any more
        self._deaths = Counter[Hashable]()

    def died(self, slot: Hashable, *, weight: int = 1) -> bool:
        """A worker died while it had `slot`'s request; return whether that was once too often.

        `weight`: 2 for episodes, which are played again only once, and alone: the death of a
        worker with another request does not count against them.

        >>> quarantine = Quarantine()
        >>> quarantine.died("a"), quarantine.is_on_probation("a")
        (False, False)
        >>> quarantine.died("a"), quarantine.is_on_probation("a")
        (False, True)
        >>> quarantine.died("a")
        True
        """
        self._deaths[slot] += weight
        return self._deaths[slot] >= QUARANTINE_DEATHS

    def is_on_probation(self, slot: Hashable) -> bool:
        """Whether the slot must be sampled while no other slot on probation is."""
        return self._deaths[slot] >= PROBATION_DEATHS

    def forget(self, slot: Hashable) -> None:
        """The slot is finished, or failed."""
        self._deaths.pop(slot, None)


class Outages:
    """Servers that are away, by type of question: no group of the type starts or trains meanwhile.

    Training only the episodes that did not need the server would bias the sample.
    """

    def __init__(self, *, timeout_s: float, progress: WorkProgress) -> None:
        self.sentences: dict[str, str] = {}  # for people: the first outage of each type
        self._timeout_s = timeout_s
        self._progress = progress
        self._open = Counter[str | None]()  # by type; None: work without a type is never held back
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
        """Hold back questions of the outage's type within."""
        kind = outage.dataset_type
        if not self._open[kind]:
            whose = f" of type {kind}" if kind else ""
            sentence = (
                f"a server is away, no question{whose} is begun or trained meanwhile; it is asked "
                f"again for up to --stall-timeout-s {self._timeout_s:g}: {outage.why}"
            )
            logger.warning("%s", sentence)
            self.sentences.setdefault(kind, sentence)
        self._open[kind] += 1
        try:
            yield
        finally:
            self._open[kind] -= 1
            self._ended.set()

    async def last(self, outage: OutageRequest) -> NoReturn:
        """Hold it open until cancelled; raise `DeadlineError` after the stall timeout."""
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


class FailureLimits:
    """Counts how slots end; raises `WorkerError` once no slot succeeds any more."""

    def __init__(self, *, graded: int | None = None) -> None:
        """`graded`: a batch that may have had a graded group before the run was resumed."""
        # [of sampled slots, of given ones]: given slots that succeed must not hide that all
        # sampled ones fail.
        self._failures_in_a_row = [0, 0]
        # By open batch: the types of its graded groups, and (type, failure) of the failed ones.
        self._graded: dict[int, set[str]] = {} if graded is None else {graded: {""}}
        self._failed: dict[int, list[tuple[str, SlotFailed]]] = {}
        # By open batch: whether grammars have sampled every token so far.
        self._forced: dict[int, bool] = {} if graded is None else {graded: False}
        # By type: failures of the latest batches, a list each, while none of its groups is graded.
        self._dead: dict[str, list[list[SlotFailed]]] = {}

    def sampled(self, batch: int, *, dataset_type: str = "", is_forced: bool = False) -> None:
        """A group of this batch was graded; `is_forced`: all of it was sampled under grammars."""
        self._failures_in_a_row[False] = 0
        self._forced[batch] = is_forced and self._forced.get(batch, True)
        self._graded.setdefault(batch, set()).add(dataset_type)

    def given(self, batch: int) -> None:
        """A slot of given pairs has succeeded."""
        self._failures_in_a_row[True] = 0
        self._forced[batch] = False

    def failed(
        self, batch: int, failure: SlotFailed, *, is_given: bool, dataset_type: str = ""
    ) -> None:
        """A slot was dropped. `dataset_type` is empty for given pairs, and if there is one type."""
        self._failed.setdefault(batch, []).append((dataset_type, failure))
        self._failures_in_a_row[is_given] += 1
        if self._failures_in_a_row[is_given] >= MAX_SEQUENTIAL_FAILURES:
            raise WorkerError(
                f"{MAX_SEQUENTIAL_FAILURES} questions in a row failed, the last: {failure}"
            )

    def settled(self, batch: int) -> None:
        """All slots of a batch have ended, and the batch is about to count as trained."""
        if self._forced.pop(batch, False):
            raise ConfigError(
                f"a batch must have a token that is trained, but every one of batch {batch + 1} "
                "was sampled under a grammar: leave out --constrained-outputs, or have agents ask "
                "for JSON less often"
            )
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
    """The message of a run that ends because no sample of `of` was graded."""
    return (
        f"at least one sample must be graded, but none of {of} could be: {failure}; once that is "
        "mended, the same command goes on from the last checkpoint, or begins again"
    )


@dataclass(eq=False)
class Grading:
    """Asks verifiers, and again after a failed connection: verifiers retry all else themselves.

    `ask(requests, rewards)` has any verifier grade; it raises `SlotFailed` when none can.
    """

    ask: Callable[[Requests, tuple[str, ...]], Awaitable[Sequence[Verdict]]]
    timeout_s: float
    progress: WorkProgress
    # By kind: the first sentence about each problem that costs no group, or not yet.
    warnings: dict[tuple[str, ...], str] = field(default_factory=dict)

    async def verdicts(self, requests: Requests, *, rewards: tuple[str, ...] = ()) -> Verdicts:
        """The final verdict of each request, which may be an error.

        `rewards`: the adapters that grade; empty: those of the question's type.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        verdicts = list(await self.ask(requests, rewards))
        pause_s = FIRST_PAUSE_S
        while True:
            self._report(verdicts)
            away = [n for n, verdict in enumerate(verdicts) if verdict.cause == "connection"]
            if not away or clock() + pause_s - started > self.timeout_s:
                break
            self.progress.problem = Problem(VERIFICATION, f"reward {verdicts[away[0]].reason}")
            await asyncio.sleep(pause_s)
            again = await self.ask(tuple(requests[n] for n in away), rewards)
            for number, verdict in zip(away, again, strict=True):
                verdicts[number] = verdict
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return tuple(verdicts)

    def _report(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            kind = (verdict.adapter, verdict.status, verdict.cause, verdict.place)
            if verdict.status == "error" and verdict.cause != "connection":
                self.progress.failed(" ".join(kind), self._sentence(verdict))
            elif verdict.cause and kind not in self.warnings and len(self.warnings) < MAX_CAUSES:
                self.warnings[kind] = self._sentence(verdict)
                logger.warning("%s", self.warnings[kind])

    def _sentence(self, verdict: Verdict) -> str:
        if verdict.status == "unscorable":
            return (
                f"reward {verdict.adapter} {verdict.reason} on an output: such outputs count as "
                "unscorable, reward 0, as it grades another sample in time; raise the limit if "
                "they are innocent"
            )
        if verdict.cause == "connection":
            return (
                f"reward {verdict.reason}: a connection that it needs fails, it is asked again for "
                f"up to --stall-timeout-s {self.timeout_s:g}"
            )
        return f"reward {verdict.reason}: the groups of such outputs are dropped, and counted"


def require_graded(verdicts: Sequence[Verdict]) -> None:
    """Raise `SlotFailed` if one is an error: the whole group is lost."""
    for verdict in verdicts:
        if verdict.status == "error":
            raise SlotFailed(VERIFICATION, f"reward {verdict.reason}")
