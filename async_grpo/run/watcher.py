"""Shows the pipeline's status while the main thread trains, and tells and keeps what goes wrong."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from async_grpo import cluster
from async_grpo.errors import AsyncGrpoError, ClusterError
from async_grpo.telemetry.incidents import Incidents
from async_grpo.types import PipelineStatus

logger = logging.getLogger(__name__)
INTERVAL_S = 1.0
ROUNDS_A_ROLL_CALL = 3  # the registries are asked more rarely
TIMEOUT_S = 30.0
LAST_LOOK_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 5.0  # the thread is a daemon: a batcher that hangs holds up nobody's end
ROLES = ("generation", "logprob")


@contextmanager
def watch_pipeline(show: Callable[[PipelineStatus], None], incidents: Incidents) -> Iterator[None]:
    """Within, `show` is told the status of the batcher every second, and `incidents` hear of it."""
    stop = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(show, incidents, stop), name="watch-pipeline", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join(JOIN_TIMEOUT_S)


def call_the_roll(incidents: Incidents, *, timeout_s: float = LAST_LOOK_TIMEOUT_S) -> None:
    """Have `incidents` see who is registered; a registry that does not answer tells nothing."""
    for role in ROLES:
        try:
            registry = cluster.find_actor(cluster.registry_name(role))
            if registry is None:
                continue
            calls = registry.members.remote(), registry.fenced.remote()
            members, fenced = (
                cluster.wait(call, timeout_s=timeout_s, who=f"the {role} registry")
                for call in calls
            )
        except AsyncGrpoError as error:
            logger.debug("nobody tells who works: %s", error)
        else:
            incidents.see_members(role, members, fenced, now_s=time.time())


def _watch(
    show: Callable[[PipelineStatus], None], incidents: Incidents, stop: threading.Event
) -> None:
    said: set[str] = set()
    for number in itertools.count():
        is_last = stop.wait(INTERVAL_S)
        if number % ROUNDS_A_ROLL_CALL == 0 and not is_last:
            call_the_roll(incidents, timeout_s=TIMEOUT_S)
        try:
            status = _status()
        except AsyncGrpoError as error:
            logger.debug("no status to show: %s", error)  # whoever needs the batcher says why
        else:
            incidents.see_status(status, now_s=time.time())
            show(status)
            _warn(status.warnings, said)
        if is_last:
            return


def _warn(warnings: tuple[str, ...], said: set[str]) -> None:
    """Each once, even of a batcher that was made anew."""
    for warning in warnings:
        if warning not in said:
            logger.warning(warning)
        said.add(warning)


def _status() -> PipelineStatus:
    batcher = cluster.find_actor(cluster.BATCHER)  # by name: it may have been started anew
    if batcher is None:
        raise ClusterError("the experience batcher has gone")
    status: PipelineStatus = cluster.wait(
        batcher.status.remote(), timeout_s=TIMEOUT_S, who="the experience batcher"
    )
    return status
