"""Work on leased workers of one role, done again elsewhere until an answer is good.

consumes:     work for one worker, and its cost
produces:     a good answer; every try whose answer could not be used, with its reason
waits for:    a lease, then the answer or the end of the lease, whichever comes first
unblocked by: a free worker, its answer, or the registry that revokes the lease
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from async_grpo.batching.quarantine import Quarantine
from async_grpo.batching.services import Service
from async_grpo.errors import (
    AsyncGrpoError,
    DeadlineError,
    ProcessLostError,
    StaleAnswerError,
    WorkerError,
)
from async_grpo.types import Lease, WeightsVersion

logger = logging.getLogger(__name__)
Reason = Literal["worker died", "lease revoked", "stalled", "stale answer", "worker error"]
Work = Callable[[Lease], Awaitable[Any]]
QUARANTINE = "quarantine"  # the stage that loses a question which kills workers
# Seconds before each try that the worker's answer was to blame for the one before.
TRIES_AFTER_S = (0.0, 1.0, 8.0)
# Workers that are lost are no fault of the work: deaths are bounded by the quarantine, these here.
MAX_REVOCATIONS = 16
# How a registry begins to say why it revoked a lease: its worker has, or no token came for it.
DIED, STALLED = "died", "stalled"
AFTER_LOSS_S = 1.0
# A dead worker is the least loaded one until its registry has missed it.
MISSED_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 60.0
LEASE_TIMEOUT_S = 7 * 24 * 3600.0  # longer than any lease: it lives as long as tokens come


class SlotFailed(WorkerError):
    """A group that could not be finished; `stage` says where it was lost."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


class Fault(NamedTuple):
    """Why an answer could not be used."""

    reason: Reason
    message: str
    is_witness: bool = False  # the worker had this work when it died


class Progress:
    """What has moved, and what is in the way: shared by the stages of a pipeline."""

    def __init__(self) -> None:
        self.answers = 0  # good ones, of workers and verifiers
        self.problem = ""  # why work is being tried again; empty when all is well

    def moved(self) -> None:
        self.answers += 1
        self.problem = ""


@dataclass(slots=True, eq=False)
class _InHand:
    """A lease that is being worked on."""

    lease: Lease
    died: asyncio.Future[Fault]  # somebody else's request met the worker's death


class LeasedWork:
    """The workers of one role, as those see them who have work for them."""

    def __init__(
        self,
        registry: Service,
        *,
        stage: str,
        timeout_s: float,
        progress: Progress,
        quarantine: Quarantine,
    ) -> None:
        self._registry = registry
        self._stage = stage
        self._timeout_s = timeout_s
        self._progress = progress
        self._quarantine = quarantine
        self._probation = asyncio.Lock()
        self._in_hand: dict[int, _InHand] = {}
        self._unwanted: set[asyncio.Future[None]] = set()  # leases on their way to nobody
        self._mourned: set[str] = set()  # workers whose death their registry has not missed yet

    async def do(
        self,
        work: Work,
        *,
        cost: float,
        version: WeightsVersion,
        slot: Hashable,
        on_retry: Callable[[Reason], None],
    ) -> Any:
        """The answer to `work(lease)`, on another lease when the first could not give a good one.

        Raises `SlotFailed` when the tries are used up, or workers keep dying of it.
        """
        tries = _Tries(self._stage)
        while True:
            async with self._turn(slot):
                outcome = await self._try(work, cost, version)
            if not isinstance(outcome, Fault):
                self._progress.moved()
                return outcome
            self._progress.problem = f"{self._stage}: {outcome.message}"
            logger.warning("%s attempt failed: %s", self._stage, outcome.message)
            if outcome.is_witness and self._quarantine.died(slot):
                raise SlotFailed(QUARANTINE, f"workers keep dying of it: {outcome.message}")
            pause_s = tries.pause_after(outcome)
            on_retry(outcome.reason)
            await asyncio.sleep(pause_s)

    @contextlib.asynccontextmanager
    async def _turn(self, slot: Hashable) -> AsyncIterator[None]:
        """At once, but for suspects: one at a time, each for as long as its try moves."""
        if not self._quarantine.is_on_probation(slot):
            yield
            return
        async with self._probation:
            yield

    async def _try(self, work: Work, cost: float, version: WeightsVersion) -> Any:
        """A good answer, or a `Fault`; the lease is given back in any case."""
        lease = await self._acquire(cost, version)
        try:
            outcome = await self._answer_or_end(work, lease)
        except BaseException:  # cancelled, or a bug: the worker must not look busy for ever
            with contextlib.suppress(AsyncGrpoError):
                await self._release(lease)
            raise
        if await self._release(lease) or isinstance(outcome, Fault):
            return outcome
        return _revoked(lease, "")

    async def _answer_or_end(self, work: Work, lease: Lease) -> Any:
        """The answer, or what ended the wait for it: the loser is cancelled."""
        hand = _InHand(lease, asyncio.get_running_loop().create_future())
        self._in_hand[lease.lease_id] = hand
        answer = asyncio.ensure_future(self._classified(work, lease))
        end = asyncio.ensure_future(self._until_revoked(lease))
        try:
            await asyncio.wait({answer, end, hand.died}, return_when=asyncio.FIRST_COMPLETED)
            first = next(one for one in (answer, hand.died, end) if one.done())
            outcome = first.result()
            if isinstance(outcome, Fault) and outcome.reason == "worker died":
                await asyncio.wait({end}, timeout=MISSED_TIMEOUT_S)
            return outcome
        finally:
            del self._in_hand[lease.lease_id]
            if hand.died.done():
                self._mourned.discard(lease.worker_id)
            for task in (answer, end, hand.died):
                task.cancel()

    async def _classified(self, work: Work, lease: Lease) -> Any:
        try:
            return await work(lease)
        except ProcessLostError as error:
            return self._mourn(lease.worker_id, str(error))
        except SlotFailed:  # whoever asks would not take a second answer either
            raise
        except StaleAnswerError as error:
            return Fault("stale answer", str(error))
        except AsyncGrpoError as error:
            return Fault("worker error", str(error))

    def _mourn(self, worker_id: str, message: str) -> Fault:
        """One death for everybody whose request the worker had, told at one moment.

        Whoever is sent to it from then on, until its registry has missed it, is no witness.
        """
        if worker_id in self._mourned:
            return Fault("worker died", message)
        self._mourned.add(worker_id)
        fault = Fault("worker died", message, is_witness=True)
        for hand in self._in_hand.values():
            if hand.lease.worker_id == worker_id and not hand.died.done():
                hand.died.set_result(fault)
        return fault

    async def _until_revoked(self, lease: Lease) -> Fault:
        try:
            reason = await self._registry.try_call(
                "until_revoked", lease.lease_id, timeout_s=LEASE_TIMEOUT_S
            )
        except AsyncGrpoError as error:
            reason = str(error)
        if reason.startswith(DIED):  # it was heard of before this worker's own error
            return self._mourn(lease.worker_id, f"worker {lease.worker_id} {reason}")
        if reason.startswith(STALLED):
            return Fault("stalled", f"worker {lease.worker_id} {reason} (--stall-timeout-s)")
        return _revoked(lease, reason)

    async def _acquire(self, cost: float, version: WeightsVersion) -> Lease:
        """A lease. The line may be long as long as it moves: by tokens, or by any answer."""
        while True:
            num_answers = self._progress.answers
            asked = asyncio.ensure_future(
                self._registry.call(
                    "acquire",
                    cost,
                    version,
                    self._timeout_s,
                    timeout_s=LEASE_TIMEOUT_S,
                    patience_s=self._timeout_s,
                )
            )
            try:
                lease: Lease = await asyncio.shield(asked)
            except DeadlineError:
                if self._progress.answers == num_answers:
                    raise
            except asyncio.CancelledError:
                self._give_back_unwanted(asked)
                raise
            else:
                return lease

    def _give_back_unwanted(self, asked: asyncio.Future[Lease]) -> None:
        """A lease may be on its way already."""

        async def give_back() -> None:
            with contextlib.suppress(AsyncGrpoError):
                await self._release(await asked)

        task = asyncio.ensure_future(give_back())
        self._unwanted.add(task)
        task.add_done_callback(self._unwanted.discard)

    async def _release(self, lease: Lease) -> bool:
        """False when the lease had been revoked: its answer must not be used.

        A registry that is lost has revoked all of its leases; one that is silent soon will be.
        """
        try:
            valid: bool = await self._registry.try_call(
                "release", lease.lease_id, timeout_s=CONTROL_TIMEOUT_S
            )
        except (ProcessLostError, DeadlineError):
            return False
        return valid


class _Tries:
    """How often one piece of work may be tried: its own faults and lost workers count apart."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._num_faults = 0
        self._num_revocations = 0

    def pause_after(self, fault: Fault) -> float:
        """Seconds before the next try; raises `SlotFailed` when there is none."""
        if fault.reason == "worker died":
            return AFTER_LOSS_S
        if fault.reason == "lease revoked":
            self._num_revocations += 1
            self._check(self._num_revocations, MAX_REVOCATIONS, fault)
            return AFTER_LOSS_S
        self._num_faults += 1
        self._check(self._num_faults, len(TRIES_AFTER_S), fault)
        return TRIES_AFTER_S[self._num_faults]

    def _check(self, number: int, limit: int, fault: Fault) -> None:
        if number >= limit:
            raise SlotFailed(
                self._stage,
                f"{self._stage} failed {number} times, the last time: {fault.message}",
            )


def _revoked(lease: Lease, reason: str) -> Fault:
    message = f"the lease on worker {lease.worker_id} was revoked"
    return Fault("lease revoked", f"{message}: {reason}" if reason else message)
