"""A whole run against scripted services: everything that can happen is fixed by a seed."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from scripted import Handle, Registry, make_completion, make_question, make_verdict

from async_grpo.batching.admission import StepKey
from async_grpo.batching.batcher import ExperienceBatcher
from async_grpo.batching.pipeline import Services
from async_grpo.batching.records import BatcherPlan
from async_grpo.config.train import TrainConfig
from async_grpo.errors import WorkerError
from async_grpo.types import Minibatch, SamplingContract, VersionSpan, WeightsVersion

INCARNATION = 5
NUM_QUESTIONS = 7
REWARDS = (0.0, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True)
class Script:
    """What happens to each question; everything is a function of the seed and the ordinal."""

    config: TrainConfig
    num_ranks: int = 2
    seed: int = 0
    failing: frozenset[int] = frozenset()  # ordinals whose verification fails
    dropped: frozenset[int] = frozenset()  # ordinals that no generation worker can answer
    flaky: frozenset[int] = frozenset()  # ordinals whose first try fails
    even: frozenset[int] = frozenset()  # ordinals whose samples all get the same reward
    slowest_s: float = 5.0
    loses_a_lease: bool = False

    def rng(self, *key):
        return np.random.default_rng([self.seed, *key])

    def rewards(self, ordinal):
        if ordinal in self.even:
            return (0.5,) * self.config.samples_per_question
        return tuple(self.rng(1, ordinal).choice(REWARDS, self.config.samples_per_question))

    def lengths(self, ordinal):
        """(tokens, masked tokens) of each sample; now and then all of them are masked."""
        rng, shape = self.rng(2, ordinal), []
        for _ in range(self.config.samples_per_question):
            num_tokens = int(rng.integers(1, 1 + self.config.max_generation_tokens))
            shape.append(
                (num_tokens, int(rng.integers(0, num_tokens + 1)) if rng.random() < 0.3 else 0)
            )
        return shape

    def seconds(self, *key):
        return float(self.rng(3, *key).random() * self.slowest_s)

    def fates(self, step):
        """What must become of every sample (ordinal, index) of a gradient step."""
        config, fates = self.config, {}
        first = step.batch * config.batch_size + step.step_in_batch * config.questions_per_step
        for ordinal in range(first, first + config.questions_per_step):
            rewards = self.rewards(ordinal)
            for index, (num_tokens, num_masked) in enumerate(self.lengths(ordinal)):
                fate = "trained"
                if len(set(rewards)) == 1 and not config.kl_coefficient:
                    fate = "zero_contribution"
                if num_masked == num_tokens:
                    fate = "zero_contribution"
                if ordinal in self.failing | self.dropped:
                    fate = "failed"
                # the mean of the rewards itself is an advantage of exactly 0
                if fate == "trained" and not config.kl_coefficient:
                    mean = np.mean(rewards)
                    fate = "zero_contribution" if rewards[index] - mean == 0.0 else fate
                fates[ordinal, index] = fate
        return fates

    def tokens(self, key):
        num_tokens, num_masked = self.lengths(key[0])[key[1]]
        return num_tokens - num_masked

    @property
    def steps(self):
        config = self.config
        return [
            StepKey(batch, step)
            for batch in range(config.num_training_batches)
            for step in range(config.steps_per_batch)
        ]


@dataclass
class Cluster:
    """Scripted workers, verifiers and reference, and what they saw."""

    script: Script
    version: WeightsVersion | None = None  # served by every generation worker
    started: dict[int, int] = field(default_factory=dict)  # ordinal -> batches published
    tries: Counter = field(default_factory=Counter)
    references: list[int] = field(default_factory=list)  # batches in the weights asked for

    async def generate(self, request):
        script, ordinal = self.script, request.ordinal
        self.tries[ordinal] += 1
        self.started.setdefault(ordinal, self.version.batches)
        first = self.version
        await asyncio.sleep(script.seconds(ordinal, self.tries[ordinal]))
        if ordinal in script.dropped or (ordinal in script.flaky and self.tries[ordinal] == 1):
            raise WorkerError("this worker is out of order")
        shapes = script.lengths(ordinal)[: request.num_samples]
        return tuple(self._completion(first, n, masked) for n, masked in shapes)

    def _completion(self, first, num_tokens, num_masked):
        """Tokens of the weights at the start, then of those at the end."""
        cut = num_tokens // 2
        spans = (VersionSpan(first, 0, cut), VersionSpan(self.version, cut, num_tokens))
        spans = tuple(span for span in spans if span.stop > span.start)
        return make_completion(first, num_tokens=num_tokens, num_masked=num_masked, spans=spans)

    async def verify(self, requests):
        ordinal = requests[0].ordinal
        await asyncio.sleep(self.script.seconds(ordinal, 100))
        rewards = self.script.rewards(ordinal)[: len(requests)]
        verdicts = [make_verdict(reward) for reward in rewards]
        if ordinal in self.script.failing:
            verdicts[-1] = make_verdict(0.0, status="error", reason="killed")
        return tuple(verdicts)

    async def logprobs(self, request):
        self.references.append(request.version.batches)
        await asyncio.sleep(self.script.seconds(request.num_tokens, 200))
        return tuple(np.full(len(ids), -1.0, np.float32) for ids in request.output_token_ids)


class Run:
    """A batcher, its services, and trainer ranks that ask as the real ones do."""

    def __init__(self, script, *, held_out=()):
        self.script, self.config = script, script.config
        self.cluster = Cluster(script)
        self.generation = Registry(self.cluster, self.cluster)
        if script.loses_a_lease:  # one: with a flaky worker a slot has still a third try
            self.generation.revoked = {2}
        self.batcher = ExperienceBatcher(
            BatcherPlan(
                config=script.config,
                questions=tuple(make_question(1 + n) for n in range(NUM_QUESTIONS)),
                held_out=held_out,
                order=lambda ordinal: ordinal % NUM_QUESTIONS,
                seed_of=None,
                sampling=SamplingContract(1.0, (1,), script.config.max_generation_tokens),
                num_ranks=script.num_ranks,
                incarnation=INCARNATION,
            ),
            Services(
                generation=Handle(self.generation),
                verifiers=Handle(self.cluster),
                reference=Handle(Registry(self.cluster)) if script.config.needs_reference else None,
            ),
        )
        self.num_published = 0

    async def publish(self, batches):
        """Load and announce in the background, as the trainer's thread does."""
        await asyncio.sleep(self.script.seconds(batches, 300) / 10)
        self.cluster.version = WeightsVersion(INCARNATION, batches)
        self.num_published = batches
        await self.batcher.published(self.cluster.version)

    async def train(self):
        """The items of every rank, to the end of the last batch."""
        await self.publish(0)
        return await asyncio.gather(*(self.rank(rank) for rank in range(self.script.num_ranks)))

    async def rank(self, rank):
        items, announced = [], None
        asked = asyncio.ensure_future(self.batcher.next_item(rank, 0))
        while True:
            await asyncio.sleep(0)
            if not asked.done():
                await self.batcher.hungry(rank, len(items))
            items.append(await asked)
            asked = asyncio.ensure_future(self.batcher.next_item(rank, len(items)))
            if isinstance(items[-1], Minibatch):
                await asyncio.sleep(self.script.seconds(rank, len(items), 400) / 5)
            elif items[-1].is_last_of_batch:
                if rank == 0:
                    announced = await self._announce(announced, items[-1].batch + 1)
                if items[-1].batch + 1 == self.config.num_training_batches:
                    asked.cancel()
                    if announced:
                        await announced
                    return items

    async def _announce(self, previous, batches):
        if previous:
            await previous
        return asyncio.ensure_future(self.publish(batches))


def make_config(**changes):
    options = {
        "model_name_or_path": "m",
        "data_path": "d",
        "batch_size": 4,
        "num_training_batches": 3,
        "samples_per_question": 3,
        "max_generation_tokens": 12,
        "max_tokens_per_gpu": 40,
        "advantage": "dr",
        "stall_timeout_s": 60.0,
        "dump_samples_filename": "",
    }
    return TrainConfig(**options | changes)
