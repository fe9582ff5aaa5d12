"""The workers of one dispatcher, and its way to the controller.

consumes:     the controller's view of each worker
produces:     registered workers, lost ones replaced; signs of life for the controller
waits for:    the work of its workers to be done, when they are to leave
unblocked by: being checked every moment; an error that no restart can mend
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Self

from async_grpo.config.roles import VERIFIER
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.launch.actors import WorkerKind
from async_grpo.launch.supervised_worker import SupervisedWorker
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, ClusterError, ConfigError, ProcessLostError
from async_grpo.util.waiting import poll

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster
    from async_grpo.cluster.handles import ControllerHandle
    from async_grpo.types import Standing  # imports numpy

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 1.0
CONTROLLER = "the controller"
RAY_DIGITS = 4  # of a resource's fraction


class Workers:
    """Starts the workers of this dispatcher, restarts lost ones, and ends all at exit."""

    def __init__(
        self,
        kinds: Sequence[WorkerKind],
        config: WorkerConfig,
        cluster: Cluster,
        *,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        """`say` is called with sentences for the user who watches the dispatcher."""
        self._kinds = kinds
        self._cluster = cluster
        self._config = config
        self._say = say
        self._run = 0  # incarnation of the run that is served; 0: none
        self._controller: ControllerHandle | None = None  # None when it is lost
        self._call: Awaitable[dict[str, Standing]] | None = None  # to the controller, under way
        self._called_at = 0.0
        self._complaint: Awaitable[str] | None = None  # a call to the verifier pool

    def __enter__(self) -> Self:
        """Start the workers; the first `check` looks for the controller while they load."""
        needed: defaultdict[str, float] = defaultdict(float)
        for kind in self._kinds:
            for what, amount in kind.resources.items():
                needed[what] += amount * kind.num_workers
        # Rounded as Ray counts: 3 x 0.2 of a device is more than 0.6 in binary.
        self._check_room({what: round(n, RAY_DIGITS) for what, n in needed.items() if n})
        self._workers = [
            SupervisedWorker(kind, self._config, self._cluster, say=self._say)
            for kind in self._kinds
            for _ in range(kind.num_workers)
        ]
        named = (f"{kind.num_workers} {kind.role} worker(s)" for kind in self._kinds)
        logger.info("starting %s", ", ".join(named))
        for worker in self._workers:
            worker.start(time.monotonic())
        return self

    def __exit__(self, *_: object) -> None:
        """Take the workers out of their registries and end them; a lost cluster is no error."""
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):
            calls = [
                self._controller.deregister.remote(worker.role, worker.worker_id)
                for worker in self._workers
                if worker.worker_id and self._controller is not None
            ]
            self._cluster.wait_for_all(calls, timeout_s=deadlines.RELEASED_S)
            for worker in self._workers:
                if worker.worker_id:
                    self._cluster.end(worker.handle)

    def check(self) -> None:
        """Check every worker and the controller once; raise what no restart can mend."""
        from async_grpo.controller.find import find_or_make_controller

        now_s = time.monotonic()
        if self._controller is None:  # the caller has just seen that the cluster lives
            self._controller = find_or_make_controller(self._cluster)
        standing = self._poll_standing(self._controller, now_s)
        self._tell_of_run(standing)
        if self._controller is None:
            return  # workers are checked again when another controller is found
        for worker in self._workers:
            worker.check(self._controller, standing.get(worker.worker_id), now_s=now_s)
        if self._config.write_failed_generation_samples:
            self._relay_complaint()

    def _poll_standing(self, controller: ControllerHandle, now_s: float) -> Mapping[str, Standing]:
        """{worker id: standing} if the controller has answered since the last check, else {}."""
        if self._call is None:
            self._call, self._called_at = self._ask_standing(controller), now_s
        if not self._cluster.is_ready(self._call):
            if now_s - self._called_at > deadlines.CONTROLLER_SILENCE_S:
                self._end_frozen_controller()
            return {}
        call, self._call = self._call, None
        try:
            return self._cluster.wait(call, timeout_s=deadlines.ANSWER_S, who=CONTROLLER)
        except (ProcessLostError, ClusterError) as error:
            logger.warning("%s; it is looked for again", error)
            self._controller = None
            return {}

    def _ask_standing(self, controller: ControllerHandle) -> Awaitable[dict[str, Standing]]:
        ids: dict[str, list[str]] = {}
        for worker in self._workers:
            ids.setdefault(worker.role, []).extend(filter(None, [worker.worker_id]))
        return controller.standing.remote(ids)

    def _end_frozen_controller(self) -> None:
        logger.warning(
            "%s has not answered for %g s and is ended", CONTROLLER, deadlines.CONTROLLER_SILENCE_S
        )
        self._cluster.end(self._controller)
        self._call = self._controller = None

    def _tell_of_run(self, standing: Mapping[str, Standing]) -> None:
        """Say when a run begins or ends to be served, or another takes its place."""
        if not standing or (run := max(worker.run for worker in standing.values())) == self._run:
            return
        if self._run:
            self._say("the run has ended, waiting for another")
        if run:
            self._say(
                f"serving the run that began at {datetime.fromtimestamp(run / 1000):%H:%M:%S}"
            )
        self._run = run

    def _relay_complaint(self) -> None:
        """Log what the verifier pool could not write."""
        if self._complaint is None:
            pools = (w.handle for w in self._workers if w.role == VERIFIER and w.worker_id)
            self._complaint = next((pool.complaint.remote() for pool in pools), None)
        elif self._cluster.is_ready(self._complaint):
            call, self._complaint = self._complaint, None
            with contextlib.suppress(AsyncGrpoError):  # a lost pool is replaced elsewhere
                who = "the verifier pool"
                if text := self._cluster.wait(call, timeout_s=deadlines.ANSWER_S, who=who):
                    logger.warning(text)

    def drain(self, *, timeout_s: float) -> None:
        """Give the workers no new work, and wait at most `timeout_s` for their leases to end."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(AsyncGrpoError):  # a controller that is lost has no leases
            for worker in self._workers:
                if worker.worker_id and self._controller is not None:
                    call = self._controller.drain.remote(worker.role, worker.worker_id)
                    self._cluster.wait(call, timeout_s=deadlines.RELEASED_S, who=CONTROLLER)
            if self._num_leases():
                self._say(f"finishing what runs, for at most {timeout_s:g} s; once more: at once")
            while self._num_leases() and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL_S / 4)

    def _num_leases(self) -> int:
        if self._controller is None:
            return 0
        call = self._ask_standing(self._controller)
        standing = self._cluster.wait(call, timeout_s=deadlines.RELEASED_S, who=CONTROLLER)
        return sum(worker.num_leases for worker in standing.values())

    def _check_room(self, needed: Mapping[str, float]) -> None:
        """Raise unless this node can hold the workers: Ray would wait for room silently.

        What other processes hold may soon become free; what the node lacks never does.
        """
        whole = self._cluster.resources_here()
        for _ in poll(every_s=POLL_INTERVAL_S, within_s=deadlines.ROOM_S):
            free = self._cluster.free_here()
            missing = [what for what, amount in needed.items() if free.get(what, 0.0) < amount]
            if not missing:
                return
            too_small = [what for what in missing if whole.get(what, 0.0) < needed[what]]
            if too_small:
                break
        what = (too_small or missing)[0]
        # A trainer's ranks hold devices too.
        holders = self._cluster.holders_here(what) if what == "GPU" else ""
        held = f", held by {holders}" if holders else ""
        raise (ConfigError if too_small else ClusterError)(
            f"{self._config.num_workers} {self._config.role} worker(s) need "
            f"{needed[what]:g} {what} of Ray on this node, {free.get(what, 0.0):g} of "
            f"{whole.get(what, 0.0):g} are free{held}: stop other workers, "
            f"or start Ray with a larger --num-{what.lower()}s"
        )
