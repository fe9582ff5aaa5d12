"""The workers of one dispatcher, and what they share with those of others.

consumes:     nothing; it watches
produces:     registered workers, and signs of life for the registry and the verifier pool
waits for:    models to load, up to --start-timeout-s
unblocked by: a worker that is ready, or an error of any actor it watches
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from async_grpo import cluster
from async_grpo.config.worker import WorkerConfig
from async_grpo.errors import AsyncGrpoError, ClusterError, WorkerError

logger = logging.getLogger(__name__)
CALL_TIMEOUT_S = 120.0
RELEASE_TIMEOUT_S = 5.0
ROOM_TIMEOUT_S = 5.0  # in which workers that have just ended give back what they held
POLL_INTERVAL_S = 1.0


class Fleet:
    """Within, actors of this dispatcher may be started; all of them end with the `with` block."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._shared: dict[str, Any] = {}
        self._workers: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """Make what is missing, after everything that can be wrong has been looked at."""
        from async_grpo.cli import launch

        self._check_room(launch.resources(self._config), num_workers=self._config.num_workers)
        if self._config.mode == "generation":
            self._shared["the verifier pool"] = launch.make_verifier_pool(self._config)
        self._registry = launch.make_registry(self._config.mode)
        self._shared["the registry"] = self._registry
        return self

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
            calls = [self._registry.deregister.remote(name) for name in self._workers]
            if calls:
                ray.wait(calls, num_returns=len(calls), timeout=RELEASE_TIMEOUT_S)
            for handle in self._workers.values():
                ray.kill(handle)

    def start(self, names: Sequence[str]) -> None:
        """Start one worker a name; they load side by side."""
        from async_grpo.cli import launch

        logger.info("loading %s in %d %s worker(s)", self._config.model_path, len(names),
                    self._config.mode)  # fmt: skip
        for name in names:
            self._workers[name] = launch.start_worker(self._config, name)

    def register(self, name: str) -> None:
        """Wait until a worker has loaded and the registry has admitted it."""
        import ray

        handle, timeout_s = self._workers[name], self._config.start_timeout_s
        loaded = handle.info.remote()
        deadline = time.monotonic() + timeout_s
        while not ray.wait([loaded], timeout=POLL_INTERVAL_S)[0]:
            self._keep_shared()
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"worker {name} was not ready within {timeout_s:g} s: raise --start-timeout-s "
                    f"or see its log in {cluster.logs_folder()}"
                )
        try:
            info = cluster.wait(loaded, timeout_s=CALL_TIMEOUT_S, who=f"worker {name}")
        except WorkerError as error:
            raise self._lost(name, error) from None
        admitted = self._registry.register.remote(info, handle)
        cluster.wait(admitted, timeout_s=timeout_s, who="the registry")

    def check(self) -> None:
        """Tell what is shared that it is needed; raises when it or a worker has died."""
        self._keep_shared()
        for name, handle in self._workers.items():
            try:
                cluster.wait(handle.ping.remote(), timeout_s=CALL_TIMEOUT_S, who=f"worker {name}")
            except AsyncGrpoError as error:
                raise self._lost(name, error) from None

    def _keep_shared(self) -> None:
        """Also while workers load: a registry without members ends itself after a time."""
        for who, handle in self._shared.items():
            cluster.wait(handle.touch.remote(), timeout_s=CALL_TIMEOUT_S, who=who)

    def _lost(self, name: str, error: AsyncGrpoError) -> WorkerError:
        """Why a worker is lost: the registry knows best, when it is the one who excluded it."""
        fenced = self._registry.fenced.remote()
        reason = cluster.wait(fenced, timeout_s=CALL_TIMEOUT_S, who="the registry").get(name)
        what = f"worker {name} was excluded: {reason}" if reason else str(error)
        return WorkerError(f"{what} (its log is in {cluster.logs_folder()})")

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
