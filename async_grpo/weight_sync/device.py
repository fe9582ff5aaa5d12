"""Sends a snapshot over devices to the workers that are there, ahead of the object store."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING

from async_grpo import cluster, deadlines
from async_grpo.errors import ConfigError, DeadlineError
from async_grpo.roles import GENERATION
from async_grpo.types import PublishReport, WeightsSnapshot, WorkerInfo
from async_grpo.weight_sync.links import Link
from async_grpo.weight_sync.publisher import Publisher, Roles

if TYPE_CHECKING:
    from async_grpo.controller.client import RunClient
    from async_grpo.types.handles import WorkerHandle

logger = logging.getLogger(__name__)
NUM_SENDERS = 4  # links that send at a time, each with its own tensors on the trainer's device
Connect = Callable[[WorkerInfo, "WorkerHandle"], Link]


class DeviceTransport:
    """One link a worker, so that a slow or dead one holds up no other.

    A link is made with the first update that a worker is there for, and dropped when the worker
    leaves or a transfer fails; no other link is concerned.
    """

    def __init__(self, publisher: Publisher, connect: Connect) -> None:
        """`connect` raises `ConfigError` for a worker that the transport does not lead to."""
        self._publisher = publisher
        self._connect = connect
        self._links: dict[WorkerInfo, Link | None] = {}  # None: it uses the object store
        self._slots = threading.BoundedSemaphore(NUM_SENDERS)

    def announce(
        self, client: RunClient, snapshot: WeightsSnapshot, *, roles: Roles, timeout_s: float
    ) -> dict[str, PublishReport]:
        """See `Transport`; devices have half of the time, so that the object store keeps as much.

        A worker that serves the snapshot already acknowledges it at once.
        """
        started = time.monotonic()
        if GENERATION in roles and snapshot.unchanged_since is None:
            self._send_to_all(snapshot, client, deadline=started + timeout_s / 2)
        remaining_s = timeout_s - (time.monotonic() - started)
        return self._publisher.announce(client, snapshot, roles=roles, timeout_s=remaining_s)

    def _send_to_all(
        self, snapshot: WeightsSnapshot, client: RunClient, *, deadline: float
    ) -> None:
        call = client.receivers(GENERATION)
        receivers = cluster.wait(call, timeout_s=deadlines.ANSWER_S, who="the controller")
        for worker in self._links.keys() - {worker for worker, _ in receivers}:
            self._drop(worker)
        outcomes = {
            worker: self._begin(link, snapshot, deadline, who=worker.worker_id)
            for worker, handle in receivers
            if (link := self._link(worker, handle)) is not None
        }
        for worker, outcome in outcomes.items():
            try:
                outcome.result(max(deadline - time.monotonic(), 0.0))
            except Exception as error:  # the thread's boundary: of vLLM, torch, NCCL or Ray
                logger.warning(
                    "weights %s did not reach worker %s over its device: %s",
                    snapshot.version,
                    worker.worker_id,
                    str(error) or "its time is over",
                )
                outcome.cancel()
                self._drop(worker)

    def _link(self, worker: WorkerInfo, handle: WorkerHandle) -> Link | None:
        if worker not in self._links:
            try:
                self._links[worker] = self._connect(worker, handle)
            except ConfigError as error:  # it has joined a run that began without it
                logger.warning("weights reach it through the object store: %s", error)
                self._links[worker] = None
        return self._links[worker]

    def _drop(self, worker: WorkerInfo) -> None:
        if (link := self._links.pop(worker)) is not None:
            link.close()

    def _begin(
        self, link: Link, snapshot: WeightsSnapshot, deadline: float, *, who: str
    ) -> Future[None]:
        """Send in a thread that ends with the process: a transfer that hangs must not keep it."""
        outcome: Future[None] = Future()

        def fail(error: BaseException) -> None:
            with contextlib.suppress(InvalidStateError):  # the first end counts
                outcome.set_exception(error)

        def run() -> None:
            try:
                if not self._slots.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
                    raise DeadlineError("other workers took all of the time")
                # Free again with the outcome, though this thread may hang on.
                outcome.add_done_callback(lambda _: self._slots.release())
                link.send(snapshot, deadline=deadline, on_failure=fail)
                with contextlib.suppress(InvalidStateError):
                    outcome.set_result(None)
            except BaseException as error:  # the thread's boundary: the outcome carries it
                fail(error)

        threading.Thread(target=run, name=f"weights-to-{who}", daemon=True).start()
        return outcome
