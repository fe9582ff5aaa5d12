"""The workers of one dispatcher, and what they share with those of others.

consumes:     the registry's view of each worker
produces:     registered workers, lost ones replaced; signs of life for registry and verifier pool
waits for:    the work of its workers to be done, when they are to leave
unblocked by: being checked every moment; an error that no restart can mend
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self

from async_grpo import cluster
from async_grpo.cli.seat import Seat
from async_grpo.cli.shared_actor import SharedActor
from async_grpo.config.worker import WorkerConfig
from async_grpo.errors import AsyncGrpoError, ClusterError

if TYPE_CHECKING:
    from async_grpo.types import Standing  # imports numpy

logger = logging.getLogger(__name__)
RELEASE_TIMEOUT_S = 5.0
ROOM_TIMEOUT_S = 5.0  # in which workers that have just ended give back what they held
POLL_INTERVAL_S = 1.0


class Fleet:
    """Within, the workers of this dispatcher live; all of them end with the `with` block."""

    def __init__(self, config: WorkerConfig, *, say: Callable[[str], None] = logger.info) -> None:
        """`say` is told whatever a person who watches should know."""
        self._config = config
        self._say = say
        self._seats = [Seat(config, say=say) for _ in range(config.num_workers)]
        self._verifiers: SharedActor | None = None
        self._run = 0  # incarnation of the run that is served; 0: none

    def __enter__(self) -> Self:
        """Make what is missing. Workers first: they load while the rest is made."""
        from async_grpo.cli import launch

        config = self._config
        self._check_room(launch.resources(config), num_workers=config.num_workers)
        logger.info(
            "loading %s in %d %s worker(s)", config.model_path, config.num_workers, config.mode
        )
        for seat in self._seats:
            seat.start(time.monotonic())
        try:
            self._join_others(config)
        except BaseException:  # nobody else would end them
            self._end_workers()
            raise
        return self

    def _join_others(self, config: WorkerConfig) -> None:
        """Find or make what all dispatchers share; raises what a running pool differs in."""
        from async_grpo.cli import launch

        started = time.monotonic()
        if config.mode == "generation":
            self._pools = pools = launch.VerifierPools(config)
            self._verifiers = SharedActor(
                launch.VERIFIERS, pools.make(), make=pools.find, ask=pools.join
            )
            logger.info("verifiers ready after %.1f s", time.monotonic() - started)
        self._registry = SharedActor(
            "the registry",
            launch.make_registry(config.mode),
            make=lambda: launch.make_registry(config.mode),
            ask=lambda registry: registry.standing.remote(self._names()),
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the workers out of their registry and end them; a lost cluster is no error."""
        import ray
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):
            calls = [self._registry.handle.deregister.remote(name) for name in self._names()]
            if self._verifiers is not None:
                calls.append(self._pools.leave(self._verifiers.handle))
            if calls:
                ray.wait(calls, num_returns=len(calls), timeout=RELEASE_TIMEOUT_S)
            self._end_workers()

    def _end_workers(self) -> None:
        import ray

        for seat in self._seats:
            if seat.handle is not None:
                ray.kill(seat.handle)

    def check(self) -> None:
        """Look after everything once; raises what no restart can mend."""
        now_s = time.monotonic()
        if self._verifiers is not None and (complaint := self._verifiers.keep(now_s)):
            logger.warning(complaint)
        standing = self._registry.keep(now_s) or {}
        self._tell_of_run(standing)
        for seat in self._seats:
            seat.look_after(self._registry.handle, standing.get(seat.name), now_s=now_s)

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

    def drain(self, *, timeout_s: float) -> None:
        """Have the workers finish what they do, in time, without giving them new work."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(AsyncGrpoError):  # a registry that is lost has no leases
            for name in self._names():
                call = self._registry.handle.drain.remote(name)
                cluster.wait(call, timeout_s=RELEASE_TIMEOUT_S, who="the registry")
            if self._num_leases():
                self._say(f"finishing what runs, for at most {timeout_s:g} s; once more: at once")
            while self._num_leases() and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL_S / 4)

    def _num_leases(self) -> int:
        call = self._registry.handle.standing.remote(self._names())
        standing = cluster.wait(call, timeout_s=RELEASE_TIMEOUT_S, who="the registry")
        return sum(worker.num_leases for worker in standing.values())

    def _names(self) -> tuple[str, ...]:
        return tuple(seat.name for seat in self._seats if seat.name)

    def _check_room(self, each: dict[str, float], *, num_workers: int) -> None:
        """Raise unless this node can hold the workers: Ray would wait for room without a word."""
        needed = {kind: amount * num_workers for kind, amount in each.items() if amount}
        deadline = time.monotonic() + ROOM_TIMEOUT_S
        while True:
            free = cluster.free_here()
            missing = [kind for kind, amount in needed.items() if free.get(kind, 0.0) < amount]
            if not missing:
                return
            if time.monotonic() > deadline:
                kind = missing[0]
                raise ClusterError(
                    f"{num_workers} {self._config.mode} worker(s) need {needed[kind]:g} {kind} of "
                    f"Ray on this node, {free.get(kind, 0.0):g} of "
                    f"{cluster.resources_here().get(kind, 0.0):g} are free: stop other workers, "
                    f"or start Ray with a larger --num-{kind.lower()}s"
                )
            time.sleep(POLL_INTERVAL_S)
