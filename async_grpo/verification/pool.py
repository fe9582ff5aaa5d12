"""The verifier pool of a run, one detached actor.

consumes      VerificationRequest, many at a time, from the batcher
produces      one Verdict for each, in the same order
waits for     its verifier processes, each bounded in time and memory
unblocked by  a verdict, or the kill of a process that overran; it ends itself when nobody has
              called for `idle_exit_s` seconds
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from async_grpo.types import Verdict, VerificationRequest
from async_grpo.verification.config import VerifierConfig, count_processes
from async_grpo.verification.sandbox import Sandbox

logger = logging.getLogger(__name__)


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


def adapter_sample(request: VerificationRequest) -> dict[str, Any]:
    """The dict that adapters receive; what the run knows goes before columns of the same name."""
    question, completion = request.question, request.completion
    return dict(question.columns) | {
        "input": question.input,
        "answer": question.answer,
        "output": completion.text,
        "sample_text": question.input + completion.text,
        "output_token_ids": completion.token_ids.tolist(),
        "finish_reason": completion.finish_reason,
    }


def append_failed(
    path: Path, requests: Sequence[VerificationRequest], verdicts: Sequence[Verdict]
) -> None:
    """Append a line of JSON for every sample that could not be graded, to find out why."""
    failed = [(r, v) for r, v in zip(requests, verdicts, strict=True) if v.status == "error"]
    if not failed:
        return
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        for request, verdict in failed:
            line = adapter_sample(request) | {"adapter": verdict.adapter, "reason": verdict.reason}
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")


class VerifierPool:
    """Made an actor by its caller: `ray.remote(VerifierPool).options(...).remote(config)`."""

    def __init__(self, config: VerifierConfig, *, idle_exit_s: float = 600.0) -> None:
        self._config = config
        self._idle_exit_s = idle_exit_s
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
        self._called = asyncio.Event()
        self._idle_watch = asyncio.create_task(self._exit_when_idle(), name="idle watch")

    async def ready(self) -> PoolInfo:
        """Wait until the pool can grade; raises `ConfigError` when an adapter cannot be had."""
        self._called.set()
        if self._starting is None:
            self._starting = asyncio.create_task(self._sandbox.start(), name="sandbox start")
        await asyncio.shield(self._starting)
        self._called.set()
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
            self._called.set()
        self._done.update(verdict.status for verdict in verdicts)
        if self._config.failed_samples:
            append_failed(Path(self._config.failed_samples), requests, verdicts)
        return tuple(verdicts)

    async def status(self) -> PoolStatus:
        sandbox = self._sandbox
        return PoolStatus(self._verifying, dict(self._done), sandbox.events, sandbox.num_up)

    async def config(self) -> VerifierConfig:
        """For `VerifierConfig.require_same_rewards` of a dispatcher that finds the pool running."""
        return self._config

    async def touch(self) -> None:
        """Somebody still needs the pool."""
        self._called.set()

    async def _exit_when_idle(self) -> None:
        while await self._called_in_time() or self._is_busy():
            self._called.clear()
        logger.info("the verifier pool ends: nobody has called it for %g s", self._idle_exit_s)
        await self._sandbox.close()
        # exit_actor() ends an actor from its methods only, not from a task of its own.
        ray.kill(ray.get_runtime_context().current_actor)

    def _is_busy(self) -> bool:
        is_starting = self._starting is not None and not self._starting.done()
        return is_starting or self._verifying > 0

    async def _called_in_time(self) -> bool:
        try:
            async with asyncio.timeout(self._idle_exit_s):
                await self._called.wait()
        except TimeoutError:
            return False
        return True
