"""One slot on its way from a question to a finished group, with retries.

consumes:     a question, and the oldest weights version that its tokens may come from
produces:     a `Group` with advantages and reference log-probabilities
waits for:    leases, generation, verdicts, reference log-probabilities; as long as they move
unblocked by: free workers of each role
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from async_grpo.batching.failures import (
    Grading,
    Requests,
    SlotFailed,
    WorkProgress,
    require_graded,
)
from async_grpo.batching.leased_work import (
    AFTER_LOSS_S,
    EvaluationTerms,
    LeasedWork,
    LeasedWorkers,
    check_completions,
    check_episodes,
)
from async_grpo.batching.ledger import SlotBooks
from async_grpo.batching.records import BatcherPlan
from async_grpo.batching.scoring import SampleScoring
from async_grpo.batching.statistics import StageClock
from async_grpo.batching.teachers import PayloadBuffer, Teachers
from async_grpo.config.roles import ENVIRONMENT, GENERATION, VERIFIER
from async_grpo.environments.base import EpisodeFailed, FailureClass
from async_grpo.environments.causes import Cause, Next, decide
from async_grpo.types import (
    Episode,
    EpisodesRequest,
    GenerationRequest,
    GradingRequest,
    Group,
    JudgeAnswer,
    JudgeRequest,
    OutageRequest,
    PlayedGroup,
    Question,
    Sample,
    ServiceRequest,
    Turn,
    Verdict,
    VerificationRequest,
    WeightsVersion,
)
from async_grpo.util.errors import ConfigError, DeadlineError, NoWorkerError

if TYPE_CHECKING:
    from async_grpo.controller.registry import WorkerRegistry

TIMED_OUT = "generation timeout"  # the stage that loses an output longer than the user wants
Played = tuple[tuple[Episode, ...], tuple[Verdict, ...]]
JoinStep = Callable[[Group], Awaitable[Group]]  # waits for advantages that the whole step decides


class SlotPipeline:
    """Runs slots; holds nothing between them but counts and the suspects of the quarantine."""

    def __init__(self, plan: BatcherPlan, registry_of: Callable[[str], WorkerRegistry]) -> None:
        """`registry_of`: of a role, by its name."""
        config, limit_s = plan.config, plan.config.places.stall_timeout_s
        self._plan = plan
        self._registry_of = registry_of
        self._judged = Counter[str]()  # what judges have said since it was taken
        self._sampled = Counter[str]()  # groups, and those that were sampled again
        excluded = plan.resume.quarantined if plan.resume else ()
        self.workers = LeasedWorkers(registry_of, timeout_s=limit_s, quarantined=excluded)
        self.grading = Grading(self._verify, timeout_s=limit_s, progress=self.workers.progress)
        self.stages = StageClock(time.monotonic())
        batching, first = config.batching, plan.first_step
        self.scoring = SampleScoring(
            self.workers,
            self._in_stage,
            max_staleness=config.sampling.max_staleness,
            needs=plan.rules.needs,
            teachers=Teachers(plan, registry_of),
            payloads=PayloadBuffer(
                int(config.teaching.teacher_buffer_gib * 2**30) or plan.object_store_bytes // 4,
                questions_per_step=batching.questions_per_step,
                step=first.batch * batching.steps_per_batch + first.step_in_batch,
                is_whole_step=batching.deterministic or plan.rules.waits_for_step,
            ),
        )

    def take_clock(self) -> dict[str, float]:
        """Seconds by stage since the last call, and what was done again in that time."""
        judged, self._judged = self._judged, Counter()
        sampled, self._sampled = self._sampled, Counter()
        lost = self._registry_of(GENERATION).take_lost()
        return (
            self.stages.take(time.monotonic()) | self.scoring.take_clock() | judged | lost | sampled
        )

    def answered(self, request: object, answer: object) -> None:
        """An environment has been answered: what judges and services say is counted."""
        if isinstance(request, JudgeRequest) and isinstance(answer, JudgeAnswer):
            self._judged.update(
                judge_answers=1, judge_tokens=answer.num_tokens, judge_asked_again=request.is_again
            )
        elif isinstance(request, ServiceRequest):
            self._judged["service_answers"] += 1

    def sampled(self, books: SlotBooks) -> None:
        """A group was sampled, or given up."""
        again = [f"resampled_groups_{why}" for why in books.resampled]
        counts = {"sampled_groups": 1, "resampled_groups": int(bool(again))}
        self._sampled.update(counts | dict.fromkeys(again, 1))

    async def run(
        self,
        question: Question,
        request: GenerationRequest,
        *,
        oldest: WeightsVersion,
        reference: WeightsVersion,
        join_step: JoinStep,
        books: SlotBooks,
    ) -> Group:
        """The group of one slot at one attempt, finished or to be replaced by another question.

        `books` get what engines answer, and what of it is sampled again. Raises `SlotFailed` naming
        the stage that lost the group.
        """
        episodes, verdicts = await self.play(
            question, request, oldest=oldest, slot=request.ordinal, books=books
        )
        samples = tuple(
            Sample(
                request.ordinal,
                index,
                question,
                episode,
                verdict,
                advantage=0.0,
                attempt=request.attempt,
            )
            for index, (episode, verdict) in enumerate(zip(episodes, verdicts, strict=True))
        )
        group = Group(request.ordinal, request.attempt, samples)
        return await self.finish(
            group,
            temperature=request.sampling.temperature,
            reference=reference,
            join_step=join_step,
        )

    async def finish(
        self, group: Group, *, temperature: float, reference: WeightsVersion, join_step: JoinStep
    ) -> Group:
        """The group with scores, advantages and masks; a given one has no advantages to wait for.

        Raises `SlotFailed` naming the stage that lost the group.
        """
        scored = partial(self.scoring.with_scores, temperature=temperature, version=reference)
        group = await scored(group, before_advantages=True)
        group = await self._plan.rules.finish_group(group)
        if group.is_replaced:
            return group
        if self._plan.rules.waits_for_step and not group.is_given:
            group = await join_step(group)
        return await scored(group, before_advantages=False)

    async def play(
        self,
        question: Question,
        request: GenerationRequest,
        *,
        oldest: WeightsVersion,
        slot: Hashable,
        books: SlotBooks,
        terms: EvaluationTerms | None = None,
    ) -> Played:
        """The group's episodes and a verdict for each, in the environment of the question's type.

        `slot` tells apart what shares an ordinal: a run's slots and held-out questions, which have
        `terms`.
        """
        of_set, rewards = (terms.name, terms.rewards) if terms else ("", ())
        if asked := self._plan.episodes_request(question, request, oldest, of_set):
            episodes, verdicts = await self._play_elsewhere(asked, slot, books, terms)
        else:
            turns = await self._generate(
                request, oldest=oldest, slot=slot, books=books, terms=terms
            )
            episodes = tuple(Episode.of_turn(question.input_token_ids, turn) for turn in turns)
            with self._in_stage("verifying", len(turns)):
                verdicts = await self.grading.verdicts(
                    tuple(
                        VerificationRequest(request.ordinal, index, question, turn)
                        for index, turn in enumerate(turns)
                    ),
                    rewards=rewards,
                )
        require_graded(verdicts)
        return episodes, verdicts

    async def _play_elsewhere(
        self,
        request: EpisodesRequest,
        slot: Hashable,
        books: SlotBooks,
        terms: EvaluationTerms | None,
    ) -> Played:
        def check(played: PlayedGroup) -> None:
            books.played(played)
            check_episodes(request, played.episodes)

        kind, outages = request.question.dataset_type, self.workers.outages
        replays = _Replays(kind, books, self.workers.progress)
        work: LeasedWork[PlayedGroup] = LeasedWork(
            role=ENVIRONMENT,
            method="play",
            request=request,
            cost=request.num_samples,
            slot=slot,
            terms=terms,
            dataset_type=kind,
            gives_up=(EpisodeFailed, ConfigError),  # no worker can make the environment
            check=check,
            on_retry=replays.worker_lost,
            received=books.received,
        )
        with self._in_stage("generating", request.num_samples), ExitStack() as opened:
            while True:
                try:
                    played = await self.workers.answer(work)
                    break
                except EpisodeFailed as error:
                    replays.failed(error)
                    if error.cause is Cause.SERVER and work.dataset_type is not None:
                        # Played through the gate that it closes, lest two such wait for each other.
                        opened.enter_context(outages.opened(OutageRequest(kind, str(error))))
                        work = replace(work, dataset_type=None)
                await asyncio.sleep(AFTER_LOSS_S)
        await outages.over(kind)
        if played.num_judged:
            self._judged.update(
                judge_comparisons=played.num_judged, judge_disagreements=played.num_disagreed
            )
        return played.episodes, played.verdicts

    async def _generate(
        self,
        request: GenerationRequest,
        *,
        oldest: WeightsVersion,
        slot: Hashable,
        books: SlotBooks,
        terms: EvaluationTerms | None,
    ) -> tuple[Turn, ...]:
        """`request.num_samples` turns whose tokens come from `oldest` or later weights."""

        def check(turns: tuple[Turn, ...]) -> None:
            books.received(turns)
            check_completions(request, turns, oldest)

        work: LeasedWork[tuple[Turn, ...]] = LeasedWork(
            role=GENERATION,
            method="generate",
            request=request,
            cost=request.num_samples,
            version=oldest,
            timeout_s=self._plan.config.sampling.generation_timeout_s or None,
            slot=slot,
            terms=terms,
            gives_up=(DeadlineError,),  # the user wants no longer output
            check=check,
            on_retry=books.sampled_again,
        )
        with self._in_stage("generating", request.num_samples):
            try:
                return await self.workers.answer(work)
            except NoWorkerError:
                raise
            except DeadlineError as error:
                raise SlotFailed(TIMED_OUT, f"{error} (--generation-timeout-s)") from error

    async def _verify(self, requests: Requests, rewards: tuple[str, ...]) -> tuple[Verdict, ...]:
        rewards = rewards or self._plan.config.data.rewards_of(requests[0].question.dataset_type)
        work: LeasedWork[tuple[Verdict, ...]] = LeasedWork(
            role=VERIFIER,
            method="verify",
            request=GradingRequest(requests, rewards=rewards),
            cost=len(requests),
            timeout_s=self._plan.config.places.stall_timeout_s,
        )
        return await self.workers.answer(work)

    @contextmanager
    def _in_stage(self, stage: str, num_samples: int) -> Iterator[None]:
        self.stages.add(stage, num_samples, now_s=time.monotonic())
        try:
            yield
        finally:
            self.stages.add(stage, -num_samples, now_s=time.monotonic())


class _Replays:
    """Of one group of episodes: how often it is played again, and when that is too often."""

    def __init__(self, dataset_type: str, books: SlotBooks, progress: WorkProgress) -> None:
        self._dataset_type = dataset_type
        self._books = books
        self._progress = progress
        self._num_tries = Counter[bool]()  # what failed before a token uses up no replay

    def failed(self, error: EpisodeFailed) -> None:
        """Its worker says so; raises `SlotFailed` where it is not played again."""
        self._books.played_again(error.again)
        stage = f"{ENVIRONMENT}: {error.failure}"
        self._again(error, stage=stage, reason=stage, has_sampled=True)

    def worker_lost(self, reason: str) -> None:
        """As `failed`, of a worker that says nothing any more."""
        problem = self._progress.problem.reason if self._progress.problem else ""
        why = EpisodeFailed(FailureClass.ENVIRONMENT, problem, cause=Cause.STATE)
        has_sampled = self._books.has_sampled
        self._again(why, stage=ENVIRONMENT, reason=reason, has_sampled=has_sampled)

    def _again(self, failed: EpisodeFailed, *, stage: str, reason: str, has_sampled: bool) -> None:
        self._num_tries[has_sampled] += 1
        num_tries = self._num_tries[has_sampled]
        follows = decide(failed.cause, has_sampled=has_sampled, num_tries=num_tries)
        if follows not in (Next.GROUP, Next.MEMBER):
            sentence = f"{failed}: the groups of such episodes are dropped, and counted"
            self._progress.failed(f"{stage} {self._dataset_type} {failed.place}", sentence)
            raise SlotFailed(stage, str(failed)) from failed
        self._books.sampled_again(reason)
