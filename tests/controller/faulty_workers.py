"""Workers that die, freeze, dawdle or refuse weights, and a registry that they belong to."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from scripted import Handle

from async_grpo.config.roles import role_of
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.types import (
    EvaluationTerms,
    Pulse,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.util.errors import LeaseLost, ProcessLostError, WeightSyncError

PHASES = ("fetch", "verify", "pause", "load", "finish", "acknowledge")
PHASE_S = 0.1
FOREVER_S = 100_000.0
V0, V1, V2 = (WeightsVersion(1, batches) for batches in range(3))


@dataclass
class Worker:
    """A worker's process; every call on it ends with it."""

    name: str
    fault: tuple[str, str] | None = None  # phase of an update, and "raises", "stalls" or "dies"
    phase_s: float = PHASE_S
    version: WeightsVersion | None = None
    is_whole: bool = True  # its weights are of one version
    updates: list = field(default_factory=list)
    num_aborts: int = 0
    pulse: Callable[[float], Pulse] | None = None  # what it has made, by the clock
    num_pings: int = 0
    is_asleep: bool = False

    def __post_init__(self):
        self.dead, self.frozen, self.woken = asyncio.Event(), False, asyncio.Event()
        self.turning = asyncio.Lock()  # a worker sleeps or loads weights, one after the other

    @property
    def handle(self):
        return Handle(self)

    def die(self):
        self.dead.set()

    def freeze(self):
        self.frozen = True

    def wake(self):
        self.frozen = False
        self.woken.set()

    async def _live(self, seconds):
        """Time passes, unless the process ends or freezes."""
        died = asyncio.create_task(self.dead.wait())
        try:
            await asyncio.wait({died}, timeout=seconds)
            if self.frozen and not self.dead.is_set():
                woken = asyncio.create_task(self.woken.wait())
                await asyncio.wait({died, woken}, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
        finally:
            died.cancel()
        if self.dead.is_set():
            raise ProcessLostError(f"worker {self.name} died")

    async def ping(self, after_s=0.0):
        self.num_pings += 1
        await self._live(after_s)
        return self.pulse(now_s()) if self.pulse else Pulse(str(self.version))

    async def generate(self, seconds):
        assert not self.is_asleep, "a lease on a worker that sleeps"
        await self._live(seconds)
        assert self.is_whole, "a token was served by partial weights"
        return self.version

    async def abort_all(self):
        self.num_aborts += 1

    async def sleep(self):
        async with self.turning:
            if self.fault == ("sleep", "stalls"):
                await self._live(FOREVER_S)
            await self._live(self.phase_s)
            self.is_asleep = True

    async def load_weights(self, snapshot):
        self.updates.append(snapshot.version)
        async with self.turning:
            return await self._load(snapshot)

    async def _load(self, snapshot):
        self.is_asleep = False
        if self.version == snapshot.version:
            return WeightsAck(self.name, snapshot.version, 0.0, 0.0)
        for phase in PHASES:
            await self._pass(phase)
            if phase == "load":
                self.is_whole = False
            elif phase == "finish":
                self.version, self.is_whole = snapshot.version, True
        return WeightsAck(self.name, snapshot.version, 0.0, 0.0)

    async def _pass(self, phase):
        await self._live(self.phase_s)
        if self.fault is None or self.fault[0] != phase or self.version is None:
            return
        kind = self.fault[1]
        if kind == "raises":
            raise WeightSyncError(f"{phase} failed")
        if kind == "dies":
            self.die()
        await self._live(FOREVER_S)


class Scene:
    """A registry, with the dispatcher's part: who it kills is dead."""

    def __init__(self, *, role="generation", **options):
        self.workers = {}
        self.killed = []
        self.role = role
        self.registry = WorkerRegistry(role_of(role), kill=self._kill, **options)
        self._held = {}

    def _kill(self, handle):
        self.killed.append(handle._actor.name)
        handle._actor.die()

    async def join(self, name, *, capacity=4.0, lease_s=30.0, **options):
        worker = self.workers[name] = Worker(name, **options)
        info = WorkerInfo(
            name, self.role, "node", 1, "model", 64, capacity, 0.0, 512, lease_s=lease_s
        )
        await self.registry.register(info, worker.handle)
        return worker

    async def publish(self, version, *, timeout_s=60.0):
        return await self.registry.publish(WeightsSnapshot(version, ()), timeout_s=timeout_s)

    async def lease(self, version=V0, *, timeout_s=5.0, hold=None, **options):
        """One that is held until it is given back."""
        terms = EvaluationTerms(hold=hold)
        context = self.registry.lease(
            1.0, version=version, timeout_s=timeout_s, terms=terms, **options
        )
        lease = await context.__aenter__()
        self._held[lease] = context
        return lease

    async def give_back(self, lease):
        """Whether an answer under it would have counted."""
        try:
            await self._held.pop(lease).__aexit__(None, None, None)
        except LeaseLost:
            return False
        return True

    @property
    def names(self):
        return [member.info.worker_id for member in self.registry.members]

    @property
    def counts(self):
        return self.registry.history.counts

    @property
    def num_leases(self):
        return sum(len(member.leases) for member in self.registry.members)


def now_s():
    return asyncio.get_running_loop().time()
