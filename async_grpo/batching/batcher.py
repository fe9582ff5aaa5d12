"""The experience batcher: from ordinals to rounds of minibatches, with every sample accounted for.

consumes:     questions by ordinal, and the news that a batch was trained and published
produces:     the same number of items to every rank: minibatches, closed by `EndOfStep`
waits for:    slots (see pipeline.py), ranks that ask, and the staleness window
unblocked by: a finished group, a rank's request, a published batch
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from async_grpo.batching.admission import StepKey
from async_grpo.batching.controls import Controls
from async_grpo.batching.evaluations import Evaluations
from async_grpo.batching.failures import QUARANTINE, Hopeless, Quarantine, SlotFailed
from async_grpo.batching.grading import Requests
from async_grpo.batching.leased_work import EvaluationTerms
from async_grpo.batching.ledger import FATES, Ledger, SlotBooks
from async_grpo.batching.outbox import Outbox
from async_grpo.batching.packing import Item, Key, estimate_cost
from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.batching.records import BatcherPlan
from async_grpo.batching.rounds import Round, RoundFormer, StepGroups
from async_grpo.batching.sample_log import SampleLog
from async_grpo.batching.statistics import SampleSums, num_taught
from async_grpo.batching.supervised import given_group
from async_grpo.batching.teachers import Teachers
from async_grpo.config.roles import GENERATION, judge, named
from async_grpo.types import (
    Control,
    EndOfStep,
    GivenPair,
    Group,
    JudgeAnswer,
    JudgeRequest,
    Minibatch,
    OutageRequest,
    PipelineStatus,
    Question,
    ResumePoint,
    RowKey,
    Sample,
    StreamItem,
    StreamItems,
    Tally,
    Verdict,
    WeightsVersion,
    tally,
    without_texts,
)
from async_grpo.util.errors import DeadlineError, ProcessLostError, WorkerError

if TYPE_CHECKING:
    from async_grpo.cluster.handles import RecorderHandle
    from async_grpo.controller.registry import WorkerRegistry

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.02  # while trainers stand still beside samples: the fill asked for falls
NUM_SHOWN = 80  # characters of a question's beginning
RESTART = "restart"  # why work of later steps is done again: of the run, or of its batcher


class ExperienceBatcher:
    """Thin: admission, ledger, rounds and sums decide, this moves things between them."""

    def __init__(
        self,
        plan: BatcherPlan,
        registry_of: Callable[[str], WorkerRegistry],
        recorder: RecorderHandle | None = None,
    ) -> None:
        """`registry_of`: of a role, by its name. `recorder`: None dumps no samples."""
        config = plan.config
        resume = plan.resume
        first = StepKey(resume.batch, resume.step_in_batch) if resume else StepKey(0, 0)
        self._plan = plan
        self._registry_of = registry_of
        self._step_groups = StepGroups(plan.rules, num_slots=config.batching.questions_per_step)
        self._quarantine = Quarantine(resume.quarantined if resume else ())
        self._teachers = Teachers.of(plan, registry_of, first=first)
        self._pipeline = SlotPipeline(
            registry_of,
            config=config,
            rules=plan.rules,
            quarantine=self._quarantine,
            episodes_request=plan.episodes_request,
            teachers=self._teachers,
        )
        self._window = plan.window(first)
        self.controls = Controls(config, settings=plan.settings, pending=plan.pending)
        self._window.max_staleness = max(self.controls.staleness)
        self._ledger = Ledger.restore(resume.ledger) if resume else Ledger()
        self._rounds = RoundFormer(
            plan.num_ranks,
            max_tokens=config.batching.max_tokens_per_gpu,
            steps_per_batch=config.batching.steps_per_batch,
            deterministic=config.batching.deterministic,
            first_step=first,
        )
        needed = named((need.role for need in plan.rules.needs), config.teacher_names)
        self._roles = (GENERATION, *needed, *map(judge, config.data.judge_names))
        self._outbox = Outbox(plan.num_ranks)
        self._unfetched: tuple[Sample, ...] = ()  # of the latest round: ranks may fetch payloads
        self._by_express = bool(config.teaching.express)
        self._sums = SampleSums(
            staleness_of=self._window.staleness_of,
            express_bytes=self._teachers.express_bytes,
            types=config.data.types,
        )
        self._parts: dict[Key, Sample] = {}
        self._unsettled: dict[StepKey, int] = {}  # slots of a step that are not finished
        self._sent = [Tally()] * plan.num_ranks  # of the current step
        self._hopeless = Hopeless(graded=first.batch if first.step_in_batch else None)
        self._tasks: set[asyncio.Task[None]] = set()  # slots, and what sends rounds
        self._news = asyncio.Event()  # a round may go out that could not before
        self._newest: WeightsVersion | None = None
        self.evaluations = Evaluations(plan, self._pipeline, registry_of, begin=self._begin)
        self._log = SampleLog(
            recorder if config.recording.dump_samples_filename else None,
            next_ordinal=self._window.next_ordinal,
            has_tokens=config.recording.dump_token_columns,
        )

    async def published(self, version: WeightsVersion) -> None:
        """Weights are out: the staleness window moves, and slots start."""
        if self._newest is None:
            self._begin(self._send_rounds(), name="rounds")
        self._newest = version
        await self._pipeline.scoring.published(version)
        if version.batches > self._window.batches_published:
            self._window.batch_published(version.batches)
        self._start_slots()
        self.evaluations.published(version)

    def control(self, control: Control) -> None:
        """Take a request, for the end of the batch; a larger staleness opens the window now.

        Raises `ConfigError` for one that cannot be.
        """
        self.controls.ask(control)
        self._window.max_staleness = max(self.controls.staleness)
        if self._newest is not None:
            self._start_slots()

    def _start_slots(self) -> None:
        for ordinal in self._window.start():
            step = self._window.step_of(ordinal)
            self._unsettled.setdefault(step, self._plan.config.batching.questions_per_step)
            if ordinal not in self._ledger.open_slots:  # a resumed ledger has admitted it already
                num_samples = self._plan.config.sampling.samples_per_question
                self._ledger.admit(ordinal, num_samples=num_samples, step=step)
            self._begin(self._run_slot(ordinal, step), name=f"slot-{ordinal}")

    async def next_items(self, rank: int, index: int) -> StreamItems:
        """Answer `index` of a rank's stream; asking for it again gives it again."""
        return await self._outbox.take(rank, index)

    async def taught_again(self, rank: int, index: int, keys: Sequence[RowKey]) -> Minibatch:
        """Item `index` of a rank with new tickets for these samples, whose payloads are lost."""
        item, *end = await self._outbox.take(rank, index)
        assert isinstance(item, Minibatch), "only minibatches have tickets"
        lost = tuple(sample for sample in item.samples if sample.key in keys)
        self._teachers.lost(len(lost))
        logger.warning("what teachers said of %d samples is lost: they are asked again", len(lost))
        again = await self._pipeline.scoring.taught_again(lost, self._plan.sampling.temperature)
        found = {sample.key: sample for sample in again}
        samples = tuple(found.get(sample.key, sample) for sample in item.samples)
        item = replace(item, samples=samples)
        self._outbox.replace(rank, index, (item, *end))
        return item

    async def hungry(self, index: int) -> None:
        """The ranks have nothing left to compute while they wait for answer `index`."""
        self._outbox.mark_hungry(index)
        self._news.set()

    def close(self, error: Exception) -> None:
        """End all work; every rank that asks for an item gets `error`."""
        self._outbox.fail(error)
        for task in self._tasks:
            task.cancel()

    async def verdicts(
        self, outputs: Requests, terms: EvaluationTerms | None
    ) -> tuple[Verdict, ...]:
        """What the run's rewards, or those of an evaluation, say of an environment's outputs."""
        rewards = terms.rewards if terms else ()
        return await self._pipeline.grading.verdicts(outputs, rewards=rewards)

    async def outage(self, request: OutageRequest, terms: EvaluationTerms | None) -> None:
        """An episode waits for a server, until this is cancelled; too long a wait ends the run."""
        try:
            await self._pipeline.workers.outages.last(request)
        except DeadlineError as error:
            if terms is None:
                self._outbox.fail(WorkerError(str(error)))
            raise

    def judged(self, request: JudgeRequest, answer: JudgeAnswer) -> None:
        """An environment has asked a judge."""
        self._pipeline.judged.update(
            judge_answers=1, judge_tokens=answer.num_tokens, judge_asked_again=request.is_again
        )

    def status(self) -> PipelineStatus:
        """What every stage is doing right now."""
        stages, progress = self._pipeline.stages.counts, self._sums.current_reward()
        registries = {role: self._registry_of(role) for role in self._roles}
        return PipelineStatus(
            batch=self._window.batches_published,
            generating=stages["generating"],
            verifying=stages["verifying"],
            in_reference=stages["in_reference"],
            ready=self._rounds.num_ready,
            training=sum(sent.num_samples for sent in self._sent),
            done=self._ledger.admitted_samples - self._ledger.in_flight,
            output_tokens=self._ledger.output_tokens,
            answers=self._pipeline.workers.progress.answers,
            reward_sum=progress[0],
            reward_count=int(progress[1]),
            workers={role: len(each.members) for role, each in registries.items()},
            worker_tokens=sum(each.num_tokens for each in registries.values()),
            problem=self._pipeline.workers.progress.problem,
            warnings=(
                *self._pipeline.grading.warnings,
                *self._pipeline.workers.outages.told.values(),
            ),
            failures=self._pipeline.workers.progress.failures,
            controls=self.controls.asked,
        )

    def _begin(self, work: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._stop_on_failure)
        return task

    async def _run_slot(self, ordinal: int, step: StepKey) -> None:
        try:
            if pairs := self._plan.given(ordinal):
                group = await self._finished_group_of(pairs, ordinal, step)
            else:
                group = await self._first_group_to_keep(ordinal, step)
        except SlotFailed as failure:
            if pairs:
                question = pairs[0].question
                self._log.failed(question, failure, batch=step.batch, slot=(ordinal, 0))
            await self._step_groups.leave(step, ordinal)
            self._settle_failure(ordinal, step, failure)
        else:
            self._ledger.teacher_tokens += num_taught(group.samples, self._by_express)
            kept = without_texts(group.samples)
            fates = tuple(self._settle_sample(sample, step) for sample in kept)
            self._log.write(group, batch=step.batch, fates=fates)
        self._unsettled[step] -= 1
        if not self._unsettled[step]:
            del self._unsettled[step]
            self._step_groups.close(step)
            if all(other.batch != step.batch for other in self._unsettled):
                self._hopeless.settled(step.batch)
            self._rounds.step_complete(step)
        self._news.set()

    async def _first_group_to_keep(self, ordinal: int, step: StepKey) -> Group:
        """The group that the slot trains; those that it replaces are counted on the way."""
        oldest = self._window.oldest_weights(ordinal)
        reference = self._reference_of(step)
        for attempt in itertools.count():
            index = self._plan.index(ordinal, attempt=attempt)
            question, request = self._plan.draw(ordinal, attempt=attempt)
            books = SlotBooks(self._ledger, ordinal)
            try:
                if index in self._quarantine:
                    raise SlotFailed(QUARANTINE, f"its question, number {index}, is in quarantine")
                group = await self._pipeline.run(
                    question,
                    request,
                    oldest=oldest,
                    reference=reference,
                    books=books,
                    join_step=partial(self._step_groups.join, step),
                )
            except SlotFailed as failure:
                if failure.stage == QUARANTINE:
                    self._exclude(index, question, failure)
                self._log.failed(question, failure, batch=step.batch, slot=(ordinal, attempt))
                raise
            finally:
                self._pipeline.sampled(books)
            self._receive(group, step)
            if not group.is_replaced:
                return group
            self._replace(group, step)
        raise AssertionError("attempts are counted without end")

    async def _finished_group_of(
        self, pairs: Sequence[GivenPair], ordinal: int, step: StepKey
    ) -> Group:
        await self._step_groups.leave(step, ordinal)  # it has no advantage to wait for
        group = await self._pipeline.finish(
            given_group(ordinal, pairs),
            temperature=self._plan.sampling.temperature,
            reference=self._reference_of(step),
            join_step=partial(self._step_groups.join, step),
        )
        self._hopeless.given()
        self._sums.add(step, group, batch=step.batch)
        return group

    def _reference_of(self, step: StepKey) -> WeightsVersion:
        batches = self._plan.config.sampling.reference_of(step.batch)
        return WeightsVersion(self._plan.incarnation, batches)

    def _exclude(self, index: int, question: Question, failure: SlotFailed) -> None:
        """The question kills workers: it is not asked any more in this run."""
        if index in self._quarantine:
            return
        self._quarantine.exclude(index)
        shown = question.input[:NUM_SHOWN]
        logger.error(
            "question %d is not asked any more in this run: %s; it begins with %r",
            index, failure, shown,
        )  # fmt: skip

    def _receive(self, group: Group, step: StepKey) -> None:
        kind = group.samples[0].question.dataset_type
        self._hopeless.sampled(step.batch, dataset_type=kind)
        self._sums.add(step, group, batch=step.batch)

    def _replace(self, group: Group, step: StepKey) -> None:
        self._ledger.reissue(group.ordinal, fate="replaced")
        self._log.write(group, batch=step.batch, fates=("replaced",) * len(group.samples))

    def _settle_sample(self, sample: Sample, step: StepKey) -> str:
        if sample.contributes:
            for part in sample.parts():
                key, num_tokens = (part.ordinal, part.index, part.row), part.num_tokens
                self._parts[key] = part
                cost = estimate_cost(num_tokens, attention_ratio=self._plan.attention_ratio)
                self._rounds.offer(step, item=Item(key, num_tokens, cost))
            return "trained"
        self._ledger.settle(
            sample.ordinal,
            fate="zero_contribution",
            num_samples=1,
            num_tokens=sample.episode.num_sampled_tokens,
        )
        self._sums.count_denominator(step, sample)
        return "zero_contribution"

    def _settle_failure(self, ordinal: int, step: StepKey, failure: SlotFailed) -> None:
        """The group is dropped whole and counted; a run in which nothing works is ended."""
        logger.warning("question %d is dropped: %s", ordinal, failure)
        self._ledger.settle(ordinal, fate="failed", reason=failure.stage)
        num_samples, kind = (
            self._plan.config.sampling.samples_per_question,
            self._plan.type_of(ordinal),
        )
        self._sums.add_failed(step, ordinal, num_samples=num_samples, dataset_type=kind)
        is_given = bool(self._plan.pairs_of(ordinal))
        self._hopeless.failed(step.batch, failure, is_given=is_given, dataset_type=kind)

    async def _send_rounds(self) -> None:
        while True:
            await self._outbox.wait_for_demand()
            # Ranks ask for an item once they hold all of the one before.
            fetched, self._unfetched = self._unfetched, ()
            await self._teachers.fetched(fetched)
            self._news.clear()
            now_s = asyncio.get_running_loop().time()
            formed = self._rounds.next_round(now_s, hungry=self._outbox.is_hungry)
            items: list[Sequence[StreamItem]] = []  # each one a rank
            if isinstance(formed, Round):
                minibatches = self._minibatches(formed)
                self._unfetched = tuple(sample for each in minibatches for sample in each.samples)
                items.append(minibatches)
                formed = self._rounds.end_step()  # with the last round, every rank asks once less
            if formed is not None:
                items.append(await self._ends_of_step(formed))
            if items:
                self._outbox.put(list(zip(*items, strict=True)))
            else:
                await self._until_news()

    async def _until_news(self) -> None:
        """Something has changed; or trainers stand still beside samples, and have for longer."""
        is_short = self._outbox.is_hungry and self._rounds.num_ready
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_INTERVAL_S if is_short else None):
                await self._news.wait()

    def _minibatches(self, formed: Round) -> tuple[Minibatch, ...]:
        minibatches, config = [], self._plan.config
        for rank, keys in enumerate(formed.bins):
            parts = tuple(self._parts.pop(key) for key in keys)
            for part in parts:
                is_first = part.row == 0  # a sample is counted where its first row is trained
                self._ledger.settle(
                    part.ordinal,
                    fate="trained",
                    num_samples=int(is_first),
                    num_tokens=part.episode.num_sampled_tokens,
                )
                if is_first:
                    self._sums.count_denominator(formed.step, part)
            self._sent[rank] = self._sent[rank].plus(
                tally(
                    parts,
                    incarnation=self._plan.incarnation,
                    aggregation=config.objective.aggregation,
                    constant_length=config.objective.constant_length_samples,
                )
            )
            minibatches.append(Minibatch(formed.index, parts))
        self._log.sent(minibatches)
        return tuple(minibatches)

    async def _ends_of_step(self, step: StepKey) -> list[EndOfStep]:
        """One a rank; the way back is rank 0's to keep."""
        await self._log.flush()  # what a checkpoint of this step counts is in the dump
        await self._teachers.buffer.step_ended()
        end = self._end_of_step(step)
        await self._log.end_step(end, self._plan.config)
        return [end] + [replace(end, resume=None, evaluations=())] * (self._plan.num_ranks - 1)

    def _end_of_step(self, step: StepKey) -> EndOfStep:
        self._ledger.check()
        num_samples, num_tokens, sums = self._sums.close(step)
        sent, self._sent = tuple(self._sent), [Tally()] * self._plan.num_ranks
        ended = self._ledger.close_step(step)
        is_last = step.step_in_batch + 1 == self._plan.config.batching.steps_per_batch
        controls = self.controls.take() if is_last else ()
        if any(control.action == "evaluate" for control in controls):
            self.evaluations.ask(step.batch + 1)
        self._window.max_staleness = max(self.controls.staleness)
        return EndOfStep(
            batch=step.batch,
            step_in_batch=step.step_in_batch,
            is_last_of_batch=is_last,
            num_samples=num_samples,
            num_tokens=num_tokens,
            incarnation=self._plan.incarnation,
            sent=sent,
            fates={fate: ended.samples[fate] for fate in FATES},
            reasons=ended.reasons,
            tokens={fate: ended.tokens[fate] for fate in FATES} | ended.token_reasons,
            sums=sums,
            clock=self._pipeline.take_clock() | {"unwritten_samples": self._log.num_lost},
            notices=self._log.take_notices(),
            evaluations=self.evaluations.take(),
            resume=self._resume_point(),
            controls=controls,
            settings=self.controls.settings,
        )

    def _resume_point(self) -> ResumePoint:
        """The cut between the step that has just ended and the next one."""
        first = self._rounds.current_step
        ledger = self._ledger.rolled_back(first=first, reason=RESTART)
        return ResumePoint(
            first.batch, first.step_in_batch, ledger.state(), self._quarantine.questions
        )

    def _stop_on_failure(self, task: asyncio.Task[None]) -> None:
        """The first failure is what every rank hears of, instead of waiting for a round."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ProcessLostError):  # to a rank, it would mean this process
            error = WorkerError(str(error))
        if error is not None:
            self._outbox.fail(error)
