"""Remembers what went wrong during a run, so that its end can name the first cause. Pure.

A worker that dies stalls all stages behind it, and the deadline that ends the run names the stall.
An incident that was put right since, as by a new worker, explains nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from async_grpo.types import PipelineStatus, WorkerInfo

NUM_KEPT = 20
NUM_WORKERS_KNOWN = 1000  # past and present members: each restart adds one


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that went wrong, and the worker that it happened to."""

    at_s: float
    role: str
    reason: str
    worker: WorkerInfo | None = None


class Incidents:
    """The incidents of a run, by its statuses and registered workers; times are of one clock."""

    def __init__(self) -> None:
        self.status: PipelineStatus | None = None
        self.moved_at_s: float | None = None  # when the last answer of a worker was seen
        self.latest: deque[Incident] = deque(maxlen=NUM_KEPT)
        self._members: dict[str, dict[str, WorkerInfo]] = {}
        self._known: dict[str, WorkerInfo] = {}
        self._lost: dict[str, deque[Incident]] = {}  # by role: losses that are not replaced yet
        self._problem: Incident | None = None

    def see_status(self, status: PipelineStatus, *, now_s: float) -> None:
        """Take a new status of the pipeline."""
        if self.status is None or status.answers != self.status.answers:
            self.moved_at_s = now_s
        self.status = status
        if not status.problem:
            self._problem = None
        elif self._problem is None:
            problem, worker = status.problem, self._known.get(status.problem.worker_id)
            self._problem = Incident(now_s, problem.stage, str(problem), worker)
            self.latest.append(self._problem)

    def see_members(
        self, role: str, members: Sequence[WorkerInfo], fenced: Mapping[str, str], *, now_s: float
    ) -> None:
        """Take the registered workers of a role, and why others were fenced, {id: reason}."""
        before = self._members.get(role, {})
        now = {member.worker_id: member for member in members}
        self._members[role] = now
        self._known |= now
        while len(self._known) > NUM_WORKERS_KNOWN:
            del self._known[next(iter(self._known))]
        lost = self._lost.setdefault(role, deque(maxlen=NUM_KEPT))
        for worker_id in before.keys() - now.keys():
            reason = fenced.get(worker_id) or f"{role} worker {worker_id} left its registry"
            lost.append(Incident(now_s, role, reason, before[worker_id]))
            self.latest.append(lost[-1])
        for _ in range(min(len(lost), len(now.keys() - before.keys()))):
            lost.popleft()

    def first_cause(self) -> Incident | None:
        """The earliest incident that explains why no answer comes; None if none does.

        The loss of a worker does so only while its role has no worker left.
        """
        lost = [
            losses[0] for role, losses in self._lost.items() if losses and not self._members[role]
        ]
        candidates = lost + ([self._problem] if self._problem else [])
        return min(candidates, key=lambda incident: incident.at_s, default=None)
