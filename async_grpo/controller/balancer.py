"""Which worker of one role takes the next piece of work, and which is held for evaluations. Pure.

The least-loaded worker takes the work. A worker takes more while its load is *below* capacity +
overhead, so that one large group may overshoot: otherwise it would never fit anywhere. A decision
is one vector operation over the workers, which stays fast for a thousand of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_grpo.types import Hold, WeightsVersion


@dataclass(slots=True)
class _Worker:
    worker_id: str
    slot: int  # index into the vectors
    capacity: float
    overhead: float
    version: WeightsVersion | None  # None: it serves no weights of this run yet
    draining: bool = False
    load: float = 0.0

    @property
    def pressure(self) -> float:
        """Load in units of the capacity; infinite when the worker may take nothing more."""
        full = self.load >= self.capacity + self.overhead
        closed = full or self.draining or self.version is None
        return np.inf if closed else self.load / self.capacity


class Balancer:
    """Knows the load of every worker, in the unit of its role."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._by_slot: dict[int, _Worker] = {}  # the latest worker of each slot
        self._free_slots: list[int] = []
        # One entry a slot; a free slot has infinite pressure, so it is never chosen.
        self._pressure_W = np.empty(0)
        self._incarnation_W = np.empty(0, dtype=np.int64)
        self._batches_W = np.empty(0, dtype=np.int64)

    def add_worker(
        self, worker_id: str, *, capacity: float, overhead: float, version: WeightsVersion | None
    ) -> None:
        """A healthy worker joins, without load; it takes nothing while its version is None."""
        if worker_id in self._workers:
            raise ValueError(f"worker {worker_id} is a member already: remove it first")
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(self._by_slot)
            self._pressure_W = np.append(self._pressure_W, np.inf)
            self._incarnation_W = np.append(self._incarnation_W, 0)
            self._batches_W = np.append(self._batches_W, 0)
        worker = _Worker(worker_id, slot, capacity, overhead, version)
        self._workers[worker_id] = worker
        self._by_slot[slot] = worker
        self._refresh(worker)

    def remove_worker(self, worker_id: str) -> None:
        """The worker left or was fenced."""
        slot = self._workers.pop(worker_id).slot
        self._pressure_W[slot] = np.inf
        self._free_slots.append(slot)

    def set_version(self, worker_id: str, version: WeightsVersion | None) -> None:
        """The worker serves new weights, or None until it gets some; its load stays."""
        self._workers[worker_id].version = version
        self._refresh(self._workers[worker_id])

    def drain(self, worker_id: str, *, draining: bool = True) -> None:
        """Give this worker no new work while its old work ends; with False, give it some again."""
        self._workers[worker_id].draining = draining
        self._refresh(self._workers[worker_id])

    @property
    def draining(self) -> tuple[str, ...]:
        """Ids of the workers that get no new work."""
        return tuple(name for name, worker in self._workers.items() if worker.draining)

    def serving(self, version: WeightsVersion | None) -> list[str]:
        """Workers that serve `version` or a later one and are not drained, the idlest first."""
        found = [
            worker
            for worker in self._workers.values()
            if worker.version is not None
            and not worker.draining
            and (version is None or (worker.version.incarnation == version.incarnation
                                     and worker.version.batches >= version.batches))
        ]  # fmt: skip
        return [each.worker_id for each in sorted(found, key=lambda w: w.load / w.capacity)]

    def try_acquire(
        self,
        cost: float,
        version: WeightsVersion | None,
        prefer: str | None = None,
        *,
        only: str = "",
    ) -> str | None:
        """Add `cost` to the least-loaded worker that qualifies, and return its id.

        Returns None if no worker can take it now. A worker qualifies if its weights are of the same
        incarnation as `version` and at least as new, or with any if that is None. A preferred
        worker that qualifies is taken first. `only`: no other worker than this one qualifies.

        >>> balancer, first = Balancer(), WeightsVersion(0, 0)
        >>> balancer.add_worker("small", capacity=2, overhead=0, version=first)
        >>> balancer.add_worker("large", capacity=8, overhead=0, version=first)
        >>> [balancer.try_acquire(2, first) for _ in range(5)]
        ['small', 'large', 'large', 'large', 'large']
        >>> balancer.try_acquire(2, None)
        """
        if not self._workers:
            return None
        pressure_W = self._pressure_W
        if version is not None:
            newer_W = self._batches_W >= version.batches
            serves_W = newer_W & (self._incarnation_W == version.incarnation)
            pressure_W = np.where(serves_W, pressure_W, np.inf)
        favourite = self._workers.get(only or prefer or "")
        if only and favourite is None:
            return None
        if favourite is not None and (only or pressure_W[favourite.slot] < np.inf):
            worker = favourite
        else:
            worker = self._by_slot[int(pressure_W.argmin())]
        if pressure_W[worker.slot] == np.inf:
            return None
        worker.load += cost
        self._refresh(worker)
        return worker.worker_id

    def release(self, worker_id: str, cost: float) -> None:
        """Work is done or given up."""
        self._workers[worker_id].load -= cost
        self._refresh(self._workers[worker_id])

    def _refresh(self, worker: _Worker) -> None:
        self._pressure_W[worker.slot] = worker.pressure
        if worker.version is not None:
            self._incarnation_W[worker.slot], self._batches_W[worker.slot] = worker.version


class Holds:
    """All open holds. At least one worker is always left for training.

    A held worker drops out of training by itself: leases for training want newer weights.
    """

    def __init__(self) -> None:
        self._open: list[Hold] = []

    @property
    def workers(self) -> frozenset[str]:
        """Ids of the held workers."""
        return frozenset(hold.worker_id for hold in self._open if hold.worker_id)

    def begin(self, version: WeightsVersion, working: Sequence[str]) -> Hold:
        """A hold on the first worker of `working` that can be spared; all of them serve `version`.

        >>> holds, first = Holds(), WeightsVersion(1, 0)
        >>> holds.begin(first, ["a", "b"]).worker_id, holds.begin(first, ["a", "b"]).worker_id
        ('a', '')
        """
        hold = Hold(version, self._spared(working))
        self._open.append(hold)
        return hold

    def end(self, hold: Hold) -> None:
        """The evaluation has ended, and releases its worker."""
        self._open.remove(hold)

    def joined(
        self, worker_id: str, version: WeightsVersion | None, working: Sequence[str]
    ) -> None:
        """A worker that serves `version` has joined: a hold without a worker may take this one.

        Engines start one after the other, and a run begins with the first.

        >>> holds, first = Holds(), WeightsVersion(1, 0)
        >>> hold = holds.begin(first, ["a"])
        >>> holds.joined("b", WeightsVersion(1, 1), ["a", "b"])  # newer weights: of no use
        >>> holds.joined("c", first, ["a", "b", "c"])
        >>> hold.worker_id
        'c'
        """
        for hold in self._open:
            if not hold.worker_id and hold.version == version and self._spared(working):
                hold.worker_id = worker_id
                return

    def review(self, working: Sequence[str]) -> None:
        """Workers have left: a hold that has lost its worker takes another.

        If training has no other worker left, the holds give theirs back.

        >>> holds = Holds()
        >>> hold = holds.begin(WeightsVersion(1, 0), ["a", "b", "c"])
        >>> holds.review(["b", "c"])
        >>> hold.worker_id
        'b'
        >>> holds.review(["b"])
        >>> hold.worker_id
        ''
        """
        for hold in self._open:
            if hold.worker_id and hold.worker_id not in working:
                hold.worker_id = self._spared(working)
        if working and not set(working) - self.workers:
            for hold in self._open:
                hold.worker_id = ""

    def _spared(self, working: Sequence[str]) -> str:
        free = [name for name in working if name not in self.workers]
        return free[0] if len(free) > 1 else ""
