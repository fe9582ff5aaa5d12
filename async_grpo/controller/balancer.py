"""Least-loaded leases over the workers of one role. Pure; who waits in line is the registry's.

A worker takes work while its load is *below* capacity + overhead, so that one large group may
overshoot: otherwise it would never fit anywhere. Decisions are one vector operation over the
workers, which a thousand of them do not slow down.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from async_grpo.types import WeightsVersion


class LeaseGrant(NamedTuple):
    """The right to send one piece of work to one worker."""

    lease_id: int
    worker_id: str
    version: WeightsVersion  # the weights that the worker served when the lease was granted


class WorkerLoad(NamedTuple):
    """What one worker carries; load, capacity and overhead in the role's unit."""

    worker_id: str
    load: float
    capacity: float
    overhead: float
    version: WeightsVersion | None
    draining: bool
    num_leases: int


@dataclass(slots=True)
class _Worker:
    worker_id: str
    slot: int  # index into the vectors
    capacity: float
    overhead: float
    version: WeightsVersion | None  # None: no weights of this run yet
    draining: bool = False
    load: float = 0.0
    leases: dict[int, float] = field(default_factory=dict)  # lease id -> cost

    @property
    def pressure(self) -> float:
        """Load in units of the capacity; infinite when the worker may take nothing more."""
        full = self.load >= self.capacity + self.overhead
        closed = full or self.draining or self.version is None
        return np.inf if closed else self.load / self.capacity


class Balancer:
    """Grants, counts and revokes leases."""

    def __init__(self, *, lease_ids: Iterator[int] | None = None) -> None:
        """`lease_ids` gives each id once; the default serves a balancer that is alone."""
        self._workers: dict[str, _Worker] = {}
        self._holders: dict[int, _Worker] = {}  # lease id -> worker
        self._lease_ids = lease_ids or itertools.count()
        self._by_slot: list[_Worker | None] = []
        self._free_slots: list[int] = []
        # One entry a slot; a free slot has infinite pressure, so it is never chosen.
        self._pressure_W = np.empty(0)
        self._incarnation_W = np.empty(0, dtype=np.int64)
        self._batches_W = np.empty(0, dtype=np.int64)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    @property
    def num_leases(self) -> int:
        return len(self._holders)

    def add_worker(
        self, worker_id: str, *, capacity: float, overhead: float, version: WeightsVersion | None
    ) -> None:
        """A healthy worker joins, without load; it gets no lease while its version is None."""
        if worker_id in self._workers:
            raise ValueError(f"worker {worker_id} is a member already: remove it first")
        if not capacity > 0 or not overhead >= 0:
            raise ValueError(
                f"worker {worker_id} must have capacity > 0 and overhead >= 0, "
                f"got {capacity} and {overhead}"
            )
        worker = _Worker(worker_id, self._take_slot(), capacity, overhead, version)
        self._workers[worker_id] = worker
        self._by_slot[worker.slot] = worker
        self._refresh(worker)

    def remove_worker(self, worker_id: str) -> tuple[int, ...]:
        """The worker left or was fenced; its leases, now revoked, in order of granting."""
        revoked = self.revoke(worker_id)
        worker = self._workers.pop(worker_id)
        self._by_slot[worker.slot] = None
        self._pressure_W[worker.slot] = np.inf
        self._free_slots.append(worker.slot)
        return revoked

    def revoke(self, worker_id: str) -> tuple[int, ...]:
        """All leases on a worker that stays a member, in order of granting."""
        revoked = self.leases_of(worker_id)
        for lease_id in revoked:
            self.release(lease_id)
        return revoked

    def set_version(self, worker_id: str, version: WeightsVersion | None) -> None:
        """The worker serves new weights, or with None must wait for some; its leases stay."""
        self._workers[worker_id].version = version
        self._refresh(self._workers[worker_id])

    def drain(self, worker_id: str, *, draining: bool = True) -> None:
        """No new leases for this worker, those it has run out; or, with False, some again."""
        self._workers[worker_id].draining = draining
        self._refresh(self._workers[worker_id])

    @property
    def num_draining(self) -> int:
        """Workers that get no new leases because somebody wants them empty."""
        return sum(worker.draining for worker in self._workers.values())

    def try_acquire(
        self, cost: float, version: WeightsVersion | None, prefer: str | None = None
    ) -> LeaseGrant | None:
        """A lease on the least-loaded worker that may take it; None when all must be waited for.

        A worker qualifies with weights of the same incarnation that are at least as new as
        `version`; None takes any weights. One that is preferred and qualifies is taken first.

        >>> balancer, first = Balancer(), WeightsVersion(0, 0)
        >>> balancer.add_worker("small", capacity=2, overhead=0, version=first)
        >>> balancer.add_worker("large", capacity=8, overhead=0, version=first)
        >>> [balancer.try_acquire(2, first).worker_id for _ in range(5)]
        ['small', 'large', 'large', 'large', 'large']
        >>> balancer.try_acquire(2, None)
        """
        if not cost > 0:
            raise ValueError(f"the cost of a lease must be positive, got {cost}")
        if not self._by_slot:
            return None
        favourite = self._workers.get(prefer) if prefer else None
        slot = favourite.slot if favourite else int(self._pressure_W.argmin())
        if not self._may_take(slot, version):
            pressure_W = self._pressure_W
            if version is not None:
                newer_W = self._batches_W >= version.batches
                serves_W = newer_W & (self._incarnation_W == version.incarnation)
                pressure_W = np.where(serves_W, pressure_W, np.inf)
            slot = int(pressure_W.argmin())
            if pressure_W[slot] == np.inf:
                return None
        worker = self._by_slot[slot]
        assert worker is not None and worker.version is not None, "its pressure is infinite"
        lease_id = next(self._lease_ids)
        worker.leases[lease_id] = cost
        worker.load += cost
        self._holders[lease_id] = worker
        self._pressure_W[slot] = worker.pressure
        return LeaseGrant(lease_id, worker.worker_id, worker.version)

    def release(self, lease_id: int) -> bool:
        """The work is done or given up. False: the lease was revoked, this is a zombie's answer."""
        worker = self._holders.pop(lease_id, None)
        if worker is None:
            return False
        worker.load -= worker.leases.pop(lease_id)
        if not worker.leases:
            worker.load = 0.0  # no rounding is carried along from fractional costs
        self._pressure_W[worker.slot] = worker.pressure
        return True

    def leases_of(self, worker_id: str) -> tuple[int, ...]:
        """The leases of a worker in order of granting; none when it is not a member."""
        worker = self._workers.get(worker_id)
        return tuple(worker.leases) if worker else ()

    def loads(self) -> tuple[WorkerLoad, ...]:
        """All workers, in the order in which they joined."""
        return tuple(
            WorkerLoad(
                w.worker_id, w.load, w.capacity, w.overhead, w.version, w.draining, len(w.leases)
            )
            for w in self._workers.values()
        )

    def _may_take(self, slot: int, version: WeightsVersion | None) -> bool:
        if self._pressure_W[slot] == np.inf:
            return False
        same_run = version is None or self._incarnation_W[slot] == version.incarnation
        return bool(same_run and (version is None or self._batches_W[slot] >= version.batches))

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._by_slot.append(None)
        self._pressure_W = np.append(self._pressure_W, np.inf)
        self._incarnation_W = np.append(self._incarnation_W, 0)
        self._batches_W = np.append(self._batches_W, 0)
        return len(self._by_slot) - 1

    def _refresh(self, worker: _Worker) -> None:
        self._pressure_W[worker.slot] = worker.pressure
        if worker.version is not None:
            self._incarnation_W[worker.slot], self._batches_W[worker.slot] = worker.version
