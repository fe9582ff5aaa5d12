"""Plays the episodes of groups in a user's environment, whose code runs in this process alone.

consumes:     requests for the episodes of one group, one lease each
produces:     their episodes, and a verdict for each
waits for:    the episodes, see play.py
unblocked by: their ends, or the end of the lease

The user's code has a thread and an event loop of its own: what blocks there holds up the other
episodes of this worker, but not the pings that say that it lives. What an episode asks for goes to
the controller, which leases a worker, and brings its answer.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial

import ray

from async_grpo.config.roles import ENVIRONMENT
from async_grpo.environments.base import Environment
from async_grpo.environments.chat.find import find_renderer
from async_grpo.environments.episode import Ask
from async_grpo.environments.find import make_environment
from async_grpo.environments.play import GroupPlay
from async_grpo.types import EpisodesRequest, PlayedGroup, Pulse, WorkerInfo
from async_grpo.util.deadlines import LEASE_S
from async_grpo.util.errors import WorkerError
from async_grpo.util.user_code import UserCode

# Python's own but for the last. Looking through all objects, half a million with transformers,
# takes 0.2 s in which no episode goes on; that is to be after 7 million new ones.
COLLECTION = (700, 10, 1_000)


class EnvironmentWorker:
    """Wrap with `ray.remote(max_concurrency=1000)`; every request is a coroutine of its own."""

    def __init__(
        self,
        ask: Ask,
        *,
        worker_id: str,
        capacity: int,
        lease_s: float = LEASE_S,
        confinement: Callable[[], dict[str, str]] = dict,
    ) -> None:
        """`capacity` in episodes that are played at a time; `ask` is told whose a question is.

        `confinement` makes of this process what it may be, and tells of it: see `WorkerInfo`.
        """
        gc.set_threshold(*COLLECTION)
        self._ask = ask
        self._worker_id = worker_id
        self._capacity = float(capacity)
        self._lease_s = lease_s
        self._confinement = confinement
        self._environments: dict[UserCode, Environment] = {}
        self._playing: dict[int, tuple[GroupPlay, asyncio.Future[PlayedGroup]]] = {}  # by lease
        self._num_tokens = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="play", daemon=True)
        self._thread.start()
        self._came_round = threading.Event()  # the loop, since `_looked_s`
        self._came_round.set()
        self._looked_s = 0.0

    async def info(self) -> WorkerInfo:
        """Who this worker is."""
        return WorkerInfo(
            worker_id=self._worker_id,
            role=ENVIRONMENT,
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            capacity=self._capacity,
            lease_s=self._lease_s,
            confinement=await asyncio.to_thread(self._confinement),
        )

    async def ping(self, after_s: float = 0.0) -> Pulse:
        """How far each group is, `after_s` from now.

        Raises `WorkerError`, which has this process replaced, when the user's code has held its
        thread for as long as an episode may ask for nothing.
        """
        await asyncio.sleep(after_s)
        groups = {lease: group for lease, (group, _) in self._playing.items()}
        if held_s := self._held_s():
            self._check_held(held_s, [group.request for group in groups.values()])
        requests = {lease: group.pulse(is_held=held_s > 0) for lease, group in groups.items()}
        return Pulse("none", self._num_tokens, requests)

    async def abort_all(self) -> None:
        """End all episodes."""
        for _, playing in self._playing.values():
            playing.cancel()

    async def play(self, request: EpisodesRequest) -> PlayedGroup:
        """The episodes of one group, graded.

        Raises:
            EpisodeFailed: one of them could not be played or graded; none of the group counts.
            ConfigError: the environment cannot be made in this process.
        """
        group = GroupPlay(request, partial(self._ask, request), find_renderer)
        work = asyncio.run_coroutine_threadsafe(self._play(group), self._loop)
        playing = asyncio.wrap_future(work)
        self._playing[request.lease_id] = group, playing
        try:
            played = await playing
        finally:
            playing.cancel()
            self._playing.pop(request.lease_id, None)
        self._num_tokens += sum(episode.num_sampled_tokens for episode in played.episodes)
        return played

    async def _play(self, group: GroupPlay) -> PlayedGroup:
        """In the thread of the user's code, which is where it is imported too."""
        code = group.request.environment
        if code not in self._environments:
            self._environments[code] = make_environment(code)
        return await group.run(self._environments[code])

    def _held_s(self) -> float:
        """For how long the thread has kept its loop from coming round; 0 when it has."""
        if not self._came_round.is_set():
            return time.monotonic() - self._looked_s
        self._came_round.clear()
        self._looked_s = time.monotonic()
        self._loop.call_soon_threadsafe(self._came_round.set)
        return 0.0

    def _check_held(self, held_s: float, requests: Sequence[EpisodesRequest]) -> None:
        if not requests or held_s <= min(request.idle_timeout_s for request in requests):
            return
        frames = traceback.extract_stack(sys._current_frames()[self._thread.ident or 0])
        code = requests[0].environment
        raise WorkerError(
            f"environment {code.name} has held its worker for {held_s:.0f} s, in "
            f"{code.line_in(frames)}: await what takes long, or give it to asyncio.to_thread"
        )
