"""Sends weights over devices to the workers that are there, ahead of the object store."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

from torch import Tensor

from async_grpo.cluster import cluster
from async_grpo.types import WeightsSnapshot, WorkerInfo
from async_grpo.types.roles import GENERATION
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, ConfigError, WeightSyncError
from async_grpo.weight_sync.buckets import NamedTensors
from async_grpo.weight_sync.links import Link, Members

if TYPE_CHECKING:
    from async_grpo.controller.client import RunClient
    from async_grpo.controller.handles import WorkerHandle

logger = logging.getLogger(__name__)
Check = Callable[[WorkerInfo], None]
Connect = Callable[[Members], Link]


class _Shared:
    """Tensors that a transfer takes, until somebody else uses up the rest of them."""

    def __init__(self, tensors: NamedTensors) -> None:
        self._tensors = iter(tensors)
        self._lock = threading.Lock()
        self._is_over = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        with self._lock:
            if self._is_over:
                raise WeightSyncError("the transfer was given up")
            return next(self._tensors)

    def use_up(self) -> None:
        """Take the rest; a transfer that hangs on gets no more."""
        with self._lock:
            self._is_over = True
            for _ in self._tensors:
                pass


class DeviceSender:
    """One link from trainer rank 0 to all workers at once.

    It is made with the first update, and made anew when a worker joins, leaves, or does not get its
    weights: whoever is not reached loads from the object store.
    """

    def __init__(self, connect: Connect, *, check: Check) -> None:
        """`check` raises `ConfigError` for a worker that devices do not lead to."""
        self._connect = connect
        self._check = check
        self._refused: set[WorkerInfo] = set()
        self._members: Members = {}
        self._link: Link | None = None

    def send(
        self,
        client: RunClient,
        snapshot: WeightsSnapshot,
        tensors: NamedTensors,
        *,
        timeout_s: float,
    ) -> None:
        """Have the workers serve a snapshot, whose parameters are `tensors` on this rank's device.

        `tensors` is used up whatever happens, since other ranks gather them along. A transfer that
        fails is told of and ends no run.
        """
        deadline = time.monotonic() + timeout_s
        shared = _Shared(tensors)
        try:
            members = self._ready(client, snapshot, deadline=deadline)
            if members.keys() != self._members.keys():
                self._drop()
            if members:
                self._link = self._link or self._connect(members)
                self._members = members
                self._transfer(self._link, snapshot, shared, deadline=deadline)
        except AsyncGrpoError as error:  # such as a controller that is lost: others will tell
            logger.warning("weights %s take the object store alone: %s", snapshot.version, error)
        finally:
            shared.use_up()

    def _ready(self, client: RunClient, snapshot: WeightsSnapshot, *, deadline: float) -> Members:
        """Who can be reached and would take the snapshot: nothing stands still for others."""
        receivers = cluster.wait(
            client.receivers(GENERATION), timeout_s=deadlines.ANSWER_S, who="the controller"
        )
        asked: dict[WorkerInfo, tuple[WorkerHandle, Any]] = {}
        for worker, handle in receivers:
            if self._leads_to(worker):
                asked[worker] = handle, handle.expect_weights.remote(snapshot)
        until = min(deadline, time.monotonic() + deadlines.ANSWER_S)
        ready = {}
        for worker, (handle, answer) in asked.items():
            who = f"{worker.role} worker {worker.worker_id}"
            try:
                cluster.wait(answer, timeout_s=max(until - time.monotonic(), 0.0), who=who)
            except AsyncGrpoError as error:
                logger.warning("%s gets no weights over its device: %s", who, error)
            else:
                ready[worker] = handle
        return ready

    def _leads_to(self, worker: WorkerInfo) -> bool:
        if worker in self._refused:
            return False
        try:
            self._check(worker)
        except ConfigError as error:  # it has joined a run that began without it
            logger.warning("weights reach it through the object store: %s", error)
            self._refused.add(worker)
            return False
        return True

    def _transfer(
        self, link: Link, snapshot: WeightsSnapshot, tensors: NamedTensors, *, deadline: float
    ) -> None:
        """Send in a thread: a transfer may be blocked where no exception reaches it."""
        outcome: Future[None] = Future()

        def fail(error: BaseException) -> None:
            with contextlib.suppress(InvalidStateError):  # the first end counts
                outcome.set_exception(error)

        def run() -> None:
            try:
                link.send(snapshot, tensors, deadline=deadline, on_failure=fail)
                with contextlib.suppress(InvalidStateError):
                    outcome.set_result(None)
            except BaseException as error:  # the thread's boundary: the outcome carries it
                fail(error)

        threading.Thread(target=run, name="weights-over-devices", daemon=True).start()
        try:
            outcome.result(max(deadline - time.monotonic(), 0.0))
        except Exception as error:  # of vLLM, torch, NCCL or Ray
            logger.warning(
                "weights %s did not reach all of %d workers over their devices: %s",
                snapshot.version,
                len(self._members),
                str(error) or "its time is over",
            )
            self._drop()

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link, self._members = None, {}
