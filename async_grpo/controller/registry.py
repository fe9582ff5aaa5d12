"""The workers of one role: who can work, with which weights, under which load.

consumes:     registrations, requests for leases, snapshots of weights, answers to pings
produces:     leases on workers, through which requests and answers pass
waits for:    a worker below its capacity that serves the requested version
unblocked by: a returned lease, a registration, loaded weights
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import ray

from async_grpo.cluster import handles
from async_grpo.cluster.batched_calls import BatchedCalls
from async_grpo.config.roles import GENERATION, Role
from async_grpo.controller.balancer import Balancer, Holds
from async_grpo.controller.heartbeat import Loss, until_lost
from async_grpo.controller.leases import Lease, LeaseRequest, WaitingLine
from async_grpo.controller.members import History, Member
from async_grpo.controller.updates import Updates
from async_grpo.types import (
    EvaluationTerms,
    Hold,
    PublishReport,
    Pulse,
    Standing,
    Turn,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.util import deadlines
from async_grpo.util.errors import (
    AsyncGrpoError,
    ConfigError,
    DeadlineError,
    LeaseLost,
    LossCause,
    NoWorkerError,
    ProcessLostError,
    WorkerError,
)

if TYPE_CHECKING:
    from async_grpo.cluster.handles import WorkerHandle

logger = logging.getLogger(__name__)
UNVERSIONED = WeightsVersion(0, 0)  # of workers whose weights are not the trainer's
SHARE_OF_EVALUATIONS = 1 / 8  # of the capacity of workers that also sample for training


class WorkerRegistry:
    """The members of one role: gives leases on them, and fences lost ones."""

    def __init__(
        self,
        role: Role,
        *,
        lease_ids: Iterator[int] | None = None,
        ping_interval_s: float = deadlines.PING_S,
        kill: Callable[[object], None] = ray.kill,
    ) -> None:
        """`lease_ids` are unique among all registries; `kill` ends the process of a handle."""
        self._role = role
        self._ping_interval_s = ping_interval_s
        self._kill = kill
        self._lease_ids = lease_ids or itertools.count()
        self._balancer = Balancer()
        self._line = WaitingLine(try_acquire=self._try_acquire, release=self._release)
        self._members: dict[str, Member] = {}
        self.num_tokens = 0  # made by the workers, by their pulses
        self._lost = Counter[str]()
        self._updates = Updates(role.name, serves=self._serves, fence=self._fence)
        self._holds = Holds()
        self._rests = False  # from `rest` to the next publication
        self.history = History()
        self._aborting: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def lease(
        self,
        cost: float,
        *,
        version: WeightsVersion | None = None,
        prefer: str | None = None,
        timeout_s: float,
        moves: Callable[[], object] = int,
        terms: EvaluationTerms | None = None,
        received: Callable[[Sequence[Turn]], None] = lambda turns: None,
    ) -> AsyncIterator[Lease]:
        """A lease on the least-loaded worker that serves `version` or a later one, for the body.

        `terms`: of an evaluation, which is sampled by the engine of its hold only. `received` gets
        the turns that the worker itself requests under the lease. Raises `NoWorkerError`, saying
        what is missing, after `timeout_s` in which no worker was free, no token was made and
        `moves()` did not change. Raises `LeaseLost` inside the body, or at its end, if the worker
        is lost or makes no token for the lease within `timeout_s`.
        """
        hold = terms.hold if terms and self._role.name == GENERATION else None
        cost = cost if terms is None or terms.is_counted else 0.0
        wanted = LeaseRequest(cost, version, prefer, hold)
        try:
            lease = self._try_acquire(wanted) or await self._line.wait(
                wanted, timeout_s=timeout_s, moves=lambda: (self.num_tokens, moves())
            )
        except TimeoutError:
            raise NoWorkerError(
                f"no {self._role.name} worker was free within {timeout_s:g} s for weights "
                f"{version}: {self._describe()}"
            ) from None
        lease.terms, lease.received = terms, received
        if lease.is_valid:
            watch = self._members[lease.worker_id].watch
            watch.granted(lease.lease_id, limit_s=timeout_s)
        try:
            yield lease
            lease.check()
        except (LeaseLost, DeadlineError, asyncio.CancelledError) as error:
            is_late = isinstance(error, DeadlineError)
            cause = getattr(error, "cause", "timed out" if is_late else LossCause.OWNER)
            self._lost[f"lost_turns_{cause}"] += round(cost)
            self._lost[f"lost_tokens_{cause}"] += lease.num_tokens
            raise
        finally:
            self._release(lease)

    async def register(self, info: WorkerInfo, handle: WorkerHandle) -> None:
        """Admit a worker once it serves the current weights, if there are any yet.

        Raises the worker's error if it cannot load them, `WorkerError` if it is lost.
        """
        worker_id, who = info.worker_id, self._who(info.worker_id)
        heartbeat = asyncio.create_task(
            until_lost(
                handle,
                partial(self._heard, worker_id),
                interval_s=self._ping_interval_s,
                lease_s=info.lease_s,
                who=who,
            ),
            name=f"heartbeat-{worker_id}",
        )
        try:
            version: WeightsVersion | None = UNVERSIONED
            if self._role.loads_weights:
                version = await self._brought_up(handle, heartbeat, who=who)
            self._balancer.add_worker(
                worker_id, capacity=info.capacity, overhead=info.overhead, version=version
            )
        except BaseException:
            heartbeat.cancel()
            raise
        self._members[worker_id] = Member(info, handle, heartbeat, BatchedCalls(handle))
        self._holds.joined(worker_id, version, self._balancer.serving(None))
        heartbeat.add_done_callback(partial(self._heart_stopped, worker_id))
        self.history.note("registered", worker_id)
        logger.info("%s registered with capacity %g", who, info.capacity)
        self._line.serve()

    async def _brought_up(
        self, handle: WorkerHandle, heartbeat: asyncio.Task[Loss], *, who: str
    ) -> WeightsVersion | None:
        """Have a new worker do as the others: serve the current weights, or sleep (None)."""
        while True:
            rests, version = self._rests, None
            if rests:
                await self._asleep(handle, who)
            else:
                version = await self._updates.bring_up(handle, heartbeat, who=who)
            if rests == self._rests:
                return version

    async def rest(self) -> None:
        """Have all members give up their devices, until new weights are published.

        They get no lease meanwhile; leases that they still have end. One that does not within its
        deadline is fenced, which frees what it holds.
        """
        self._rests = True
        members = self.members
        for member in members:
            reason = "the trainer needs its devices"
            self._end_leases(member, tuple(member.leases), LossCause.SLEEP, reason)
            self._balancer.set_version(member.info.worker_id, None)
        await asyncio.gather(*map(self._put_to_sleep, members))

    async def _put_to_sleep(self, member: Member) -> None:
        worker_id = member.info.worker_id
        try:
            await self._asleep(member.handle, self._who(worker_id))
        except AsyncGrpoError as error:
            self._fence(worker_id, LossCause.SLEEP, f"it does not sleep: {error}")

    async def _asleep(self, handle: WorkerHandle, who: str) -> None:
        try:
            await handles.call(handle.sleep.remote(), timeout_s=deadlines.ENGINE_ASLEEP_S, who=who)
        except ProcessLostError as error:  # a dispatcher would take it for the controller's end
            raise WorkerError(str(error)) from None
        self.history.note("slept")

    def deregister(self, worker_id: str) -> None:
        """Forget a worker; its leases are lost."""
        if self._remove(worker_id, LossCause.LEFT, f"{self._who(worker_id)} has left"):
            self.history.note("left", worker_id)

    def drain(self, worker_id: str, *, draining: bool = True) -> None:
        """Give a worker no new work, in this run and later ones, or with False some again."""
        if worker_id in self._members:
            self._balancer.drain(worker_id, draining=draining)
            self._review_holds()
            self.history.note("drained" if draining else "undrained", worker_id)
            self._line.serve()

    @property
    def draining(self) -> tuple[str, ...]:
        """Ids of the workers that get no new work."""
        return self._balancer.draining

    def standing(self, worker_ids: Collection[str], *, run: int = 0) -> dict[str, Standing]:
        """The state of each of these workers here; `run` is the incarnation served (0: none)."""
        standing = {}
        for name in worker_ids:
            member, excluded = self._members.get(name), self.history.exclusions.get(name, "")
            num_leases = len(member.leases) if member else 0
            standing[name] = Standing(member is not None, num_leases, excluded, run)
        return standing

    def take_lost(self) -> Counter[str]:
        """Numbers of answers that were lost since the last call, and of their tokens, by cause."""
        lost, self._lost = self._lost, Counter()
        return lost

    @property
    def members(self) -> tuple[Member, ...]:
        """All admitted workers."""
        return tuple(self._members.values())

    @property
    def receivers(self) -> dict[str, Member]:
        """The members that get new weights, by id: a held one does not."""
        held = self._holds.workers
        return {name: member for name, member in self._members.items() if name not in held}

    def find_lease(self, lease_id: int) -> Lease | None:
        """The valid lease of that id."""
        found = (member.leases.get(lease_id) for member in self._members.values())
        return next(filter(None, found), None)

    async def publish(self, snapshot: WeightsSnapshot, *, timeout_s: float) -> PublishReport:
        """Have every receiver serve `snapshot`; fence those that cannot within the deadline.

        Once a member serves it, this does not wait for one that needs much longer, which gets no
        work until it has caught up. Members that rest wake.
        """
        self._rests = False
        return await self._updates.publish(snapshot, self.receivers, timeout_s=timeout_s)

    @contextlib.contextmanager
    def held(self, version: WeightsVersion) -> Iterator[Hold]:
        """One worker that serves `version` keeps it for the body, if training can spare one.

        At the end it loads the latest weights.
        """
        hold = self._holds.begin(version, self._balancer.serving(version))
        try:
            yield hold
        finally:
            self._holds.end(hold)
            if hold.worker_id:
                self._catch_up(hold.worker_id)

    def room(self, hold: Hold | None) -> float:
        """The load that an evaluation may have at a time, in the unit of the role.

        It may use the whole capacity of its own worker, but a part of those that train meanwhile.
        """
        if hold and hold.worker_id in self._members:
            return self._members[hold.worker_id].info.capacity
        whole = sum(member.info.capacity for member in self._members.values())
        return whole if hold is None else whole * SHARE_OF_EVALUATIONS

    def end_run(self) -> None:
        """Forget the run's weights, end its leases and requests, refuse waiting requests.

        No request gets a lease on weights before the next run has published some.
        """
        cause, reason = LossCause.RUN_ENDED, "the run that asked for a lease has ended"
        self._updates.snapshot, self._rests = None, False
        self._line.cancel(LeaseLost(cause, reason))
        for worker_id, member in self._members.items():
            if self._end_leases(member, tuple(member.leases), cause, reason):
                aborting = asyncio.create_task(self._abort(member), name=f"abort-{worker_id}")
                self._aborting.add(aborting)
                aborting.add_done_callback(self._aborting.discard)
            if self._role.loads_weights:
                self._balancer.set_version(worker_id, None)
        self.history.note("run ended")

    def _try_acquire(self, wanted: LeaseRequest) -> Lease | None:
        cost, version, prefer, hold = wanted
        only = hold.worker_id if hold else ""
        worker_id = self._balancer.try_acquire(cost, version, prefer, only=only)
        if worker_id is None:
            return None
        member, lease_id = self._members[worker_id], next(self._lease_ids)
        lease = Lease(lease_id, member.info, member.calls, cost, self._fence)
        member.leases[lease_id] = lease
        return lease

    def _release(self, lease: Lease) -> None:
        """Return a lease, unless it has been lost before."""
        if lease.is_valid:
            del self._members[lease.worker_id].leases[lease.lease_id]
            self._balancer.release(lease.worker_id, lease.cost)
            lease.end()
            self._line.serve()

    def _shrink(self, lease: Lease) -> None:
        """Others may have the places of outputs that have ended."""
        if lease.cuts:
            num_open = sum(not part.is_finished for part in lease.cuts[-1].parts)
            freed = max(lease.cost - num_open, 0)  # an evaluation's may cost nothing
            lease.cost -= freed
            self._balancer.release(lease.worker_id, freed)

    def _end_leases(
        self, member: Member, lease_ids: Collection[int], cause: LossCause, reason: str
    ) -> int:
        """End these leases with `LeaseLost`; return their number."""
        worker_id = member.info.worker_id
        message = f"the lease on {self._who(worker_id)} has ended: {reason}"
        for lease_id in lease_ids:
            lease = member.leases.pop(lease_id)
            self._balancer.release(worker_id, lease.cost)
            lease.end(LeaseLost(cause, message))
        self.history.note("revoked", worker_id, cause, num=len(lease_ids))
        return len(lease_ids)

    def _serves(self, worker_id: str, version: WeightsVersion) -> None:
        if worker_id in self._members and not self._rests:
            self._balancer.set_version(worker_id, version)
            self._line.serve()

    def _remove(self, worker_id: str, cause: LossCause, reason: str) -> bool:
        """Forget a worker; return whether it was a member."""
        member = self._members.pop(worker_id, None)
        if member is None:
            return False
        member.heartbeat.cancel()
        self._end_leases(member, tuple(member.leases), cause, reason)
        self._balancer.remove_worker(worker_id)
        self._review_holds()
        return True

    def _review_holds(self) -> None:
        before = self._holds.workers
        self._holds.review(self._balancer.serving(None))
        for worker_id in before - self._holds.workers:
            self._catch_up(worker_id)
        self._line.serve()

    def _catch_up(self, worker_id: str) -> None:
        if worker_id in self._members and not self._rests:
            self._updates.catch_up(self._members[worker_id])

    def _fence(self, worker_id: str, cause: LossCause, reason: str) -> None:
        member = self._members.get(worker_id)
        if member is None:
            return
        logger.warning("%s is fenced: %s", self._who(worker_id), reason)
        self.history.note("fenced", worker_id, cause, reason)
        self._remove(worker_id, cause, reason)
        # It may still work: it must not serve before it has registered again.
        self._kill(member.handle)

    def _heard(self, worker_id: str, pulse: Pulse) -> None:
        """Count the tokens that a worker has made since its last pulse; end leases without any."""
        member = self._members.get(worker_id)
        if member is None:  # it is not admitted yet
            return
        member.watch.keep(member.leases)
        self.num_tokens += member.watch.heard(pulse, seconds=self._ping_interval_s)
        for lease_id, request in (pulse.requests or {}).items():
            if lease := member.leases.get(lease_id):
                lease.heard(request)
                self._shrink(lease)
        for lease_id, reason in member.watch.dead().items():
            reason = f"stalled: {reason} (--stall-timeout-s)"
            self._end_leases(member, (lease_id,), LossCause.STALLED, reason)
        self._line.serve()

    def _heart_stopped(self, worker_id: str, heartbeat: asyncio.Task[Loss]) -> None:
        if not heartbeat.cancelled():
            self._fence(worker_id, *heartbeat.result())

    async def _abort(self, member: Member) -> None:
        """End the requests of a worker; one that cannot is found by its heartbeat."""
        call, who = member.handle.abort_all.remote(), self._who(member.info.worker_id)
        with contextlib.suppress(AsyncGrpoError):
            await handles.call(call, timeout_s=deadlines.WORK_ENDED_S, who=who)

    def _who(self, worker_id: str) -> str:
        return f"{self._role.name} worker {worker_id}"

    def _describe(self) -> str:
        latest = list(self.history.exclusions.items())[-8:]
        fenced = "; ".join(f"{name}: {why}" for name, why in latest)
        excluded = f" (excluded: {fenced})" if fenced else ""
        if not self._members:
            return "none is registered" + excluded
        snapshot = self._updates.snapshot
        serving = snapshot.version if snapshot else "none yet"
        draining = f", {num} of them draining" if (num := len(self.draining)) else ""
        asleep = ", asleep until the trainer leaves their devices" if self._rests else ""
        return (
            f"{len(self._members)} registered{draining}{asleep}, weights published: {serving}"
            f"{excluded}"
        )


def registry_with(worker_id: str, registries: Collection[WorkerRegistry]) -> WorkerRegistry:
    """The registry of a worker; raises `ConfigError` if no registry has it."""
    found = {each.info.worker_id: registry for registry in registries for each in registry.members}
    if worker_id in found:
        return found[worker_id]
    raise ConfigError(
        f"the worker must be one of {', '.join(found) or 'those that have registered'}, got "
        f"{worker_id!r}: async-grpo control RUN show lists them"
    )
