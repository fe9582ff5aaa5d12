"""A whole run against scripted services: everything that can happen is fixed by a script."""

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from script import BEHAVIOUR, NUM_QUESTIONS, REFERENCE_LOGPROB, Script, reference_length
from scripted import Handle, Registry, make_completion, make_question, make_verdict

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.records import BatcherPlan
from async_grpo.config.roles import ENVIRONMENT, GENERATION, REFERENCE, VERIFIER
from async_grpo.config.train_config import TrainConfig
from async_grpo.controller.served_run import ServedRun
from async_grpo.run.companions import RunRecorder
from async_grpo.types import (
    EndOfStep,
    Episode,
    Minibatch,
    PlayedGroup,
    Row,
    SamplingContract,
    VersionSpan,
    WeightsVersion,
)
from async_grpo.util.errors import ProcessLostError, WorkerError
from async_grpo.util.user_code import UserCode

INCARNATION = 5
ATTENTION_RATIO = 10.0
ROWS = UserCode("scripted.py:Rows", "")
QUESTIONS = tuple(make_question(1 + number) for number in range(NUM_QUESTIONS))
REFERRED = tuple(  # the same, with reference answers
    replace(
        question,
        reference_token_ids=np.arange(reference_length(number), dtype=np.int32),
        reference=f"answer {number}",
    )
    for number, question in enumerate(QUESTIONS)
)


@dataclass
class Cluster:
    """Scripted workers, verifiers and reference, and what they saw."""

    script: Script
    version: WeightsVersion | None = None  # served by every generation worker
    started: dict[int, int] = field(default_factory=dict)  # ordinal -> batches published
    attempts: dict[int, int] = field(default_factory=dict)  # ordinal -> the latest
    tries: Counter = field(default_factory=Counter)
    references: list[int] = field(default_factory=list)  # batches in the weights asked for
    scored_tokens: int = 0
    sampled_tokens: int = 0  # answered by engines, for whatever slot
    registry: Registry | None = None  # of environments: what `play` asks for is told to its lease

    async def generate(self, request):
        script, ordinal, attempt = self.script, request.ordinal, request.attempt
        self.tries[ordinal, attempt] += 1
        self.started.setdefault(ordinal, self.version.batches)
        self.attempts[ordinal] = attempt
        first, number = self.version, self.tries[ordinal, attempt]
        await asyncio.sleep(script.seconds("generate", ordinal, attempt, number))
        if script.question(ordinal, attempt) in script.deadly:
            raise ProcessLostError("segmentation fault")
        if ordinal in script.dropped or (ordinal in script.flaky and number == 1):
            raise WorkerError("this worker is out of order")
        shapes = script.lengths(ordinal, attempt)[: request.num_samples]
        self.sampled_tokens += sum(shapes)
        return tuple(self._completion(first, n) for n in shapes)

    def _completion(self, first, num_tokens):
        """Tokens of the weights at the start, then of those at the end."""
        cut = num_tokens // 2
        spans = (VersionSpan(first, 0, cut), VersionSpan(self.version, cut, num_tokens))
        return make_completion(
            first,
            num_tokens=num_tokens,
            spans=tuple(span for span in spans if span.stop > span.start),
            finish_reason="length" if self.script.is_cut(num_tokens) else "stop",
            logprob=BEHAVIOUR,
        )

    async def verify(self, request):
        script, ordinal = self.script, request.outputs[0].ordinal
        attempt = self.attempts[ordinal]
        await asyncio.sleep(script.seconds("verify", ordinal, attempt))
        rewards = script.rewards(ordinal, attempt)
        rewards = (*rewards, *script.reference(ordinal, attempt).values())[: len(request.outputs)]
        verdicts = [make_verdict(reward) for reward in rewards]
        if ordinal in (script.failing_later if attempt else script.failing):
            verdicts[-1] = make_verdict(0.0, status="error", reason="scripted: killed")
        return tuple(verdicts)

    async def play(self, request):
        """The same tokens and verdicts, in as many rows as the script says."""
        turns = await self.generate(request)
        self.registry.open[request.lease_id].received(turns)
        output = SimpleNamespace(ordinal=request.ordinal)
        verdicts = await self.verify(SimpleNamespace(outputs=(output,) * len(turns)))
        episodes = tuple(self._episode(request, *numbered) for numbered in enumerate(turns))
        return PlayedGroup(episodes, verdicts)

    def _episode(self, request, index, turn):
        lengths = self.script.row_lengths(request.ordinal, request.attempt, index)
        stops = np.cumsum(lengths)
        rows = tuple(
            Row(
                request.question.input_token_ids,
                turn.token_ids[start:stop],
                turn.logprobs[start:stop],
                np.ones(stop - start, np.bool_),
                tuple(_within(turn.weights_versions, start, stop)),
            )
            for start, stop in zip(stops - lengths, stops, strict=True)
        )
        return Episode(rows, (turn,))

    async def logprobs(self, request):
        self.references.append(request.version.batches)
        self.scored_tokens += sum(map(len, request.output_token_ids))
        await asyncio.sleep(self.script.seconds("reference", request.num_tokens))
        return tuple(
            np.full(len(ids), REFERENCE_LOGPROB, np.float32) for ids in request.output_token_ids
        )


def _within(spans, first, last):
    """The spans of the tokens [first, last), counted from there."""
    for version, start, stop in spans:
        if max(start, first) < min(stop, last):
            yield VersionSpan(version, int(max(start, first) - first), int(min(stop, last) - first))


class Run:
    """A batcher, its services, and trainer ranks that ask as the real ones do."""

    def __init__(self, script, *, held_out=()):
        self.script, self.config = script, script.config
        self.cluster = Cluster(script)
        self.generation = self.cluster.registry = Registry(self.cluster, self.cluster)
        if script.loses_a_lease:  # one: with a flaky worker a slot has still a third try
            self.generation.revoked = {2}
        self.plan = make_plan(
            script.config,
            held_out=held_out,
            replacement=script.replacement,
            num_ranks=script.num_ranks,
            attention_ratio=ATTENTION_RATIO,
            shares_prefixes=script.shares_prefixes,
            environment=ROWS if script.max_rows > 1 else None,
        )
        dump = Path(self.config.recording.output_dir) / self.config.recording.dump_samples_filename
        self.recorder = Handle(RunRecorder(str(dump)))
        self.serve()
        self.num_published = 0

    def serve(self, resume=None):
        """As a controller at which the run begins, or goes on."""
        plan = replace(self.plan, resume=resume)
        self.served = ServedRun(plan, self.registries().__getitem__, self.recorder)
        self.batcher = self.served.batcher

    def registries(self):
        return {
            GENERATION: self.generation,
            ENVIRONMENT: self.generation,
            VERIFIER: Registry(self.cluster, role=VERIFIER),
            REFERENCE: self.make_reference(),
        }

    def make_reference(self):
        return Registry(self.cluster, role=REFERENCE)

    async def publish(self, batches):
        """Load and announce in the background, as the trainer's thread does."""
        await asyncio.sleep(self.script.seconds("publish", batches) / 10)
        self.cluster.version = WeightsVersion(INCARNATION, batches)
        self.num_published = batches
        await self.served.published(self.cluster.version)

    async def train(self):
        """The items of every rank, to the end of the last batch."""
        await self.publish(0)
        return await asyncio.gather(*(self.rank(rank) for rank in range(self.script.num_ranks)))

    async def answers(self, rank):
        """What a rank is sent, each with the request for the next, which is under way already."""
        asked = asyncio.ensure_future(self.batcher.next_items(rank, 0))
        for index in itertools.count(1):
            await asyncio.sleep(0)
            if rank == 0 and not asked.done():
                await self.batcher.hungry(index - 1)
            answer = await asked
            asked = asyncio.ensure_future(self.batcher.next_items(rank, index))
            yield answer, asked

    async def rank(self, rank):
        items, announced = [], None
        async for answer, asked in self.answers(rank):
            items += answer
            if isinstance(answer[0], Minibatch):
                await asyncio.sleep(self.script.seconds("train", rank, len(items)) / 5)
            if isinstance(answer[-1], EndOfStep) and answer[-1].is_last_of_batch:
                if rank == 0:
                    announced = await self._announce(announced, items[-1].batch + 1)
                if items[-1].batch + 1 == self.config.batching.num_training_batches:
                    asked.cancel()
                    break
        if announced:
            await announced
        return items

    async def _announce(self, previous, batches):
        if previous:
            await previous
        return asyncio.ensure_future(self.publish(batches))


def split_steps(items):
    """[(minibatches, end)] of one rank's items."""
    steps, minibatches = [], []
    for item in items:
        if isinstance(item, Minibatch):
            minibatches.append(item)
        else:
            steps.append((minibatches, item))
            minibatches = []
    assert not minibatches
    return steps


def make_plan(config, **changes):
    """Of a run whose slots ask the questions in order."""
    options = {
        "rules": LocalRules(find_algorithm(config)),
        "questions": REFERRED if config.objective.use_ref_answers else QUESTIONS,
        "held_out": (),
        "order": lambda ordinal: ordinal % NUM_QUESTIONS,
        "replacement": lambda slot, *, attempt: 0,
        "seed_of": None,
        "sampling": SamplingContract(1.0, (1,), config.sampling.max_generation_tokens),
        "num_ranks": 1,
        "incarnation": INCARNATION,
    }
    return BatcherPlan(config=config, **options | changes)


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
