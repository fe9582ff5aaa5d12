"""Trainer's side of the weight sync: gather on all ranks, then let the cluster load meanwhile.

consumes:     the policy after the last step of a batch
produces:     a snapshot at every registry, then the batcher's permission to use it
waits for:    the previous announcement, so that versions arrive in order
unblocked by: the acknowledgement of the workers, each with a deadline
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from async_grpo import cluster
from async_grpo.errors import WorkerError
from async_grpo.training.fsdp import iter_full_tensors
from async_grpo.training.learner import Learner
from async_grpo.training.preparation import Run
from async_grpo.types import WeightsSnapshot, WeightsVersion
from async_grpo.weight_sync.publisher import Publisher, take_part

logger = logging.getLogger(__name__)
ANNOUNCE_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 60.0


class WeightSync:
    """Publishes versions in order. Only rank 0 has a `run` to tell of them."""

    def __init__(self, learner: Learner, run: Run | None) -> None:
        on_cpu = learner.device.type == "cpu"
        self._learner = learner
        self._run = run
        self._publisher = Publisher(dtype=torch.float32 if on_cpu else torch.bfloat16)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="announce-weights")
        self._announced: Future[None] | None = None

    def publish(self, num_batches: int) -> float:
        """Collective: gather the weights after `num_batches` batches; rank 0 then announces them.

        Returns when the gathering is done, the seconds that this rank stood still for it. Raises
        what went wrong with the previous announcement.
        """
        started = time.monotonic()
        self._gather(num_batches)
        return time.monotonic() - started

    def _gather(self, num_batches: int) -> None:
        tensors = iter_full_tensors(self._learner.policy)
        if self._run is None:
            take_part(tensors)
            return
        self.wait()
        version = WeightsVersion(self._run.plan.incarnation, num_batches)
        snapshot = self._publisher.collect(tensors, version=version)
        self._announced = self._thread.submit(self._announce, self._run, snapshot)

    def wait(self) -> None:
        """Until the last announcement has been acknowledged."""
        if self._announced is not None:
            self._announced.result()

    def close(self) -> None:
        """No more announcements; one that still runs is left to its deadline, or to `wait`."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _announce(self, run: Run, snapshot: WeightsSnapshot) -> None:
        try:
            reports = self._publisher.announce(
                snapshot,
                registries=self._registries(run, snapshot.version.batches),
                timeout_s=ANNOUNCE_TIMEOUT_S,
            )
            for role, report in reports.items():
                if not report.acks:
                    reasons = "; ".join(report.failures.values()) or "all have left"
                    raise WorkerError(f"no {role} worker could load new weights: {reasons}")
            _tell(run.batcher.published.remote(snapshot.version))
        except Exception as error:  # the boundary of a thread: the ranks must hear of it
            _tell(run.batcher.abort.remote(str(error)))
            raise

    def _registries(self, run: Run, num_batches: int) -> dict[str, Any]:
        registries = {"generation": run.services.generation}
        period = self._learner.config.num_batches_per_ref_model_update
        if run.services.reference is not None and num_batches % period == 0:
            registries["logprob"] = run.services.reference
        return registries


def _tell(call: Any) -> None:
    cluster.wait(call, timeout_s=CALL_TIMEOUT_S, who="the experience batcher")
