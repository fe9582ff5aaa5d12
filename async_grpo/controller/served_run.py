"""A run while the controller serves it: its batcher, evaluations, and calls beside the batcher.

consumes:     requests of the trainer, of workers under leases and of `async-grpo control`
produces:     items for ranks, results of evaluations, answers of workers, the run's status
waits for:    workers; ranks that ask for items
unblocked by: answers; published weights
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from async_grpo.batching.batcher import ExperienceBatcher
from async_grpo.batching.evaluations import Evaluations
from async_grpo.batching.leased_work import LAST
from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.batching.records import BatcherPlan, Controls, RegistryOf
from async_grpo.config.roles import ENVIRONMENT, GENERATION, VERIFIER, judge, named
from async_grpo.controller.leases import Lease
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.types import (
    Arrays,
    Control,
    GenerationRequest,
    HeadRequest,
    OutageRequest,
    PipelineStatus,
    RunId,
    RunStatus,
    WeightsVersion,
)
from async_grpo.util.errors import DeadlineError, LeaseLost, ProcessLostError, WorkerError

if TYPE_CHECKING:
    from async_grpo.cluster.handles import RecorderHandle

logger = logging.getLogger(__name__)


class ServedRun:
    """The batcher, evaluations and controls of one run, over one pipeline."""

    def __init__(
        self,
        plan: BatcherPlan,
        registry_of: RegistryOf,
        recorder: RecorderHandle | None = None,
        *,
        trainer: str = "",
    ) -> None:
        """`registry_of(role)` is the registry of a role. `recorder`: None dumps no samples.
        `trainer`: its name in messages.
        """
        config = plan.config
        self.id = RunId(plan.incarnation, plan.epoch)
        self.trainer = trainer
        self.folder = config.recording.output_dir
        self.silent_ticks = 0  # of the controller, since the trainer's last sign of life
        self.calls: set[asyncio.Task[object]] = set()  # cancelled when the run ends
        self.pipeline = SlotPipeline(plan, registry_of)
        self.controls = Controls(plan)
        self.evaluations = Evaluations(plan, self.pipeline, registry_of, self._begin)
        self.batcher = ExperienceBatcher(
            plan,
            self.pipeline,
            controls=self.controls,
            evaluations=self.evaluations,
            begin=self._begin,
            recorder=recorder,
        )
        self.evaluations.log = self.batcher.log
        self._registry_of = registry_of
        self._stall_timeout_s = config.places.stall_timeout_s
        scorers = named((need.role for need in plan.rules.needs), config.teacher_names)
        judges = map(judge, config.data.judge_names)
        self._roles = (GENERATION, *scorers, *judges, *plan.services)
        self._num_batches = config.batching.num_training_batches
        self._tasks: set[asyncio.Task[None]] = set()  # slots, evaluations, the sending of rounds

    async def published(self, version: WeightsVersion) -> None:
        """Weights are published: slots start, and the evaluations that are due."""
        await self.batcher.published(version)
        self.evaluations.published(version)

    def control(self, control: Control) -> None:
        """Take a request for the end of the batch; a larger staleness opens the window now.

        Raises `ConfigError` for one that this run cannot fulfil.
        """
        self.controls.ask(control)
        self.batcher.control_asked()

    def close(self, error: Exception) -> None:
        """End all work; every rank that asks for an item gets `error`."""
        self.batcher.fail(error)
        for task in self._tasks:
            task.cancel()

    def status(self) -> PipelineStatus:
        """What every stage is doing right now."""
        registries = {role: self._registry_of(role) for role in self._roles}
        workers, grading = self.pipeline.workers, self.pipeline.grading
        return replace(
            self.batcher.status(),
            workers={role: len(each.members) for role, each in registries.items()},
            worker_tokens=sum(each.num_tokens for each in registries.values()),
            problem=workers.progress.problem,
            warnings=(*grading.warnings.values(), *workers.outages.sentences.values()),
            failures=workers.progress.failures,
            controls=self.controls.asked,
        )

    def running(self, registries: Collection[WorkerRegistry]) -> RunStatus:
        """The options, batches and workers that a request may name."""
        draining = {name for registry in registries for name in registry.draining}
        members = [member.info for registry in registries for member in registry.members]
        return RunStatus(
            self.batcher.status().batch,
            self._num_batches,
            self.controls.options,
            self.controls.waiting,
            {info.worker_id: (info.role, info.worker_id in draining) for info in members},
        )

    async def teacher_head(self, role: str) -> tuple[Awaitable[Arrays], ...]:
        """The reference to a teacher's head (which turns hidden states into logits), in a tuple."""
        while True:
            lease = self._registry_of(role).lease(0, timeout_s=self._stall_timeout_s)
            try:
                async with lease as worker:
                    _, references = await worker.call("head", HeadRequest(), num_objects=1)
                    return tuple(references)
            except LeaseLost as error:
                logger.warning("another %s worker is asked for its head: %s", role, error)

    async def ask(
        self,
        role: str,
        method: str,
        request: Any,
        *,
        cost: float,
        version: WeightsVersion | None,
        prefer: str | None,
        owner: Lease | None,
    ) -> object:
        """As `Controller.ask`; `owner` is the lease of the asking worker, if it has one."""
        terms = owner.terms if owner else None
        if role == VERIFIER:  # by the run's grading, which asks again after a failed connection
            rewards = terms.rewards if terms else ()
            return await self.pipeline.grading.verdicts(request.outputs, rewards=rewards)
        if role == ENVIRONMENT:  # an episode reports that it waits for its server
            await self.outage(request, ends_run=terms is None)
        is_last = role == GENERATION and terms is not None
        lease = self._registry_of(role).lease(
            cost, version=version, prefer=prefer, timeout_s=self._stall_timeout_s, terms=terms
        )
        async with lease as worker:
            asked = replace(request, priority=LAST) if is_last else request
            answer = await worker.call(method, asked)
        self.pipeline.answered(request, answer)
        if isinstance(request, GenerationRequest) and owner and owner.is_valid:
            owner.received(answer)
        return answer

    async def outage(self, request: OutageRequest, *, ends_run: bool = True) -> NoReturn:
        """An episode waits for a server until this is cancelled; a timeout fails the run."""
        try:
            await self.pipeline.workers.outages.last(request)
        except DeadlineError as error:
            if ends_run:
                self.batcher.fail(WorkerError(str(error)))
            raise

    def _begin(self, work: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._has_ended)
        return task

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        """Pass a failure on to every rank that waits for a round."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ProcessLostError):  # a rank would take it for the controller's end
            error = WorkerError(str(error))
        if error is not None:
            self.batcher.fail(error)
