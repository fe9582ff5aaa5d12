"""The verifier pool of a run, one detached actor.

consumes      VerificationRequest, many at a time, from the batcher
produces      one Verdict for each, in the same order
waits for     its verifier processes, each bounded in time and memory
unblocked by  a verdict, or the kill of a process that overran; it ends with the last dispatcher
              that needs it, unless a run still uses it
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import ray

from async_grpo import cluster
from async_grpo.types import Verdict, VerificationRequest
from async_grpo.verification.config import VerifierConfig, count_processes
from async_grpo.verification.dispatchers import Dispatcher, Dispatchers
from async_grpo.verification.failed_samples import FailedSamples, adapter_sample
from async_grpo.verification.sandbox import Sandbox

logger = logging.getLogger(__name__)
TICK_S = 0.5
SILENCE_S = 10.0  # after which a dispatcher has left, and a pool that nobody calls ends


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """What a pool says of itself once it can grade."""

    num_processes: int
    reward_names: tuple[str, ...]
    node_id: str
    pid: int
    is_confined: bool  # verifier processes live in namespaces of their own


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """What a pool is doing, and has done since it started."""

    verifying: int  # samples
    done: Mapping[str, int]  # samples, by Verdict.status
    events: Mapping[str, int]  # attempts that were accidents, and how they were mended: see Sandbox
    num_up: int  # slots that have a process


class VerifierPool:
    """Made an actor by its caller: `ray.remote(VerifierPool).options(...).remote(config)`."""

    def __init__(self, config: VerifierConfig, *, silence_s: float = SILENCE_S) -> None:
        self._config = config
        self._num_processes = count_processes(
            config.num_verifiers,
            cluster_cpus=int(ray.cluster_resources().get("CPU", 1)),
            num_nodes=sum(node["Alive"] for node in ray.nodes()),
            local_cpus=os.cpu_count() or 1,
        )
        self._sandbox = Sandbox(config, num_processes=self._num_processes)
        self._starting: asyncio.Task[None] | None = None
        self._verifying = 0
        self._done: Counter[str] = Counter()
        self._patience = round(silence_s / TICK_S)
        self._dispatchers = Dispatchers(patience=self._patience)
        self._had_dispatchers = False
        self._ticked = asyncio.Event()
        self._quiet_ticks = 0  # since anybody has called
        self._failed_samples = FailedSamples()
        self._watch = asyncio.create_task(self._end_with_the_last(), name="end with the last")

    async def join(self, dispatcher: Dispatcher, wanted: VerifierConfig) -> str:
        """A dispatcher lives and needs the pool; it says so again and again.

        Answers what its user should know, mostly nothing. Raises `ConfigError` when others use
        other rewards; when nobody uses these any more, the pool ends, and another takes its name.
        """
        self._quiet_ticks = 0
        if dispatcher not in self._dispatchers:
            users = await self._others()
            if users:
                wanted.require_same_rewards(self._config, users=users)
            elif self._had_dispatchers or wanted != self._config:
                await self._end("its dispatchers have left, and another begins anew")
        self._had_dispatchers = True
        self._dispatchers.heard(dispatcher)
        return self._failed_samples.take_complaint(dispatcher.failed_samples)

    async def leave(self, dispatcher: Dispatcher) -> None:
        """A dispatcher ends."""
        self._dispatchers.left(dispatcher)
        if not self._dispatchers:
            self._quiet_ticks = self._patience

    async def ready(self) -> PoolInfo:
        """Wait until the pool can grade; raises `ConfigError` when an adapter cannot be had."""
        self._quiet_ticks = 0
        if self._starting is None:
            self._starting = asyncio.create_task(self._sandbox.start(), name="sandbox start")
        await asyncio.shield(self._starting)
        return PoolInfo(
            self._num_processes,
            self._config.reward_names,
            ray.get_runtime_context().get_node_id(),
            os.getpid(),
            self._sandbox.is_confined,
        )

    async def verify(self, requests: tuple[VerificationRequest, ...]) -> tuple[Verdict, ...]:
        """Grade the requests side by side; verdicts in the order of the requests."""
        await self.ready()
        self._verifying += len(requests)
        try:
            samples = map(adapter_sample, requests)
            verdicts = await asyncio.gather(*(self._sandbox.grade(sample) for sample in samples))
        finally:
            self._verifying -= len(requests)
        self._done.update(verdict.status for verdict in verdicts)
        paths = [dispatcher.failed_samples for dispatcher in self._dispatchers]
        self._failed_samples.append(paths, requests, verdicts)
        return tuple(verdicts)

    async def try_out(self, request: VerificationRequest) -> tuple[Verdict, ...]:
        """The verdict of each adapter alone, before a run begins.

        What they grade here is what a later overrun is measured by.
        """
        await self.ready()
        return await self._sandbox.grade_with_each(adapter_sample(request))

    async def status(self) -> PoolStatus:
        sandbox = self._sandbox
        return PoolStatus(self._verifying, dict(self._done), sandbox.events, sandbox.num_up)

    async def _others(self) -> str:
        """Who else lives and needs these rewards; empty when nobody does.

        Of a dispatcher that was killed nobody knows until it has been silent for long enough.
        """
        asked = self._dispatchers.now
        while not self._is_starting and self._dispatchers.unheard_since(asked):
            await self._ticked.wait()
        return " and ".join(filter(None, [*map(str, self._dispatchers), await self._trainer()]))

    async def _trainer(self) -> str:
        """Whose run may go on while dispatchers are started again; empty when there is none."""
        run = await asyncio.to_thread(cluster.owner_of, cluster.BATCHER)
        return f"trainer process {run.pid} on {run.address}" if run else ""

    async def _end_with_the_last(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self._is_starting:
                continue  # dispatchers wait for it
            self._dispatchers.tick()
            self._ticked.set()
            self._ticked.clear()  # for those who wait by now, once
            self._quiet_ticks = 0 if self._verifying else self._quiet_ticks + 1
            if self._quiet_ticks > self._patience and not self._dispatchers:
                if not await self._trainer() and not self._dispatchers:
                    await self._end("nobody needs it")
                self._quiet_ticks = 0

    async def _end(self, reason: str) -> NoReturn:
        logger.info("the verifier pool ends: %s", reason)
        await self._sandbox.close()
        # exit_actor() ends an actor from its methods only, not from a task of its own.
        ray.kill(ray.get_runtime_context().current_actor)
        await asyncio.Future()  # whoever has called hears of the end instead of an answer
        raise AssertionError("nobody has ended it")

    @property
    def _is_starting(self) -> bool:
        return self._starting is not None and not self._starting.done()
