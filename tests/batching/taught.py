"""Scripted teachers, and a pipeline that asks them."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from scripted import Registry, make_sample, run
from scripted_run import make_config, make_plan

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.admission import StepKey
from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.batching.supervised import given_group
from async_grpo.config.roles import GENERATION, teacher
from async_grpo.types import (
    GivenPair,
    Group,
    Question,
    SamplingContract,
    WeightsVersion,
    WorkerInfo,
)

VERSION = WeightsVersion(5, 0)
MATH, CODE = teacher("math"), teacher("code")
LOGPROBS = {MATH: -1.0, CODE: -2.0}
STUDENT_VOCAB = 100
LEARNS = {"teacher_for": "sums=math,programs=code", "gkd_coefficient": 1.0, "gkd_top_k": 5}
SIZES = {MATH: (32, 4, 128), CODE: (64, 2, 90)}  # hidden size, bytes of a weight, vocabulary


class Teacher:
    """Says the same of every token, after the errors of the script."""

    def __init__(self, role, *errors, seconds=1.0):
        self.role, self.errors, self.seconds = role, list(errors), seconds
        self.asked = []  # (method, request)

    async def teach(self, request, method="teach"):
        self.asked.append((method, request))
        await asyncio.sleep(self.seconds)
        if self.errors:
            error = self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]
            if error is not None:
                raise error
        return tuple(
            np.full(len(ids), LOGPROBS[self.role], np.float32) for ids in request.output_token_ids
        )

    async def logprobs(self, request):
        return await self.teach(request, "logprobs")


class TeacherRegistry(Registry):
    """Whose members say what their payloads are made of."""

    is_empty = False

    @property
    def members(self):
        if self.is_empty:
            return ()
        hidden, item, vocab = SIZES[self.role]
        info = WorkerInfo(
            "w0", self.role, "node", 1, "model", vocab, 1.0, 0.0, 512,
            hidden_size=hidden, item_size=item,
        )  # fmt: skip
        return tuple(SimpleNamespace(info=info) for _ in self.workers)


class School:
    """A pipeline, two teachers, and the room for what they say."""

    def __init__(self, *, math=None, code=None, limit=10**9, **options):
        self.workers = {MATH: math or [Teacher(MATH)], CODE: code or [Teacher(CODE)]}
        self.registries = {
            role: TeacherRegistry(*workers, role=role) for role, workers in self.workers.items()
        } | {GENERATION: Registry(role=GENERATION)}
        self.config = make_config(**(LEARNS | options))
        self.rules = LocalRules(find_algorithm(self.config))
        plan = make_plan(
            self.config,
            rules=self.rules,
            vocab_size=STUDENT_VOCAB,
            object_store_bytes=4 * limit,  # a quarter is for payloads
            sampling=SamplingContract(0.7, (1,), self.config.sampling.max_generation_tokens),
        )
        self.pipeline = SlotPipeline(plan, self.registries.__getitem__)
        self.buffer = self.pipeline.scoring.payloads

    async def finish(self, group):
        """The group with scores; no lease is left open, and nothing in a stage."""
        return await self.pipeline.finish(group, StepKey(0, 0))

    def run(self, scenario):
        try:
            return run(scenario)
        finally:
            assert set(self.pipeline.stages.counts.values()) <= {0}
            assert not any(registry.open for registry in self.registries.values())

    def requests(self, role):
        return [request for worker in self.workers[role] for _, request in worker.asked]


def sampled(ordinal, kind, *, num_samples=2):
    """A graded group of one question; sample i has 4 + i tokens."""
    samples = (
        make_sample(VERSION, ordinal=ordinal, index=i, reward=float(i), num_tokens=4 + i)
        for i in range(num_samples)
    )
    return Group(
        ordinal,
        0,
        tuple(
            replace(sample, question=replace(sample.question, dataset_type=kind))
            for sample in samples
        ),
    )


def given(ordinal, *kinds):
    """Pairs of one slot; pair i has 1 + i tokens."""
    return given_group(
        ordinal,
        [
            GivenPair(
                Question(np.arange(3, dtype=np.int32), "prompt", None, {}, kind),
                np.arange(1 + number, dtype=np.int32),
                "completion",
            )
            for number, kind in enumerate(kinds)
        ],
    )
