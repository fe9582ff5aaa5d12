"""One worker of this node: started, registered, and replaced when it is lost.

consumes:     the controller's view of the worker, the ends of its calls
produces:     a registered worker, again and again as long as its budget of restarts lasts
waits for:    its model to load, up to --start-timeout-s; the pause before a restart
unblocked by: being checked, every moment, by its `Workers`; nothing here blocks
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.launch.actors import WorkerKind
from async_grpo.types.worker_info import confinement_in_words
from async_grpo.util import deadlines
from async_grpo.util.errors import (
    AsyncGrpoError,
    ClusterError,
    ConfigError,
    ProcessLostError,
    WorkerError,
)
from async_grpo.util.log_tail import last_words

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster
    from async_grpo.cluster.handles import ControllerHandle, WorkerHandle
    from async_grpo.types import Standing, WorkerInfo

logger = logging.getLogger(__name__)
State = Literal["pausing", "loading", "registering", "serving"]
WINDOW_S = 3600.0  # in which restarts are counted
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class SupervisedWorker:
    """Steps from state to state; raises when its worker cannot start, or is lost too often."""

    def __init__(
        self,
        kind: WorkerKind,
        config: WorkerConfig,
        cluster: Cluster,
        *,
        say: Callable[[str], None],
    ) -> None:
        """`say` gets a sentence when the worker has registered."""
        self._cluster = cluster
        self._kind = kind
        self._config = config
        self._say = say
        self._budget = RestartBudget(config.max_restarts)
        self._has_served = False  # this process or one before it
        self._is_known = False  # this process has registered before
        self._state: State = "pausing"
        self._state_since = float("-inf")
        self._pause_s = 0.0
        self._info: WorkerInfo  # as soon as it has loaded
        self._pid = 0
        self._call: Awaitable[Any]  # what the state waits for
        self.role = kind.role
        self.worker_id = ""  # while there is none
        self.handle: WorkerHandle  # of the worker with this id

    def check(
        self, controller: ControllerHandle, standing: Standing | None, *, now_s: float
    ) -> None:
        """Take one step. `standing`: the controller's view of the worker; None: no answer yet."""
        try:
            if self._state == "pausing":
                self.start(now_s)
            elif self._state == "loading":
                self._load(controller, now_s)
            elif self._state == "registering":
                self._await_registration(now_s)
            elif standing is not None and not standing.is_member:
                self._register_again(controller, standing, now_s)
        except WorkerError as error:
            self._replace(str(error), now_s)

    def _enter(self, state: State, now_s: float) -> None:
        self._state, self._state_since = state, now_s

    def start(self, now_s: float) -> None:
        """Start a worker, which begins to load, unless the pause before it is not over."""
        if now_s - self._state_since < self._pause_s:
            return
        self.worker_id = f"{self.role}-{uuid.uuid4().hex[:8]}"
        self.handle = self._kind.start(self.worker_id)
        self._pid, self._is_known = 0, False
        self._call = self.handle.info.remote()
        self._enter("loading", now_s)

    def _load(self, controller: ControllerHandle, now_s: float) -> None:
        if not self._pid:
            self._pid = self._cluster.process_of(self.handle)
        seconds = now_s - self._state_since
        if self._cluster.is_ready(self._call):
            owner = f"dispatcher process {os.getpid()} on {socket.gethostname()}"
            info = self._info = replace(self._answer(f"worker {self.worker_id}"), owner=owner)
            parts = ", ".join(f"{seconds:.1f} s {what}" for what, seconds in info.startup)
            logger.info(
                "worker %s is ready after %.1f s%s",
                self.worker_id, seconds, f": {parts}" if parts else "",
            )  # fmt: skip
            if any(info.confinement.values()):
                self._say(f"WARNING {self.worker_id}: {confinement_in_words(info.confinement)}")
            self._register(controller, now_s)
        elif not self._pid and seconds > self._kind.placed_s:
            raise ClusterError(
                f"Ray has found no place for worker {self.worker_id} within {seconds:.0f} s: "
                "somebody else has taken its CPUs or devices; stop other workers, or start Ray "
                "with more"
            )
        elif seconds > self._config.start_timeout_s:
            raise WorkerError(
                f"worker {self.worker_id} was not ready within {self._config.start_timeout_s:g} s: "
                "raise --start-timeout-s or see its log"
            )

    def _register(self, controller: ControllerHandle, now_s: float) -> None:
        self._call = controller.register.remote(self._info, self.handle)
        self._enter("registering", now_s)

    def _await_registration(self, now_s: float) -> None:
        if self._cluster.is_ready(self._call):
            try:
                self._answer("the controller")
            except ProcessLostError:  # of the controller: it does not say this of the worker
                self._enter("serving", now_s)  # its successor will not know the worker
                return
            self._enter("serving", now_s)
            self._say(f"worker {self.worker_id} registered{' again' if self._is_known else ''}")
            self._has_served = self._is_known = True
        elif now_s - self._state_since > self._config.start_timeout_s:
            raise WorkerError(
                f"worker {self.worker_id} could not load the run's weights within "
                f"{self._config.start_timeout_s:g} s: raise --start-timeout-s"
            )

    def _register_again(
        self, controller: ControllerHandle, standing: Standing, now_s: float
    ) -> None:
        """Register a worker that the controller has fenced, or that a new controller lacks."""
        if standing.excluded:
            raise WorkerError(standing.excluded)
        self.handle.abort_all.remote()  # its leases are gone: no caller waits for these requests
        self._register(controller, now_s)

    def _replace(self, reason: str, now_s: float) -> None:
        """End the worker and let the next start after a pause; raise when there may be none."""
        self._cluster.end(self.handle)
        words = last_words(self._cluster.logs_folder(), pid=self._pid)
        cause = reason + words.sentence
        for line in words.lines:
            logger.warning("%s | %s", self.worker_id, line)
        if not self._has_served:
            raise WorkerError(cause)
        pause_s = self._budget.next_pause_s(now_s)
        if pause_s is None:
            raise WorkerError(
                f"{cause}; it is the last of more than --max-restarts {self._config.max_restarts} "
                "losses within an hour"
            )
        logger.warning(
            "%s; another is started in %g s, restart %d of at most %d within an hour",
            cause, pause_s, self._budget.num_used, self._config.max_restarts,
        )  # fmt: skip
        self._pause_s = pause_s
        self.worker_id = ""
        self._enter("pausing", now_s)

    def _answer(self, who: str) -> Any:
        try:
            return self._cluster.wait(self._call, timeout_s=deadlines.ANSWER_S, who=who)
        except (ProcessLostError, ClusterError, ConfigError):
            raise
        except AsyncGrpoError as error:
            raise WorkerError(str(error)) from None


class RestartBudget:
    """Grants `max_restarts` in any `window_s`, each after twice the pause of the last."""

    def __init__(self, max_restarts: int, *, window_s: float = WINDOW_S) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._restarts: deque[float] = deque()  # when they were granted, within the window

    @property
    def num_used(self) -> int:
        """Restarts granted in the window before the latest one."""
        return len(self._restarts)

    def next_pause_s(self, now_s: float) -> float | None:
        """Grant a restart and return the seconds to wait before it; None: there were too many.

        >>> budget = RestartBudget(3, window_s=100)
        >>> [budget.next_pause_s(now_s) for now_s in (0, 1, 50, 60)]
        [1.0, 2.0, 4.0, None]
        >>> budget.next_pause_s(101)  # the first two are forgotten
        2.0
        """
        while self._restarts and now_s - self._restarts[0] >= self._window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            return None
        pause_s = min(FIRST_PAUSE_S * 2 ** min(len(self._restarts), 30), LONGEST_PAUSE_S)
        self._restarts.append(now_s)
        return pause_s
