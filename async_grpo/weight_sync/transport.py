"""Device transports: how weights reach the present workers ahead of the object store.

Every publication goes through the object store (`publisher.py`). A device transport is a faster
path ahead of it: a worker that it does not reach, or that joins later, loads from the store. A
further transport is a `Link` in another file, an add-on that `routes.check_route` knows.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import ray
import torch
from torch import Tensor

from async_grpo.config.roles import GENERATION
from async_grpo.types import WeightsSnapshot, WorkerInfo
from async_grpo.util import deadlines
from async_grpo.util.add_ons import add_on
from async_grpo.util.errors import AsyncGrpoError, ConfigError, DeadlineError, WeightSyncError
from async_grpo.util.waiting import poll
from async_grpo.weight_sync.buckets import NamedTensors
from async_grpo.weight_sync.routes import OBJECT_STORE, check_route

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster
    from async_grpo.cluster.handles import RunClient, WorkerHandle

logger = logging.getLogger(__name__)
OnFailure = Callable[[Exception], None]
Members = Mapping[WorkerInfo, "WorkerHandle"]
LOOK_INTERVAL_S = 0.02


def open_sender(name: str, cluster: Cluster, *, device_id: str) -> DeviceSender | None:
    """The sender of `--weight-transport` in trainer rank 0; None: the object store alone.

    `device_id`: the identity of this rank's device, as `WorkerInfo.devices` gives it.
    """
    if name == OBJECT_STORE:
        return None
    link = add_on(f"transport.{name}")  # imports vLLM, which takes seconds
    device = torch.device("cuda", torch.cuda.current_device())
    sender = Sender(device, ray.util.get_node_ip_address(), cluster)
    check = partial(check_route, name, sender=device_id)
    return DeviceSender(partial(link, sender=sender), check=check)


@dataclass(frozen=True, slots=True)
class Sender:
    """What a link needs of trainer rank 0."""

    device: torch.device
    address: str  # of its machine
    cluster: Cluster


class Link(Protocol):
    """A connection from trainer rank 0 to all workers."""

    def send(
        self,
        snapshot: WeightsSnapshot,
        tensors: NamedTensors,
        *,
        deadline: float,
        on_failure: OnFailure,
    ) -> None:
        """Have the workers serve a snapshot before `deadline`, in `time.monotonic` seconds.

        Raises on any failure; the caller must then close the link. Calls `on_failure` as soon as a
        worker refuses or dies, because `send` itself may be blocked on a device, where no exception
        reaches it.
        """
        ...

    def close(self) -> None:
        """Disconnect from the workers; called also from another thread while `send` hangs."""
        ...


class DeviceSender:
    """One link from trainer rank 0 to all workers at once.

    It is made with the first update, and made anew when a worker joins, leaves, or does not get its
    weights. A worker that the link does not reach loads from the object store.
    """

    def __init__(self, connect: Callable[[Members], Link], *, check: Callable[..., None]) -> None:
        """`check` raises `ConfigError` for a worker that the transport cannot reach.

        It gets the worker and, as `others`, those that are in the group already.
        """
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

        Always consumes all of `tensors`, since the other ranks gather them too. A transfer that
        fails is logged, and the run goes on.
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
        except AsyncGrpoError as error:  # as of a lost controller, which is noticed elsewhere
            logger.warning("weights %s take the object store alone: %s", snapshot.version, error)
        finally:
            shared.use_up()

    def _ready(self, client: RunClient, snapshot: WeightsSnapshot, *, deadline: float) -> Members:
        """The workers that can be reached and accept the snapshot; only these pause for it."""
        receivers = client.answer(deadlines.ANSWER_S, client.controller.receivers, GENERATION)
        asked: dict[WorkerInfo, tuple[WorkerHandle, Awaitable[None]]] = {}
        for worker, handle in receivers:
            if self._leads_to(worker, asked):
                asked[worker] = handle, handle.expect_weights.remote(snapshot)
        until = min(deadline, time.monotonic() + deadlines.ANSWER_S)
        ready = {}
        for worker, (handle, answer) in asked.items():
            who = f"{worker.role} worker {worker.worker_id}"
            try:
                client.cluster.wait(answer, timeout_s=max(until - time.monotonic(), 0.0), who=who)
            except AsyncGrpoError as error:
                logger.warning("%s gets no weights over its device: %s", who, error)
            else:
                ready[worker] = handle
        return ready

    def _leads_to(self, worker: WorkerInfo, others: Iterable[WorkerInfo]) -> bool:
        if worker in self._refused:
            return False
        try:
            self._check(worker, others=others)
        except ConfigError as error:  # a worker that joined after the run began
            logger.warning("weights reach it through the object store: %s", error)
            self._refused.add(worker)
            return False
        return True

    def _transfer(
        self, link: Link, snapshot: WeightsSnapshot, tensors: NamedTensors, *, deadline: float
    ) -> None:
        """Send in a thread, because a transfer may block where no exception reaches it."""
        outcome: Future[None] = Future()

        def fail(error: BaseException) -> None:
            with contextlib.suppress(InvalidStateError):  # the first result counts
                outcome.set_exception(error)

        def run() -> None:
            try:
                link.send(snapshot, tensors, deadline=deadline, on_failure=fail)
                with contextlib.suppress(InvalidStateError):
                    outcome.set_result(None)
            except BaseException as error:  # the thread's boundary: `outcome` carries it
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


class _Shared:
    """Tensors for a transfer, until the sender consumes the rest of them."""

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
        """Consume the rest; a transfer that still hangs gets no more."""
        with self._lock:
            self._is_over = True
            for _ in self._tensors:
                pass


class WorkersClient:
    """Passes the calls of vLLM's update protocol (`VLLMWeightSyncClient`) on to Ray workers."""

    def __init__(self, members: Members, cluster: Cluster) -> None:
        self._members = members
        self._cluster = cluster

    def prepare(self, snapshot: WeightsSnapshot, *, deadline: float, on_failure: OnFailure) -> None:
        """Set the snapshot of the next update and the deadline of all its calls."""
        self._snapshot, self._deadline, self._on_failure = snapshot, deadline, on_failure

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open each worker's route; ranks are numbered worker after worker, a rank a device."""
        calls, offset, left_s = {}, init_info["rank_offset"], self._remaining_s()
        for worker, handle in self._members.items():
            calls[worker] = handle.open_route.remote({**init_info, "rank_offset": offset}, left_s)
            offset += len(worker.devices)
        self._wait(calls)

    def start_weight_update(self) -> None:
        """Do nothing: `DeviceSender` has had each worker accept these weights."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Return when all workers have received all parameters and serve them."""
        left_s = self._remaining_s()
        calls = {
            worker: handle.receive_weights.remote(self._snapshot, update_info, left_s)
            for worker, handle in self._members.items()
        }
        self._wait(calls)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing: `update_weights` has finished the update."""

    def _remaining_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _wait(self, calls: dict[WorkerInfo, Awaitable[None]]) -> None:
        try:
            self._wait_for_all(calls)
        except AsyncGrpoError as error:
            self._on_failure(error)
            raise

    def _wait_for_all(self, waiting: dict[WorkerInfo, Awaitable[None]]) -> None:
        """Raise the first failure at once, while other calls may still run."""
        for _ in poll(every_s=LOOK_INTERVAL_S, within_s=self._deadline - time.monotonic()):
            ready = [w for w, call in waiting.items() if self._cluster.is_ready(call)]
            for worker in ready:
                who = f"{worker.role} worker {worker.worker_id}"
                self._cluster.wait(waiting.pop(worker), timeout_s=deadlines.ANSWER_S, who=who)
            if not waiting:
                return
        names = ", ".join(worker.worker_id for worker in waiting)
        raise DeadlineError(f"no answer in time from worker {names}")
