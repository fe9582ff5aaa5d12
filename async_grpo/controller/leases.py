"""Leases on workers, and the line of requests that wait for one."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from async_grpo.cluster import handles
from async_grpo.cluster.batched_calls import BatchedCalls
from async_grpo.controller.heartbeat import in_ticks
from async_grpo.types import (
    Cut,
    EvaluationTerms,
    Hold,
    RequestPulse,
    Turn,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.util.errors import LeaseLost, LossCause, ProcessLostError, WorkerError
from async_grpo.util.waiting import forget

T = TypeVar("T")
Line = tuple[WeightsVersion | None, Hold | None]  # of requests for the same weights and hold
Fence = Callable[[str, LossCause, str], None]  # gets the worker's id, the cause and the reason


class LeaseRequest(NamedTuple):
    """What a request for a lease asks for."""

    cost: float  # in the unit of the role
    version: WeightsVersion | None = None  # of these weights, or later ones; None: of any
    prefer: str | None = None  # the id of a worker that is taken if it qualifies
    hold: Hold | None = None  # whose worker alone qualifies, if it has one

    @property
    def line(self) -> Line:
        return self.version, self.hold


@dataclass(slots=True, eq=False)
class Lease:
    """The right to one piece of a worker's work. An answer counts only while it is valid."""

    lease_id: int
    info: WorkerInfo
    calls: BatchedCalls
    cost: float
    fence: Fence  # called when the worker's process has died
    num_tokens: int = 0  # of the answer under way and in no cut, by the worker's latest pulse
    cuts: list[Cut] = field(default_factory=list)  # of the answer, from the first on
    _num_cut: int = 0  # tokens that its open outputs had at the last one
    # Gets the turns that the worker itself requests under this lease.
    received: Callable[[Sequence[Turn]], None] = lambda turns: None
    told: Callable[[Sequence[Cut]], None] = lambda cuts: None  # gets the cuts after each
    terms: EvaluationTerms | None = None  # of the evaluation that it is for
    # Done when the lease has ended: the loss, or None if it was returned.
    ended: asyncio.Future[LeaseLost | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def is_valid(self) -> bool:
        return not self.ended.done()

    async def call(
        self, method: str, request: object, *, timeout_s: float | None = None, num_objects: int = 0
    ) -> Any:
        """The worker's answer to `method(request)`.

        If the method returns `num_objects` more values: (answer, references). These values stay
        where the worker made them, and this process owns them: they live as long as a reference
        does, even if the worker ends.

        Raises the worker's error, `DeadlineError`, and `LeaseLost` when the lease ends first. The
        worker stops working on a request that is given up.
        """
        request = self._under(request)
        if not num_objects:
            return await self._answer(self.calls.ask(method, request), timeout_s=timeout_s)
        asked = getattr(self.calls.handle, method).options(num_returns=1 + num_objects)
        call, *objects = asked.remote(request)
        return await self._answer(call, timeout_s=timeout_s), objects

    def _under(self, request: Any) -> object:
        return replace(request, lease_id=self.lease_id) if hasattr(request, "lease_id") else request

    async def _answer(self, call: Awaitable[T], *, timeout_s: float | None = None) -> T:
        who = f"{self.info.role} worker {self.worker_id}"
        try:
            return await self.during(handles.work(call, timeout_s=timeout_s, who=who))
        except ProcessLostError as error:
            # The fence ends all leases on the worker at once, this one among them.
            self.fence(self.worker_id, LossCause.DIED, str(error))
            self.check()
            raise
        except LeaseLost as error:
            self.check()  # it is still valid: the worker has lost a lease that it requested itself
            raise WorkerError(str(error)) from error

    async def during(self, work: Coroutine[object, object, T]) -> T:
        """What `work` returns; `LeaseLost` when the lease ends first, which ends the work."""
        task = asyncio.ensure_future(work)
        waited: set[asyncio.Future[Any]] = {task, self.ended}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            return task.result()
        finally:
            task.cancel()
            task.add_done_callback(forget)

    def heard(self, pulse: RequestPulse) -> None:
        """Take the worker's news of the answer. What a missed pulse has told is not known."""
        if pulse.cut and pulse.cut.number == len(self.cuts):
            self.cuts.append(pulse.cut)
            self._num_cut = pulse.num_tokens
            self.told(self.cuts)
        self.num_tokens = max(pulse.num_tokens - self._num_cut, 0)

    def check(self) -> None:
        """Raise `LeaseLost` when the lease has ended."""
        if self.ended.done():
            raise self.ended.result() or LeaseLost(LossCause.OWNER, "the lease was returned")

    def end(self, lost: LeaseLost | None = None) -> None:
        """The lease is returned, or `lost`."""
        if not self.ended.done():
            self.ended.set_result(lost)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """One request for a lease."""

    number: int  # in the order of the requests
    wanted: LeaseRequest
    lease: asyncio.Future[Lease]


@dataclass(slots=True, eq=False)
class WaitingLine:
    """First come, first served; a request for weights that no worker serves lets others pass.

    Whether a worker takes more does not depend on the cost, so one refusal holds for all requests
    for the same weights and hold: they form a line, of which only the head is tried.
    """

    try_acquire: Callable[[LeaseRequest], Lease | None]
    release: Callable[[Lease], object]  # gets a lease that was granted to a cancelled request
    _lines: dict[Line, deque[_Waiter]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def wait(
        self, wanted: LeaseRequest, *, timeout_s: float, moves: Callable[[], object]
    ) -> Lease:
        """A lease, when it is this request's turn.

        Raises `TimeoutError` after `timeout_s` in which `moves()` did not change, and the error
        that `cancel` was given.
        """
        granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(next(self._numbers), wanted, granted)
        self._lines.setdefault(wanted.line, deque()).append(waiter)
        before = moves()
        try:
            while not await in_ticks(waiter.lease, limit_s=timeout_s):
                if moves() == before:
                    raise TimeoutError
                before = moves()
        except BaseException:
            # A lease may have been granted at the moment in which the request was cancelled.
            if not waiter.lease.cancel() and waiter.lease.exception() is None:
                self.release(waiter.lease.result())
            raise
        return waiter.lease.result()

    def serve(self) -> None:
        """Give leases to as many as can have one now."""
        refused = set[Line]()
        while (waiter := self._first(refused)) is not None:
            lease = self.try_acquire(waiter.wanted)
            if lease is None:
                refused.add(waiter.wanted.line)
            else:
                self._lines[waiter.wanted.line].popleft()
                waiter.lease.set_result(lease)

    def cancel(self, error: Exception) -> None:
        """All requests get `error`."""
        for waiter in itertools.chain.from_iterable(self._lines.values()):
            if not waiter.lease.done():
                waiter.lease.set_exception(error)
        self._lines.clear()

    def _first(self, without: Collection[Line]) -> _Waiter | None:
        """The oldest request that has not been given up."""
        for wanted in [wanted for wanted in self._lines if wanted not in without]:
            line = self._lines[wanted]
            while line and line[0].lease.done():
                line.popleft()
            if not line:
                del self._lines[wanted]
        heads = [line[0] for wanted, line in self._lines.items() if wanted not in without]
        return min(heads, key=lambda waiter: waiter.number, default=None)
