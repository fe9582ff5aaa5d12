"""The control process: a registry for each role, and the batcher of the run.

consumes:     registrations, the calls of one run, its trainer's signs of life
produces:     registered workers, items for the ranks, answers of workers
waits for:    workers and ranks
unblocked by: a registration, an answer, a request of every rank
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from async_grpo.batching.records import BatcherPlan
from async_grpo.cluster.batched_calls import BatchedActor
from async_grpo.cluster.cluster import Cluster
from async_grpo.config.roles import GENERATION, VERIFIER, check_service, is_service, role_of
from async_grpo.controller.heartbeat import until_gone
from async_grpo.controller.leases import Lease
from async_grpo.controller.registry import WorkerRegistry, registry_with
from async_grpo.controller.served_run import ServedRun
from async_grpo.controller.verifier_terms import VerifierTerms
from async_grpo.types import (
    AT_ONCE,
    Arrays,
    Control,
    EvaluationResult,
    Minibatch,
    PipelineStatus,
    PublishReport,
    RowKey,
    RunId,
    RunStatus,
    Standing,
    StreamItems,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError, LeaseLost, LossCause, RunLost, WorkerError

if TYPE_CHECKING:
    from async_grpo.cluster.handles import (
        ControllerHandle,
        RecorderHandle,
        WitnessHandle,
        WorkerHandle,
    )

logger = logging.getLogger(__name__)
T = TypeVar("T")
Work = Callable[[], Coroutine[object, object, T]]
TICK_S = 1.0
# Counted in ticks: time in which this process itself stood still does not count.
IDLE_TICKS = round(deadlines.CONTROLLER_IDLE_S / TICK_S)
SILENT_TICKS = round(deadlines.TRAINER_SILENCE_S / TICK_S)
UNWITNESSED_TICKS = round(deadlines.UNWITNESSED_S / TICK_S)
TAKEOVER_TICK_S = 0.1
# A collection over the objects of a thousand episodes takes 0.2 s, in which no call is answered;
# Python itself ran five in 73 s. A minute of their turns left no garbage at all.
COLLECT_TICKS = 600


class Controller(BatchedActor):
    """One in each namespace, see `find.find_or_make_controller`.

    Every call of a run passes its `RunId`; a call of any other run raises `RunLost` at once.
    """

    def __init__(self, code: str, *, kill: Callable[[object], None] = ray.kill) -> None:
        """`code`: the hash of the package that this process runs."""
        self._code = code
        self._kill = kill
        self._registries: dict[str, WorkerRegistry] = {}
        # No lease and no epoch has the number of one of an earlier controller.
        self._lease_ids = itertools.count(time.time_ns())
        self._epochs = itertools.count(time.time_ns() // 1_000)
        self._run: ServedRun | None = None
        self._teachers: dict[str, WorkerInfo] = {}  # the latest teacher or service of each role
        self._beginning = asyncio.Lock()
        self._endings: dict[RunId, str] = {}
        self._idle_ticks = 0
        self._terms = VerifierTerms(
            pools=lambda: self.registry_of(VERIFIER).members,
            trainer=lambda: f"trainer {self._run.trainer}" if self._run else "",
        )
        self._ticking = asyncio.create_task(self._tick(), name="tick")

    async def hello(self, code: str) -> None:
        """A dispatcher or a trainer of this `code` is alive; this controller lives on for a while.

        If the code differs, raises `ConfigError` while workers or a run use this controller, and
        ends this process otherwise.
        """
        self._idle_ticks = 0
        if code == self._code:
            return
        if users := self._users():
            raise ConfigError(
                "the controller, its workers and its trainer must run the same source of "
                f"async-grpo, and this command runs another: stop {users} first, or give this "
                "command another --namespace"
            )
        await self._end_process("a command of another source has come")

    async def register(self, info: WorkerInfo, handle: WorkerHandle) -> None:
        """Admit a worker once it serves the weights of its role, if there are any yet.

        Raises the worker's error if it cannot load them, `WorkerError` if it is lost, `ConfigError`
        for a verifier pool with other rewards than those in use, and for a teacher whose model
        differs from the others of its name.
        """
        self._idle_ticks = 0
        self._check_model(info)
        async with self._terms.admitted(info):
            await self.registry_of(info.role).register(info, handle)

    async def deregister(self, role: str, worker_id: str) -> None:
        """Forget a worker; its leases are revoked."""
        self.registry_of(role).deregister(worker_id)

    async def drain(self, role: str, worker_id: str, draining: bool = True) -> None:
        """Give a worker no new work, in this run and later ones, or with False some again."""
        self.registry_of(role).drain(worker_id, draining=draining)

    async def standing(self, worker_ids: Mapping[str, Sequence[str]]) -> dict[str, Standing]:
        """The state of each worker, listed by role; the call is a dispatcher's sign of life."""
        self._idle_ticks = 0
        run = self._run.id.incarnation if self._run else 0
        standing: dict[str, Standing] = {}
        for role, names in worker_ids.items():
            standing |= self.registry_of(role).standing(names, run=run)
        return standing

    async def current_run(self) -> RunId | None:
        """The id of the run, for commands that observe it; None: there is none."""
        return self._run.id if self._run else None

    async def roles(self) -> tuple[str, ...]:
        """The names of the roles that have had a worker."""
        known = self._registries.items()
        return tuple(name for name, registry in known if registry.history.counts["registered"])

    async def members(self, role: str) -> tuple[WorkerInfo, ...]:
        """All admitted workers of a role."""
        return tuple(member.info for member in self.registry_of(role).members)

    async def receivers(self, role: str) -> tuple[tuple[WorkerInfo, WorkerHandle], ...]:
        """The workers that get new weights, with handles: device transport calls them directly."""
        receivers = self.registry_of(role).receivers.values()
        return tuple((member.info, member.handle) for member in receivers)

    async def fenced(self, role: str) -> dict[str, str]:
        """The latest excluded workers, with the reasons."""
        return dict(self.registry_of(role).history.exclusions)

    async def counts(self, role: str) -> dict[str, int]:
        """Counts of the events of a role's workers, see `History`."""
        return dict(self.registry_of(role).history.counts)

    async def begin_run(
        self, plan: BatcherPlan, witness: WitnessHandle, recorder: RecorderHandle | None
    ) -> int:
        """Begin or resume a run with this plan; return its epoch.

        `witness`: an actor that dies with the run's trainer. `recorder`: the run's `RunRecorder`,
        None to record nothing. A run of the same incarnation is replaced. Raises `ConfigError` if
        another run does not end within a while.
        """
        async with self._beginning:
            trainer = await trainer_of(witness)
            await self._until_free(plan.incarnation)
            if self._run is not None:
                self._end(self._run, f"trainer {trainer} has begun it again")
            run = RunId(plan.incarnation, next(self._epochs))
            plan = replace(plan, epoch=run.epoch)
            self._run = ServedRun(plan, self.registry_of, recorder, trainer=trainer)
            gc.disable()
            watch = self._end_with(witness, self._run)
            self._run.calls.add(asyncio.create_task(watch, name="end-with-trainer"))
            logger.info("run %s of trainer %s begins", run, trainer)
            if plan.config.memory.colocated:  # the ranks have the devices first
                await self.registry_of(GENERATION).rest()
            return run.epoch

    async def end_run(self, run: RunId) -> None:
        """Forget the run and its weights, revoke its leases, end its requests."""
        self._end(self._current(run), "its trainer has ended it")

    async def heard(self, run: RunId) -> None:
        """The trainer is alive; a thread of it calls this every second."""
        self._current(run).silent_ticks = 0

    async def publish(
        self, run: RunId, snapshot: WeightsSnapshot, roles: tuple[str, ...], timeout_s: float
    ) -> dict[str, PublishReport]:
        """Have every member of these roles serve `snapshot`; reports by role."""

        async def update() -> list[PublishReport]:
            registries = map(self.registry_of, roles)
            return await asyncio.gather(
                *(r.publish(snapshot, timeout_s=timeout_s) for r in registries)
            )

        return dict(zip(roles, await self._while_it_lasts(run, update), strict=True))

    async def published(self, run: RunId, version: WeightsVersion) -> None:
        """Weights are published: the staleness window moves, and slots start."""
        await self._current(run).published(version)

    async def rest(self, run: RunId) -> None:
        """Have the engines give their devices to the ranks, whatever they do now."""
        await self._while_it_lasts(run, self.registry_of(GENERATION).rest)

    async def next_items(self, run: RunId, rank: int, index: int) -> StreamItems:
        """Answer `index` of a rank's stream; a repeated call gets the same answer."""
        return await self._current(run).batcher.next_items(rank, index)

    async def taught_again(
        self, run: RunId, rank: int, index: int, keys: Sequence[RowKey]
    ) -> Minibatch:
        """Item `index` of a rank, with new tickets for these samples, whose payloads are lost."""
        batcher = self._current(run).batcher
        return await self._while_it_lasts(run, partial(batcher.taught_again, rank, index, keys))

    async def teacher_head(self, run: RunId, role: str) -> tuple[Awaitable[Arrays], ...]:
        """The reference to a teacher's head (which turns hidden states into logits), in a tuple."""
        served = self._current(run)
        return await self._while_it_lasts(run, partial(served.teacher_head, role))

    async def hungry(self, run: RunId, index: int) -> None:
        """The ranks have nothing left to compute while they wait for answer `index`."""
        await self._current(run).batcher.hungry(index)

    async def evaluated(self, run: RunId) -> tuple[EvaluationResult, ...]:
        """Results that no `EndOfStep` has carried, once all evaluations have ended."""
        return await self._while_it_lasts(run, self._current(run).evaluations.finished)

    async def control(self, folder: str, control: Control) -> None:
        """Take a request of `async-grpo control` for the run of this output folder.

        Raises `ConfigError` if that run does not train here, or cannot fulfil the request.
        """
        served = self._run_in(folder)
        if control.action in AT_ONCE:
            registry = registry_with(control.worker, self._registries.values())
            registry.drain(control.worker, draining=control.action == "drain")
        served.control(control)

    async def running(self, folder: str) -> RunStatus:
        """The status of the run of this output folder, for `control`; errors as there."""
        return self._run_in(folder).running(self._registries.values())

    def _run_in(self, folder: str) -> ServedRun:
        if self._run is None:
            raise ConfigError(
                f"the run in {folder} must be training, this controller serves none: it has ended, "
                "or not begun to train"
            )
        own = self._run.folder
        if os.path.realpath(folder) != os.path.realpath(own):
            raise ConfigError(
                f"the run must be the one that trains here, in {own}, got {folder}: it has ended, "
                "or is one of another Ray cluster or namespace"
            )
        return self._run

    async def status(self, run: RunId) -> PipelineStatus:
        """What every stage is doing right now."""
        return self._current(run).status()

    async def abort(self, run: RunId, reason: str) -> None:
        """End all work; every rank that waits for an item gets an error with this reason."""
        self._current(run).close(WorkerError(reason))

    async def ask(
        self,
        run: RunId,
        role: str,
        method: str,
        request: Any,
        *,
        cost: float,
        version: WeightsVersion | None = None,
        prefer: str | None = None,
        owner: int | None = None,
    ) -> object:
        """The answer of one worker of a role to `method(request)`, under a lease.

        `prefer`: the id of a worker that is taken if it qualifies. `owner`: the lease of the asking
        worker; the work ends with it. Raises `LeaseLost` if the worker or the owner's lease is
        lost.
        """
        check_service(role, await self.roles())
        owning = None if owner is None else self._lease(owner)
        ask = self._current(run).ask
        work = partial(
            ask, role, method, request, cost=cost, version=version, prefer=prefer, owner=owning
        )
        return await self._while_it_lasts(
            run, work if owner is None else partial(_under, owning, work)
        )

    def registry_of(self, role: str) -> WorkerRegistry:
        """The registry of a role; raises `ConfigError` for an unknown role."""
        if role not in self._registries:
            self._registries[role] = WorkerRegistry(
                role_of(role), lease_ids=self._lease_ids, kill=self._kill
            )
        return self._registries[role]

    def _check_model(self, info: WorkerInfo) -> None:
        """Raise `ConfigError` for a teacher or service that differs from others of its name."""
        if role_of(info.role).follows != "own":
            return
        known = self._teachers.get(info.role)
        is_used = self._run is not None or self.registry_of(info.role).members
        if known and is_used and known.model_hash != info.model_hash:
            what, remedy = "model", "start it with the same --model-path"
            if is_service(info.role):
                what, remedy = "class", "stop the others first"
            raise ConfigError(
                f"every {info.role} worker must serve the same {what}: {known.model_path} of "
                f"worker {known.worker_id} has the sha256 {known.model_hash[:12]}, got "
                f"{info.model_path} with {info.model_hash[:12]}: {remedy}, or under another --name"
            )
        self._teachers[info.role] = info

    def _lease(self, lease_id: int) -> Lease | None:
        found = (registry.find_lease(lease_id) for registry in self._registries.values())
        return next(filter(None, found), None)

    def _current(self, run: RunId) -> ServedRun:
        if self._run is None or self._run.id != run:
            why = self._endings.get(run, "it is not known here, for this controller is a new one")
            raise RunLost(f"the controller does not serve run {run}: {why}")
        return self._run

    async def _while_it_lasts(self, run: RunId, work: Work[T]) -> T:
        """The result of `work`; if the run ends first, cancel the work and raise `RunLost`."""
        tasks = self._current(run).calls
        task = asyncio.ensure_future(work())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        try:
            return await task
        except (asyncio.CancelledError, LeaseLost):
            self._current(run)
            raise

    def _end(self, run: ServedRun, why: str) -> None:
        """End a run, if it is still the current one."""
        if self._run is not run:
            return
        logger.info("run %s ends: %s", run.id, why)
        self._run = None
        gc.enable()
        self._endings[run.id] = why
        run.close(RunLost(f"the controller does not serve run {run.id}: {why}"))
        for task in run.calls - {asyncio.current_task()}:
            task.cancel()
        for registry in self._registries.values():
            registry.end_run()

    async def _end_with(self, witness: WitnessHandle, run: ServedRun) -> None:
        """End it once the witness is gone and the trainer silent; a killed witness restarts."""
        reason = ""
        while not reason or run.silent_ticks < UNWITNESSED_TICKS:
            reason = await until_gone(witness.until_death.remote, who=f"trainer {run.trainer}")
            await asyncio.sleep(TICK_S)
        self._end(run, reason)

    async def _until_free(self, incarnation: int) -> None:
        """Wait until no other run is here; raise `ConfigError` if one stays."""
        for _ in range(round(deadlines.OTHER_RUN_ENDED_S / TAKEOVER_TICK_S)):
            if self._run is None or self._run.id.incarnation == incarnation:
                return
            await asyncio.sleep(TAKEOVER_TICK_S)
        if (other := self._run) and other.id.incarnation != incarnation:
            raise ConfigError(
                f"another trainer ({other.trainer}) uses these workers: wait for it, or start "
                "workers and trainer with another --namespace, the trainer with another "
                "--output-dir too"
            )

    def _users(self) -> str:
        """The commands that use the controller; empty if none does."""
        users = [f"trainer {self._run.trainer}"] if self._run else []
        for registry in self._registries.values():
            users += [member.info.owner for member in registry.members]
        return ", ".join(dict.fromkeys(filter(None, users)))

    async def _tick(self) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(TICK_S)
            if number % COLLECT_TICKS == 0:
                gc.collect()
            self._terms.tell_shares()
            if (run := self._run) is not None:
                run.silent_ticks += 1
                if run.silent_ticks > SILENT_TICKS:
                    self._end(run, f"trainer {run.trainer} has been silent for {SILENT_TICKS} s")
            is_used = run is not None or any(r.members for r in self._registries.values())
            self._idle_ticks = 0 if is_used else self._idle_ticks + 1
            if self._idle_ticks > IDLE_TICKS:
                await self._end_process("it has no workers and no run")

    async def _end_process(self, why: str) -> None:
        logger.info("the controller ends: %s", why)
        # exit_actor() works in methods of an actor only, not in its tasks.
        self._kill(own_handle())
        await asyncio.Future()  # the call fails when the process ends, instead of returning


def own_handle() -> ControllerHandle:
    """The handle of this process's actor."""
    return ray.get_runtime_context().current_actor


async def trainer_of(witness: WitnessHandle) -> str:
    """The name of a witness's trainer, for messages."""
    return await asyncio.to_thread(Cluster().driver_of, witness)


async def _under(owner: Lease | None, work: Work[T]) -> T:
    """The result of `work`; if the lease ends first, cancel the work and raise `LeaseLost`."""
    lost = LeaseLost(LossCause.OWNER, "the lease under which the asker works has ended")
    if owner is None:
        raise lost
    try:
        return await owner.during(work())
    except LeaseLost:
        if owner.is_valid:  # the work has lost another lease
            raise
        raise lost from None
