"""Leases that are held, and requests for leases that wait in line."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from async_grpo.cluster import handles
from async_grpo.controller.balancer import Hold
from async_grpo.controller.heartbeat import in_ticks
from async_grpo.types import Turn, WeightsVersion, WorkerInfo
from async_grpo.util.errors import LeaseLost, LossCause, ProcessLostError, WorkerError

if TYPE_CHECKING:
    from async_grpo.batching.leased_work import EvaluationTerms
    from async_grpo.cluster.handles import WorkerHandle

T = TypeVar("T")
TryAcquire = Callable[[float, WeightsVersion | None, str | None, Hold | None], "Lease | None"]
Line = tuple[WeightsVersion | None, Hold | None]  # what all its requests want


class Lease:
    """The right to one piece of a worker's work. An answer counts only while it is valid."""

    def __init__(
        self,
        lease_id: int,
        info: WorkerInfo,
        handle: WorkerHandle,
        *,
        cost: float,
        fence: Callable[[str, LossCause, str], None],
    ) -> None:
        """`fence` gets the worker's id, the cause and the reason when its process has died."""
        self.lease_id = lease_id
        self.worker_id = info.worker_id
        self.handle = handle
        self.cost = cost
        self.num_tokens = 0  # that its worker has told of, for an answer that has not come
        # Gets the turns that the worker itself asks for under this lease.
        self.received: Callable[[Sequence[Turn]], None] = lambda turns: None
        self.terms: EvaluationTerms | None = None  # of the evaluation that it is for
        # What the lease was lost to; None when it was returned.
        self.ended: asyncio.Future[LeaseLost | None] = asyncio.get_running_loop().create_future()
        self._who = f"{info.role} worker {info.worker_id}"
        self._fence = fence

    @property
    def is_valid(self) -> bool:
        return not self.ended.done()

    async def call(
        self, method: str, request: object, *, timeout_s: float | None = None, num_objects: int = 0
    ) -> Any:
        """The worker's answer to `method(request)`.

        Of a method that returns `num_objects` more values: (answer, references). These values stay
        where the worker made them. This process owns them: they live as long as anybody holds a
        reference, whatever becomes of the worker.

        Raises what the worker raised, `DeadlineError`, and `LeaseLost` when the lease ends first.
        The worker stops working on a request that is given up.
        """
        asked = getattr(self.handle, method)
        if not num_objects:
            return await self._answer(asked.remote(self._under(request)), timeout_s=timeout_s)
        call, *objects = asked.options(num_returns=1 + num_objects).remote(self._under(request))
        return await self._answer(call, timeout_s=timeout_s), objects

    def _under(self, request: Any) -> object:
        return replace(request, lease_id=self.lease_id) if hasattr(request, "lease_id") else request

    async def _answer(self, call: Awaitable[T], *, timeout_s: float | None = None) -> T:
        try:
            return await self.during(handles.work(call, timeout_s=timeout_s, who=self._who))
        except ProcessLostError as error:
            # One death ends all leases on the worker at this moment, this one among them.
            self._fence(self.worker_id, LossCause.DIED, str(error))
            self.check()
            raise
        except LeaseLost as error:
            self.check()  # else it is one that the worker itself had asked for
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
            task.add_done_callback(_forget)

    def check(self) -> None:
        """Raise `LeaseLost` when the lease has ended."""
        if self.ended.done():
            raise self.ended.result() or LeaseLost(LossCause.OWNER, "the lease was returned")

    def end(self, lost: LeaseLost | None = None) -> None:
        """The lease is returned, or `lost`."""
        if not self.ended.done():
            self.ended.set_result(lost)


def _forget(answer: asyncio.Future[T]) -> None:
    """Its end is of no interest any more, nor its error."""
    if not answer.cancelled():
        answer.exception()


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """One request for a lease."""

    number: int  # in the order of asking
    cost: float
    version: WeightsVersion | None
    prefer: str | None
    hold: Hold | None
    lease: asyncio.Future[Lease]

    @property
    def line(self) -> Line:
        return self.version, self.hold


class WaitingLine:
    """First come, first served; a request for weights that no worker serves lets others pass.

    Whether a worker takes more does not depend on the cost, so one refusal speaks for all requests
    for the same weights, of anybody or of a worker that is held: they stand in a line of their own,
    of which only the head is looked at.
    """

    def __init__(self, *, try_acquire: TryAcquire, release: Callable[[Lease], object]) -> None:
        """`release` gets a lease that came when its request had been given up."""
        self._try_acquire = try_acquire
        self._release = release
        self._lines: dict[Line, deque[_Waiter]] = {}
        self._numbers = itertools.count()

    async def wait(
        self,
        cost: float,
        version: WeightsVersion | None,
        prefer: str | None,
        hold: Hold | None = None,
        *,
        timeout_s: float,
        moves: Callable[[], object],
    ) -> Lease:
        """A lease, when it is this request's turn.

        Raises `TimeoutError` when it does not come for `timeout_s` in which `moves` stays the same,
        and what `cancel` was given.
        """
        granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(next(self._numbers), cost, version, prefer, hold, granted)
        self._lines.setdefault(waiter.line, deque()).append(waiter)
        before = moves()
        try:
            while not await in_ticks(waiter.lease, limit_s=timeout_s):
                if moves() == before:
                    raise TimeoutError
                before = moves()
        except BaseException:
            # A lease may have been granted at the moment in which the request was cancelled.
            if not waiter.lease.cancel() and waiter.lease.exception() is None:
                self._release(waiter.lease.result())
            raise
        return waiter.lease.result()

    def serve(self) -> None:
        """Give leases to as many as can have one now."""
        refused = set[Line]()
        while (waiter := self._first(refused)) is not None:
            lease = self._try_acquire(waiter.cost, waiter.version, waiter.prefer, waiter.hold)
            if lease is None:
                refused.add(waiter.line)
            else:
                self._lines[waiter.line].popleft()
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
