"""Trainer's side of the weight sync: gather on all ranks, then let the cluster load meanwhile.

consumes:     the policy after the last step of a batch
produces:     a snapshot at every registry, then the batcher's permission to use it
waits for:    the previous announcement, so that versions arrive in order
unblocked by: the acknowledgement of the workers, each with a deadline
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from async_grpo import cluster
from async_grpo.checkpoint.references import read_reference
from async_grpo.checkpoint.resume import Start, reference_of
from async_grpo.errors import AsyncGrpoError, ProcessLostError, WorkerError
from async_grpo.model.collate import collate_pairs, split_by_row, to_device
from async_grpo.run.preparation import Run, registries_of
from async_grpo.training.fsdp import compute_dtype, iter_full_tensors
from async_grpo.training.learner import Learner
from async_grpo.types import (
    CanaryRow,
    PublishReport,
    WeightsSnapshot,
    WeightsVersion,
    canary_tokens,
)
from async_grpo.weight_sync.announcer import Announcer
from async_grpo.weight_sync.buckets import NamedTensors
from async_grpo.weight_sync.publisher import Publisher, join_gather
from async_grpo.weight_sync.references import ReferenceSchedule
from async_grpo.weight_sync.sync_report import SyncReport, summarise_sync, sync_complaints
from async_grpo.weight_sync.transport import open_transport

logger = logging.getLogger(__name__)
ANNOUNCE_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 60.0
CANARY_TEMPERATURE = 1.0  # vLLM scores prompts at no other


class WeightSync:
    """Publishes versions in order. Only rank 0 has a `run` to tell of them."""

    def __init__(
        self,
        learner: Learner,
        run: Run | None,
        *,
        on_synced: Callable[[SyncReport], None] | None = None,
    ) -> None:
        """`on_synced` hears of every finished sync, from a thread."""
        config, on_cpu = learner.config, learner.device.type == "cpu"
        self._learner = learner
        self._run = run
        self._on_synced = on_synced
        self._publisher = Publisher(dtype=torch.float32 if on_cpu else torch.bfloat16)
        self._announcer: Announcer | None = None
        if run is not None:
            transport = open_transport(config.weight_transport, self._publisher)
            self._announcer = Announcer(transport, registries_of(run.services))
            self._announcer.start()
        questions = run.plan.questions if run else ()
        self._canary = canary_tokens(question.input_token_ids for question in questions)
        self._references = ReferenceSchedule(
            period=config.num_batches_per_ref_model_update, max_staleness=config.max_staleness
        )
        self._has_reference = run is not None and run.services.reference is not None
        self._newest: WeightsSnapshot | None = None
        self._num_updates = -1  # of the parameters, when the newest snapshot was taken
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="announce-weights")
        self._announced: Future[None] | None = None

    def publish(self, num_batches: int) -> float:
        """Collective: gather the weights after `num_batches` batches; rank 0 then announces them.

        Returns when the gathering is done, the seconds that this rank stood still for it. Raises
        what went wrong with the previous announcement.
        """
        started = time.monotonic()
        # Where every step of the batch was skipped, its version is another name of the weights
        # that are out; the ranks agree on it, for they skip together.
        changed = self._num_updates != self._learner.step.num_updates
        self._num_updates = self._learner.step.num_updates
        if self._run is None:
            if changed:
                self._score_canary()
                join_gather(iter_full_tensors(self._learner.policy))
        else:
            version = WeightsVersion(self._run.plan.incarnation, num_batches)
            self.wait()
            if changed or self._newest is None:
                self._newest = self._collect(version)
            else:
                self._newest = self._newest.renamed(version)
            due = self._references.completed(self._newest) if self._has_reference else None
            self._announced = self._thread.submit(self._announce, self._run, self._newest, due)
        return time.monotonic() - started

    def _collect(self, version: WeightsVersion) -> WeightsSnapshot:
        canary = self._score_canary()
        tensors = iter_full_tensors(self._learner.policy)
        return replace(self._publisher.collect(tensors, version=version), canary=canary)

    def restore_references(self, start: Start) -> None:
        """Collective, before the first publication of a resumed run and while the policy is still
        what the model folder holds: the reference's weights, under this run's incarnation.
        """
        config = self._learner.config
        if not self._learner.algorithm.needs_reference:
            return
        if reference_of(config, start.batches) == 0:
            tensors = iter_full_tensors(self._learner.policy)
            if self._run is None:
                join_gather(tensors)
            else:
                self._references.restore([self._snapshot_of(tensors, self._run, batches=0)])
        if self._run is not None:
            for batches in start.state["references"]:
                saved = read_reference(Path(str(start.folder)), batches)
                self._references.restore([self._snapshot_of(saved, self._run, batches=batches)])

    def _snapshot_of(self, tensors: NamedTensors, run: Run, *, batches: int) -> WeightsSnapshot:
        version = WeightsVersion(run.plan.incarnation, batches)
        return self._publisher.collect(tensors, version=version)

    def references_to_save(self, batches: int) -> tuple[WeightsSnapshot, ...]:
        """Rank 0: what a checkpoint after `batches` holds of the reference, once it has moved."""
        return self._references.to_save(batches)

    @torch.no_grad()
    def _score_canary(self) -> tuple[CanaryRow, ...]:
        """Collective: the canary under the weights of this moment; ranks without rows fill in.

        Leaves the root gathered, which `iter_full_tensors` undoes.
        """
        config, device = self._learner.config, self._learner.device
        dtype = str(compute_dtype(config.mixed_precision, device)).removeprefix("torch.")
        packed = to_device(collate_pairs([(row[:1], row[1:]) for row in self._canary]), device)
        scored = self._learner.policy(
            packed, temperature=CANARY_TEMPERATURE, chunk_size=config.chunk_size
        )
        parts = split_by_row(scored.logprobs, packed)
        return tuple(
            CanaryRow(row, part.float().cpu().numpy(), dtype)
            for row, part in zip(self._canary, parts, strict=True)
        )

    def wait(self) -> None:
        """Until the last announcement has been acknowledged."""
        if self._announced is not None:
            self._announced.result()

    def close(self) -> None:
        """No more announcements; one that still runs is left to its deadline, or to `wait`."""
        if self._announcer is not None:
            self._announcer.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _announce(self, run: Run, newest: WeightsSnapshot, due: WeightsSnapshot | None) -> None:
        """`due`: what the reference is to serve from now on, if that is something new."""
        started = time.monotonic()
        roles = ("generation", "logprob") if due is newest else ("generation",)
        try:
            report = self._have_served(newest, *roles)["generation"]
            self._tell_of(newest, report, seconds=time.monotonic() - started)
            if due is not None and due is not newest:
                self._have_served(due, "logprob")
            self.tell_batcher()
        except Exception as error:  # the boundary of a thread: the ranks must hear of it
            with contextlib.suppress(AsyncGrpoError):  # they hear of the first error
                _tell(run.batcher.abort.remote(str(error)))
            raise

    def tell_batcher(self) -> None:
        """The newest weights are served: slots may start. A batcher that died is replaced later."""
        if self._run is None or self._newest is None:
            return
        try:
            _tell(self._run.batcher.published.remote(self._newest.version))
        except ProcessLostError as error:
            logger.info("weights %s are told to the next batcher: %s", self._newest.version, error)

    def _have_served(self, snapshot: WeightsSnapshot, *roles: str) -> dict[str, PublishReport]:
        assert self._announcer is not None, "only rank 0 announces"
        is_first = not self._announcer.has_announced
        reports = self._announcer.announce(snapshot, roles=roles, timeout_s=ANNOUNCE_TIMEOUT_S)
        for role, report in reports.items():
            reasons = "; ".join(report.failures.values())
            # Later on workers were lost that had served: others, or their successors, will come.
            if is_first and reasons and not report.acks:
                raise WorkerError(f"no {role} worker could load the weights: {reasons}")
        if is_first:
            logger.info("workers serve the run's first weights")
        return reports

    def _tell_of(self, snapshot: WeightsSnapshot, report: PublishReport, *, seconds: float) -> None:
        for complaint in sync_complaints(snapshot, report):
            logger.warning("%s", complaint)
        if self._on_synced is not None:
            self._on_synced(summarise_sync(snapshot, report, seconds=seconds))


def _tell(call: Any) -> None:
    cluster.wait(call, timeout_s=CALL_TIMEOUT_S, who="the experience batcher")
