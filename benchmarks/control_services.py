"""The real actors of the control plane on a cluster of their own, and who plays the rest.

`WorkerRegistry`, `ExperienceBatcher` and `VerifierPool` are the real ones, with one change: they
tell what they have computed, and where. Workers answer at once, ranks train nothing.
"""

from __future__ import annotations

import asyncio
import cProfile
import io
import pstats
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from async_grpo.batching.batcher import ExperienceBatcher
from async_grpo.batching.records import BatcherPlan
from async_grpo.batching.services import Services
from async_grpo.bundles import Bundles
from async_grpo.config.train import TrainConfig
from async_grpo.routing.registry import WorkerRegistry
from async_grpo.types import (
    Completion,
    EndOfStep,
    GenerationRequest,
    LogprobRequest,
    Pulse,
    Question,
    SamplingContract,
    Verdict,
    VerificationRequest,
    VersionSpan,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
)
from async_grpo.verification import pool
from async_grpo.verification.config import VerifierConfig
from benchmarks.control_cores import GROUP, worker_info

TIMEOUT_S = 300.0
FIRST = WeightsVersion(0, 0)
OPTIONS = {"num_cpus": 0, "max_concurrency": 10_000}
NUM_QUESTIONS = 256
QUESTION = Question(
    np.arange(64, dtype=np.int32), "use 2 9 8 to make 15\n", "15", {"target": 15, "nums": [2, 9, 8]}
)


class Watched:
    """What an actor tells of itself besides its work."""

    _profile: cProfile.Profile | None = None

    async def cpu_seconds(self) -> float:
        """Of all threads of its process."""
        return time.process_time()

    async def start_profile(self) -> None:
        """Profile the thread of its event loop."""
        self._profile = cProfile.Profile()
        self._profile.enable()

    async def stop_profile(self, num_lines: int) -> str:
        """The functions that took most, by their own time."""
        assert self._profile is not None
        self._profile.disable()
        text = io.StringIO()
        pstats.Stats(self._profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(
            num_lines
        )
        return "\n".join(line for line in text.getvalue().splitlines()[6:] if line)


class WatchedRegistry(Watched, WorkerRegistry):
    """The registry."""


class WatchedBatcher(Watched, ExperienceBatcher):
    """The batcher."""


class WatchedPool(Watched, pool.VerifierPool):
    """The pool, with as many slots as it is told, whatever the machine has."""

    def __init__(self, config: VerifierConfig) -> None:
        pool.count_processes = lambda requested, **_: requested  # type: ignore[assignment]
        super().__init__(config, silence_s=3600.0)  # no dispatcher needs it here


class Player(Watched):
    """Plays all workers, and the verifiers too: it knows every answer before it is asked."""

    def __init__(self, num_output_tokens: int) -> None:
        self._token_ids = np.arange(num_output_tokens, dtype=np.int32) % 100
        self._logprobs = np.full(num_output_tokens, -1.0, np.float32)
        self._mask = np.ones(num_output_tokens, np.bool_)
        self._version = FIRST

    async def ping(self, after_s: float = 0.0) -> Pulse:
        await asyncio.sleep(after_s)
        return Pulse("none")

    async def abort_all(self) -> None:
        return None

    async def load_weights(self, snapshot: WeightsSnapshot) -> WeightsAck:
        self._version = snapshot.version
        return WeightsAck("all", snapshot.version, 0.0, 0.0)

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """Outputs that differ in their first token."""
        return tuple(
            Completion(
                np.concatenate([[np.int32(index)], self._token_ids[1:]], dtype=np.int32),
                self._logprobs.copy(),
                (VersionSpan(self._version, 0, len(self._token_ids)),),
                self._mask.copy(),
                "stop",
                "8-2+9=15",
            )
            for index in range(request.num_samples)
        )

    async def verify(self, requests: tuple[VerificationRequest, ...]) -> tuple[Verdict, ...]:
        """Every reward of a group is another one: all samples are trained."""
        return tuple(
            Verdict("scored", float(request.index), None, "played", "", 0.0) for request in requests
        )

    async def logprobs(self, request: LogprobRequest) -> tuple[np.ndarray, ...]:
        return tuple(np.full(len(ids), -1.0, np.float32) for ids in request.output_token_ids)


def make_registry(player: Any, *, num_workers: int) -> Any:
    """A registry with workers that all are one player; they serve the first weights."""
    registry = ray.remote(WatchedRegistry).options(**OPTIONS).remote("generation")
    get([registry.register.remote(worker_info(n), player) for n in range(num_workers)])
    get(registry.publish.remote(WeightsSnapshot(FIRST, ()), TIMEOUT_S))
    return registry


def make_player(num_output_tokens: int = 256) -> Any:
    return ray.remote(Player).options(**OPTIONS).remote(num_output_tokens)


def make_pool(reward: str, *, num_slots: int) -> Any:
    """A pool whose processes are up."""
    config = VerifierConfig(
        reward_names=(f"{Path('benchmarks/rewards.py').resolve()}:{reward}",),
        num_verifiers=num_slots,
    )
    verifiers = ray.remote(WatchedPool).options(**OPTIONS).remote(config)
    get(verifiers.ready.remote())
    return verifiers


def make_batcher(registry: Any, player: Any, *, num_ranks: int, batch_size: int) -> Any:
    """A batcher of a run without end."""
    config = TrainConfig(
        model_name_or_path="none",
        data_path="none",
        batch_size=batch_size,
        num_training_batches=10**6,
        samples_per_question=GROUP,
        max_generation_tokens=256,
        max_tokens_per_gpu=4096,
        max_staleness=1,
        dump_samples_filename="",
    )
    services = Services(generation=registry, verifiers=player, reference=None)
    plan = BatcherPlan(
        config=config,
        questions=(QUESTION,) * NUM_QUESTIONS,
        held_out=(),
        order=lambda ordinal: ordinal % NUM_QUESTIONS,
        replacement=lambda slot, *, attempt: slot,
        seed_of=None,
        sampling=SamplingContract(1.0, (1,), config.max_generation_tokens),
        num_ranks=num_ranks,
        incarnation=FIRST.incarnation,
    )
    return ray.remote(WatchedBatcher).options(**OPTIONS).remote(plan, services)


class Ranks:
    """Ranks that train nothing: they ask as real ones do, and rank 0 publishes."""

    def __init__(self, batcher: Any, registry: Any, *, num_ranks: int) -> None:
        self._batcher = batcher
        self._registry = registry
        self._ranks = range(num_ranks)
        self._index = 0

    async def train(self, *, num_batches: int) -> None:
        """So many batches more."""
        asked = self._ask()
        while num_batches:
            await asyncio.sleep(0)
            for rank in self._ranks:
                self._batcher.hungry.remote(rank, self._index)
            items = await asyncio.gather(*asked)
            self._index += 1
            asked = self._ask()
            if isinstance(items[0], EndOfStep) and items[0].is_last_of_batch:
                num_batches -= 1
                version = FIRST._replace(batches=items[0].batch + 1)
                await self._registry.publish.remote(WeightsSnapshot(version, ()), TIMEOUT_S)
                await self._batcher.published.remote(version)

    def _ask(self) -> list[Any]:
        return [self._batcher.next_item.remote(rank, self._index) for rank in self._ranks]


async def lease_one_by_one(registry: Any, *, num_leases: int, at_once: int) -> None:
    """Every acquire and every release is a Ray call."""

    async def holder() -> None:
        for _ in range(num_leases // at_once):
            lease = await registry.acquire.remote(GROUP, FIRST, TIMEOUT_S)
            await registry.release.remote(lease.lease_id)

    await asyncio.gather(*(holder() for _ in range(at_once)))


async def lease_in_bundles(registry: Any, *, num_leases: int, at_once: int) -> None:
    """The same calls, those of a moment together."""
    bundles = Bundles(registry)

    async def holder() -> None:
        for _ in range(num_leases // at_once):
            lease = await bundles.call("acquire", GROUP, FIRST, TIMEOUT_S)
            await bundles.call("release", lease.lease_id)

    await asyncio.gather(*(holder() for _ in range(at_once)))


async def verify(verifiers: Any, *, num_samples: int, at_once: int = 32) -> None:
    """Groups of outputs, as the batcher has them graded."""
    turn = asyncio.Semaphore(at_once)
    requests = _requests()

    async def group() -> None:
        async with turn:
            verdicts = await verifiers.verify.remote(requests)
            assert all(verdict.status == "scored" for verdict in verdicts), verdicts[0]

    await asyncio.gather(*(group() for _ in range(num_samples // GROUP)))


def _requests() -> tuple[VerificationRequest, ...]:
    token_ids, logprobs = np.arange(64, dtype=np.int32), np.zeros(64, np.float32)
    completion = Completion(
        token_ids, logprobs, (), np.ones(64, np.bool_), "stop", "8-2+9=15\n" * 3
    )
    return tuple(VerificationRequest(0, index, QUESTION, completion) for index in range(GROUP))


def end(*actors: Any) -> None:
    """They are not needed any more."""
    for actor in actors:
        ray.kill(actor)


def get(reference: Any) -> Any:
    """What an actor answers."""
    return ray.get(reference, timeout=TIMEOUT_S)
