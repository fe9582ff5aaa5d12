"""The membership of one role: who can work, with which weights, under which load.

consumes:     registrations, requests for leases, snapshots of weights, answers to its pings
produces:     leases on workers (samples then travel straight to the worker, never through here)
waits for:    a worker below its capacity that serves the version asked for
unblocked by: a release, a registration, a committed snapshot
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray

from async_grpo import cluster
from async_grpo.bundles import TakesCalls
from async_grpo.controller.desk import LeaseDesk
from async_grpo.controller.heartbeat import Loss, until_lost
from async_grpo.controller.history import History
from async_grpo.controller.run_watch import RunWatch
from async_grpo.controller.updates import PATIENCE_S, Member, Updates
from async_grpo.errors import AsyncGrpoError, DeadlineError, WorkerError
from async_grpo.types import (
    Lease,
    PublishReport,
    Pulse,
    RegistryEvent,
    RegistryStatus,
    Standing,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)

logger = logging.getLogger(__name__)
PING_INTERVAL_S = 5.0  # no --stall-timeout-s may be shorter than two of them
IDLE_EXIT_S = 120.0
ABORT_TIMEOUT_S = 30.0
WATCH_INTERVAL_S = 1.0


class WorkerRegistry(TakesCalls):
    """The control plane of one role; who gets a lease is the `LeaseDesk`'s to say.

    It ends itself when it has had no member for `idle_exit_s` and nobody has asked for anything.
    Restarted by Ray, it is another session that knows nothing: dispatchers register their workers
    again, and the trainer announces its weights again.
    """

    def __init__(
        self,
        role: str,
        *,
        ping_interval_s: float = PING_INTERVAL_S,
        idle_exit_s: float = IDLE_EXIT_S,
        patience_s: float = PATIENCE_S,
        kill: Callable[[Any], None] = ray.kill,
    ) -> None:
        self._role = role
        self._ping_interval_s = ping_interval_s
        self._idle_exit_s = idle_exit_s
        self._kill = kill
        self._session = time.time_ns()
        self._desk = LeaseDesk(first_lease_id=self._session)
        self._members: dict[str, Member] = {}
        self._updates = Updates(role, serves=self._serves, fence=self._fence, patience_s=patience_s)
        self._history = History()
        self._last_sign_of_life = 0.0
        self._run = RunWatch(batcher_died=partial(self._revoke_all, "batcher died"))
        self._aborting: set[asyncio.Task[None]] = set()
        self._monitor: asyncio.Task[None] | None = None
        with contextlib.suppress(RuntimeError):  # an actor has a loop by now
            self._note_life()

    async def touch(self) -> None:
        """Somebody needs the registry, or is about to."""
        self._note_life()

    async def session(self) -> int:
        """Which life of this registry this is; the trainer asks again and again, while it lives."""
        await self.touch()
        self._run.trainer_heard(asks=True)
        return self._session

    async def register(self, info: WorkerInfo, handle: Any) -> None:
        """Admit a worker once it serves the current weights, if there are any yet.

        Raises what the worker raised when it cannot load them, `WorkerError` when it is lost.
        """
        await self.touch()
        who = self._who(info.worker_id)
        heartbeat = asyncio.create_task(
            until_lost(
                handle,
                partial(self._heard, info.worker_id),
                interval_s=self._ping_interval_s,
                lease_s=info.lease_s,
                who=who,
            ),
            name=f"heartbeat-{info.worker_id}",
        )
        try:
            version = await self._updates.bring_up(handle, heartbeat, who=who)
        except BaseException:
            heartbeat.cancel()
            raise
        self._members[info.worker_id] = Member(info, handle, heartbeat)
        heartbeat.add_done_callback(partial(self._heart_stopped, info.worker_id))
        self._history.note("registered", info.worker_id)
        logger.info("%s registered with capacity %g", who, info.capacity)
        self._desk.add(info, handle, version=version)

    async def deregister(self, worker_id: str) -> None:
        """Forget a worker; its leases are revoked."""
        if self._remove(worker_id, "left", f"{self._who(worker_id)} has left"):
            self._history.note("left", worker_id)

    async def drain(self, worker_id: str, draining: bool = True) -> None:
        """Give a worker no new work, in this run and later ones, until it is told otherwise."""
        if worker_id in self._members:
            self._desk.drain(worker_id, draining=draining)
            self._history.note("drained" if draining else "undrained", worker_id)

    async def standing(self, worker_ids: tuple[str, ...]) -> dict[str, Standing]:
        """How each of these workers is seen here; asking keeps the registry alive."""
        await self.touch()
        excluded, snapshot = self._history.exclusions, self._updates.snapshot
        run = snapshot.version.incarnation if snapshot else 0
        return {
            name: Standing(
                name in self._members, self._desk.num_leases_of(name), excluded.get(name, ""), run
            )
            for name in worker_ids
        }

    async def members(self) -> tuple[WorkerInfo, ...]:
        """Everyone admitted; asking for them keeps the registry alive."""
        await self.touch()
        return tuple(member.info for member in self._members.values())

    async def receivers(self) -> tuple[tuple[WorkerInfo, Any], ...]:
        """Everyone admitted, with its handle: weights that come over devices go there directly."""
        return tuple((member.info, member.handle) for member in self._members.values())

    async def fenced(self) -> dict[str, str]:
        """The latest workers that were excluded, with the reason."""
        return dict(self._history.exclusions)

    async def acquire(self, cost: float, version: WeightsVersion | None, timeout_s: float) -> Lease:
        """A lease on the least-loaded worker that serves `version` or a later one.

        `cost` is in sequences for generation and tokens for log-probabilities. The lease is revoked
        when no token comes for it for `timeout_s`. Raises `DeadlineError`, saying what was missing,
        when for as long nobody was free and no token was made.
        """
        await self.touch()
        try:
            return await self._desk.acquire(cost, version, timeout_s=timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"no {self._role} worker was free within {timeout_s:g} s for weights "
                f"{version}: {self._describe()}"
            ) from None

    async def release(self, lease_id: int) -> bool:
        """Return a lease; False when it had been revoked, and the answer must not be used."""
        return self._desk.release(lease_id)

    async def until_revoked(self, lease_id: int) -> str:
        """Answer when a lease ends: "died: its process ...", or "" when it was returned.

        No lease is granted on a worker that is lost once the holders of its leases are told.
        """
        return await self._desk.until_revoked(lease_id)

    async def publish(self, snapshot: WeightsSnapshot, timeout_s: float) -> PublishReport:
        """Have every member serve `snapshot`; fence those that cannot within the deadline.

        When somebody serves it, whoever needs much longer is not waited for: it gets no work until
        it has caught up.
        """
        await self.touch()
        self._run.trainer_heard()
        return await self._updates.publish(snapshot, dict(self._members), timeout_s=timeout_s)

    async def begin_run(self, batcher: Any = None) -> None:
        """Nobody gets a lease before the new run has published weights.

        What an earlier run has left behind is forgotten. The work ends with `batcher`, an actor.
        """
        await self.end_run()
        self._run.follow(batcher)
        self._history.note("run begun")

    async def replace_batcher(self, batcher: Any) -> None:
        """The run goes on with another batcher: the leases of the former end, weights stay."""
        await self.touch()
        self._run.trainer_heard()
        self._revoke_all("batcher replaced", "the batcher that asked for the lease was replaced")
        self._run.follow(batcher)

    async def end_run(self) -> None:
        """Forget the run's weights, revoke its leases, end its requests, refuse who still waits."""
        await self.touch()
        self._run.trainer_heard()
        self._run.follow(None)
        self._updates.snapshot = None
        self._revoke_all("run ended", "the run that asked for a lease has ended")
        for worker_id in self._members:
            self._desk.serves(worker_id, None)
        self._history.note("run ended")

    async def status(self) -> RegistryStatus:
        """What there is, and how often what has happened."""
        snapshot = self._updates.snapshot
        return RegistryStatus(
            session=self._session,
            workers=len(self._members),
            leases=self._desk.num_leases,
            serves=snapshot.version if snapshot else None,
            counts=self._history.counts,
            num_tokens=self._desk.num_tokens,
        )

    async def history(self) -> tuple[RegistryEvent, ...]:
        """The newest events."""
        return self._history.events

    def _serves(self, worker_id: str, version: WeightsVersion) -> None:
        if worker_id in self._members:
            self._desk.serves(worker_id, version)

    def _remove(self, worker_id: str, cause: str, reason: str) -> bool:
        """Whether it was a member."""
        member = self._members.pop(worker_id, None)
        if member is None:
            return False
        member.heartbeat.cancel()
        num_leases = self._desk.remove(worker_id, reason=f"{cause}: {reason}")
        self._history.note("revoked", worker_id, cause, num=num_leases)
        return True

    def _fence(self, worker_id: str, loss: Loss) -> None:
        member = self._members.get(worker_id)
        if member is None:
            return
        logger.warning("%s is fenced: %s", self._who(worker_id), loss.reason)
        self._history.note("fenced", worker_id, loss.cause, loss.reason)
        self._remove(worker_id, loss.cause, loss.reason)
        # A worker in doubt must not serve: it comes back only through a new registration.
        self._kill(member.handle)

    def _heard(self, worker_id: str, pulse: Pulse) -> None:
        num_stalled = self._desk.heard(worker_id, pulse, seconds=self._ping_interval_s)
        self._history.note("revoked", worker_id, "stalled", num=num_stalled)

    def _heart_stopped(self, worker_id: str, heartbeat: asyncio.Task[Loss]) -> None:
        if not heartbeat.cancelled():
            self._fence(worker_id, heartbeat.result())

    def _revoke_all(self, cause: str, reason: str) -> None:
        self._desk.send_away(WorkerError(reason))
        for worker_id, member in self._members.items():
            num_leases = self._desk.revoke(worker_id, reason=f"{cause}: {reason}")
            self._history.note("revoked", worker_id, cause, num=num_leases)
            aborting = asyncio.create_task(self._abort(member), name=f"abort-{worker_id}")
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)

    async def _abort(self, member: Member) -> None:
        """End the requests of a worker; its heartbeat tells when it cannot."""
        call, who = member.handle.abort_all.remote(), self._who(member.info.worker_id)
        with contextlib.suppress(AsyncGrpoError):
            await cluster.call(call, timeout_s=ABORT_TIMEOUT_S, who=who)

    def _note_life(self) -> None:
        loop = asyncio.get_running_loop()
        self._last_sign_of_life = loop.time()
        if self._monitor is None:
            self._monitor = loop.create_task(self._watch(), name=f"{self._role}-monitor")

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._members:
                self._note_life()
            elif clock() - self._last_sign_of_life > self._idle_exit_s:
                logger.info("the %s registry ends: no member and no trainer", self._role)
                self._kill(ray.get_runtime_context().current_actor)
            if self._run.trainer_died:
                logger.warning("the trainer of the run has died: its weights are forgotten")
                await self.end_run()
                self._session = time.time_ns()  # should it live after all, it announces again

    def _who(self, worker_id: str) -> str:
        return f"{self._role} worker {worker_id}"

    def _describe(self) -> str:
        latest = list(self._history.exclusions.items())[-8:]
        fenced = "; ".join(f"{name}: {why}" for name, why in latest)
        excluded = f" (excluded: {fenced})" if fenced else ""
        if not self._members:
            return "none is registered" + excluded
        snapshot = self._updates.snapshot
        serving = snapshot.version if snapshot else "none yet"
        draining = f", {num} of them draining" if (num := self._desk.num_draining) else ""
        return f"{len(self._members)} registered{draining}, weights published: {serving}{excluded}"
