"""Rank 0's half of publishing weights: which weights each role serves, and their announcement.

Every rank gathers its share (`sampled_data.SampledData`); rank 0 sends and announces the whole.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.records import BatcherPlan
from async_grpo.checkpoint.resume import Start
from async_grpo.checkpoint.saving import Read
from async_grpo.checkpoint.tensors import read_reference
from async_grpo.cluster.handles import RunClient
from async_grpo.config.roles import GENERATION, REFERENCE
from async_grpo.training.ranks import Absent
from async_grpo.types import (
    CanaryRow,
    PublishReport,
    WeightsSnapshot,
    WeightsVersion,
    canary_tokens,
)
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, ProcessLostError, WorkerError
from async_grpo.weight_sync.buckets import NamedTensors
from async_grpo.weight_sync.publisher import Collected, Publisher
from async_grpo.weight_sync.reference_schedule import ReferenceSchedule
from async_grpo.weight_sync.sync_report import (
    SyncReport,
    probe_complaints,
    summarise_sync,
    sync_complaints,
)
from async_grpo.weight_sync.transport import DeviceSender

logger = logging.getLogger(__name__)
Due = Mapping[str, WeightsSnapshot]  # {role: weights that it shall serve}


class Publication:
    """Publishes the weights of a run; rank 0 has one."""

    def __init__(
        self,
        plan: BatcherPlan,
        publisher: Publisher,
        *,
        sender: DeviceSender | None,
        alone: bool = False,
        served: torch.dtype = torch.float32,
    ) -> None:
        """`sender` sends weights from device to device, before the object store has them."""
        config = plan.config
        # `alone`: the adapter travels, and is not merged into weights. `served`: what engines
        # round to.
        self.published_as = plan.incarnation, publisher.dtype, alone, served
        self._merges = config.adapter.trains_adapter and not alone
        self.canary = canary_tokens(question.input_token_ids for question in plan.questions)
        self._publisher = publisher
        self.announcements = Announcements()
        self._sender = sender
        self._references = ReferenceSchedule(config.sampling)
        self._has_reference = find_algorithm(config).needs_reference
        self._newest: WeightsSnapshot | None = None
        self._collected: tuple[Collected, WeightsSnapshot] | None = None  # since `_newest`

    def collected(self, newest: Collected, outline: WeightsSnapshot) -> None:
        """Take the newest weights, to be announced, and their snapshot without what is stored."""
        self._collected = newest, outline

    def prove(self, client: RunClient, before: tuple[CanaryRow, ...]) -> None:
        """Have all generation workers serve the collected probe of an adapter; see `probing`.

        `before`: the trainer's scores of the canary without it. Raises `WorkerError` when a worker
        does not compute with it.
        """
        assert self._collected is not None, "the probe is collected before it is sent"
        probe, self._collected = self._whole(*self._collected), None
        timeout_s = deadlines.WEIGHTS_APPLIED_S
        call = client.controller.publish.remote(client.run, probe, (GENERATION,), timeout_s)
        report = client.wait(call, timeout_s=timeout_s + deadlines.PUBLISH_SLACK_S)[GENERATION]
        wrong = probe_complaints(probe, report, before)
        if not report.acks:  # else the registry has fenced those that could not load it
            wrong += report.failures.values()
        if wrong:
            raise WorkerError(
                "every generation worker must compute with the adapter that it is sent, the probe "
                f"at the start shows that {len(wrong)} do not: {'; '.join(wrong)}; give workers "
                "and trainer the same model folder, and report it if it is"
            )
        logger.info("a probe shows that adapters arrive in %d workers", len(report.acks))

    def send(self, client: RunClient, outline: WeightsSnapshot, tensors: NamedTensors) -> None:
        """Send weights over devices, before they are stored and announced; collective.

        `outline`: their snapshot, without buckets.
        """
        assert self._sender is not None, "as configured"
        timeout_s = deadlines.WEIGHTS_APPLIED_S / 2  # the other half is for the object store
        self._sender.send(client, outline, tensors, timeout_s=timeout_s)

    def announce(self, client: RunClient, num_batches: int) -> None:
        """Announce the newest weights as those after `num_batches` batches, in a thread."""
        version = WeightsVersion(self.published_as[0], num_batches)
        self.announcements.begin(client, lambda: self._due(version))

    def _due(self, version: WeightsVersion) -> Due:
        """The snapshots that roles serve from `version` on; waits until they are stored."""
        if self._collected is not None:
            self._newest, self._collected = self._whole(*self._collected), None
        assert self._newest is not None, "weights are collected before they are announced"
        if self._newest.version != version:
            self._newest = self._newest.renamed(version)
        due = {GENERATION: self._newest}
        if self._has_reference:
            reference = self._references.completed(self._newest)
            due |= {REFERENCE: reference} if reference else {}
        return due

    def _whole(self, newest: Collected, outline: WeightsSnapshot) -> WeightsSnapshot:
        stored = newest.wait()
        assert stored is not None, "rank 0 gets the snapshot"
        return replace(
            outline, buckets=stored.buckets, is_base=stored.is_base, delta_since=stored.delta_since
        )

    def restore_first_reference(self, snapshot: WeightsSnapshot | None) -> None:
        """Take the run's first weights as the reference of a resumed run."""
        assert snapshot is not None, "rank 0 gets the snapshot"
        self._references.restore(snapshot)

    def restore_moved_references(self, start: Start) -> None:
        """Read a moved reference's weights from a checkpoint."""
        for batches in start.state["references"]:
            saved = read_reference(Path(str(start.folder)), batches)
            version = WeightsVersion(self.published_as[0], batches)
            packed = self._publisher.pack(saved, version=version)
            self._references.restore(replace(packed, rest_of_folder=self._merges))

    def references_to_save(self, batches: int) -> Mapping[int, Read]:
        """Readers of the reference's moved weights for a checkpoint, by their batches."""
        self.announcements.wait_prepared()
        held, read = self._references.to_save(batches), self._publisher.read
        return {snapshot.version.batches: partial(read, snapshot) for snapshot in held}


class OthersPublication(Absent):
    """In place of `Publication` on every other rank, which only takes part in collectives."""

    canary = canary_tokens(())
    published_as: tuple[int, torch.dtype, bool, torch.dtype]  # unset: rank 0 shares its value
    announcements = Absent()

    def send(self, client: RunClient, outline: WeightsSnapshot, tensors: NamedTensors) -> None:
        for _ in tensors:
            pass


class Announcements:
    """Announces new weights to the controller, in a thread of rank 0: the ranks train meanwhile.

    consumes:     snapshots, in the order of their versions, when all ranks have stored their share
    produces:     workers that serve them, then the batcher's permission to use them
    waits for:    the workers' acknowledgements
    unblocked by: each worker's deadline

    Makes one announcement at a time, and remembers what each role serves. One that fails because
    the controller was lost is no error: `repeat` announces the same to the next controller.
    """

    def __init__(self) -> None:
        # Called with the report of each sync of the policy.
        self.on_synced: Callable[[SyncReport], None] = lambda sync: None
        self._serves: dict[str, WeightsSnapshot] = {}  # by role; workers may still be loading them
        self._kept: dict[str, WeightsSnapshot] = {}  # keeps these alive until newer ones are served
        self._has_served = False
        self._has_warned_of_kept = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="announce-weights")
        self._running: Future[None] | None = None
        self._due: Future[Due] | None = None

    def begin(self, client: RunClient, prepare: Callable[[], Due]) -> None:
        """Have each role serve what `prepare` returns; call it after `wait` has returned."""
        self._due = due = self._thread.submit(prepare)
        self._running = self._thread.submit(self._announce, client, due)

    def wait_prepared(self) -> None:
        """Return when the last announcement's weights are stored; raise the error of `prepare`."""
        if self._due is not None:
            self._due.result()

    def wait(self) -> None:
        """Return when the last announcement has been acknowledged; raise its error."""
        if self._running is not None:
            self._running.result()

    def repeat(self, client: RunClient) -> None:
        """Announce the weights that every role serves to a new controller."""
        if self._serves:
            self._publish(client, self._serves)

    def close(self) -> None:
        """Begin no more; a running one ends by its deadline."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _announce(self, client: RunClient, prepared: Future[Due]) -> None:
        try:
            due = prepared.result()
            self._serves |= due
            self._publish(client, due)
        except ProcessLostError as error:
            logger.info("new weights wait for the next controller: %s", error)
        except Exception as error:  # the boundary of a thread: the ranks must end too
            with contextlib.suppress(AsyncGrpoError):  # the first error is raised, not this one
                abort = client.controller.abort
                client.answer(deadlines.ANSWER_S, abort, client.run, str(error))
            raise

    def _publish(self, client: RunClient, due: Due) -> None:
        newest = due[GENERATION]
        for snapshot in dict.fromkeys((newest, *due.values())):
            roles, started = tuple(r for r, s in due.items() if s is snapshot), time.monotonic()
            timeout_s = deadlines.WEIGHTS_APPLIED_S
            call = client.controller.publish.remote(client.run, snapshot, roles, timeout_s)
            reports = client.wait(call, timeout_s=timeout_s + deadlines.PUBLISH_SLACK_S)
            self._kept |= dict.fromkeys(roles, snapshot)
            for role, report in reports.items():
                reasons = "; ".join(report.failures.values())
                # Later failures are of workers that have served: others, or restarts, take over.
                if not self._has_served and reasons and not report.acks:
                    raise WorkerError(f"no {role} worker could load the weights: {reasons}")
            if snapshot is newest:
                self._report(snapshot, reports[GENERATION], seconds=time.monotonic() - started)
        self._has_served = True
        published = client.controller.published
        client.answer(deadlines.ANSWER_S, published, client.run, newest.version)

    def _report(self, snapshot: WeightsSnapshot, report: PublishReport, *, seconds: float) -> None:
        for complaint in sync_complaints(snapshot, report):
            logger.warning("%s", complaint)
        summary = summarise_sync(snapshot, report, seconds=seconds)
        if summary.kept_tokens and not self._has_warned_of_kept:
            self._has_warned_of_kept = True
            logger.warning(
                "log-probabilities of tokens that are sampled over an update are of mixed weights: "
                "workers with --keep-kv-cache keep the caches of running requests, now of %d "
                "tokens; the metric kept_tokens counts them",
                summary.kept_tokens,
            )
        self.on_synced(summary)
