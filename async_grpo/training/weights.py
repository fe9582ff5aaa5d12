"""Trainer's side of the weight sync: gather on all ranks, then let the cluster load meanwhile.

consumes:     the policy after the last step of a batch
produces:     a snapshot at every registry, then the batcher's permission to use it
waits for:    the previous announcement, so that versions arrive in order
unblocked by: the acknowledgement of the workers, each with a deadline
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from async_grpo import cluster
from async_grpo.errors import WorkerError
from async_grpo.model.collate import collate_pairs, split_by_sample, to_device
from async_grpo.training.fsdp import compute_dtype, iter_full_tensors
from async_grpo.training.learner import Learner
from async_grpo.training.preparation import Run
from async_grpo.types import (
    CanaryRow,
    PublishReport,
    WeightsSnapshot,
    WeightsVersion,
    canary_tokens,
)
from async_grpo.weight_sync.publisher import Publisher, take_part
from async_grpo.weight_sync.references import ReferenceSchedule
from async_grpo.weight_sync.sync_report import SyncReport, summarise_sync, sync_complaints
from async_grpo.weight_sync.transport import Transport, open_transport

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
        self._transport: Transport = self._publisher
        if run is not None:
            self._transport = open_transport(config.weight_transport, self._publisher)
        questions = run.plan.questions if run else ()
        self._canary = canary_tokens(question.input_token_ids for question in questions)
        self._references = ReferenceSchedule(
            period=config.num_batches_per_ref_model_update, max_staleness=config.max_staleness
        )
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
                take_part(iter_full_tensors(self._learner.policy))
        else:
            version = WeightsVersion(self._run.plan.incarnation, num_batches)
            self.wait()
            if changed or self._newest is None:
                self._newest = self._collect(version)
            else:
                self._newest = self._newest.renamed(version)
            self._announced = self._thread.submit(self._announce, self._run, self._newest)
        return time.monotonic() - started

    def _collect(self, version: WeightsVersion) -> WeightsSnapshot:
        canary = self._score_canary()
        tensors = iter_full_tensors(self._learner.policy)
        return replace(self._publisher.collect(tensors, version=version), canary=canary)

    @torch.no_grad()
    def _score_canary(self) -> tuple[CanaryRow, ...]:
        """Collective: the canary under the weights of this moment; ranks without rows fill in.

        Leaves the root gathered, which `iter_full_tensors` undoes.
        """
        config, device = self._learner.config, self._learner.device
        dtype = str(compute_dtype(config.mixed_precision, device)).removeprefix("torch.")
        packed = to_device(collate_pairs([(row[:1], row[1:]) for row in self._canary]), device)
        scored = self._learner.policy(
            packed, temperature=CANARY_TEMPERATURE, chunk_size=config.loss_chunksize
        )
        parts = split_by_sample(scored.logprobs, packed)
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
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _announce(self, run: Run, newest: WeightsSnapshot) -> None:
        started = time.monotonic()
        registries = {"generation": run.services.generation}
        due = self._references.completed(newest) if run.services.reference is not None else None
        try:
            if due is newest:
                registries["logprob"] = run.services.reference
            report = self._have_served(newest, registries)["generation"]
            self._tell_of(newest, report, seconds=time.monotonic() - started)
            if due is not None and due is not newest:
                self._have_served(due, {"logprob": run.services.reference})
            _tell(run.batcher.published.remote(newest.version))
        except Exception as error:  # the boundary of a thread: the ranks must hear of it
            _tell(run.batcher.abort.remote(str(error)))
            raise

    def _have_served(
        self, snapshot: WeightsSnapshot, registries: Mapping[str, Any]
    ) -> dict[str, PublishReport]:
        reports = self._transport.announce(
            snapshot, registries=registries, timeout_s=ANNOUNCE_TIMEOUT_S
        )
        for role, report in reports.items():
            if not report.acks:
                reasons = "; ".join(report.failures.values()) or "all have left"
                raise WorkerError(f"no {role} worker could load new weights: {reasons}")
        return reports

    def _tell_of(self, snapshot: WeightsSnapshot, report: PublishReport, *, seconds: float) -> None:
        for complaint in sync_complaints(snapshot, report):
            logger.warning("%s", complaint)
        if self._on_synced is not None:
            self._on_synced(summarise_sync(snapshot, report, seconds=seconds))


def _tell(call: Any) -> None:
    cluster.wait(call, timeout_s=CALL_TIMEOUT_S, who="the experience batcher")
