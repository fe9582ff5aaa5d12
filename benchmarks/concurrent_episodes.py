"""What Python adds to a turn when a thousand episodes are played at a time on two cores.

    python -m benchmarks.concurrent_episodes

Controller and environment workers are the real ones, each a process. Engines answer a turn after
`turn_s`, a tenth more or less, and the first of an episode at a random moment before, so that turns
come spread, as from real engines. Measured inside the episodes: seconds of a turn less those that
the engine took. All episodes begin at once: turns that are asked for before every first one is with
its engine wait in that queue, and are told apart.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import ray

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.records import BatcherPlan
from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import CONTROLLER
from async_grpo.config.roles import ENVIRONMENT, GENERATION
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.controller.find import code_hash
from async_grpo.data.order import QuestionStream
from async_grpo.environments.find import users_environment
from async_grpo.launch.actors import worker_kinds
from async_grpo.types import (
    GenerationRequest,
    Question,
    RunId,
    SamplingContract,
    Turn,
    VersionSpan,
    WeightsSnapshot,
    WorkerInfo,
)
from benchmarks import results, stack
from benchmarks.results import Figure
from benchmarks.scripted_control import (
    FIRST,
    OPTIONS,
    TIMEOUT_S,
    Player,
    Ranks,
    WatchedController,
    get,
)

NAME = "concurrent_episodes"
GROUP = 8
NUM_WORKERS = 2  # of each role
MAX_WAIT_MS = 50.0
TURN_TOKENS = 256
ENVIRONMENT_FILE = Path(__file__).with_name("long_turns.py")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is played."""

    num_episodes: int = 1_000
    num_turns: int = 7  # of an episode
    turn_s: float = 10.0


QUICK = Size(num_episodes=64, num_turns=4, turn_s=1.0)


class Engine(Player):
    """Answers after a while, which it tells."""

    def __init__(self, turn_s: float, prompt_tokens: int) -> None:
        super().__init__(TURN_TOKENS)
        self._turn_s = turn_s
        self._prompt_tokens = prompt_tokens
        self._random = np.random.default_rng(0)
        gc.disable()  # what stands for engines must not stand still itself

    async def generate(self, request: GenerationRequest) -> tuple[Turn, ...]:
        """One turn."""
        asked_s, seconds = time.monotonic(), self._turn_s
        if len(request.input_token_ids) == self._prompt_tokens:
            seconds *= self._random.random()
        else:
            seconds *= self._random.uniform(0.9, 1.1)
        await asyncio.sleep(seconds)
        spans = (VersionSpan(self._version, 0, TURN_TOKENS),)
        text = str(time.monotonic() - asked_s)
        return (Turn(self._token_ids, self._logprobs, spans, "stop", text, "one"),)


def measure(size: Size, *, file: Path) -> list[Figure]:
    """Play them all, once."""
    columns = {"num_turns": size.num_turns, "file": str(file)}
    question = Question(np.arange(64, dtype=np.int32), "talk", None, columns)
    controller = ray.remote(WatchedController).options(name=CONTROLLER, **OPTIONS)
    controller = controller.remote(code_hash())
    engine = ray.remote(Engine).options(**OPTIONS).remote(size.turn_s, 64)
    for number in range(NUM_WORKERS):
        info = WorkerInfo(
            f"engine-{number}", GENERATION, "node", 0, "model", 512, 1e4, 0.0, 1 << 20
        )
        get(controller.register.remote(info, engine))
    (kind,) = worker_kinds(
        Cluster(), WorkerConfig(mode=ENVIRONMENT, max_num_seqs=size.num_episodes // NUM_WORKERS)
    )
    for number in range(NUM_WORKERS):
        worker = kind.start(f"environment-{number}")
        get(controller.register.remote(get(worker.info.remote()), worker))
    plan = make_plan(size, question)
    run = RunId(plan.incarnation, get(controller.begin_run.remote(plan, engine, None)))
    get(controller.publish.remote(run, WeightsSnapshot(FIRST, ()), (GENERATION,), TIMEOUT_S))
    before_s, started = get(controller.cpu_seconds.remote()), time.monotonic()
    get(controller.published.remote(run, FIRST))
    asyncio.run(train(controller, run))
    seconds = time.monotonic() - started
    spent_s = get(controller.cpu_seconds.remote()) - before_s
    return figures_of(file, seconds=seconds, spent_s=spent_s)


async def train(controller: Any, run: RunId) -> None:
    """The batch, with the trainer's signs of life."""

    async def live() -> None:
        while True:
            await controller.heard.remote(run)
            await asyncio.sleep(1.0)

    living = asyncio.create_task(live(), name="heard")
    await Ranks(controller, run, num_ranks=1).train(num_batches=1)
    living.cancel()


def make_plan(size: Size, question: Question) -> BatcherPlan:
    """One batch of all the episodes."""
    longest = (TURN_TOKENS + 1) * size.num_turns + len(question.input_token_ids)
    config = TrainConfig(
        model_name_or_path="none",
        data_path="none",
        batch_size=size.num_episodes // GROUP,
        num_training_batches=1,
        samples_per_question=GROUP,
        max_generation_tokens=TURN_TOKENS,
        max_tokens_per_gpu=8 * longest,
        dump_samples_filename="",
    )
    return BatcherPlan(
        config=config,
        rules=LocalRules(find_algorithm(config)),
        questions=(question,),
        held_out=(),
        order=QuestionStream(1, seed=0).index,
        replacement=lambda slot, *, attempt: slot,
        seed_of=None,
        sampling=SamplingContract(1.0, (1,), TURN_TOKENS),
        num_ranks=1,
        incarnation=FIRST.incarnation,
        environment=users_environment(f"{ENVIRONMENT_FILE}:LongTurns"),
    )


def figures_of(file: Path, *, seconds: float, spent_s: float) -> list[Figure]:
    """Of what the episodes have told: a line each, with `[asked_s, waited_ms]` of its turns."""
    episodes = [np.array(json.loads(line)) for line in file.read_text().splitlines()]
    asked_s, waited_ms = np.concatenate(episodes).T
    first_asked_s, first_waited_ms = np.array([turns[0] for turns in episodes]).T
    is_at_once = asked_s < (first_asked_s + first_waited_ms / 1e3).max()
    num_turns = len(asked_s)
    return [
        Figure("turns", num_turns / seconds, "1/s", better="higher"),
        *_percentiles("a turn beyond the engine", waited_ms[~is_at_once], goal=MAX_WAIT_MS),
        Figure("turns while all begin at once", int(is_at_once.sum()), ""),
        *_percentiles("a turn while all begin at once", waited_ms[is_at_once]),
        Figure("a turn, CPU of the controller", 1e6 * spent_s / num_turns, "us"),
    ]


def _percentiles(
    name: str, waited_ms: Sequence[float] | np.ndarray[Any, Any], *, goal: float | None = None
) -> list[Figure]:
    median, high, highest = (float(np.percentile(waited_ms, q)) for q in (50, 99, 100))
    return [
        Figure(f"{name}, p50", median, "ms"),
        Figure(f"{name}, p99", high, "ms", goal=goal),
        Figure(f"{name}, longest", highest, "ms"),
    ]


@click.command()
@click.option("--quick", is_flag=True, help="a small size, which proves that everything runs")
@click.option("--results-dir", default=str(results.FOLDER), help="where the figures go")
def main(quick: bool, results_dir: str) -> None:
    """Measure it."""
    click.echo(f"{results.machine()}, {results.load()}")
    with tempfile.TemporaryDirectory() as folder, stack.start(Path(folder)) as running:
        os.environ["RAY_AUTH_MODE"] = running.environment["RAY_AUTH_MODE"]
        Cluster.join(running.environment["RAY_ADDRESS"], namespace=NAME)
        try:
            figures = measure(QUICK if quick else Size(), file=Path(folder) / "waited.jsonl")
        finally:
            ray.shutdown()
    click.echo("\n" + results.show(figures))
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}, {results.load()}")


if __name__ == "__main__":
    main()
