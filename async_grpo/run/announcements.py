"""Rank 0 tells the controller of new weights from a thread, so that the ranks train meanwhile.

consumes:     snapshots, in the order of their versions, when all ranks have stored their share
produces:     workers that serve them, then the batcher's permission to use them
waits for:    the workers' acknowledgements
unblocked by: each worker's deadline

An announcement that fails because the controller was lost is no error: what every role serves is
announced again to the next one (see `run/main_rank.py`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from async_grpo.cluster import cluster
from async_grpo.controller.client import WHO, RunClient
from async_grpo.types import PublishReport, WeightsSnapshot
from async_grpo.types.roles import GENERATION
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, ProcessLostError, WorkerError
from async_grpo.weight_sync.publisher import Publisher
from async_grpo.weight_sync.sync_report import SyncReport, summarise_sync, sync_complaints

logger = logging.getLogger(__name__)
Due = Mapping[str, WeightsSnapshot]  # by role


class Announcements:
    """One at a time; remembers what each role serves."""

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


def _wait(reference: Any) -> None:
    cluster.wait(reference, timeout_s=deadlines.ANSWER_S, who=WHO)
