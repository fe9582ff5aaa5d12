"""One slot on its way from a question to a finished group, with deadlines and retries.

consumes:     a question, and the oldest weights version that its tokens may come from
produces:     a `Group` with advantages and reference log-probabilities
waits for:    leases, generation, verdicts, reference log-probabilities; each with a deadline
unblocked by: free workers of each role
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_grpo import cluster
from async_grpo.batching.groups import GroupRules, Samples, with_scores
from async_grpo.batching.lag import covers_output
from async_grpo.batching.stages import StageClock
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
Scores = NDArray[np.float32]  # [L]
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

    def __init__(
        self, services: Services, *, rules: GroupRules, timeout_s: float, max_staleness: int = 0
    ) -> None:
        self._services = services
        self._max_staleness = max_staleness
        self._batches_published = 0
        self._has_published = asyncio.Condition()
        self._rules = rules
        self._timeout_s = timeout_s
        self.stages = StageClock(time.monotonic())
        self.answers = 0  # good ones, of workers and verifiers
        self.problem = ""  # why work is being tried again; empty when all is well

    async def published(self, version: WeightsVersion) -> None:
        """The trainer has completed another batch, and whatever was due with it is served."""
        async with self._has_published:
            self._batches_published = version.batches
            self._has_published.notify_all()

    async def run(
        self,
        question: Question,
        request: GenerationRequest,
        *,
        oldest: WeightsVersion,
        reference: WeightsVersion,
    ) -> Group:
        """The group of one slot at one attempt, finished or to be replaced by another question.

        Raises `SlotFailed` naming the stage that lost it.
        """
        rules, temperature = self._rules, request.sampling.temperature
        completions = await self.generate(request, oldest=oldest)
        verdicts = await self.verify(request.ordinal, question, completions)
        samples = tuple(
            Sample(request.ordinal, index, question, completion, verdict, advantage=0.0)
            for index, (completion, verdict) in enumerate(zip(completions, verdicts, strict=True))
        )
        scored = await self._score(
            rules.to_score_before_advantages(samples), temperature, reference
        )
        samples = rules.graded(with_scores(samples, scored))
        if rules.is_drawn_again(samples, attempt=request.attempt):
            return Group(request.ordinal, request.attempt, samples, is_replaced=True)
        samples = rules.masked(samples)
        scored = await self._score(rules.to_score_for_loss(samples), temperature, reference)
        return Group(request.ordinal, request.attempt, with_scores(samples, scored))

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
        self, samples: Samples, temperature: float, version: WeightsVersion
    ) -> Samples:
        """The samples with their reference log-probabilities; none are asked for no samples."""
        if not samples:
            return ()
        request = LogprobRequest(
            samples[0].question.input_token_ids,
            tuple(sample.completion.token_ids for sample in samples),
            temperature,
            version,
        )

        async def work(lease: Lease) -> tuple[Scores, ...]:
            scores: tuple[Scores, ...] = await cluster.call(
                lease.handle.logprobs.remote(request),
                timeout_s=self._timeout_s,
                who=f"logprob worker {lease.worker_id}",
            )
            _check_scores(request, scores)
            return scores

        registry = self._services.reference
        with self._in_stage("in_reference", len(samples)):
            await self._until_reference_is_due(version)
            scores = await self._leased(registry, "reference", request.num_tokens, version, work)
        return tuple(
            replace(sample, reference_logprobs=score)
            for sample, score in zip(samples, scores, strict=True)
        )

    async def _until_reference_is_due(self, version: WeightsVersion) -> None:
        """Version v comes when v + S batches are completed: older batches need the one before.

        No deadline of its own: what it waits for is the trainer, which needs nothing of this slot
        for these batches, may compute for as long as it likes, and takes the batcher along when it
        ends.
        """
        due = version.batches + self._max_staleness if version.batches else 0
        async with self._has_published:
            await self._has_published.wait_for(lambda: self._batches_published >= due)

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
        self.stages.add(stage, num_samples, now_s=time.monotonic())
        try:
            yield
        finally:
            self.stages.add(stage, -num_samples, now_s=time.monotonic())


def _check_answer(
    request: GenerationRequest, completions: tuple[Completion, ...], oldest: WeightsVersion
) -> None:
    if len(completions) != request.num_samples:
        raise WorkerError(f"{len(completions)} samples came back, {request.num_samples} were asked")
    for completion in completions:
        if completion.finish_reason == "abort":
            raise WorkerError("the worker gave up the request before it was finished")
        if not covers_output(completion):
            raise WorkerError("the worker did not say of every token which weights sampled it")
        for span in completion.weights_versions:
            if span.version < oldest or span.version.incarnation != oldest.incarnation:
                raise StaleAnswerError(
                    f"tokens of weights {span.version} came back, {oldest} or later were asked"
                )


def _check_scores(request: LogprobRequest, scores: tuple[Scores, ...]) -> None:
    lengths = [len(score) for score in scores]
    asked = [len(ids) for ids in request.output_token_ids]
    if lengths != asked:
        raise WorkerError(f"scores of outputs of {lengths} tokens came back, {asked} were asked")
    if not all(np.isfinite(score).all() for score in scores):
        raise WorkerError("reference log-probabilities must be finite, and are not")
