"""Watches the controller during a run, and records the first failure when the run dies.

A thread of rank 0 sends heartbeats to the controller and shows its status, from before the model is
loaded until the run has ended, however long the main thread computes. The incidents that it sees go
into `first_failure.json`, and let the error name the cause.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from async_grpo.cluster.handles import CONTROLLER, ControllerClient, RunClient
from async_grpo.telemetry.incidents import Incident, Incidents
from async_grpo.telemetry.jsonl import write_json_atomic
from async_grpo.training.ranks import COLLECTIVES_FILE, Ranks, as_ranks_failure
from async_grpo.types import Control, PipelineStatus, WorkerInfo
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, ClusterError, DeadlineError, ProcessLostError
from async_grpo.util.log_tail import LastWords, last_words

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster

logger = logging.getLogger(__name__)
T = TypeVar("T")
STATUSES_A_MEMBERSHIP = 3  # statuses between two requests for the members
NUM_LOG_LINES = 20  # of the failed worker's log, in the record
FIRST_FAILURE_FILE = "first_failure.json"
# Errors that an earlier incident may explain.
CONSEQUENCES = (DeadlineError, ProcessLostError, ClusterError)


class Watcher:
    """Once a second sends a heartbeat and shows the controller's status, until it is closed."""

    interval_s = 1.0

    def __init__(self, client: Callable[[], RunClient], incidents: Incidents) -> None:
        """`client` returns the client of the current controller; incidents go to `incidents`."""
        self.received: Callable[[Sequence[Control]], None] = lambda controls: None
        self.show: Callable[[PipelineStatus], None] = lambda status: None
        self.show_workers: Callable[[Sequence[WorkerInfo]], None] = lambda workers: None
        self._client = client
        self._incidents = incidents
        self._said: set[str] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch-controller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show the last status, and end the thread."""
        self._closed.set()
        # A daemon: where the controller hangs, the process ends all the same.
        self._thread.join(deadlines.RUN_ENDED_S)

    def _watch(self) -> None:
        number, asked = 0, None
        while not self._closed.wait(self.interval_s):
            client = self._client()
            client.controller.heard.remote(client.run)
            # A late answer delays no heartbeat.
            asked = asked or client.controller.status.remote(client.run)
            if client.cluster.is_ready(asked):
                self._take(client, asked)
                asked, number = None, number + 1
                if number % STATUSES_A_MEMBERSHIP == 0:
                    self.show_workers(see_members(client, self._incidents))
        client = self._client()
        self._take(client, client.controller.status.remote(client.run))

    def _take(self, client: RunClient, asked: Awaitable[PipelineStatus]) -> None:
        try:
            status = client.wait(asked, timeout_s=deadlines.STATUS_S)
        except AsyncGrpoError as error:
            # The thread that needs the run raises the reason.
            logger.debug("no status to show: %s", error)
            return
        self._incidents.see_status(status, now_s=time.time())
        self.show(status)
        self.received(status.controls)
        for warning in status.warnings:
            if warning not in self._said:  # once, also where a later controller repeats it
                logger.warning(warning)
            self._said.add(warning)


def see_members(client: ControllerClient, incidents: Incidents) -> list[WorkerInfo]:
    """Pass the registered workers to `incidents`, and return those that the controller names."""
    seen: list[WorkerInfo] = []
    controller, timeout_s = client.controller, deadlines.STATUS_S
    try:
        for role in client.answer(timeout_s, controller.roles):
            members = client.answer(timeout_s, controller.members, role)
            fenced = client.answer(timeout_s, controller.fenced, role)
            incidents.see_members(role, members, fenced, now_s=time.time())
            seen += members
    except AsyncGrpoError as error:
        logger.debug("nobody tells who works: %s", error)
    return seen


class RunRecord:
    """Collects what `first_failure.json` says of a rank's run if it dies."""

    def __init__(self, output_dir: str | Path, *, rank: int) -> None:
        self.path = Path(output_dir) / FIRST_FAILURE_FILE
        self.incidents = Incidents()
        self.cluster: Cluster | None = None  # joined by rank 0
        self._rank = rank
        self._num_batches = 0
        self._trained_at_s = time.time()

    def trained(self, num_batches: int) -> None:
        """Note that `num_batches` batches of the run are complete."""
        self._num_batches, self._trained_at_s = num_batches, time.time()

    def forget(self) -> None:
        """Remove what an earlier run died of: this one has started."""
        for path in (self.path, *self.path.parent.glob(f"{COLLECTIVES_FILE}*")):
            path.unlink(missing_ok=True)

    def write(self, error: BaseException, *, sentence: str, first: Incident | None) -> bool:
        """Write the record; False when another rank has written one before."""
        moved_at_s = self.incidents.moved_at_s
        status = self.incidents.status
        is_bug = not isinstance(error, AsyncGrpoError)
        trace = "".join(traceback.format_exception(error)).splitlines() if is_bug else None
        record = {
            "sentence": sentence,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "role": "trainer",
            "rank": self._rank,
            "node": socket.gethostname(),
            "pid": os.getpid(),
            "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "exception": type(error).__name__,
            "message": str(error),
            "traceback": trace,
            "last_progress": {
                "batches_completed": self._num_batches,
                "seconds_since_batch": time.time() - self._trained_at_s,
                "seconds_since_answer": None if moved_at_s is None else time.time() - moved_at_s,
            },
            "first_error": self._account(first) if first else None,
            "incidents": [self._account(each) for each in self.incidents.latest],
            "pipeline": dataclasses.asdict(status) if status else None,
            "workers": dict(status.workers) if status else {},
        }
        return _write_once(self.path, record)

    def _account(self, incident: Incident) -> dict[str, object]:
        """An incident as JSON, with the end of the worker's log if that lies on this node."""
        worker, cluster = incident.worker, self.cluster
        log = LastWords()
        if worker and cluster and cluster.is_here(worker.node_id):
            log = last_words(cluster.logs_folder(), pid=worker.pid, num_lines=NUM_LOG_LINES)
        return {
            "time": datetime.fromtimestamp(incident.at_s, UTC).isoformat(timespec="seconds"),
            "role": incident.role,
            "reason": incident.reason,
            "worker": worker.worker_id if worker else None,
            "node": worker.node_id if worker else None,
            "pid": worker.pid if worker else None,
            "log": log.path or None,
            "log_tail": list(log.lines),
        }


@contextmanager
def first_failure_recorded(record: RunRecord, ranks: Ranks) -> Iterator[None]:
    """Record the error that ends a run, and raise it with its cause; used around the run."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a boundary: recorded once, and raised again
        known = as_ranks_failure(error, record.path.parent) or error
        first = _first_cause(known, record, ranks)
        sentence = _sentence(known, first)
        try:
            if record.write(known, sentence=sentence, first=first):
                logger.warning("what is known of the failure is in %s", record.path)
        except (AsyncGrpoError, OSError) as refusal:  # a full disk, which did not cause the error
            logger.warning("what is known of the failure cannot be kept: %s", refusal)
        if isinstance(known, AsyncGrpoError) and (known is not error or sentence != str(known)):
            raise (type(known)(sentence) if isinstance(known, CONSEQUENCES) else known) from error
        raise


def _first_cause(error: BaseException, record: RunRecord, ranks: Ranks) -> Incident | None:
    if not isinstance(error, CONSEQUENCES) or not ranks.is_main:
        return None
    if record.cluster and (controller := record.cluster.find_actor(CONTROLLER)):
        see_members(ControllerClient(record.cluster, controller), record.incidents)
    return record.incidents.first_cause()


def _sentence(error: BaseException, first: Incident | None) -> str:
    said = " ".join(str(error).split())
    if not isinstance(error, AsyncGrpoError):
        return f"{type(error).__name__}: {said}"
    return said if first is None or first.reason in said else f"{first.reason}; then {said}"


def _write_once(path: Path, record: dict[str, object]) -> bool:
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    write_json_atomic(draft, record)
    try:
        os.link(draft, path)  # unlike a rename, a link replaces no file
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True
