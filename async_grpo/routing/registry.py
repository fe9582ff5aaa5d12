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
from collections import deque
from dataclasses import dataclass
from typing import Any

import ray

from async_grpo import cluster
from async_grpo.errors import AsyncGrpoError, DeadlineError
from async_grpo.routing.balancer import Balancer
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


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that is admitted, or is loading weights before its admission."""

    info: WorkerInfo
    handle: Any


@dataclass(slots=True)
class Waiter:
    """Somebody who asked for a lease that nobody could give yet."""

    cost: float
    version: WeightsVersion | None
    lease: asyncio.Future[Lease]


class WorkerRegistry:
    """The control plane of one role; pure decisions are the `Balancer`'s."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._balancer = Balancer()
        self._members: dict[str, Member] = {}
        self._waiters: deque[Waiter] = deque()
        self._snapshot: WeightsSnapshot | None = None
        self._fenced: dict[str, str] = {}
        self._last_sign_of_life = time.monotonic()
        self._monitor: asyncio.Task[None] | None = None

    async def register(self, info: WorkerInfo, handle: Any) -> None:
        """Admit a worker once it serves the current weights, if there are any yet.

        Raises what the worker raised when it cannot load them.
        """
        self._start_monitor()
        who = self._who(info.worker_id)
        loaded: WeightsVersion | None = None
        while self._snapshot is not None and loaded != self._snapshot.version:
            snapshot = self._snapshot
            call = handle.load_weights.remote(snapshot)
            await cluster.call(call, timeout_s=LOAD_TIMEOUT_S, who=who)
            loaded = snapshot.version
        self._members[info.worker_id] = Member(info, handle)
        self._admit(info, version=loaded)
        logger.info("%s registered with capacity %g", who, info.capacity)
        self._serve_waiters()

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
        self._last_sign_of_life = time.monotonic()
        lease = self._try_acquire(cost, version)
        if lease is not None:
            return lease
        waiter = Waiter(cost, version, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            return await asyncio.wait_for(waiter.lease, timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"no {self._role} worker was free within {timeout_s:g} s for weights "
                f"{version}: {self._describe()}"
            ) from None
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    async def release(self, lease_id: int) -> bool:
        """Return a lease; False when it had been revoked, and the answer must not be used."""
        valid = self._balancer.release(lease_id)
        self._serve_waiters()
        return valid

    async def publish(self, snapshot: WeightsSnapshot, timeout_s: float) -> PublishReport:
        """Have every member serve `snapshot`; fence those that cannot within the deadline."""
        self._start_monitor()
        self._last_sign_of_life = time.monotonic()
        self._snapshot = snapshot
        members = list(self._members.values())
        outcomes = await asyncio.gather(*(self._load(m, snapshot, timeout_s) for m in members))
        acks = tuple(o for o in outcomes if isinstance(o, WeightsAck))
        failures = {
            member.info.worker_id: outcome
            for member, outcome in zip(members, outcomes, strict=True)
            if isinstance(outcome, str)
        }
        self._serve_waiters()
        return PublishReport(snapshot.version, acks, failures)

    async def begin_run(self) -> None:
        """Forget an earlier run: nobody gets a lease before the new one has published weights.

        Leases of the earlier run are revoked, and its requests end.
        """
        self._snapshot = None
        for member in self._members.values():
            self._balancer.remove_worker(member.info.worker_id)
            self._admit(member.info, version=None)
            member.handle.abort_all.remote()

    async def members(self) -> tuple[WorkerInfo, ...]:
        """Everyone admitted; asking for them keeps the registry alive."""
        self._last_sign_of_life = time.monotonic()
        return tuple(member.info for member in self._members.values())

    async def fenced(self) -> dict[str, str]:
        """Workers that were excluded, with the reason."""
        return dict(self._fenced)

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
        except AsyncGrpoError as error:
            self._fence(worker_id, str(error))
            return str(error)
        if worker_id in self._members:
            self._balancer.set_version(worker_id, snapshot.version)
            self._serve_waiters()
        return ack

    def _try_acquire(self, cost: float, version: WeightsVersion | None) -> Lease | None:
        grant = self._balancer.try_acquire(cost, version)
        if grant is None:
            return None
        handle = self._members[grant.worker_id].handle
        return Lease(grant.lease_id, grant.worker_id, handle, cost, grant.version)

    def _serve_waiters(self) -> None:
        for waiter in list(self._waiters):
            if waiter.lease.done():
                self._waiters.remove(waiter)
                continue
            lease = self._try_acquire(waiter.cost, waiter.version)
            if lease is not None:
                self._waiters.remove(waiter)
                waiter.lease.set_result(lease)

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
        self._remove(worker_id)
        # A worker in doubt must not serve: it comes back only through a new registration.
        ray.kill(member.handle)

    def _start_monitor(self) -> None:
        if self._monitor is None:
            self._monitor = asyncio.create_task(self._watch(), name=f"{self._role}-monitor")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            await asyncio.gather(*(self._ping(m) for m in list(self._members.values())))
            if self._members:
                self._last_sign_of_life = time.monotonic()
            elif time.monotonic() - self._last_sign_of_life > IDLE_EXIT_S:
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
        if not self._members:
            fenced = "; ".join(f"{name}: {why}" for name, why in self._fenced.items())
            return "none is registered" + (f" (excluded: {fenced})" if fenced else "")
        serving = self._snapshot.version if self._snapshot else "none yet"
        return f"{len(self._members)} registered, weights published: {serving}"
