"""Remembers what went wrong while a run still went on: the first of it explains what follows. Pure.

A worker that dies makes everything behind it stall; the deadline that ends the run then names the
stall. What has been put right since explains nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from async_grpo.types import PipelineStatus, WorkerInfo

NUM_KEPT = 20
NUM_WORKERS_KNOWN = 1000  # of those that have been members: restarts make new ones


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that went wrong, and who it was."""

    at_s: float
    role: str
    reason: str
    worker: WorkerInfo | None = None


class Incidents:
    """Follows a run by its statuses and its registries' members; all times are of one clock."""

    def __init__(self) -> None:
        self.status: PipelineStatus | None = None
        self.moved_at_s: float | None = None  # when the last good answer was seen
        self.latest: deque[Incident] = deque(maxlen=NUM_KEPT)
        self._members: dict[str, dict[str, WorkerInfo]] = {}
        self._known: dict[str, WorkerInfo] = {}
        self._lost: dict[str, deque[Incident]] = {}  # by role, those not replaced yet
        self._problem: Incident | None = None

    def see_status(self, status: PipelineStatus, *, now_s: float) -> None:
        """Take in what every stage is doing."""
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
        """Take in who is registered, and why others no longer are."""
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
        """The earliest incident that still explains why nothing moves, None when there is none.

        A lost worker explains it if its role has no worker left.
        """
        lost = [
            losses[0] for role, losses in self._lost.items() if losses and not self._members[role]
        ]
        candidates = lost + ([self._problem] if self._problem else [])
        return min(candidates, key=lambda incident: incident.at_s, default=None)
