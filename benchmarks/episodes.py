"""Long episodes beside short ones: what is trained here, and under a rule that drops by age.

    python -m benchmarks.episodes --tail 30 --staleness 1 --json

Half of the episodes have MEDIAN_TURNS turns, the others up to `tail` times as many. Batcher,
pipeline, registries and the play of episodes are the service's own, on a clock that jumps; engines
and trainer take scripted times. Beside it, with the same episodes, the usual rule: as many are in
flight, the trainer takes whichever end first, and what began more than `staleness` versions ago is
dropped. It is faster, for it trains the short ones.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.records import BatcherPlan
from async_grpo.config.roles import ENVIRONMENT, GENERATION, role_of
from async_grpo.config.train_config import TrainConfig
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.controller.served_run import ServedRun
from async_grpo.data.order import QuestionStream
from async_grpo.environments.base import Environment, Policy, Services
from async_grpo.environments.play import GroupPlay
from async_grpo.planning import clock
from async_grpo.types import (
    EndOfStep,
    Episode,
    EpisodesRequest,
    GenerationRequest,
    Minibatch,
    PlayedGroup,
    Pulse,
    Question,
    Sample,
    SamplingContract,
    Turn,
    Verdict,
    VersionSpan,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.util.user_code import UserCode
from benchmarks import results
from benchmarks.results import Figure

NAME = "episodes"
MEDIAN_TURNS = 4
LONG = 10  # times the median: what is told apart
TURN_S = 1.0
TURN_TOKENS = 4
TRAIN_S = 8.0  # a batch, from its first sample on
GROUP = 8
PROMPT = np.array([2], np.int32)
SEEN = np.array([3], np.int32)  # what the environment says between two turns
QUESTION = Question(PROMPT, "", None, {})
FIRST = WeightsVersion(0, 0)


@dataclass(frozen=True, slots=True)
class Size:
    """What is asked."""

    tail: float
    staleness: int
    num_batches: int
    batch_size: int  # questions
    seed: int = 0

    def num_turns(self, ordinal: int, index: int) -> int:
        """Of one episode, whoever plays it."""
        share = np.random.default_rng([self.seed, ordinal, index]).random()
        return round(MEDIAN_TURNS * self.tail ** max(0.0, 2 * share - 1) ** 2)

    def turns(self) -> Iterator[int]:
        """Of the episodes of all questions, in their order, without end."""
        for ordinal in itertools.count():
            yield from (self.num_turns(ordinal, index) for index in range(GROUP))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the episodes; lengths in turns."""

    trained: tuple[int, ...]
    lost: tuple[int, ...]
    max_lag: int
    batch_s: float

    @property
    def lost_long(self) -> float:
        """The share that was lost of the long ones."""
        lost = sum(length >= LONG * MEDIAN_TURNS for length in self.lost)
        return lost / max(1, lost + sum(n >= LONG * MEDIAN_TURNS for n in self.trained))


class Talk(Environment):
    """So many turns, with a word between them."""

    def __init__(self, lengths: Iterator[int]) -> None:
        self._lengths = lengths

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        history = question.input_token_ids
        for _ in range(next(self._lengths)):
            turn = await policy.sample(history)
            history = np.concatenate([history, turn.token_ids, SEEN])
        return policy.episode()

    async def grade(self, question: Question, episodes: Any, services: Services) -> list[Verdict]:
        return [Verdict.scored(n) for n in range(len(episodes))]


class Cluster:
    """Plays every worker; each method is one of an actor's."""

    def __init__(self, size: Size) -> None:
        self._size = size
        self._version = FIRST
        self._playing: dict[int, GroupPlay] = {}
        self.registries = {
            name: WorkerRegistry(role_of(name), kill=lambda handle: None)
            for name in (GENERATION, ENVIRONMENT)
        }

    async def ping(self, after_s: float = 0.0) -> Pulse:
        await asyncio.sleep(after_s)
        pulses = {lease: group.pulse() for lease, group in self._playing.items()}
        return Pulse("none", requests=pulses)

    async def load_weights(self, snapshot: WeightsSnapshot) -> WeightsAck:
        self._version = snapshot.version
        return WeightsAck("all", snapshot.version, 0.0, 0.0)

    async def generate(self, request: GenerationRequest) -> tuple[Turn, ...]:
        version = self._version
        await asyncio.sleep(TURN_S)
        half = TURN_TOKENS // 2  # tokens of the weights at its beginning, and at its end
        spans = (VersionSpan(version, 0, half), VersionSpan(self._version, half, TURN_TOKENS))
        ids = np.full(TURN_TOKENS, 5, np.int32)
        return (Turn(ids, -np.ones(TURN_TOKENS, np.float32), spans, "stop", "", "all"),)

    async def play(self, request: EpisodesRequest) -> PlayedGroup:
        group = GroupPlay(request, partial(self._ask, request), lambda *_: None)  # type: ignore[arg-type, return-value]
        self._playing[request.lease_id] = group
        lengths = (self._size.num_turns(request.ordinal, index) for index in range(GROUP))
        try:
            return await group.run(Talk(lengths))
        finally:
            del self._playing[request.lease_id]

    async def _ask(
        self, played: EpisodesRequest, role: str, method: str, request: Any, **where: Any
    ) -> Any:
        """As `Controller.ask`."""
        async with self.registries[role].lease(timeout_s=3600.0, **where) as worker:
            answer = await worker.call(method, request)
        owner = self.registries[ENVIRONMENT].find_lease(played.lease_id)
        assert owner is not None, "no lease ends while its episodes are played"
        owner.received(answer)
        return answer


def make_plan(size: Size) -> BatcherPlan:
    """The run."""
    longest = round(MEDIAN_TURNS * size.tail) * (TURN_TOKENS + 1) + TURN_TOKENS
    config = TrainConfig(
        model_name_or_path="none",
        data_path="none",
        batch_size=size.batch_size,
        num_training_batches=size.num_batches,
        samples_per_question=GROUP,
        max_generation_tokens=TURN_TOKENS,
        max_tokens_per_gpu=8 * longest,
        max_staleness=size.staleness,
        stall_timeout_s=3600.0,
        dump_samples_filename="",
    )
    return BatcherPlan(
        config=config,
        rules=LocalRules(find_algorithm(config)),
        questions=(QUESTION,),
        held_out=(),
        order=QuestionStream(1, seed=0).index,
        replacement=lambda slot, *, attempt: 0,
        seed_of=None,
        sampling=SamplingContract(1.0, (1,), TURN_TOKENS),
        num_ranks=1,
        incarnation=FIRST.incarnation,
        environment=UserCode("benchmarks/episodes.py:Talk", ""),
    )


class Trainer:
    """One rank, which trains nothing for a while, and publishes beside it."""

    def __init__(self, size: Size) -> None:
        self._cluster = Cluster(size)
        self._served = ServedRun(make_plan(size), self._cluster.registries.__getitem__)
        self._num_batches = size.num_batches
        self.samples: list[tuple[int, Sample]] = []  # with their batch
        self.ends: list[EndOfStep] = []

    async def train(self) -> float:
        """The run's seconds."""
        for name, registry in self._cluster.registries.items():
            info = WorkerInfo("all", name, "node", 0, "model", 64, 1e9, 0.0, 1 << 20)
            await registry.register(info, clock.Local(self._cluster))  # type: ignore[arg-type]
        await self._publish(0)
        for index in itertools.count():
            asked = asyncio.ensure_future(self._served.batcher.next_items(0, index))
            await asyncio.sleep(0)
            if not asked.done():
                await self._served.batcher.hungry(index)
            for item in await asked:
                await self._take(item)
            if len(self.ends) == self._num_batches:
                return asyncio.get_running_loop().time()
        raise AssertionError("the batches are counted")

    async def _take(self, item: Minibatch | EndOfStep) -> None:
        if isinstance(item, Minibatch):
            self.samples += [(len(self.ends), sample) for sample in item.samples]
            return
        await asyncio.sleep(TRAIN_S)
        self.ends.append(item)
        await self._publish(len(self.ends))

    async def _publish(self, batches: int) -> None:
        version = FIRST._replace(batches=batches)
        snapshot = WeightsSnapshot(version, ())
        await self._cluster.registries[GENERATION].publish(snapshot, timeout_s=60.0)
        await self._served.published(version)


def by_admission(size: Size) -> Outcome:
    """The service."""
    trainer = Trainer(size)
    seconds = clock.run(trainer.train())
    asked = set(itertools.product(range(size.num_batches * size.batch_size), range(GROUP)))
    trained = [(sample.ordinal, sample.index) for _, sample in trainer.samples]
    lags = [
        batch - span.version.batches
        for batch, sample in trainer.samples
        for row in sample.episode.rows
        for span in row.weights_versions
    ]
    fates = trainer.ends[-1].resume.ledger["samples"]  # type: ignore[union-attr]
    assert len(trained) == len(set(trained)), "an episode was trained twice"
    assert fates["trained"] == len(trained), "the ledger counts what the trainer was given"
    return Outcome(
        tuple(size.num_turns(*key) for key in trained),
        tuple(size.num_turns(*key) for key in asked - set(trained)),
        max(lags),
        seconds / size.num_batches,
    )


def by_age(size: Size) -> Outcome:
    """As many episodes at a time; the first to end are trained, what is too old is dropped."""
    lengths, needed = size.turns(), size.batch_size * GROUP
    now_s = 0.0
    in_flight: list[tuple[float, int, int]] = []  # end, version at its beginning, turns
    ready: list[tuple[int, int]] = []  # version at its beginning, turns
    trained: list[int] = []
    lost: list[int] = []

    def go_on(until_s: float, version: int) -> float:
        """Episodes end, and others begin."""
        at_s = now_s
        while True:
            places = (size.staleness + 1) * needed - len(in_flight) - len(ready)
            for turns in itertools.islice(lengths, places):
                heapq.heappush(in_flight, (at_s + turns * TURN_S, version, turns))
            if not in_flight or in_flight[0][0] > until_s:
                return until_s
            at_s, began, turns = heapq.heappop(in_flight)
            ready.append((began, turns))

    for version in range(size.num_batches):
        oldest = version - size.staleness
        lost += [turns for began, turns in ready if began < oldest]
        lost += [turns for _, began, turns in in_flight if began < oldest]
        ready = [each for each in ready if each[0] >= oldest]
        in_flight = [each for each in in_flight if each[1] >= oldest]
        heapq.heapify(in_flight)
        now_s = go_on(now_s, version)
        while len(ready) < needed:
            now_s = go_on(in_flight[0][0], version)
        now_s = go_on(now_s + TRAIN_S, version)  # what is being trained holds its places
        trained += [turns for _, turns in ready[:needed]]
        del ready[:needed]
    return Outcome(tuple(trained), tuple(lost), size.staleness, now_s / size.num_batches)


def figures_of(size: Size, ours: Outcome, dropping: Outcome) -> list[Figure]:
    """Both, beside each other."""
    figures = [
        Figure("episodes dropped", len(ours.lost), "", goal=0),
        Figure("largest lag", ours.max_lag, "versions", goal=size.staleness),
    ]
    for name, outcome in {"": ours, "by age: ": dropping}.items():
        lost = len(outcome.lost) / (len(outcome.lost) + len(outcome.trained))
        figures += [
            Figure(f"{name}share of episodes lost", lost, "fraction"),
            Figure(f"{name}of those {LONG} times the median", outcome.lost_long, "fraction"),
            Figure(f"{name}turns of a trained episode", statistics.mean(outcome.trained), ""),
            Figure(f"{name}a batch", outcome.batch_s, "s"),
        ]
    return figures


@click.command()
@click.option("--tail", default=30.0, help="the longest episode, in medians")
@click.option("--staleness", default=1, help="versions that an episode may lag behind")
@click.option("--quick", is_flag=True, help="a few batches, to show that all of it runs")
@click.option("--json", "as_json", is_flag=True, help="print the figures as JSON")
@click.option("--results-dir", default=str(results.FOLDER), help="where episodes.json goes")
def main(tail: float, staleness: int, quick: bool, as_json: bool, results_dir: str) -> None:
    """Run it both ways."""
    size = Size(tail, staleness, num_batches=4 if quick else 20, batch_size=16)
    figures = figures_of(size, by_admission(size), by_age(size))
    shown = {figure.name: figure.value for figure in figures}
    click.echo(json.dumps(shown, indent=1) if as_json else results.show(figures))
    results.write(NAME, figures, folder=Path(results_dir))


if __name__ == "__main__":
    main()
