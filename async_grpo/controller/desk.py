"""Where leases are asked for, returned and revoked. Pure but for futures."""

from __future__ import annotations

import asyncio
from typing import Any

from async_grpo.controller.balancer import Balancer
from async_grpo.controller.token_watch import TokenWatch
from async_grpo.controller.waiting import WaitingLine
from async_grpo.types import Lease, Pulse, WeightsVersion, WorkerInfo

NOT_VALID = "the lease is not known here: it was returned or revoked, or the registry is a new one"


class LeaseDesk:
    """The balancer decides; whoever waits, for a lease or for the end of one, is told here."""

    def __init__(self, *, first_lease_id: int = 0) -> None:
        self._balancer = Balancer(first_lease_id=first_lease_id)
        self._line = WaitingLine()
        self._handles: dict[str, Any] = {}
        self._ends: dict[int, asyncio.Future[str]] = {}  # lease id -> why it was revoked
        self._watches: dict[str, TokenWatch] = {}
        self.num_tokens = 0  # that workers have made, by their pulses

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._balancer

    @property
    def num_leases(self) -> int:
        return self._balancer.num_leases

    def add(self, info: WorkerInfo, handle: Any, *, version: WeightsVersion | None) -> None:
        """A worker takes work from now on; with no version, once `serves` has told of one."""
        self._balancer.add_worker(
            info.worker_id, capacity=info.capacity, overhead=info.overhead, version=version
        )
        self._handles[info.worker_id] = handle
        self._watches[info.worker_id] = TokenWatch()
        self._line.serve(self._try_acquire)

    def remove(self, worker_id: str, *, reason: str) -> int:
        """The worker has gone; the number of its leases, whose holders are told why."""
        del self._handles[worker_id], self._watches[worker_id]
        return self._end(self._balancer.remove_worker(worker_id), reason)

    def revoke(self, worker_id: str, *, reason: str) -> int:
        """The worker stays, its leases end; their number."""
        return self._end(self._balancer.revoke(worker_id), reason)

    def serves(self, worker_id: str, version: WeightsVersion | None) -> None:
        """The worker has loaded new weights, or with None must wait for some."""
        self._balancer.set_version(worker_id, version)
        self._line.serve(self._try_acquire)

    def drain(self, worker_id: str, *, draining: bool = True) -> None:
        """No new leases for this worker; or, with False, some again."""
        self._balancer.drain(worker_id, draining=draining)
        self._line.serve(self._try_acquire)

    @property
    def num_draining(self) -> int:
        """Workers that get no new leases."""
        return self._balancer.num_draining

    def num_leases_of(self, worker_id: str) -> int:
        """How much a worker still has to do, in leases; 0 when it is not a member."""
        return len(self._balancer.leases_of(worker_id))

    async def acquire(
        self, cost: float, version: WeightsVersion | None, *, timeout_s: float
    ) -> Lease:
        """A lease, at once or in one's turn; it ends when no token comes for it for `timeout_s`.

        Raises `TimeoutError` when for as long nobody was free and no worker made any.
        """
        lease = self._try_acquire(cost, version) or await self._line.wait(
            cost, version, timeout_s=timeout_s, moves=lambda: self.num_tokens
        )
        if lease.worker_id in self._watches:
            self._watches[lease.worker_id].granted(lease.lease_id, limit_s=timeout_s)
        return lease

    def heard(self, worker_id: str, pulse: Pulse, *, seconds: float) -> int:
        """A worker told what it has made in these seconds; the number of leases that end for it."""
        watch = self._watches.get(worker_id)
        if watch is None:  # it has not joined yet
            return 0
        watch.keep(self._balancer.leases_of(worker_id))
        self.num_tokens += watch.heard(pulse, seconds=seconds)
        dead = watch.dead()
        for lease_id, reason in dead.items():
            self.release(lease_id, reason=f"stalled: {reason}")
        return len(dead)

    def release(self, lease_id: int, *, reason: str = "") -> bool:
        """False: the lease had been revoked, as it is now for a `reason`."""
        valid = self._balancer.release(lease_id)
        self._end((lease_id,), reason)
        self._line.serve(self._try_acquire)
        return valid

    async def until_revoked(self, lease_id: int) -> str:
        """Why a lease was revoked, when it is; empty when it was returned instead."""
        if self._balancer.holder(lease_id) is None:
            return NOT_VALID
        if lease_id not in self._ends:
            self._ends[lease_id] = asyncio.get_running_loop().create_future()
        # Shielded: one who no longer wants to know must not end it for others.
        return await asyncio.shield(self._ends[lease_id])

    def send_away(self, error: Exception) -> None:
        """Nobody need wait for a lease any longer: all of them get `error`."""
        self._line.end(error)

    def _end(self, lease_ids: tuple[int, ...], reason: str) -> int:
        for lease_id in lease_ids:
            end = self._ends.pop(lease_id, None)
            if end is not None and not end.done():
                end.set_result(reason)
        return len(lease_ids)

    def _try_acquire(self, cost: float, version: WeightsVersion | None) -> Lease | None:
        grant = self._balancer.try_acquire(cost, version)
        if grant is None:
            return None
        handle = self._handles[grant.worker_id]
        return Lease(grant.lease_id, grant.worker_id, handle, cost, grant.version)
