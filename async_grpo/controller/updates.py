"""Updates of a role's workers to new weights: publications, first loads, late loads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from async_grpo.cluster import handles
from async_grpo.controller.heartbeat import Loss
from async_grpo.controller.leases import Fence
from async_grpo.controller.members import Member
from async_grpo.types import PublishReport, WeightsAck, WeightsSnapshot, WeightsVersion
from async_grpo.util import deadlines
from async_grpo.util.errors import (
    AsyncGrpoError,
    LossCause,
    ProcessLostError,
    SnapshotLostError,
    WorkerError,
)

if TYPE_CHECKING:
    from async_grpo.cluster.handles import WorkerHandle

logger = logging.getLogger(__name__)
Load = asyncio.Task[WeightsAck | str]  # the acknowledgement, or why there is none


@dataclass(slots=True, eq=False)
class Updates:
    """Keeps the latest snapshot, and has workers load it."""

    role: str
    serves: Callable[[str, WeightsVersion], None]  # gets a worker that has loaded a version
    fence: Fence  # gets a worker that cannot load the snapshot
    snapshot: WeightsSnapshot | None = None  # the latest published one
    _loads: set[Load] = field(default_factory=set)

    async def publish(
        self, snapshot: WeightsSnapshot, members: Mapping[str, Member], *, timeout_s: float
    ) -> PublishReport:
        """Have all of `members` serve `snapshot`; fence those that cannot within the deadline.

        Once a member serves it, this does not wait for one that needs much longer, which serves it
        later or is fenced.
        """
        self.snapshot = snapshot
        loads = {name: self._begin(each, snapshot, timeout_s) for name, each in members.items()}
        await self._until_enough(loads.values())
        outcomes = {name: load.result() for name, load in loads.items() if load.done()}
        return PublishReport(
            snapshot.version,
            acks=tuple(o for o in outcomes.values() if isinstance(o, WeightsAck)),
            failures={name: o for name, o in outcomes.items() if isinstance(o, str)},
            late=tuple(name for name in loads if name not in outcomes),
        )

    def catch_up(self, member: Member) -> None:
        """Start to load the latest snapshot into a worker that was left out of updates."""
        if (newest := self.snapshot) is not None:
            timeout_s = deadlines.for_bytes(deadlines.WEIGHTS_APPLIED_S, newest.size_bytes)
            self._begin(member, newest, timeout_s)

    async def bring_up(
        self, handle: WorkerHandle, heartbeat: asyncio.Task[Loss], *, who: str
    ) -> WeightsVersion | None:
        """Have a new worker load the published snapshot; return the version, None without one."""
        loaded: WeightsVersion | None = None
        while self.snapshot is not None and loaded != self.snapshot.version:
            snapshot = self.snapshot
            timeout_s = deadlines.for_bytes(deadlines.FIRST_LOAD_S, snapshot.size_bytes)
            load = asyncio.create_task(
                handles.call(handle.load_weights.remote(snapshot), timeout_s=timeout_s, who=who),
                name=f"first-load-{who}",
            )
            await asyncio.wait({load, heartbeat}, return_when=asyncio.FIRST_COMPLETED)
            if not load.done():
                load.cancel()
                raise WorkerError(heartbeat.result().reason)
            try:
                load.result()
            except SnapshotLostError:
                self._forget(snapshot)
            except ProcessLostError as error:  # the caller would take it for the controller's end
                raise WorkerError(str(error)) from None
            else:
                loaded = snapshot.version
        return loaded if self.snapshot is not None else None

    def _begin(self, member: Member, snapshot: WeightsSnapshot, timeout_s: float) -> Load:
        name = f"load-{snapshot.version}-{member.info.worker_id}"
        load = asyncio.create_task(self._load(member, snapshot, timeout_s), name=name)
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)
        return load

    async def _load(
        self, member: Member, snapshot: WeightsSnapshot, timeout_s: float
    ) -> WeightsAck | str:
        """The acknowledgement, or the reason why there is none."""
        worker_id = member.info.worker_id
        try:
            ack = await handles.call(
                member.handle.load_weights.remote(snapshot),
                timeout_s=timeout_s,
                who=f"{self.role} worker {worker_id}",
            )
        except SnapshotLostError as error:  # the trainer has ended: not the worker's fault
            self._forget(snapshot)
            return str(error)
        except AsyncGrpoError as error:
            died = isinstance(error, ProcessLostError)
            self.fence(worker_id, LossCause.DIED if died else LossCause.UPDATE, str(error))
            return str(error)
        if self.snapshot is snapshot:
            self.serves(worker_id, snapshot.version)
        return ack

    async def _until_enough(self, loads: Collection[Load]) -> None:
        """Wait for all loads; but after the first success only as long again, and some more."""
        clock = asyncio.get_running_loop().time
        started, pending = clock(), set(loads)
        done = set[Load]()
        while pending and not any(isinstance(load.result(), WeightsAck) for load in done):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            await asyncio.wait(pending, timeout=deadlines.LATE_LOADS_S + clock() - started)

    def _forget(self, snapshot: WeightsSnapshot) -> None:
        if self.snapshot is snapshot:
            logger.info("weights %s are forgotten: their trainer has ended", snapshot.version)
            self.snapshot = None
