"""Work on leased workers: requests, checks of answers, and retries.

consumes:     pieces of work, one at a time from each caller
produces:     a good answer, or the error that says why there is none
waits for:    leases, answers, servers that episodes need, while workers progress
unblocked by: free workers of each role
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from async_grpo.batching.failures import (
    QUARANTINE,
    VERIFICATION,
    Outages,
    Quarantine,
    SlotFailed,
    WorkProgress,
)
from async_grpo.config.roles import ENVIRONMENT, VERIFIER
from async_grpo.types import (
    Cut,
    Episode,
    EpisodesRequest,
    EvaluationTerms,
    GenerationRequest,
    LogprobRequest,
    Problem,
    Turn,
    VersionSpan,
    WeightsVersion,
)
from async_grpo.util.errors import (
    AsyncGrpoError,
    LeaseLost,
    LossCause,
    NoWorkerError,
    StaleAnswerError,
    WorkerError,
)

if TYPE_CHECKING:
    from async_grpo.controller.leases import Lease
    from async_grpo.controller.registry import WorkerRegistry

logger = logging.getLogger(__name__)
T = TypeVar("T")
ErrorTypes = tuple[type[AsyncGrpoError], ...]
Scores = NDArray[np.float32]  # [L]
Reason = Literal["worker died", "lease revoked", "stalled", "stale answer", "worker error"]
LOSSES = frozenset[Reason]({"worker died", "lease revoked", "stalled"})
# Seconds before each try, the first included, if the worker's answer made the last one fail.
TRIES_AFTER_S = (0.0, 1.0, 8.0)
# A lost worker is no fault of the work. The quarantine limits deaths; this limits other losses.
MAX_REVOCATIONS = 16
AFTER_LOSS_S = 1.0
LAST = 1  # the priority of evaluations in an engine, which decodes samples for training first


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LeasedWork(Generic[T]):
    """One request, `method(request)`, to any worker of `role` under a lease."""

    role: str
    method: str
    request: object
    cost: float  # in the unit of the role
    version: WeightsVersion | None = None  # the oldest weights that may answer; None: any
    timeout_s: float | None = None  # of the answer
    num_objects: int = 0  # values that the method returns beside its answer, see `Lease.call`
    slot: Hashable = None  # deaths of workers count against it until the work is done; None: not
    terms: EvaluationTerms | None = None  # of the evaluation that it is for
    dataset_type: str | None = None  # the work waits while a server of this type is away
    gives_up: ErrorTypes = ()  # errors after which it is not tried again
    check: Callable[[T], None] = lambda answer: None  # raises for a bad answer
    on_retry: Callable[[Reason], None] = lambda reason: None
    # (request, cost) of the next try, given the cuts of the answer that failed; None: as before.
    again: Callable[[Reason, Sequence[Cut]], tuple[object, float]] | None = None
    told: Callable[[Sequence[Cut]], None] = lambda cuts: None  # gets the cuts of the answer so far
    received: Callable[[Sequence[Turn]], None] = lambda turns: None  # gets turns of its episodes

    @property
    def stage(self) -> str:
        """The name of the work in messages and the dump."""
        return VERIFICATION if self.role == VERIFIER else self.role


class LeasedWorkers:
    """Asks workers of all roles, and another worker after a failure."""

    def __init__(
        self,
        registry_of: Callable[[str], WorkerRegistry],
        *,
        timeout_s: float,
        quarantined: Iterable[int] = (),
    ) -> None:
        """`timeout_s`: a request for a lease fails after so long without any progress.

        `quarantined`: indices of questions that are in quarantine from the start.
        """
        self.quarantine = Quarantine(quarantined)
        self.progress = WorkProgress()
        self.outages = Outages(timeout_s=timeout_s, progress=self.progress)
        self._registry_of = registry_of
        self._timeout_s = timeout_s
        self._probation = asyncio.Lock()  # held for each try of a slot on probation

    async def answer(self, work: LeasedWork[T]) -> T:
        """A good answer; with `num_objects`, a pair as in `Lease.call`.

        Raises `SlotFailed` when the tries are used up, or when workers keep dying of the work;
        `NoWorkerError` when no worker makes progress.
        """
        final: ErrorTypes = (NoWorkerError, *work.gives_up)
        attempts = Attempts(work.stage, work.slot, self.quarantine)
        try:
            while True:
                await self.outages.over(work.dataset_type)
                asked, cuts = "", list[Cut]()  # the worker's id, once there is one; what it tells
                suspect = self.quarantine.is_on_probation(work.slot)
                turn = self._probation if suspect else nullcontext()
                try:
                    async with turn, self._lease(work) as lease:
                        if self.outages.is_open(work.dataset_type):
                            continue  # the outage began while it waited for the lease
                        asked, cuts, lease.told = lease.worker_id, lease.cuts, work.told
                        answer: Any = await lease.call(
                            work.method,
                            work.request,
                            timeout_s=work.timeout_s,
                            num_objects=work.num_objects,
                        )
                        work.check(answer)
                except final:
                    raise
                except AsyncGrpoError as error:
                    self.progress.problem = Problem(work.stage, str(error), asked)
                    logger.warning("%s attempt failed: %s", work.stage, error)
                    reason, pause_s = attempts.pause_after(error)
                else:
                    self.progress.moved()
                    return answer
                work.on_retry(reason)
                if work.again:
                    request, cost = work.again(reason, cuts)
                    work = replace(work, request=request, cost=cost)
                await asyncio.sleep(pause_s)
        finally:
            self.quarantine.forget(work.slot)

    def _lease(self, work: LeasedWork[T]) -> AbstractAsyncContextManager[Lease]:
        return self._registry_of(work.role).lease(
            work.cost,
            version=work.version,
            timeout_s=self._timeout_s,
            moves=lambda: self.progress.answers,
            terms=work.terms,
            received=work.received,
        )


@dataclass(slots=True, eq=False)
class Attempts:
    """The tries of one piece of work: bad answers, lost workers and deaths have separate limits."""

    stage: str
    slot: Hashable  # deaths of workers count against it; None: this work does not cause them
    quarantine: Quarantine
    num_faults: int = 0
    num_losses: int = 0

    def pause_after(self, error: AsyncGrpoError) -> tuple[Reason, float]:
        """The reason why a try failed, and the seconds before the next one.

        Raises `SlotFailed` if no try is left, or if workers keep dying of the work.
        """
        reason = _reason(error)
        if reason == "worker died" and self.slot is not None:
            if self.quarantine.died(self.slot, weight=2 if self.stage == ENVIRONMENT else 1):
                raise SlotFailed(QUARANTINE, f"workers keep dying of it: {error}")
            return reason, AFTER_LOSS_S
        is_loss = reason in ("worker died", "lease revoked")
        self.num_losses += is_loss
        self.num_faults += not is_loss
        if self.num_faults >= len(TRIES_AFTER_S) or self.num_losses >= MAX_REVOCATIONS:
            number = self.num_losses if is_loss else self.num_faults
            sentence = f"{self.stage} failed {number} times, the last time: {error}"
            raise SlotFailed(self.stage, sentence)
        return reason, AFTER_LOSS_S if is_loss else TRIES_AFTER_S[self.num_faults]


def _reason(error: AsyncGrpoError) -> Reason:
    if isinstance(error, LeaseLost):
        if error.cause is LossCause.DIED:
            return "worker died"
        return "stalled" if error.cause is LossCause.STALLED else "lease revoked"
    return "stale answer" if isinstance(error, StaleAnswerError) else "worker error"


def check_completions(
    request: GenerationRequest, completions: tuple[Turn, ...], oldest: WeightsVersion
) -> None:
    """Raise unless all `completions` are finished, and every token is of `oldest` or later."""
    if len(completions) != request.num_samples:
        raise WorkerError(f"{len(completions)} samples came back, {request.num_samples} were asked")
    for completion in completions:
        if completion.finish_reason == "abort":
            raise WorkerError("the worker gave up the request before it was finished")
        is_sampled = np.ones(len(completion.token_ids), np.bool_)
        _check_versions(completion.weights_versions, is_sampled, oldest)


def check_episodes(request: EpisodesRequest, episodes: tuple[Episode, ...]) -> None:
    """Raise unless these are all episodes, and every token is of `request.oldest` or later."""
    if len(episodes) != request.num_samples:
        raise WorkerError(f"{len(episodes)} episodes came back, {request.num_samples} were asked")
    for episode in episodes:
        for row in episode.rows:
            is_sampled = row.loss_mask & (row.logprobs is not None)
            _check_versions(row.weights_versions, is_sampled, request.oldest)


def _check_versions(
    spans: Sequence[VersionSpan], is_sampled: NDArray[np.bool_], oldest: WeightsVersion
) -> None:
    if not covers(spans, is_sampled):
        raise WorkerError("the worker did not say of every token which weights sampled it")
    for span in spans:
        if span.version < oldest or span.version.incarnation != oldest.incarnation:
            raise StaleAnswerError(
                f"tokens of weights {span.version} came back, {oldest} or later were asked"
            )


def covers(spans: Sequence[VersionSpan], is_sampled: NDArray[np.bool_]) -> bool:
    """Whether every sampled token has exactly one version, and no other token has several."""
    ends = [0, *(span.stop for span in spans)]
    if ends == sorted(ends) and [*(s.start for s in spans), len(is_sampled)] == ends:
        return True  # the usual case: an engine's spans follow each other
    num_versions = np.zeros(len(is_sampled), np.int64)
    for span in spans:
        if not 0 <= span.start <= span.stop <= len(num_versions):
            return False
        num_versions[span.start : span.stop] += 1
    return bool((num_versions <= 1).all() and (num_versions[is_sampled] == 1).all())


def check_scores(request: LogprobRequest, scores: tuple[Scores, ...]) -> None:
    """Raise unless there is a finite score for every token."""
    lengths = [len(score) for score in scores]
    asked = [len(ids) for ids in request.output_token_ids]
    if lengths != asked:
        raise WorkerError(f"scores of outputs of {lengths} tokens came back, {asked} were asked")
    if not all(np.isfinite(score).all() for score in scores):
        raise WorkerError("reference log-probabilities must be finite, and are not")
