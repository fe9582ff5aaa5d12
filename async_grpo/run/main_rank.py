"""Rank 0's part of a sampled run: its client of the controller, its report, its publisher.

consumes:     ends of steps (where to resume), collected weights, losses of the controller
produces:     the run at the controller, its weights there, recoveries
waits for:    the controller and one worker of every role that the run needs
unblocked by: the process that makes a controller; a registration, up to --worker-timeout-s

Every other rank has an `OtherRank` in its place: the training loop is the same on all ranks.

Every loss of the controller is recovered from in the same way. The ranks agree that it is lost and
discard their sums; rank 0 finds or makes a controller and begins the run there at the latest
`EndOfStep.resume`; a worker of every role registers; rank 0 announces what each role serves; all
ranks take the new epoch. Work of the unfinished step is done again and counted once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Self

from async_grpo.batching.records import BatcherPlan
from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import ControllerClient, RunClient
from async_grpo.controller.find import find_or_make_controller
from async_grpo.run.companions import start_recorder, start_witness
from async_grpo.run.journals import ControlJournal
from async_grpo.run.output_folder import leave_connection
from async_grpo.run.publication import OthersPublication, Publication
from async_grpo.run.report import Report
from async_grpo.run.watch import RunRecord, Watcher
from async_grpo.telemetry.gauges import RayGauges
from async_grpo.training.ranks import Absent, Ranks
from async_grpo.training.stream import Standstill
from async_grpo.types import EndOfStep, EvaluationResult, ResumePoint, WorkerInfo
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, ClusterError, DeadlineError, ProcessLostError

if TYPE_CHECKING:
    from async_grpo.cluster.handles import GatewayHandle

logger = logging.getLogger(__name__)
MAX_RECOVERIES = 3  # per run
STOP_POLL_S = 0.2
DONE, EVALUATING = range(2)  # sent to the other ranks while they wait for an evaluation


class RunAtController:
    """The run at the current controller, and what is needed to begin it at another one."""

    def __init__(
        self,
        plan: BatcherPlan,
        cluster: Cluster,
        *,
        recruit: Callable[[ControllerClient], object],
    ) -> None:
        """Begin the run. `recruit` returns when a worker of every role has registered.

        Raises `ConfigError` when the controller has another run.
        """
        self.plan = plan
        self.cluster = cluster
        self.journal = ControlJournal(Path(plan.config.recording.output_dir), plan.pending)
        self._recruit = recruit
        self._cut: ResumePoint | None = plan.resume
        self._settings = plan.settings
        self._num_recoveries = 0
        self._witness = start_witness(cluster)
        self._recorder = start_recorder(
            plan.config.recording, cluster, model=plan.config.places.model_name_or_path
        )
        self.client = self._begin()

    def step_agreed(self, end: EndOfStep) -> None:
        """Note the end of a step that all ranks have: a recovery resumes after it."""
        self._cut = end.resume
        self._settings = end.settings
        self.journal.done(end.controls, from_batch=end.batch + 1)

    def lost(self, reason: str) -> None:
        """Count a loss of the controller; raises `ClusterError` after `MAX_RECOVERIES`."""
        if self._num_recoveries == MAX_RECOVERIES:
            raise ClusterError(
                f"the controller was lost {MAX_RECOVERIES + 1} times in this run, the last "
                f"time: {reason}; look at the memory of the Ray head's machine"
            )
        self._num_recoveries += 1
        logger.warning("%s: the unfinished gradient step is done again", reason)

    def begin_again(self) -> None:
        """Begin the run at a live controller; raises `ProcessLostError` when that is lost too."""
        self.client = self._begin()
        self._recruit(self.client)

    def end(self) -> None:
        """End the run at the controller, which also notices the end of the witness."""
        with contextlib.suppress(AsyncGrpoError):
            client = self.client
            client.answer(deadlines.RUN_ENDED_S, client.controller.end_run, client.run)

    def _begin(self) -> RunClient:
        plan = replace(
            self.plan, resume=self._cut, settings=self._settings, pending=self.journal.pending
        )
        client = ControllerClient(self.cluster, find_or_make_controller(self.cluster))
        return client.begin_run(plan, self._witness, self._recorder, incarnation=plan.incarnation)


class MainRank:
    """Rank 0's part of a run; leaving its `with` block ends the run at the controller."""

    def __init__(
        self,
        run: RunAtController,
        weights: Publication,
        record: RunRecord,
        *,
        workers: Sequence[WorkerInfo] = (),
        hashes: Future[Mapping[str, str]] | None = None,
        teachers: Mapping[str, WorkerInfo],
        code: Mapping[str, str],
        gateway: GatewayHandle | None = None,
    ) -> None:
        """`workers`: those registered at the start. `code`: see `preparation.hash_code`.

        `teachers`: {name: one of its workers}. The gateway ends when its handle is dropped.
        """
        self.weights = weights
        self.teacher_widths = {name: worker.vocab_size for name, worker in teachers.items()}
        self.hashes = hashes
        self.report: Report | Absent = Absent()
        self.run = run
        self._workers = workers
        self._code = code
        self._gateway = gateway
        self._record = record

    @property
    def client(self) -> RunClient:
        """The client of the run at the current controller."""
        return self.run.client

    def __enter__(self) -> Self:
        self._watcher = Watcher(lambda: self.client, self._record.incidents)
        self._watcher.received = self.run.journal.received
        return self

    def __exit__(self, *_: object) -> None:
        self.weights.announcements.close()
        self._watcher.close()
        self.run.end()

    def reporting(self, make: Callable[..., Report]) -> AbstractContextManager[Report | Absent]:
        """Make the report of the run, in which the watcher shows the status of every stage."""
        recording = self.run.plan.config.recording
        gauges = RayGauges(recording.shown_name)
        self.report = report = make(code=self._code, gauges=gauges)
        report.workers(self._workers)
        self.weights.announcements.on_synced = report.synced
        self._watcher.show, self._watcher.show_workers = report.status, report.workers
        leave_connection(Path(recording.output_dir), self.run.cluster)
        if url := self.run.cluster.metrics_url():
            logger.info("metrics for Prometheus: %s", url)
        return report

    def recover(self, lost: RunClient, reason: str) -> None:
        """Continue at a live controller, unless the run has left the controller of `lost` already.

        Raises `ClusterError` when this run has lost its controllers too often.
        """
        while self.client is lost:
            self.run.lost(reason)
            try:
                self.weights.announcements.wait()
                self.run.begin_again()
                self.weights.announcements.repeat(self.client)
            except ProcessLostError as error:
                lost, reason = self.client, str(error)
            else:
                self.report.recovered()
                return

    def finish_evaluations(self, ranks: Ranks, stop: Event) -> None:
        """Wait for the last evaluations while they progress and no stop is requested; collective.

        Rank 0 asks again when the controller is lost; now and then it lets the waiting ranks know.
        """
        if self.run.plan.sets:
            self.report.doing("waiting for the last evaluation")
            self.weights.announcements.wait()
            self._finish_evaluations(ranks, stop)
        ranks.agree(DONE)

    def _finish_evaluations(self, ranks: Ranks, stop: Event) -> None:
        why = "the run was stopped before its end"
        results: tuple[EvaluationResult, ...] = ()
        while True:
            client = self.client
            try:
                results = self._evaluated(client, ranks, stop)
                break
            except DeadlineError as error:
                why = str(error)
                break
            except ProcessLostError as error:
                self.recover(client, str(error))
        for result in results:
            self.report.evaluation(result)
        self.report.unevaluated(why)

    def _evaluated(
        self, client: RunClient, ranks: Ranks, stop: Event
    ) -> tuple[EvaluationResult, ...]:
        call = client.controller.evaluated.remote(client.run)
        due_at = time.monotonic() + deadlines.RANKS_TOLD_S
        standstill = Standstill(client, timeout_s=self.run.plan.config.places.stall_timeout_s)
        while not client.cluster.is_ready(call):
            if stop.wait(STOP_POLL_S):
                return ()
            standstill.check()
            if time.monotonic() >= due_at:
                ranks.agree(EVALUATING)
                due_at = time.monotonic() + deadlines.RANKS_TOLD_S
        return client.cluster.wait(
            call, timeout_s=deadlines.STATUS_S, who="the evaluation of held-out questions"
        )


class OtherRank(Absent):
    """In place of `MainRank` on every other rank, which follows rank 0."""

    run = report = Absent()
    weights = OthersPublication()
    hashes = None
    teacher_widths: Mapping[str, int]  # unset, as the next: rank 0 shares its values
    client: RunClient

    def reporting(self, make: Callable[..., Report]) -> AbstractContextManager[Absent]:
        return self.report

    def finish_evaluations(self, ranks: Ranks, stop: Event) -> None:
        """Wait until rank 0 has the results."""
        while ranks.agree(DONE) == EVALUATING:
            pass
