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

import ray

from async_grpo.deadlines import LEASE_S
from async_grpo.environments.base import Environment
from async_grpo.environments.find import load_environment
from async_grpo.environments.play import GroupPlay, TurnServices
from async_grpo.roles import ENVIRONMENT
from async_grpo.types import EnvironmentSource, EpisodesRequest, PlayedGroup, Pulse, WorkerInfo


class EnvironmentWorker:
    """Wrap with `ray.remote(max_concurrency=1000)`; every request is a coroutine of its own."""

    def __init__(
        self,
        services_of: Callable[[EpisodesRequest], TurnServices],
        *,
        worker_id: str,
        capacity: int,
        lease_s: float = LEASE_S,
    ) -> None:
        """`capacity` in episodes that are played at a time."""
        self._services_of = services_of
        self._worker_id = worker_id
        self._capacity = float(capacity)
        self._lease_s = lease_s
        self._environments: dict[EnvironmentSource, Environment] = {}
        self._playing: dict[int, tuple[GroupPlay, asyncio.Task[PlayedGroup]]] = {}  # by lease
        self._num_tokens = 0

    async def info(self) -> WorkerInfo:
        """Who this worker is."""
        return WorkerInfo(
            worker_id=self._worker_id,
            role=ENVIRONMENT,
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            model_path="",
            vocab_size=0,
            capacity=self._capacity,
            overhead=0.0,
            max_model_len=0,
            lease_s=self._lease_s,
        )

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
            self._playing.pop(request.lease_id, None)
        self._num_tokens += sum(episode.num_sampled_tokens for episode in played.episodes)
        return played
