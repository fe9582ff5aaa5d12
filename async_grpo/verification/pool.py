"""The verifier pool of one dispatcher: a worker of the verifier role, on the dispatcher's node.

consumes      the outputs of groups, many at a time, from the controller
produces      one Verdict for each output, in the same order
waits for     its verifier processes, each bounded in time and memory
unblocked by  a verdict, or the kill of a process that overran
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from async_grpo.config.roles import VERIFIER
from async_grpo.types import (
    GradingRequest,
    Pulse,
    RequestPulse,
    Verdict,
    VerificationRequest,
    WorkerInfo,
)
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.sandbox import Sandbox
from async_grpo.verification.tasks import adapter_sample

# Texts that may wait in a pool, for each core: many, as one that hangs must not hold up others.
TEXTS_WAITING = 1024


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The present work of a pool, and its counts since it started."""

    verifying: int  # samples
    done: Mapping[str, int]  # samples, by Verdict.status
    events: Mapping[str, int]  # failed attempts, late requests, restarts: see Sandbox
    num_processes: int  # its share of the global number
    confinement: Mapping[str, str]  # by kind, why what it runs is not confined; empty: it is


class VerifierPool:
    """Grades outputs for the controller; its dispatcher starts it as an actor, and ends it."""

    def __init__(
        self,
        config: VerifierConfig,
        *,
        worker_id: str,
        failed_samples: str = "",
        lease_s: float = 30.0,
        ray_cpus: float = float("inf"),
    ) -> None:
        """`failed_samples`: a file for samples that could not be graded; empty: they are not kept.

        `ray_cpus`: the CPUs of this node by Ray's count, which may differ from the machine's.
        """
        self._config = config
        self._worker_id = worker_id
        self._lease_s = lease_s
        self._ray_cpus = ray_cpus
        self._sandbox = Sandbox(config, num_processes=1)  # until `take_share`
        self._verifying: dict[int, int] = {}  # samples, by lease
        self._done: Counter[str] = Counter()
        self._failed_samples = failed_samples
        self._complaints: list[str] = []
        self._num_read = 0  # complaints that the dispatcher has read

    async def info(self) -> WorkerInfo:
        """Start the sandbox, and return the record with which the dispatcher registers this pool.

        Raises `ConfigError` for an unusable adapter, or one that must be confined and cannot be.
        """
        await self._sandbox.start()
        # An option of Ray's may count more cores than the machine has.
        num_cores = max(1, int(min(self._ray_cpus, os.cpu_count() or 1)))
        return WorkerInfo(
            worker_id=self._worker_id,
            role=VERIFIER,
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            capacity=float(num_cores),
            overhead=float(TEXTS_WAITING * num_cores),
            lease_s=self._lease_s,
            rewards=replace(
                self._config.rewards(num_cores=num_cores), groupwise=self._sandbox.groupwise
            ),
            confinement=self._sandbox.confinement,
        )

    async def ping(self, after_s: float = 0.0) -> Pulse:
        """The leases whose outputs are graded, as of `after_s` from now."""
        await asyncio.sleep(after_s)
        # Waiting: a group has no progress to show before its verdicts.
        requests = {lease_id: RequestPulse(0, is_waiting=True) for lease_id in self._verifying}
        return Pulse("none", self._done.total(), requests)

    async def take_share(self, num_processes: int) -> None:
        """Run `num_processes` verifier processes from now on; the controller calls this."""
        await self._sandbox.resize(num_processes)

    async def verify(self, request: GradingRequest) -> tuple[Verdict, ...]:
        """Grade the outputs of one group; the verdicts have the outputs' order."""
        outputs, lease_id = request.outputs, request.lease_id
        self._verifying[lease_id] = len(outputs)
        try:
            samples = [adapter_sample(output) for output in outputs]
            verdicts = await self._sandbox.grade(samples, request.rewards)
        finally:
            del self._verifying[lease_id]
        self._done.update(verdict.status for verdict in verdicts)
        if self._failed_samples:
            try:
                append_failed(self._failed_samples, outputs, verdicts)
            except OSError as error:
                complaint = (
                    f"samples that could not be graded are not kept in {self._failed_samples}: "
                    f"{error}"
                )
                if complaint not in self._complaints:
                    self._complaints.append(complaint)
        return verdicts

    async def try_out(self, request: GradingRequest) -> tuple[Verdict, ...]:
        """The verdict of each adapter alone on one output, before a run begins.

        The output becomes the sandbox' control for later overruns.
        """
        (output,) = request.outputs
        return await self._sandbox.grade_with_each(adapter_sample(output), request.rewards)

    async def complaint(self) -> str:
        """New complaints for the dispatcher to log, each returned once; mostly there is none."""
        unread = self._complaints[self._num_read :]
        self._num_read = len(self._complaints)
        return "; ".join(unread)

    async def abort_all(self) -> None:
        """Do nothing: each verification ends within its limit."""

    async def status(self) -> PoolStatus:
        sandbox = self._sandbox
        return PoolStatus(
            sum(self._verifying.values()),
            dict(self._done),
            dict(sandbox.events),
            sandbox.num_processes,
            sandbox.confinement,
        )


def append_failed(
    path: str, requests: Sequence[VerificationRequest], verdicts: Sequence[Verdict]
) -> None:
    """Append each sample whose verdict is an error, with the reason, as a line of JSON."""
    lines = [
        adapter_sample(request) | {"adapter": verdict.adapter, "reason": verdict.reason}
        for request, verdict in zip(requests, verdicts, strict=True)
        if verdict.status == "error"
    ]
    if lines:
        with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(x, ensure_ascii=False, default=str) + "\n" for x in lines)
