"""One slot on its way from a question to a finished group, with retries.

consumes:     a question, and the oldest weights version that its tokens may come from
produces:     a `Group` with advantages and reference log-probabilities
waits for:    leases, generation, verdicts, reference log-probabilities; as long as they move
unblocked by: free workers of each role
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo import cluster
from async_grpo.batching.answers import Scores, check_completions, check_scores
from async_grpo.batching.grading import Grading
from async_grpo.batching.leased_work import LeasedWork, Progress, Reason, SlotFailed
from async_grpo.batching.quarantine import Quarantine
from async_grpo.batching.services import Service, Services
from async_grpo.batching.stages import StageClock
from async_grpo.errors import AsyncGrpoError, DeadlineError
from async_grpo.types import (
    Episode,
    GenerationRequest,
    Group,
    Lease,
    LogprobRequest,
    Question,
    RegistryStatus,
    Sample,
    Turn,
    Verdict,
    VerificationRequest,
    WeightsVersion,
)

if TYPE_CHECKING:
    from async_grpo.algorithms.base import GroupRules

COUNT_TIMEOUT_S = 5.0  # less than a rank waits for the status that the count is part of
TIMED_OUT = "generation timeout"  # the stage that loses an output longer than the user wants
OnDiscard = Callable[[Reason], None]  # hears why a slot's samples are sampled again
JoinStep = Callable[[Group], Awaitable[Group]]  # waits for advantages that the whole step decides
Samples = tuple[Sample, ...]


class SlotPipeline:
    """Runs slots; holds nothing between them but counts and the suspects of the quarantine."""

    def __init__(
        self,
        services: Services,
        *,
        rules: GroupRules,
        timeout_s: float,
        generation_timeout_s: float = 0.0,
        max_staleness: int = 0,
        quarantine: Quarantine | None = None,
    ) -> None:
        """`timeout_s` without progress; `generation_timeout_s` for an answer, 0: no limit."""
        self._generation_timeout_s = generation_timeout_s
        self._max_staleness = max_staleness
        self._batches_published = 0
        self._has_published = asyncio.Condition()
        self._rules = rules
        self._timeout_s = timeout_s
        self._quarantine = quarantine or Quarantine()
        self._verifiers = Service(
            "the verifier pool", services.verifiers, name=cluster.VERIFIER_POOL
        )
        self._registries = {"generation": Service.registry("generation", services.generation)}
        if services.reference is not None:
            self._registries["logprob"] = Service.registry("logprob", services.reference)
        self._progress = Progress()
        self._grading = Grading(self._verifiers, timeout_s=timeout_s, progress=self._progress)
        self._workers = {
            role: LeasedWork(
                registry,
                stage="reference" if role == "logprob" else role,
                timeout_s=timeout_s,
                progress=self._progress,
                quarantine=self._quarantine,
            )
            for role, registry in self._registries.items()
        }
        self._num_scored_again = 0  # samples
        self._trainer_heard_s = 0.0
        self.stages = StageClock(time.monotonic())

    @property
    def answers(self) -> int:
        """Good ones, of workers and verifiers."""
        return self._progress.answers

    @property
    def problem(self) -> str:
        """Why work is being tried again; empty when all is well."""
        return self._progress.problem

    @property
    def warnings(self) -> tuple[str, ...]:
        """What people should know of the rewards: the first failure of each kind."""
        return self._grading.warnings

    def take_clock(self) -> dict[str, float]:
        """Seconds by stage since the last call, and what was done again in that time."""
        sums = self.stages.take(time.monotonic())
        sums["reference_retries"], self._num_scored_again = self._num_scored_again, 0
        services = (self._verifiers, *self._registries.values())
        sums["service_retries"] = sum(service.num_retries for service in services)
        for service in services:
            service.num_retries = 0
        return sums

    async def published(self, version: WeightsVersion) -> None:
        """The trainer has completed another batch, and whatever was due with it is served."""
        self.trainer_heard()
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
        join_step: JoinStep,
        on_discard: OnDiscard = lambda reason: None,
    ) -> Group:
        """The group of one slot at one attempt, finished or to be replaced by another question.

        `on_discard` hears of all samples that are given up and sampled again. Raises `SlotFailed`
        naming the stage that lost the group.
        """
        scored = partial(
            self._with_scores, temperature=request.sampling.temperature, version=reference
        )
        turns = await self.generate(request, oldest=oldest, on_discard=on_discard)
        verdicts = await self.verify(request.ordinal, question, turns)
        episodes = [Episode.of_turn(request.input_token_ids, turn) for turn in turns]
        samples = tuple(
            Sample(request.ordinal, index, question, episode, verdict, advantage=0.0)
            for index, (episode, verdict) in enumerate(zip(episodes, verdicts, strict=True))
        )
        group = Group(request.ordinal, request.attempt, samples)
        group = await scored(group, before_advantages=True)
        group = await self._rules.finish_group(group)
        if group.is_replaced:
            return group
        if self._rules.waits_for_step:
            group = await join_step(group)
        return await scored(group, before_advantages=False)

    async def generate(
        self,
        request: GenerationRequest,
        *,
        oldest: WeightsVersion,
        slot: Hashable | None = None,
        on_discard: OnDiscard = lambda reason: None,
    ) -> tuple[Turn, ...]:
        """`request.num_samples` completions whose tokens come from `oldest` or later weights.

        `slot` tells requests apart that share an ordinal; the ordinal by default.
        """

        async def work(lease: Lease) -> tuple[Turn, ...]:
            try:
                completions: tuple[Turn, ...] = await cluster.work(
                    lease.handle.generate.remote(replace(request, lease_id=lease.lease_id)),
                    timeout_s=self._generation_timeout_s or None,
                    who=f"generation worker {lease.worker_id}",
                )
            except DeadlineError as error:
                raise SlotFailed(TIMED_OUT, f"{error} (--generation-timeout-s)") from error
            check_completions(request, completions, oldest)
            return completions

        with self._in_stage("generating", request.num_samples):
            found: tuple[Turn, ...] = await self._leased(
                "generation",
                work,
                cost=request.num_samples,
                version=oldest,
                slot=request.ordinal if slot is None else slot,
                on_retry=on_discard,
            )
        return found

    async def verify(
        self, ordinal: int, question: Question, completions: tuple[Turn, ...]
    ) -> tuple[Verdict, ...]:
        """A verdict for each completion; an error of the verifiers loses the whole group."""
        requests = tuple(
            VerificationRequest(ordinal, index, question, completion)
            for index, completion in enumerate(completions)
        )
        with self._in_stage("verifying", len(requests)):
            return await self._grading.verdicts(requests)

    async def _with_scores(
        self, group: Group, *, before_advantages: bool, temperature: float, version: WeightsVersion
    ) -> Group:
        """The group with what its algorithm needs at this point of the samples to be trained."""
        for need in self._rules.needs:
            wanted = tuple(s for s in group.samples if s.num_trained_tokens and s.contributes)
            if wanted and need.before_advantages == before_advantages:
                scored = await self._score(wanted, need.role, temperature, version)
                found = {sample.index: sample for sample in scored}
                samples = tuple(found.get(sample.index, sample) for sample in group.samples)
                group = replace(group, samples=samples)
        return group

    async def _score(
        self, samples: Samples, role: str, temperature: float, version: WeightsVersion
    ) -> Samples:
        """The samples with the log-probabilities that workers of `role` give their tokens."""
        rows = [row for sample in samples for row in sample.episode.rows]
        request = LogprobRequest(
            tuple(row.prompt_token_ids for row in rows),
            tuple(row.token_ids for row in rows),
            temperature,
            version,
        )

        async def work(lease: Lease) -> tuple[Scores, ...]:
            scores: tuple[Scores, ...] = await cluster.work(
                lease.handle.logprobs.remote(replace(request, lease_id=lease.lease_id)),
                timeout_s=None,
                who=f"logprob worker {lease.worker_id}",
            )
            check_scores(request, scores)
            return scores

        def on_retry(_: Reason) -> None:
            self._num_scored_again += len(samples)

        with self._in_stage("in_reference", len(samples)):
            await self._until_reference_is_due(version)
            scores = await self._leased(
                "logprob" if role == "reference" else role,
                work,
                cost=request.num_tokens,
                version=version,
                slot=samples[0].ordinal,
                on_retry=on_retry,
            )
        return tuple(_with_scores(samples, role, scores))

    async def _leased(self, role: str, work: Any, *, slot: Hashable, **options: Any) -> Any:
        """The answer of a worker; the deaths that a slot met are forgotten with its answer."""
        try:
            return await self._workers[role].do(work, slot=slot, **options)
        finally:
            self._quarantine.forget(slot)

    async def _until_reference_is_due(self, version: WeightsVersion) -> None:
        """Version v comes when v + S batches are completed: older batches need the one before.

        What it waits for is the trainer, which needs nothing of this slot for these batches and may
        compute for as long as it likes, but not be silent for as long as that: rank 0 asks for the
        status every second. Raises `DeadlineError` when it is.
        """
        due = version.batches + self._max_staleness if version.batches else 0
        while self._batches_published < due:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s), self._has_published:
                    await self._has_published.wait()
            silent_s = asyncio.get_running_loop().time() - self._trainer_heard_s
            if self._batches_published < due and silent_s >= self._timeout_s:
                raise DeadlineError(
                    f"the trainer has asked for nothing for {silent_s:g} s, and published none of "
                    f"the batches that reference weights {version} wait for"
                )

    def trainer_heard(self) -> None:
        """A rank has asked for something, or told of something."""
        self._trainer_heard_s = asyncio.get_running_loop().time()

    async def roles(self) -> dict[str, RegistryStatus]:
        """What the registries know now, by role; a silent one is left out."""
        found = {}
        for role, registry in self._registries.items():
            with contextlib.suppress(AsyncGrpoError):  # it is lost: whoever needs it says so
                found[role] = await registry.try_call("status", timeout_s=COUNT_TIMEOUT_S)
        return found

    @contextlib.contextmanager
    def _in_stage(self, stage: str, num_samples: int) -> Iterator[None]:
        self.stages.add(stage, num_samples, now_s=time.monotonic())
        try:
            yield
        finally:
            self.stages.add(stage, -num_samples, now_s=time.monotonic())


def _with_scores(samples: Samples, role: str, scores: Sequence[Scores]) -> Iterator[Sample]:
    """Each sample with the scores of its own rows, laid end to end."""
    rest = iter(scores)
    for sample in samples:
        own = [next(rest) for _ in sample.episode.rows]
        laid_out = own[0] if len(own) == 1 else np.concatenate(own)
        yield replace(sample, scores={**sample.scores, role: laid_out})
