"""A command on another node of the Ray cluster: as a child of this process, it ends with it.

consumes:     the words of a command
produces:     its log, on that node, and its end
waits for:    the command's end
unblocked by: its exit, or whoever entered the `with` block, also by dying
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Self

from async_grpo.cluster import cluster
from async_grpo.launch.processes import Process
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, WorkerError

logger = logging.getLogger(__name__)


class CommandHost:
    """The actor there, which holds the command as its child."""

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        folder: str,
        log: str,
        variables: Mapping[str, str],
        max_restarts: int,
    ) -> None:
        """`words` behind Python; `folder`: where it works, the same on all machines."""
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        self._process = Process(
            name,
            [sys.executable, *words],
            log=Path(log),
            environment={**os.environ, **variables},
            stdin=subprocess.PIPE,
            folder=folder,
            max_restarts=max_restarts,
        )
        self._process.__enter__()

    async def last_words(self) -> str:
        """Once the command has ended by itself and is not started again, or was stopped."""
        while True:
            await asyncio.to_thread(self._process.child.wait)
            try:
                self._process.check()
            except WorkerError:
                return self._process.last_words

    async def stop(self) -> None:
        """Ask it to end, and return when it has."""
        await asyncio.to_thread(self._process.__exit__)


@dataclass(eq=False)
class RemoteProcess:
    """`Process` on another node; the log lies there, where the folder is not shared."""

    name: str
    words: Sequence[str]  # behind Python
    _: KW_ONLY
    node_id: str
    log: Path
    environment: Mapping[str, str]  # that the command gets beside those of `ray start` there
    max_restarts: int = 0

    def __enter__(self) -> Self:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = NodeAffinitySchedulingStrategy(node_id=self.node_id, soft=False)
        actor: Any = ray.remote(CommandHost)
        self._host = actor.options(num_cpus=0, scheduling_strategy=place, max_concurrency=10)
        log = str(self.log.absolute())
        self._host = self._host.remote(
            self.name, [*self.words], os.getcwd(), log, dict(self.environment), self.max_restarts
        )
        self._last_words = self._host.last_words.remote()
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        timeout_s = deadlines.CHILD_ENDED_S + deadlines.ANSWER_S
        with contextlib.suppress(AsyncGrpoError):  # its node may be lost: then it has ended
            cluster.wait(self._host.stop.remote(), timeout_s=timeout_s, who=self.name)
        ray.kill(self._host)

    def check(self) -> None:
        """Raise `WorkerError` when the command has ended, as nobody asked it to."""
        if self.has_ended:
            raise WorkerError(f"{self.name} {self.last_words}")

    @property
    def has_ended(self) -> bool:
        return cluster.is_ready(self._last_words)

    @property
    def last_words(self) -> str:
        """Of a command that has ended; raises `AsyncGrpoError` when its node was lost."""
        return str(cluster.wait(self._last_words, timeout_s=deadlines.ANSWER_S, who=self.name))
