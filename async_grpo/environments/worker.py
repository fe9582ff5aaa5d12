"""Plays the episodes of groups in a user's environment, whose code runs in this process alone.

consumes:     requests for the episodes of one group, one lease each
produces:     their episodes, and a verdict for each
waits for:    the episodes, see play.py
unblocked by: their ends, or the end of the lease
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace

from async_grpo.environments.base import Environment
from async_grpo.environments.find import load_environment
from async_grpo.environments.play import GroupPlay, TurnServices
from async_grpo.types import EnvironmentSource, EpisodesRequest, PlayedGroup, Pulse, WorkerInfo


class EnvironmentWorker:
    """Wrap with `ray.remote(max_concurrency=1000)`; every request is a coroutine of its own."""

    def __init__(
        self, services_of: Callable[[EpisodesRequest], TurnServices], *, info: WorkerInfo
    ) -> None:
        """`info`: all but the process; its capacity is in episodes."""
        self._services_of = services_of
        self._info = replace(info, pid=os.getpid())
        self._environments: dict[EnvironmentSource, Environment] = {}
        self._playing: dict[int, tuple[GroupPlay, asyncio.Task[PlayedGroup]]] = {}  # by lease
        self._num_tokens = 0

    async def info(self) -> WorkerInfo:
        """Who this worker is."""
        return self._info

    async def ping(self, after_s: float = 0.0) -> Pulse:
        """How far each group is, `after_s` from now."""
        await asyncio.sleep(after_s)
        requests = {lease: group.pulse() for lease, (group, _) in self._playing.items()}
        return Pulse("none", self._num_tokens, requests)

    async def abort_all(self) -> None:
        """End all episodes."""
        for _, task in self._playing.values():
            task.cancel()

    async def play(self, request: EpisodesRequest) -> PlayedGroup:
        """The episodes of one group, graded.

        Raises:
            EpisodeFailed: one of them could not be played or graded; none of the group counts.
            WorkerError: the environment cannot be made in this process.
        """
        if request.source not in self._environments:
            self._environments[request.source] = load_environment(request.source)
        environment = self._environments[request.source]
        group = GroupPlay(environment, request, self._services_of(request))
        task = asyncio.create_task(group.run(), name=f"group-{request.ordinal}")
        self._playing[request.lease_id] = group, task
        try:
            played = await task
        finally:
            task.cancel()
            del self._playing[request.lease_id]
        self._num_tokens += sum(episode.num_sampled_tokens for episode in played.episodes)
        return played
