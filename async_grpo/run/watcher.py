"""A thread of rank 0 that tells the controller of its life and people of the controller's status.

It does so from before the model is loaded until the run has ended: the main thread may compute for
as long as it likes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from async_grpo.cluster import cluster
from async_grpo.controller.client import WHO, RunClient
from async_grpo.telemetry.incidents import Incidents
from async_grpo.types import Control, PipelineStatus, WorkerInfo
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError

if TYPE_CHECKING:
    from async_grpo.controller.handles import ControllerHandle

logger = logging.getLogger(__name__)
INTERVAL_S = 1.0
STATUSES_A_MEMBERSHIP = 3  # members are asked for more rarely


class Watcher:
    """Pings, asks and tells once a second until it is closed."""

    def __init__(self, client: Callable[[], RunClient], incidents: Incidents) -> None:
        """`client` gives the way to the run of this moment; `incidents` hear what goes wrong."""
        self.heard: Callable[[Sequence[Control]], None] = lambda controls: None
        self.show: Callable[[PipelineStatus], None] = lambda status: None
        self.show_workers: Callable[[Sequence[WorkerInfo]], None] = lambda workers: None
        self._client = client
        self._incidents = incidents
        self._said: set[str] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch-controller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show the last status, and end."""
        self._closed.set()
        # It is a daemon: a controller that hangs holds up nobody's end.
        self._thread.join(deadlines.RUN_ENDED_S)

    def _watch(self) -> None:
        number, asked = 0, None
        while not self._closed.wait(INTERVAL_S):
            client = self._client()
            client.heard()
            # An answer that does not come holds up no ping.
            asked = asked or client.status()
            if cluster.is_ready(asked):
                self._take(asked)
                asked, number = None, number + 1
                if number % STATUSES_A_MEMBERSHIP == 0:
                    self.show_workers(see_members(client.controller, self._incidents))
        self._take(self._client().status())

    def _take(self, asked: Any) -> None:
        try:
            status: PipelineStatus = cluster.wait(asked, timeout_s=deadlines.STATUS_S, who=WHO)
        except AsyncGrpoError as error:
            logger.debug("no status to show: %s", error)  # whoever needs the run says why
            return
        self._incidents.see_status(status, now_s=time.time())
        self.show(status)
        self.heard(status.controls)
        for warning in status.warnings:
            if warning not in self._said:  # once, whichever controller says it
                logger.warning(warning)
            self._said.add(warning)


def see_members(controller: ControllerHandle, incidents: Incidents) -> list[WorkerInfo]:
    """Have `incidents` see who is registered, and return them all, as far as a controller tells."""
    seen: list[WorkerInfo] = []

    def ask(call: Any) -> Any:
        return cluster.wait(call, timeout_s=deadlines.STATUS_S, who=WHO)

    try:
        for role in ask(controller.roles.remote()):
            members = ask(controller.members.remote(role))
            fenced = ask(controller.fenced.remote(role))
            incidents.see_members(role, members, fenced, now_s=time.time())
            seen += members
    except AsyncGrpoError as error:
        logger.debug("nobody tells who works: %s", error)
    return seen
