"""Syncs of one model: a trainer's rank in this process, a real worker and engine beside it."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from async_grpo.cluster.cluster import Cluster
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.model.served import FlatShards, served
from async_grpo.rollout.generation_worker import worker_environment
from async_grpo.types import CanaryRow, WeightsAck, WeightsSnapshot, WeightsVersion
from async_grpo.weight_sync.gather import Shards
from async_grpo.weight_sync.publisher import Collector
from async_grpo.weight_sync.sync_report import canary_differences
from benchmarks import procfs
from benchmarks.cores import family
from benchmarks.stack import Stack
from benchmarks.weight_sync.memory import Held, MemoryWatch
from benchmarks.weight_sync.models import LONGEST, Policy, Size
from benchmarks.weight_sync.timed_worker import PROMPT, Load, TimedWorker

TIMEOUT_S = 240.0
NUM_REQUESTS = 8
SETTLE_S = 1.0  # of requests without an update: what memory they take by themselves
STORE = "raylet/raylet"


@dataclass(frozen=True, slots=True, eq=False)
class Sync:
    """One update, from the trainer's parameters to the engine's tokens; times in seconds."""

    size_bytes: int
    num_buckets: int
    copying: float  # the same bytes, from one place in memory to another
    gathering: float  # the trainer stands still, while its rows leave the parameters
    collecting: float  # gathering, checking, hashing and putting them into the object store
    serving: float  # from there to the acknowledgement
    load: Load
    canary_max: float | None  # |engine - trainer| right after it, nats; None: it was not scored
    peaks: Held  # most bytes that each role held, above what it held between updates


def run(stack: Stack, size: Size, *, repeats: int, report: Callable[[str], None]) -> list[Sync]:
    """`repeats` updates while requests run, after a first one without any."""
    with tempfile.TemporaryDirectory(prefix="weights-") as folder:
        policy = Policy(size.make(Path(folder)))
        actor = ray.remote(TimedWorker).options(
            num_cpus=1, max_concurrency=1000, runtime_env={"env_vars": worker_environment()}
        )
        worker: Any = actor.remote(WorkerConfig(model_path=folder, max_num_seqs=NUM_REQUESTS))
        try:
            info = ray.get(worker.info.remote(), timeout=TIMEOUT_S)
            report(f"{policy.size_bytes / 2**20:.0f} MiB, engine started")
            with MemoryWatch(_roles(stack, info.pid)) as watch:
                return _Trainer(policy, worker, watch).updates(repeats)
        finally:
            ray.kill(worker)


class _Trainer:
    """Rank 0 as `run.sampled_data` has it, with a worker in the place of its registry."""

    def __init__(self, policy: Policy, worker: Any, watch: MemoryWatch) -> None:
        self._policy = policy
        self._worker = worker
        self._watch = watch
        self._kept: WeightsSnapshot | None = None
        self._collector = Collector(
            Shards.of(policy.policy, served(policy.policy)),
            Cluster(),
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        # Written once, so that no page of them is new.
        self._from, self._to = (np.ones(policy.size_bytes, dtype=np.uint8) for _ in range(2))
        self._before: Held = {}

    def updates(self, repeats: int) -> list[Sync]:
        self._update(0)  # a process that loads for the first time takes memory for good
        call = self._worker.start_traffic.remote(NUM_REQUESTS, max_tokens=LONGEST - len(PROMPT))
        ray.get(call, timeout=TIMEOUT_S)
        self._before = self._watch.peaks_within(SETTLE_S)
        return [self._update(1 + turn) for turn in range(repeats)]

    def _update(self, batches: int) -> Sync:
        self._policy.change()
        canary = self._policy.canary()
        copying = _seconds(lambda: np.copyto(self._to, self._from))
        self._watch.peaks()  # what was held until now is not the sync's
        began_at = time.monotonic()
        shards, version = FlatShards(served(self._policy.policy)), WeightsVersion(0, batches)
        collected = self._collector.collect(shards, version=version)
        gathered_at = time.monotonic()
        snapshot: Any = collected.wait()
        snapshot = dataclasses.replace(snapshot, canary=canary)
        collected_at = time.monotonic()
        load: Any = ray.get(self._worker.publish.remote(snapshot, TIMEOUT_S), timeout=TIMEOUT_S)
        self._kept = snapshot  # until newer weights are served
        return Sync(
            size_bytes=snapshot.size_bytes,
            num_buckets=len(snapshot.buckets),
            copying=copying,
            gathering=gathered_at - began_at,
            collecting=collected_at - began_at,
            serving=load.ended_at - load.began_at,
            load=load,
            canary_max=_largest(canary, load.ack),
            peaks={
                role: peak - self._before.get(role, 0) for role, peak in self._watch.peaks().items()
            },
        )


def _largest(canary: tuple[CanaryRow, ...], ack: WeightsAck) -> float | None:
    if len(ack.canary) != len(canary):
        return None
    return float(canary_differences(canary, ack.canary).max())


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _roles(stack: Stack, worker_pid: int) -> dict[str, tuple[int, ...]]:
    store = [pid for pid in family(stack.head.pid) if STORE in procfs.command_line(pid)]
    return {
        "trainer": (os.getpid(),),
        "object store": tuple(store),
        "worker": tuple(sorted(family(worker_pid))),  # and its engine
    }
