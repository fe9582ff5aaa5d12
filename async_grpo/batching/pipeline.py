"""From a question to a finished group: sampling, grading, scoring and retries of one slot.

consumes:     a question, and the oldest weights version that its tokens may come from
produces:     a `Group` with advantages and reference log-probabilities
waits for:    leases, generation, verdicts, reference log-probabilities, while workers progress
unblocked by: free workers of each role
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial

from async_grpo.batching.admission import StepKey
from async_grpo.batching.failures import (
    Grading,
    Requests,
    SlotFailed,
    Verdicts,
    require_graded,
)
from async_grpo.batching.leased_work import (
    AFTER_LOSS_S,
    LeasedWork,
    LeasedWorkers,
    check_completions,
    check_episodes,
)
from async_grpo.batching.ledger import SlotAccount
from async_grpo.batching.losses import Members, Replays
from async_grpo.batching.records import BatcherPlan, RegistryOf
from async_grpo.batching.rounds import StepGroups
from async_grpo.batching.scoring import SampleScoring
from async_grpo.batching.statistics import StageClock
from async_grpo.batching.supervised import reference_of, without_references
from async_grpo.batching.teachers import PayloadBuffer, Teachers
from async_grpo.config.roles import ENVIRONMENT, GENERATION, VERIFIER
from async_grpo.environments.base import EpisodeFailed
from async_grpo.environments.causes import Cause
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
    WeightsVersion,
)
from async_grpo.util.errors import ConfigError, DeadlineError, NoWorkerError

LENGTH_LIMIT = "length limit"  # reason of what --length-limit-policy leaves out
TIMED_OUT = "generation timeout"  # stage of a failure: an output is longer than the user wants
Samples = tuple[Sample, ...]
Played = tuple[tuple[Episode, ...], Verdicts]


class SlotPipeline:
    """Runs slots; keeps nothing between them but counts, and what their workers share."""

    def __init__(self, plan: BatcherPlan, registry_of: RegistryOf) -> None:
        config, limit_s = plan.config, plan.config.places.stall_timeout_s
        self._plan = plan
        self._registry_of = registry_of
        self._judged = Counter[str]()  # answers of judges and services since the last call
        self._sampled = Counter[str]()  # groups, and those of them that were sampled again
        excluded = plan.resume.quarantined if plan.resume else ()
        room = int(config.teaching.teacher_buffer_gib * 2**30) or plan.object_store_bytes // 4
        if config.memory.colocated:  # nothing is fetched before a whole batch is scored
            room = sys.maxsize
        self.workers = LeasedWorkers(registry_of, timeout_s=limit_s, quarantined=excluded)
        self.grading = Grading(self._verify, timeout_s=limit_s, progress=self.workers.progress)
        self.stages = StageClock(time.monotonic())
        batching, first = config.batching, plan.first_step
        self.step_groups = StepGroups(rules=plan.rules, num_slots=batching.questions_per_step)
        self.scoring = SampleScoring(
            plan,
            self.workers,
            self._in_stage,
            teachers=Teachers(plan, registry_of),
            payloads=PayloadBuffer(
                room,
                questions_per_step=batching.questions_per_step,
                step=first.batch * batching.steps_per_pass + first.step_in_batch,
                is_whole_step=batching.deterministic or plan.rules.waits_for_step,
            ),
        )

    async def rest(self) -> None:
        """Have the engines give their devices to the ranks, until weights are published."""
        await self._registry_of(GENERATION).rest()

    def take_clock(self) -> dict[str, float]:
        """Seconds by stage since the last call, and counts of what was repeated in that time."""
        judged, self._judged = self._judged, Counter()
        sampled, self._sampled = self._sampled, Counter()
        lost = self._registry_of(GENERATION).take_lost()
        return (
            self.stages.take(time.monotonic()) | self.scoring.take_clock() | judged | lost | sampled
        )

    def answered(self, request: object, answer: object) -> None:
        """Count an answer that an environment got, if a judge or a service gave it."""
        if isinstance(request, JudgeRequest) and isinstance(answer, JudgeAnswer):
            self._judged.update(
                judge_answers=1, judge_tokens=answer.num_tokens, judge_asked_again=request.is_again
            )
        elif isinstance(request, ServiceRequest):
            self._judged["service_answers"] += 1

    def sampled(self, account: SlotAccount) -> None:
        """Count a group that was sampled, or given up."""
        again = [f"resampled_groups_{why}" for why in account.resampled]
        counts = {
            "sampled_groups": 1,
            "resampled_groups": int(bool(again)),
            "continued_groups": int(bool(account.continued)),
        }
        self._sampled.update(counts | dict.fromkeys(again, 1))

    async def run(
        self,
        question: Question,
        request: GenerationRequest,
        step: StepKey,
        *,
        oldest: WeightsVersion,
        account: SlotAccount,
    ) -> Group:
        """The group of one slot at one attempt, finished or to be replaced by another question.

        `account` counts the tokens that engines answer, and those that are sampled again. Raises
        `SlotFailed` with the stage that failed.
        """
        episodes, verdicts = await self.play(question, request, oldest=oldest, account=account)
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
        kept, left_out = by_length_limit(samples, self._plan.config.sampling.length_limit_policy)
        group = await self.finish(Group(request.ordinal, request.attempt, kept), step)
        are_trained = self._plan.config.objective.ref_answer_coefficient > 0
        return replace(group if are_trained else without_references(group), left_out=left_out)

    async def finish(self, group: Group, step: StepKey) -> Group:
        """The group with scores, advantages and masks; a given one needs no advantages of its step.

        Raises `SlotFailed` with the stage that failed.
        """
        scored = partial(self.scoring.with_scores, version=self._plan.reference_of(step))
        group = await scored(group, before_advantages=True)
        group = await self._plan.rules.finish_group(group)
        if group.is_replaced:
            return group
        if self._plan.rules.waits_for_step and not group.is_given:
            group = await self.step_groups.join(step, group)
        return await scored(group, before_advantages=False)

    async def play(
        self,
        question: Question,
        request: GenerationRequest,
        *,
        oldest: WeightsVersion,
        account: SlotAccount,
    ) -> Played:
        """The group's episodes and a verdict for each, in the environment of the question's type.

        No token is of weights older than `oldest`. Raises `SlotFailed` with the stage that failed.
        """
        terms = account.terms
        of_set, rewards = (terms.name, terms.rewards) if terms else ("", ())
        if asked := self._plan.episodes_request(question, request, oldest, of_set):
            episodes, verdicts = await self._play_elsewhere(asked, account)
        else:
            grade = partial(self.grading.verdicts, rewards=rewards)
            singly = partial(self._grades_singly, question.dataset_type, rewards)
            with closing(Members(request, question, account, grade, singly)) as members:
                turns = await self._generate(members, oldest)
                episodes = tuple(Episode.of_turn(question.input_token_ids, turn) for turn in turns)
                if reference := reference_of(question):
                    episodes, turns = (*episodes, reference[0]), (*turns, reference[1])
                with self._in_stage("verifying", len(turns)):
                    verdicts = await members.verdicts(turns)
        require_graded(verdicts)
        return episodes, verdicts

    async def _play_elsewhere(self, request: EpisodesRequest, account: SlotAccount) -> Played:
        """Episodes and verdicts of an environment worker."""

        def check(played: PlayedGroup) -> None:
            account.played(played)
            check_episodes(request, played.episodes)

        kind, outages = request.question.dataset_type, self.workers.outages
        replays = Replays(kind, account, self.workers.progress)
        work: LeasedWork[PlayedGroup] = LeasedWork(
            role=ENVIRONMENT,
            method="play",
            request=request,
            cost=request.num_samples,
            slot=account.slot,
            terms=account.terms,
            dataset_type=kind,
            gives_up=(EpisodeFailed, ConfigError),  # the second: no worker can make the environment
            check=check,
            on_retry=replays.worker_lost,
            received=account.received,
        )
        with self._in_stage("generating", request.num_samples), ExitStack() as opened:
            while True:
                try:
                    played = await self.workers.answer(work)
                    break
                except EpisodeFailed as error:
                    replays.failed(error)
                    if error.cause is Cause.SERVER and work.dataset_type is not None:
                        # Played without a type, it passes the gate that its own outage closes:
                        # otherwise two such groups would wait for each other.
                        opened.enter_context(outages.opened(OutageRequest(kind, str(error))))
                        work = replace(work, dataset_type=None)
                await asyncio.sleep(AFTER_LOSS_S)
        await outages.over(kind)
        if played.num_judged:
            self._judged.update(
                judge_comparisons=played.num_judged, judge_disagreements=played.num_disagreed
            )
        return played.episodes, played.verdicts

    async def _generate(self, members: Members, oldest: WeightsVersion) -> tuple[Turn, ...]:
        """A turn of each member, whose tokens come from `oldest` or later weights."""
        request, account = members.request, members.account

        def check(turns: tuple[Turn, ...]) -> None:
            account.received(turns)
            check_completions(request, turns, oldest)

        work: LeasedWork[tuple[Turn, ...]] = LeasedWork(
            role=GENERATION,
            method="generate",
            request=request,
            cost=request.num_samples,
            version=oldest,
            timeout_s=self._plan.config.sampling.generation_timeout_s or None,
            slot=account.slot,
            terms=account.terms,
            gives_up=(DeadlineError,),  # the user wants no longer output
            check=check,
            again=members.again,
            told=members.told,
        )
        with self._in_stage("generating", request.num_samples):
            try:
                return await self.workers.answer(work)
            except NoWorkerError:
                raise
            except DeadlineError as error:
                raise SlotFailed(TIMED_OUT, f"{error} (--generation-timeout-s)") from error

    def _grades_singly(self, dataset_type: str, rewards: tuple[str, ...]) -> bool:
        """Whether an output is graded before others of its group end; no, while no pool is here."""
        rewards = rewards or self._plan.config.data.rewards_of(dataset_type)
        pools = [member.info.rewards for member in self._registry_of(VERIFIER).members]
        return bool(pools) and all(each and each.grade_singly(rewards) for each in pools)

    async def _verify(self, requests: Requests, rewards: tuple[str, ...]) -> Verdicts:
        rewards = rewards or self._plan.config.data.rewards_of(requests[0].question.dataset_type)
        work: LeasedWork[Verdicts] = LeasedWork(
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


def by_length_limit(samples: Samples, policy: str) -> tuple[Samples, Samples]:
    """(The members of the group, samples that are left out of it), by --length-limit-policy.

    Raises `SlotFailed` if no sampled member is left.
    """
    cut = [sample.episode.finish_reason == "length" for sample in samples]
    if policy == "zero_reward":
        zero = partial(replace, status="unscorable", reward=0.0, reason=LENGTH_LIMIT)
        samples = tuple(
            replace(sample, verdict=zero(sample.verdict)) if is_cut else sample
            for sample, is_cut in zip(samples, cut, strict=True)
        )
    if policy != "invalidate":
        return samples, ()
    if all(is_cut or sample.episode.is_given for sample, is_cut in zip(samples, cut, strict=True)):
        raise SlotFailed(
            LENGTH_LIMIT,
            f"all of its {sum(cut)} outputs were cut, which --length-limit-policy invalidate "
            "leaves out: raise --max-generation-tokens",
        )
    kept, left_out = (
        tuple(itertools.compress(samples, chosen)) for chosen in ([not c for c in cut], cut)
    )
    return kept, left_out
