"""New weights on their way to the workers of a role: who must load what, and who waits for whom."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from async_grpo.cluster import handles
from async_grpo.controller.heartbeat import Loss
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


class Updates:
    """Holds the snapshot that was announced last, and brings workers to serve it."""

    def __init__(
        self,
        role: str,
        *,
        serves: Callable[[str, WeightsVersion], None],
        fence: Callable[[str, LossCause, str], None],
    ) -> None:
        """`serves` gets a worker that has loaded the snapshot, `fence` one that cannot."""
        self._role = role
        self._serves = serves
        self._fence = fence
        self._loads: set[asyncio.Task[WeightsAck | str]] = set()
        self.snapshot: WeightsSnapshot | None = None

    async def publish(
        self, snapshot: WeightsSnapshot, members: Mapping[str, Member], *, timeout_s: float
    ) -> PublishReport:
        """Have all of `members` serve `snapshot`; those that cannot within the deadline are fenced.

        Once a member serves it, one that needs much longer is not waited for: it is fenced or
        serves later.
        """
        self.snapshot = snapshot
        loads = {}
        for worker_id, member in members.items():
            loads[worker_id] = self._begin(member, snapshot, timeout_s)
        await self._until_enough(loads.values())
        outcomes = {name: load.result() for name, load in loads.items() if load.done()}
        return PublishReport(
            snapshot.version,
            acks=tuple(o for o in outcomes.values() if isinstance(o, WeightsAck)),
            failures={name: o for name, o in outcomes.items() if isinstance(o, str)},
            late=tuple(name for name in loads if name not in outcomes),
        )

    def catch_up(self, member: Member, *, timeout_s: float) -> None:
        """Have a worker that was left out of updates serve the latest, some time soon."""
        if self.snapshot is not None:
            self._begin(member, self.snapshot, timeout_s)

    async def bring_up(
        self, handle: WorkerHandle, heartbeat: asyncio.Task[Loss], *, who: str
    ) -> WeightsVersion | None:
        """The version that a newcomer serves, after loading what is published at this moment."""
        loaded: WeightsVersion | None = None
        while self.snapshot is not None and loaded != self.snapshot.version:
            snapshot = self.snapshot
            load = asyncio.create_task(
                handles.call(
                    handle.load_weights.remote(snapshot), timeout_s=deadlines.FIRST_LOAD_S, who=who
                ),
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
            except ProcessLostError as error:  # the caller must not take it for ours
                raise WorkerError(str(error)) from None
            else:
                loaded = snapshot.version
        return loaded if self.snapshot is not None else None

    def _begin(
        self, member: Member, snapshot: WeightsSnapshot, timeout_s: float
    ) -> asyncio.Task[WeightsAck | str]:
        name = f"load-{snapshot.version}-{member.info.worker_id}"
        load = asyncio.create_task(self._load(member, snapshot, timeout_s), name=name)
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)
        return load

    async def _load(
        self, member: Member, snapshot: WeightsSnapshot, timeout_s: float
    ) -> WeightsAck | str:
        """The acknowledgement, or why there is none."""
        worker_id = member.info.worker_id
        try:
            ack = await handles.call(
                member.handle.load_weights.remote(snapshot),
                timeout_s=timeout_s,
                who=f"{self._role} worker {worker_id}",
            )
        except SnapshotLostError as error:  # the trainer's end, not the worker's fault
            self._forget(snapshot)
            return str(error)
        except AsyncGrpoError as error:
            died = isinstance(error, ProcessLostError)
            self._fence(worker_id, LossCause.DIED if died else LossCause.UPDATE, str(error))
            return str(error)
        if self.snapshot is snapshot:
            self._serves(worker_id, snapshot.version)
        return ack

    async def _until_enough(self, loads: Collection[asyncio.Task[WeightsAck | str]]) -> None:
        """All have ended; or one well, and the others have had as long again, and some patience."""
        clock = asyncio.get_running_loop().time
        started, pending = clock(), set(loads)
        while pending and not any(_is_served(load) for load in loads):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            await asyncio.wait(pending, timeout=deadlines.LATE_LOADS_S + clock() - started)

    def _forget(self, snapshot: WeightsSnapshot) -> None:
        if self.snapshot is snapshot:
            logger.info("weights %s are forgotten: their trainer has ended", snapshot.version)
            self.snapshot = None


def _is_served(load: asyncio.Task[WeightsAck | str]) -> bool:
    return load.done() and isinstance(load.result(), WeightsAck)
