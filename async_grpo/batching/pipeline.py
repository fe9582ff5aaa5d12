"""One slot on its way from a question to a finished group, with deadlines and retries.

consumes:     a question, and the oldest weights version that its tokens may come from
produces:     a `Group` with advantages and reference log-probabilities
waits for:    leases, generation, verdicts, reference log-probabilities; each with a deadline
unblocked by: free workers of each role
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from async_grpo import cluster
from async_grpo.batching.advantage import group_advantages
from async_grpo.errors import AsyncGrpoError, DeadlineError, StaleAnswerError, WorkerError
from async_grpo.types import (
    Completion,
    GenerationRequest,
    Group,
    Lease,
    LogprobRequest,
    Question,
    Sample,
    Verdict,
    VerificationRequest,
    WeightsVersion,
)

logger = logging.getLogger(__name__)
# Seconds before each try. A dead worker is the least loaded one until its registry's next ping has
# missed it, so that tries in a row would all go to it: the last one waits for longer than that.
TRIES_AFTER_S = (0.0, 1.0, 8.0)
CONTROL_TIMEOUT_S = 60.0


class SlotFailed(WorkerError):
    """A group that could not be finished; `stage` says where it was lost."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


@dataclass(frozen=True, slots=True)
class Services:
    """The Ray actors that a slot passes through."""

    generation: Any  # registry of generation workers
    verifiers: Any  # the verifier pool
    reference: Any | None  # registry of logprob workers; None when the KL coefficient is 0


class SlotPipeline:
    """Runs slots; holds nothing between them but the counts of samples in each stage."""

    def __init__(self, services: Services, *, advantage: str, timeout_s: float) -> None:
        self._services = services
        self._advantage = advantage
        self._timeout_s = timeout_s
        self.stages: Counter[str] = Counter()
        self.answers = 0  # good ones, of workers and verifiers
        self.problem = ""  # why work is being tried again; empty when all is well

    async def run(
        self,
        question: Question,
        request: GenerationRequest,
        *,
        oldest: WeightsVersion,
        reference: WeightsVersion,
    ) -> Group:
        """The finished group of one slot. Raises `SlotFailed` naming the stage that lost it."""
        completions = await self.generate(request, oldest=oldest)
        verdicts = await self.verify(request.ordinal, question, completions)
        rewards = [verdict.reward for verdict in verdicts]
        advantages = group_advantages(rewards, method=self._advantage)
        samples = tuple(
            Sample(request.ordinal, index, question, completion, verdict, float(advantage))
            for index, (completion, verdict, advantage) in enumerate(
                zip(completions, verdicts, advantages, strict=True)
            )
        )
        if self._services.reference is not None:
            samples = await self._score(samples, request.sampling.temperature, reference)
        return Group(request.ordinal, request.attempt, samples)

    async def generate(
        self, request: GenerationRequest, *, oldest: WeightsVersion
    ) -> tuple[Completion, ...]:
        """`request.num_samples` completions whose tokens come from `oldest` or later weights."""

        async def work(lease: Lease) -> tuple[Completion, ...]:
            completions: tuple[Completion, ...] = await cluster.call(
                lease.handle.generate.remote(request),
                timeout_s=self._timeout_s,
                who=f"generation worker {lease.worker_id}",
            )
            _check_answer(request, completions, oldest)
            return completions

        registry = self._services.generation
        with self._in_stage("generating", request.num_samples):
            return await self._leased(registry, "generation", request.num_samples, oldest, work)

    async def verify(
        self, ordinal: int, question: Question, completions: tuple[Completion, ...]
    ) -> tuple[Verdict, ...]:
        """A verdict for each completion; an error of the verifiers loses the whole group."""
        requests = tuple(
            VerificationRequest(ordinal, index, question, completion)
            for index, completion in enumerate(completions)
        )
        with self._in_stage("verifying", len(requests)):
            try:
                verdicts: tuple[Verdict, ...] = await cluster.call(
                    self._services.verifiers.verify.remote(requests),
                    timeout_s=self._timeout_s,
                    who="the verifier pool",
                )
            except AsyncGrpoError as error:
                raise SlotFailed("verification", str(error)) from error
        self.answers += 1
        for verdict in verdicts:
            if verdict.status == "error":
                raise SlotFailed("verification", f"{verdict.adapter}: {verdict.reason}")
        return verdicts

    async def _score(
        self, samples: tuple[Sample, ...], temperature: float, version: WeightsVersion
    ) -> tuple[Sample, ...]:
        request = LogprobRequest(
            samples[0].question.input_token_ids,
            tuple(sample.completion.token_ids for sample in samples),
            temperature,
            version,
        )

        async def work(lease: Lease) -> tuple[Any, ...]:
            answer: tuple[Any, ...] = await cluster.call(
                lease.handle.logprobs.remote(request),
                timeout_s=self._timeout_s,
                who=f"logprob worker {lease.worker_id}",
            )
            return answer

        registry = self._services.reference
        with self._in_stage("in_reference", len(samples)):
            scores = await self._leased(registry, "reference", request.num_tokens, version, work)
        return tuple(
            dataclasses.replace(sample, reference_logprobs=score)
            for sample, score in zip(samples, scores, strict=True)
        )

    async def _leased(
        self, registry: Any, stage: str, cost: float, version: WeightsVersion, work: Any
    ) -> Any:
        """The result of `work(lease)`, on another lease when a worker fails or was fenced."""
        reason = ""
        for pause_s in TRIES_AFTER_S:
            await asyncio.sleep(pause_s)
            lease = await self._acquire(registry, stage, cost, version)
            try:
                answer = await work(lease)
            except AsyncGrpoError as error:
                answer, reason = None, str(error)
            if await self._release(registry, stage, lease) and answer is not None:
                self.answers += 1
                self.problem = ""
                return answer
            if answer is not None:
                reason = f"the lease on worker {lease.worker_id} was revoked"
            self.problem = f"{stage}: {reason}"
            logger.warning("%s attempt failed: %s", stage, reason)
        tries = len(TRIES_AFTER_S)
        raise SlotFailed(stage, f"{stage} failed {tries} times, the last time: {reason}")

    async def _acquire(
        self, registry: Any, stage: str, cost: float, version: WeightsVersion
    ) -> Lease:
        """A lease. The line may be longer than the deadline as long as it moves."""
        while True:
            num_answers = self.answers
            try:
                lease: Lease = await cluster.call(
                    registry.acquire.remote(cost, version, self._timeout_s),
                    timeout_s=self._timeout_s + CONTROL_TIMEOUT_S,
                    who=f"the {stage} registry",
                )
            except DeadlineError:
                if self.answers == num_answers:
                    raise
            else:
                return lease

    async def _release(self, registry: Any, stage: str, lease: Lease) -> bool:
        """False when the lease had been revoked: its answer must not be used."""
        valid: bool = await cluster.call(
            registry.release.remote(lease.lease_id),
            timeout_s=CONTROL_TIMEOUT_S,
            who=f"the {stage} registry",
        )
        return valid

    async def count_workers(self) -> dict[str, int]:
        """Admitted workers by role, as the registries see them now."""
        roles = {"generation": self._services.generation, "logprob": self._services.reference}
        return {
            role: len(
                await cluster.call(
                    registry.members.remote(),
                    timeout_s=CONTROL_TIMEOUT_S,
                    who=f"the {role} registry",
                )
            )
            for role, registry in roles.items()
            if registry is not None
        }

    @contextmanager
    def _in_stage(self, stage: str, num_samples: int) -> Iterator[None]:
        self.stages[stage] += num_samples
        try:
            yield
        finally:
            self.stages[stage] -= num_samples


def _check_answer(
    request: GenerationRequest, completions: tuple[Completion, ...], oldest: WeightsVersion
) -> None:
    if len(completions) != request.num_samples:
        raise WorkerError(f"{len(completions)} samples came back, {request.num_samples} were asked")
    for completion in completions:
        if completion.finish_reason == "abort":
            raise WorkerError("the worker gave up the request before it was finished")
        for span in completion.weights_versions:
            if span.version < oldest or span.version.incarnation != oldest.incarnation:
                raise StaleAnswerError(
                    f"tokens of weights {span.version} came back, {oldest} or later were asked"
                )
