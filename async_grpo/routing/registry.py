"""The membership of one role: who can work, with which weights, under which load.

consumes:     registrations, requests for leases, snapshots of weights, answers to its pings
produces:     leases on workers (samples then travel straight to the worker, never through here)
waits for:    a worker below its capacity that serves the version asked for
unblocked by: a release, a registration, a committed snapshot
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import ray

from async_grpo import cluster
from async_grpo.errors import AsyncGrpoError, DeadlineError, SnapshotLostError, WorkerError
from async_grpo.routing.balancer import Balancer
from async_grpo.routing.waiting import WaitingLine
from async_grpo.types import (
    Lease,
    PublishReport,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)

logger = logging.getLogger(__name__)
PING_INTERVAL_S = 5.0
PING_TIMEOUT_S = 60.0
IDLE_EXIT_S = 120.0
LOAD_TIMEOUT_S = 600.0
NUM_EXCLUSIONS_KEPT = 16


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that is admitted."""

    info: WorkerInfo
    handle: Any


class WorkerRegistry:
    """The control plane of one role; pure decisions are the `Balancer`'s.

    It ends itself when it has had no member for `idle_exit_s` and nobody has asked for anything.
    """

    def __init__(
        self,
        role: str,
        *,
        ping_interval_s: float = PING_INTERVAL_S,
        idle_exit_s: float = IDLE_EXIT_S,
    ) -> None:
        self._role = role
        self._ping_interval_s = ping_interval_s
        self._idle_exit_s = idle_exit_s
        self._balancer = Balancer()
        self._members: dict[str, Member] = {}
        self._line = WaitingLine()
        self._snapshot: WeightsSnapshot | None = None
        self._fenced: dict[str, str] = {}
        self._last_sign_of_life = time.monotonic()
        self._monitor: asyncio.Task[None] | None = None

    async def touch(self) -> None:
        """Somebody needs the registry, or is about to."""
        self._last_sign_of_life = time.monotonic()
        if self._monitor is None:
            self._monitor = asyncio.create_task(self._watch(), name=f"{self._role}-monitor")

    async def register(self, info: WorkerInfo, handle: Any) -> None:
        """Admit a worker once it serves the current weights, if there are any yet.

        Raises what the worker raised when it cannot load them.
        """
        await self.touch()
        version = await self._load_current(handle, who=self._who(info.worker_id))
        self._members[info.worker_id] = Member(info, handle)
        self._admit(info, version=version)
        logger.info("%s registered with capacity %g", self._who(info.worker_id), info.capacity)
        self._line.serve(self._try_acquire)

    async def deregister(self, worker_id: str) -> None:
        """Forget a worker; its leases are revoked."""
        self._remove(worker_id)

    async def drain(self, worker_id: str) -> None:
        """Give a worker no new work; what it has is finished."""
        self._balancer.drain(worker_id)

    async def acquire(self, cost: float, version: WeightsVersion | None, timeout_s: float) -> Lease:
        """A lease on the least-loaded worker that serves `version` or a later one.

        `cost` is in sequences for generation and tokens for log-probabilities. Raises
        `DeadlineError`, saying what was missing, when nobody could take the work in time.
        """
        await self.touch()
        lease = self._try_acquire(cost, version)
        if lease is not None:
            return lease
        try:
            return await self._line.wait(cost, version, timeout_s=timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"no {self._role} worker was free within {timeout_s:g} s for weights "
                f"{version}: {self._describe()}"
            ) from None

    async def release(self, lease_id: int) -> bool:
        """Return a lease; False when it had been revoked, and the answer must not be used."""
        valid = self._balancer.release(lease_id)
        self._line.serve(self._try_acquire)
        return valid

    async def publish(self, snapshot: WeightsSnapshot, timeout_s: float) -> PublishReport:
        """Have every member serve `snapshot`; fence those that cannot within the deadline."""
        await self.touch()
        self._snapshot = snapshot
        members = list(self._members.values())
        outcomes = await asyncio.gather(*(self._load(m, snapshot, timeout_s) for m in members))
        acks = tuple(o for o in outcomes if isinstance(o, WeightsAck))
        failures = {
            member.info.worker_id: outcome
            for member, outcome in zip(members, outcomes, strict=True)
            if isinstance(outcome, str)
        }
        return PublishReport(snapshot.version, acks, failures)

    async def begin_run(self) -> None:
        """Nobody gets a lease before the new run has published weights.

        What an earlier run that crashed has left behind is forgotten, as by `end_run`.
        """
        await self.end_run()

    async def end_run(self) -> None:
        """Forget the run's weights, revoke its leases, end its requests, refuse who still waits."""
        await self.touch()
        self._snapshot = None
        self._line.end(WorkerError("the run that asked for a lease has ended"))
        for member in self._members.values():
            self._balancer.remove_worker(member.info.worker_id)
            self._admit(member.info, version=None)
            member.handle.abort_all.remote()

    async def members(self) -> tuple[WorkerInfo, ...]:
        """Everyone admitted; asking for them keeps the registry alive."""
        await self.touch()
        return tuple(member.info for member in self._members.values())

    async def receivers(self) -> tuple[tuple[WorkerInfo, Any], ...]:
        """Everyone admitted, with its handle: weights that come over devices go there directly."""
        return tuple((member.info, member.handle) for member in self._members.values())

    async def fenced(self) -> dict[str, str]:
        """The latest workers that were excluded, with the reason."""
        return dict(self._fenced)

    async def _load_current(self, handle: Any, *, who: str) -> WeightsVersion | None:
        """The version that a newcomer serves, after loading what is published at this moment."""
        loaded: WeightsVersion | None = None
        while self._snapshot is not None and loaded != self._snapshot.version:
            snapshot = self._snapshot
            call = handle.load_weights.remote(snapshot)
            try:
                await cluster.call(call, timeout_s=LOAD_TIMEOUT_S, who=who)
            except SnapshotLostError:
                self._forget(snapshot)
            else:
                loaded = snapshot.version
        return loaded if self._snapshot is not None else None

    async def _load(
        self, member: Member, snapshot: WeightsSnapshot, timeout_s: float
    ) -> WeightsAck | str:
        worker_id = member.info.worker_id
        try:
            ack: WeightsAck = await cluster.call(
                member.handle.load_weights.remote(snapshot),
                timeout_s=timeout_s,
                who=self._who(worker_id),
            )
        except SnapshotLostError as error:  # the trainer's end, not the worker's fault
            self._forget(snapshot)
            return str(error)
        except AsyncGrpoError as error:
            self._fence(worker_id, str(error))
            return str(error)
        if worker_id in self._members and self._snapshot is snapshot:
            self._balancer.set_version(worker_id, snapshot.version)
            self._line.serve(self._try_acquire)
        return ack

    def _forget(self, snapshot: WeightsSnapshot) -> None:
        if self._snapshot is snapshot:
            logger.info("weights %s are forgotten: their trainer has ended", snapshot.version)
            self._snapshot = None

    def _try_acquire(self, cost: float, version: WeightsVersion | None) -> Lease | None:
        grant = self._balancer.try_acquire(cost, version)
        if grant is None:
            return None
        handle = self._members[grant.worker_id].handle
        return Lease(grant.lease_id, grant.worker_id, handle, cost, grant.version)

    def _admit(self, info: WorkerInfo, *, version: WeightsVersion | None) -> None:
        self._balancer.add_worker(
            info.worker_id, capacity=info.capacity, overhead=info.overhead, version=version
        )

    def _remove(self, worker_id: str) -> None:
        if self._members.pop(worker_id, None) is not None:
            self._balancer.remove_worker(worker_id)

    def _fence(self, worker_id: str, reason: str) -> None:
        member = self._members.get(worker_id)
        if member is None:
            return
        logger.warning("%s is fenced: %s", self._who(worker_id), reason)
        self._fenced[worker_id] = reason
        if len(self._fenced) > NUM_EXCLUSIONS_KEPT:
            del self._fenced[next(iter(self._fenced))]
        self._remove(worker_id)
        # A worker in doubt must not serve: it comes back only through a new registration.
        ray.kill(member.handle)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._ping_interval_s)
            await asyncio.gather(*(self._ping(m) for m in list(self._members.values())))
            if self._members:
                self._last_sign_of_life = time.monotonic()
            elif time.monotonic() - self._last_sign_of_life > self._idle_exit_s:
                logger.info("the %s registry ends: no member and no trainer", self._role)
                ray.kill(ray.get_runtime_context().current_actor)

    async def _ping(self, member: Member) -> None:
        worker_id = member.info.worker_id
        try:
            await cluster.call(
                member.handle.ping.remote(), timeout_s=PING_TIMEOUT_S, who=self._who(worker_id)
            )
        except AsyncGrpoError as error:
            self._fence(worker_id, str(error))

    def _who(self, worker_id: str) -> str:
        return f"{self._role} worker {worker_id}"

    def _describe(self) -> str:
        fenced = "; ".join(f"{name}: {why}" for name, why in self._fenced.items())
        excluded = f" (excluded: {fenced})" if fenced else ""
        if not self._members:
            return "none is registered" + excluded
        serving = self._snapshot.version if self._snapshot else "none yet"
        return f"{len(self._members)} registered, weights published: {serving}{excluded}"
