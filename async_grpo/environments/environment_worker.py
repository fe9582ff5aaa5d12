"""Plays episodes in a user's environment, whose code runs in processes of this class only.

consumes:     requests for the episodes of one group, one lease each
produces:     the episodes, with a verdict for each
waits for:    the episodes, see play.py
unblocked by: their ends, or the end of the lease

The user's code runs in a separate thread with an event loop: code that blocks there delays the
other episodes of this worker, but not the answers to pings. Requests of an episode go to the
controller, which leases a worker and returns its answer.
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

# Python's thresholds but for the last. A full collection takes 0.2 s with the half million objects
# of transformers, and no episode goes on meanwhile: it is to run once in 7 million new objects.
COLLECTION = (700, 10, 1_000)


class EnvironmentWorker:
    """Wrap with `ray.remote(max_concurrency=1000)`; each request runs as another coroutine."""

    def __init__(
        self,
        ask: Ask,
        *,
        worker_id: str,
        capacity: int,
        lease_s: float = LEASE_S,
        confinement: Callable[[], dict[str, str]] = dict,
    ) -> None:
        """`capacity`: episodes at a time; `ask` gets the group's request before its arguments.

        `confinement` confines this process, and returns the field of `WorkerInfo`.
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
        self._has_run = threading.Event()  # the loop ran a callback since `_checked_s`
        self._has_run.set()
        self._checked_s = 0.0

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
        """The progress of each group, `after_s` from now.

        Raises `WorkerError`, so that this process is replaced, when the user's code has blocked its
        thread for longer than an episode may wait for nothing.
        """
        await asyncio.sleep(after_s)
        groups = {lease: group for lease, (group, _) in self._playing.items()}
        if held_s := self._held_s():
            self._check_held(held_s, [group.request for group in groups.values()])
        requests = {lease: group.pulse(is_held=held_s > 0) for lease, group in groups.items()}
        return Pulse("none", self._num_tokens, requests)

    async def abort_all(self) -> None:
        """Cancel all episodes."""
        for _, playing in self._playing.values():
            playing.cancel()

    async def play(self, request: EpisodesRequest) -> PlayedGroup:
        """Play and grade the episodes of one group.

        Raises:
            EpisodeFailed: one of them could not be played or graded, so the group is lost.
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
        """Run in the thread of the user's code, which imports it too."""
        code = group.request.environment
        if code not in self._environments:
            self._environments[code] = make_environment(code)
        return await group.run(self._environments[code])

    def _held_s(self) -> float:
        """For how long the user's code has blocked its event loop; 0: the loop runs."""
        if not self._has_run.is_set():
            return time.monotonic() - self._checked_s
        self._has_run.clear()
        self._checked_s = time.monotonic()
        self._loop.call_soon_threadsafe(self._has_run.set)
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
