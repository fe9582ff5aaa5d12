"""What only rank 0 has of a sampled run: its end of the controller, its report, its publisher.

consumes:     ends of steps (where to go on from), collected weights, losses of the controller
produces:     a run at the controller, its weights there, recoveries
waits for:    the controller and one worker of every role that the run needs
unblocked by: whoever makes a controller first; a registration, up to --worker-timeout-s

Every other rank has an `OtherRank` in its place, so that nobody asks who he is.

There is one path back from every loss of the controller. The ranks agree that they have lost it
and forget their sums; rank 0 finds or makes a controller and begins the run there at the latest
`EndOfStep.resume`; a worker of every role registers; rank 0 announces what each role serves; all
ranks take the new epoch. Work of the unfinished step is done again and counted once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Self

import torch

from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.records import BatcherPlan
from async_grpo.checkpoint.resume import Start
from async_grpo.checkpoint.tensors import read_reference
from async_grpo.cluster import cluster
from async_grpo.cluster.handles import WHO, RunClient
from async_grpo.config.roles import GENERATION, REFERENCE
from async_grpo.config.train_config import TrainConfig
from async_grpo.controller.find import find_or_make_controller
from async_grpo.run.companions import start_recorder, start_witness
from async_grpo.run.journals import ControlJournal
from async_grpo.run.output_folder import leave_connection
from async_grpo.run.recruitment import Demand, recruit
from async_grpo.run.report import Report
from async_grpo.run.watch import RunRecord, Watcher
from async_grpo.telemetry.gauges import RayGauges
from async_grpo.training.ranks import Absent, Ranks
from async_grpo.training.stream import Standstill
from async_grpo.types import (
    CanaryRow,
    EndOfStep,
    EvaluationResult,
    PublishReport,
    ResumePoint,
    RunId,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
    canary_tokens,
)
from async_grpo.util import deadlines
from async_grpo.util.errors import (
    AsyncGrpoError,
    ClusterError,
    DeadlineError,
    ProcessLostError,
    WorkerError,
)
from async_grpo.weight_sync.buckets import NamedTensors
from async_grpo.weight_sync.publisher import Collected, Publisher
from async_grpo.weight_sync.reference_schedule import ReferenceSchedule
from async_grpo.weight_sync.sync_report import SyncReport, summarise_sync, sync_complaints
from async_grpo.weight_sync.transport import open_sender

if TYPE_CHECKING:
    from async_grpo.cluster.handles import ControllerHandle, GatewayHandle

logger = logging.getLogger(__name__)
MAX_RECOVERIES = 3  # a run
STOP_POLL_S = 0.2
DONE, EVALUATING = range(2)  # what rank 0 tells the others while they wait for an evaluation
Due = Mapping[str, WeightsSnapshot]  # by role


class MainRank:
    """Rank 0's; `with` it ends the run at the controller."""

    def __init__(
        self,
        plan: BatcherPlan,
        demand: Demand,
        record: RunRecord,
        *,
        workers: Sequence[WorkerInfo],
        hashes: Future[Mapping[str, str]],
        teacher_widths: Mapping[str, int],
        dtype: torch.dtype,
    ) -> None:
        """Begin the run at the controller; `teacher_widths` are the vocabularies' sizes by name.

        `dtype` is that of published weights. Raises `ConfigError` when another run lives there."""
        self.plan = plan
        self.teacher_widths = teacher_widths
        self.hashes: Future[Mapping[str, str]] | None = hashes
        self.report: Report | Absent = Absent()
        self.code: Mapping[str, str] = {}  # see `preparation.hash_code`
        self.gateway: GatewayHandle | None = None  # which ends with its handle
        self.canary = canary_tokens(question.input_token_ids for question in plan.questions)
        self._demand = demand
        self._workers = workers  # that were there at the beginning
        self._cut: ResumePoint | None = plan.resume
        self._settings = plan.settings
        self._journal = ControlJournal(Path(plan.config.recording.output_dir), plan.pending)
        self._num_recoveries = 0
        self._witness = start_witness()
        self._recorder = start_recorder(
            plan.config.recording, model=plan.config.places.model_name_or_path
        )
        self.client = self._begin(find_or_make_controller())
        self._watcher = Watcher(lambda: self.client, record.incidents)
        self._watcher.heard = self._journal.heard
        config = plan.config
        self.published_as = plan.incarnation, dtype
        self._publisher = Publisher(dtype=dtype)
        self._announcements = Announcements(
            self._publisher,
            on_synced=lambda sync: self.report.synced(sync),
        )
        self._sender = open_sender(config.memory.weight_transport)
        self._references = ReferenceSchedule(config)
        self._newest: WeightsSnapshot | None = None
        self._collected: tuple[Collected, tuple[CanaryRow, ...]] | None = None  # since `_newest`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._announcements.close()
        self._watcher.close()
        with contextlib.suppress(AsyncGrpoError):  # it hears of our end by the witness' too
            cluster.wait(self.client.end_run(), timeout_s=deadlines.RUN_ENDED_S, who=WHO)

    def reporting(
        self, config: TrainConfig, start: Start
    ) -> AbstractContextManager[Report | Absent]:
        """Open the report of the run, in which the watcher shows what every stage does."""
        gauges = RayGauges(config.recording.shown_name)
        self.report = report = Report(config, start=start, code=self.code, gauges=gauges)
        report.workers(self._workers)
        self._watcher.show, self._watcher.show_workers = report.status, report.workers
        leave_connection(Path(config.recording.output_dir))
        if url := cluster.metrics_url():
            logger.info("metrics for Prometheus: %s", url)
        return report

    # The controller

    def step_agreed(self, end: EndOfStep) -> None:
        """All ranks hold the end of a step: a recovery goes on after it."""
        self._cut = end.resume
        self._settings = end.settings
        self._journal.done(end.controls, from_batch=end.batch + 1)

    def recover(self, lost: RunClient, reason: str) -> None:
        """Go on at a controller that lives, unless that has been done since `lost`.

        Raises `ClusterError` when this run has lost its controllers too often.
        """
        if self.client is not lost:
            return
        while True:
            if self._num_recoveries == MAX_RECOVERIES:
                raise ClusterError(
                    f"the controller was lost {MAX_RECOVERIES + 1} times in this run, the last "
                    f"time: {reason}; look at the memory of the Ray head's machine"
                )
            self._num_recoveries += 1
            logger.warning("%s: the unfinished gradient step is done again", reason)
            try:
                self._announcements.wait()
                self.client = self._begin(find_or_make_controller())
                recruit(self.client.controller, self._demand)
                self._announcements.repeat(self.client)
            except ProcessLostError as error:
                reason = str(error)
            else:
                self.report.recovered()
                return

    def _begin(self, controller: ControllerHandle) -> RunClient:
        plan = replace(
            self.plan,
            resume=self._cut,
            settings=self._settings,
            pending=self._journal.pending,
        )
        call = controller.begin_run.remote(plan, self._witness, self._recorder)
        epoch = cluster.wait(call, timeout_s=deadlines.BEGIN_RUN_S, who=WHO)
        return RunClient(controller, RunId(plan.incarnation, epoch))

    def finish_evaluations(self, ranks: Ranks, stop: Event) -> None:
        """Wait for those that have not ended, as long as they move or until a stop. Collective.

        Asked again when the controller is lost; the others hear now and then that it goes on.
        """
        if self.plan.sets:
            self.report.doing("waiting for the last evaluation")
            self.wait_announced()
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
        call, due_at = client.evaluated(), time.monotonic() + deadlines.RANKS_TOLD_S
        standstill = Standstill(client, timeout_s=self.plan.config.places.stall_timeout_s)
        while not cluster.is_ready(call):
            if stop.wait(STOP_POLL_S):
                return ()
            standstill.check()
            if time.monotonic() >= due_at:
                ranks.agree(EVALUATING)
                due_at = time.monotonic() + deadlines.RANKS_TOLD_S
        return cluster.wait(
            call, timeout_s=deadlines.STATUS_S, who="the evaluation of held-out questions"
        )

    # Weights

    def wait_announced(self) -> None:
        """Return when the workers serve what was announced last."""
        self._announcements.wait()

    def collected(self, newest: Collected, canary: tuple[CanaryRow, ...]) -> None:
        """Take the newest weights, to be announced, and how the trainer scores with them."""
        self._collected = newest, canary

    def send(self, tensors: NamedTensors) -> None:
        """Send the newest weights over devices, ahead of their announcement; collective."""
        assert self._collected is not None and self._sender is not None, "as configured"
        newest, canary = self._collected
        snapshot = newest.wait()
        assert snapshot is not None, "rank 0 gets the snapshot"
        self._sender.send(
            self.client,
            replace(snapshot, canary=canary),
            tensors,
            timeout_s=deadlines.WEIGHTS_APPLIED_S / 2,  # the object store keeps as much
        )

    def announce(self, num_batches: int) -> None:
        """Announce the newest weights as those after `num_batches` batches, in a thread."""
        version = WeightsVersion(self.plan.incarnation, num_batches)
        self._announcements.begin(self.client, lambda: self._due(version))

    def _due(self, version: WeightsVersion) -> dict[str, WeightsSnapshot]:
        """What each role serves with the weights of `version`; waits until they are stored."""
        if self._collected is not None:
            newest, canary = self._collected
            snapshot = newest.wait()
            assert snapshot is not None, "rank 0 gets the snapshot"
            self._newest, self._collected = replace(snapshot, canary=canary), None
        assert self._newest is not None, "weights are collected before they are announced"
        if self._newest.version != version:
            self._newest = self._newest.renamed(version)
        due = {GENERATION: self._newest}
        if find_algorithm(self.plan.config).needs_reference:
            reference = self._references.completed(self._newest)
            due |= {REFERENCE: reference} if reference else {}
        return due

    def restore_first_reference(self, snapshot: WeightsSnapshot | None) -> None:
        """Take the run's first weights for the reference of a resumed run."""
        assert snapshot is not None, "rank 0 gets the snapshot"
        self._references.restore(snapshot)

    def restore_moved_references(self, start: Start) -> None:
        """Take the later weights of the reference from a checkpoint."""
        for batches in start.state["references"]:
            saved = read_reference(Path(str(start.folder)), batches)
            version = WeightsVersion(self.plan.incarnation, batches)
            self._references.restore(self._publisher.pack(saved, version=version))

    def references_to_save(self, batches: int) -> tuple[WeightsSnapshot, ...]:
        """Return what a checkpoint after `batches` holds of the reference, once it has moved."""
        self._announcements.wait_prepared()
        return self._references.to_save(batches)


class OtherRank(Absent):
    """What a rank other than 0 has: it follows rank 0."""

    report = Absent()
    hashes = None
    canary = canary_tokens(())
    teacher_widths: Mapping[str, int]  # rank 0 shares its own, as the next ones
    published_as: tuple[int, torch.dtype]
    client: RunClient

    def reporting(self, config: TrainConfig, start: Start) -> AbstractContextManager[Absent]:
        return self.report

    def finish_evaluations(self, ranks: Ranks, stop: Event) -> None:
        """Wait until rank 0 has its answer."""
        while ranks.agree(DONE) == EVALUATING:
            pass

    def send(self, tensors: NamedTensors) -> None:
        for _ in tensors:
            pass


class Announcements:
    """Rank 0 tells the controller of new weights from a thread, so that the ranks train meanwhile.

    consumes:     snapshots, in the order of their versions, when all ranks have stored their share
    produces:     workers that serve them, then the batcher's permission to use them
    waits for:    the workers' acknowledgements
    unblocked by: each worker's deadline

    One at a time; remembers what each role serves. An announcement that fails because the
    controller was lost is no error: what every role serves is announced again to the next one.
    """

    def __init__(self, publisher: Publisher, *, on_synced: Callable[[SyncReport], None]) -> None:
        """`on_synced` hears of every finished sync of the policy, from the thread."""
        self._publisher = publisher
        self._on_synced = on_synced
        self._serves: dict[str, WeightsSnapshot] = {}  # by role
        self._has_served = False
        self._has_told_of_kept = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="announce-weights")
        self._running: Future[None] | None = None
        self._due: Future[Due] | None = None

    def begin(self, client: RunClient, prepare: Callable[[], Due]) -> None:
        """Have each role serve what `prepare` returns from now on; `wait` has returned before."""
        self._due = due = self._thread.submit(prepare)
        self._running = self._thread.submit(self._announce, client, due)

    def wait_prepared(self) -> None:
        """Return when it is known what the last announcement brings to whom; raise what failed."""
        if self._due is not None:
            self._due.result()

    def wait(self) -> None:
        """Return when the last announcement has been acknowledged; raise what ended it."""
        if self._running is not None:
            self._running.result()

    def repeat(self, client: RunClient) -> None:
        """Tell a controller that knows no weights of those that every role serves."""
        if self._serves:
            self._tell(client, self._serves)

    def close(self) -> None:
        """Begin no more; one that still runs is left to its deadline."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _announce(self, client: RunClient, prepared: Future[Due]) -> None:
        try:
            due = prepared.result()
            self._serves |= due
            self._tell(client, due)
        except ProcessLostError as error:
            logger.info("new weights wait for the next controller: %s", error)
        except Exception as error:  # the boundary of a thread: the ranks must hear of it
            with contextlib.suppress(AsyncGrpoError):  # they hear of the first error
                _wait(client.abort(str(error)))
            raise

    def _tell(self, client: RunClient, due: Due) -> None:
        newest = due[GENERATION]
        for snapshot in dict.fromkeys((newest, *due.values())):
            roles, started = tuple(r for r, s in due.items() if s is snapshot), time.monotonic()
            reports = self._publisher.announce(
                client, snapshot, roles=roles, timeout_s=deadlines.WEIGHTS_APPLIED_S
            )
            for role, report in reports.items():
                reasons = "; ".join(report.failures.values())
                # Later on workers were lost that had served: others, or successors, will come.
                if not self._has_served and reasons and not report.acks:
                    raise WorkerError(f"no {role} worker could load the weights: {reasons}")
            if snapshot is newest:
                self._report(snapshot, reports[GENERATION], seconds=time.monotonic() - started)
        self._has_served = True
        _wait(client.published(newest.version))

    def _report(self, snapshot: WeightsSnapshot, report: PublishReport, *, seconds: float) -> None:
        for complaint in sync_complaints(snapshot, report):
            logger.warning("%s", complaint)
        summary = summarise_sync(snapshot, report, seconds=seconds)
        if summary.kept_tokens and not self._has_told_of_kept:
            self._has_told_of_kept = True
            logger.warning(
                "log-probabilities of tokens that are sampled over an update are of mixed weights: "
                "workers with --keep-kv-cache keep the caches of running requests, now of %d "
                "tokens; the metric kept_tokens counts them",
                summary.kept_tokens,
            )
        self._on_synced(summary)


def _wait(reference: Awaitable[object]) -> None:
    cluster.wait(reference, timeout_s=deadlines.ANSWER_S, who=WHO)
