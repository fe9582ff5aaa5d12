"""A controller whose workers answer at once and whose ranks train nothing: what is left is its own.

The `Controller` is the real actor, with one change: it tells what it has computed, and where.
"""

from __future__ import annotations

import asyncio
import cProfile
import io
import os
import pstats
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.records import BatcherPlan
from async_grpo.cluster.batched_calls import BatchedActor, BatchedCalls
from async_grpo.config.roles import GENERATION, VERIFIER, teacher
from async_grpo.config.train_config import TrainConfig
from async_grpo.controller.controller import Controller
from async_grpo.data.order import QuestionStream
from async_grpo.types import (
    EndOfStep,
    GenerationRequest,
    GradingRequest,
    Pulse,
    Question,
    RunId,
    SamplingContract,
    Turn,
    Verdict,
    VersionSpan,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)

GROUP = 8  # samples of a question
NUM_RANKS = 64
NUM_WORKERS = 8  # of each role
AT_ONCE = 64  # turns that are asked at a time
MATH = teacher("math")
PLAYED = (GENERATION, MATH, VERIFIER)
TIMEOUT_S = 300.0
FIRST = WeightsVersion(0, 0)
OPTIONS = {"num_cpus": 0, "max_concurrency": 10_000}
NUM_QUESTIONS = 256
QUESTION = Question(
    np.arange(64, dtype=np.int32), "use 2 9 8 to make 15\n", "15", {"target": 15, "nums": [2, 9, 8]}
)


class Watched(BatchedActor):
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
        pstats.Stats(self._profile, stream=text).strip_dirs().sort_stats(
            os.environ.get("SORT", "tottime")
        ).print_stats(num_lines)
        return "\n".join(line for line in text.getvalue().splitlines()[6:] if line)


class WatchedController(Watched, Controller):
    """The controller."""


class Asker(Watched):
    """Asks as an environment worker does."""

    def __init__(self, controller: Any, run: RunId) -> None:
        self._controller = BatchedCalls(controller)
        self._run = run

    async def ask(self, num_turns: int) -> None:
        """So many turns, some at a time."""

        async def episode() -> None:
            for _ in range(num_turns // AT_ONCE):
                await self._controller.ask("ask", self._run, MATH, "turn", 7, cost=1.0)

        await asyncio.gather(*(episode() for _ in range(AT_ONCE)))


class Player(Watched):
    """Plays all workers, and the verifiers too: it knows every answer before it is asked."""

    def __init__(self, num_output_tokens: int = 256) -> None:
        self._token_ids = np.arange(num_output_tokens, dtype=np.int32) % 100
        self._logprobs = np.full(num_output_tokens, -1.0, np.float32)
        self._version = FIRST

    async def ping(self, after_s: float = 0.0) -> Pulse:
        await asyncio.sleep(after_s)
        return Pulse("none")

    async def abort_all(self) -> None:
        return None

    async def load_weights(self, snapshot: WeightsSnapshot) -> WeightsAck:
        self._version = snapshot.version
        return WeightsAck("all", snapshot.version, 0.0, 0.0)

    async def generate(self, request: GenerationRequest) -> tuple[Turn, ...]:
        """Outputs that differ in their first token."""
        return tuple(
            Turn(
                np.concatenate([[np.int32(index)], self._token_ids[1:]], dtype=np.int32),
                self._logprobs.copy(),
                (VersionSpan(self._version, 0, len(self._token_ids)),),
                "stop",
                "8-2+9=15",
            )
            for index in range(request.num_samples)
        )

    async def verify(self, request: GradingRequest) -> tuple[Verdict, ...]:
        """Every reward of a group is another one: all samples are trained."""
        return tuple(Verdict.scored(output.index, adapter="played") for output in request.outputs)

    async def turn(self, number: int) -> int:
        """What an asker waits for."""
        return number

    async def until_death(self) -> None:
        """It plays the run's witness too."""
        await asyncio.Future()


def make_run(
    *,
    batch_size: int,
    questions: Sequence[Question] = (QUESTION,) * NUM_QUESTIONS,
    num_ranks: int = NUM_RANKS,
    group: int = GROUP,
    num_workers: int = NUM_WORKERS,
) -> tuple[Any, Any, RunId]:
    """A controller, its workers that all are one player, and a run without end."""
    player = ray.remote(Player).options(**OPTIONS).remote()
    controller = ray.remote(WatchedController).options(**OPTIONS).remote("benchmark")
    infos = [
        WorkerInfo(f"{role}-{n}", role, "node", 0, "model", 128, 256.0, group, 512)
        for role in PLAYED
        for n in range(num_workers)
    ]
    get([controller.register.remote(info, player) for info in infos])
    plan = make_plan(batch_size=batch_size, questions=questions, num_ranks=num_ranks, group=group)
    run = RunId(plan.incarnation, get(controller.begin_run.remote(plan, player, None)))
    publish = controller.publish.remote(run, WeightsSnapshot(FIRST, ()), (GENERATION,), TIMEOUT_S)
    get(publish)
    get(controller.published.remote(run, FIRST))
    return controller, player, run


def make_plan(
    *, batch_size: int, questions: Sequence[Question], num_ranks: int, group: int
) -> BatcherPlan:
    """A run without end."""
    config = TrainConfig(
        model_name_or_path="none",
        data_path="none",
        batch_size=batch_size,
        num_training_batches=10**6,
        samples_per_question=group,
        max_generation_tokens=256,
        max_tokens_per_gpu=4096,
        max_staleness=1,
        dump_samples_filename="",
    )
    return BatcherPlan(
        config=config,
        rules=LocalRules(find_algorithm(config)),
        questions=questions,
        held_out=(),
        order=QuestionStream(len(questions), seed=0).index,
        replacement=lambda slot, *, attempt: slot,
        seed_of=None,
        sampling=SamplingContract(1.0, (1,), config.sampling.max_generation_tokens),
        num_ranks=num_ranks,
        incarnation=FIRST.incarnation,
    )


class Ranks:
    """Ranks that train nothing: they ask as real ones do, and rank 0 publishes."""

    def __init__(self, controller: Any, run: RunId, *, num_ranks: int = NUM_RANKS) -> None:
        self._controller = controller
        self._run = run
        self._ranks = range(num_ranks)
        self._index = 0
        self.num_asked = 0

    async def train(self, *, num_batches: int) -> None:
        """So many batches more."""
        controller, run = self._controller, self._run
        asked = self._ask()
        while num_batches:
            await asyncio.sleep(0)
            controller.hungry.remote(run, self._index)
            (*_, item), *_ = await asyncio.gather(*asked)
            self._index += 1
            asked = self._ask()
            if isinstance(item, EndOfStep) and item.is_last_of_batch:
                num_batches -= 1
                version = FIRST._replace(batches=item.batch + 1)
                snapshot = WeightsSnapshot(version, ())
                await controller.publish.remote(run, snapshot, (GENERATION,), TIMEOUT_S)
                await controller.published.remote(run, version)
                await controller.heard.remote(run)

    def _ask(self) -> list[Any]:
        self.num_asked += len(self._ranks)
        return [
            self._controller.next_items.remote(self._run, rank, self._index) for rank in self._ranks
        ]


def end(*actors: Any) -> None:
    """They are not needed any more."""
    for actor in actors:
        ray.kill(actor)


def get(reference: Any) -> Any:
    """What an actor answers."""
    return ray.get(reference, timeout=TIMEOUT_S)
