"""The experience batcher: from finished groups to rounds, with every sample accounted for.

consumes:     finished groups of slots (slots.py); published batches
produces:     the same number of items for every rank: minibatches, closed by `EndOfStep`
waits for:    requests of ranks, ready samples
unblocked by: a rank's request, a finished group
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from async_grpo.batching.admission import StepKey, Turns
from async_grpo.batching.evaluations import Evaluations
from async_grpo.batching.ledger import FATES, Ledger
from async_grpo.batching.packing import Key, items_of
from async_grpo.batching.pipeline import LENGTH_LIMIT, SlotPipeline
from async_grpo.batching.records import BatcherPlan, Begin, Controls
from async_grpo.batching.rounds import Outbox, Round, RoundFormer
from async_grpo.batching.sample_log import SampleLog
from async_grpo.batching.slots import Slots
from async_grpo.batching.statistics import SampleSums
from async_grpo.types import (
    EndOfStep,
    Group,
    Minibatch,
    PipelineStatus,
    ResumePoint,
    RowKey,
    Sample,
    StreamItem,
    StreamItems,
    Tally,
    WeightsVersion,
    tally,
    without_texts,
)

if TYPE_CHECKING:
    from async_grpo.cluster.handles import RecorderHandle


class ExperienceBatcher:
    """Moves samples between admission, ledger, rounds and sums, which make the decisions."""

    def __init__(
        self,
        plan: BatcherPlan,
        pipeline: SlotPipeline,
        *,
        controls: Controls,
        evaluations: Evaluations,
        begin: Begin,
        recorder: RecorderHandle | None = None,
    ) -> None:
        """`recorder`: None dumps no samples."""
        config = plan.config
        self._plan = plan
        self._pipeline = pipeline
        self._payloads = pipeline.scoring.payloads
        self._controls = controls
        self._evaluations = evaluations
        self._begin = begin
        self._window = plan.window(max_staleness=max(controls.staleness))
        self._ledger = Ledger.restore(plan.resume.ledger) if plan.resume else Ledger()
        self._sums = SampleSums(
            staleness_of=self._window.staleness_of,
            of_scoring=pipeline.scoring.teachers.sums,
            types=config.data.types,
        )
        self.log = SampleLog(
            recorder if config.recording.dump_samples_filename else None,
            next_ordinal=self._window.next_ordinal,
            has_tokens=config.recording.dump_token_columns,
            batch_size=config.batching.batch_size,
        )
        self._slots = Slots(
            plan=plan,
            pipeline=pipeline,
            window=self._window,
            ledger=self._ledger,
            sums=self._sums,
            log=self.log,
            begin=begin,
            finished=self._finished,
            settled=self._settled,
        )
        self._rounds = RoundFormer(
            plan.num_ranks,
            max_tokens=config.batching.max_tokens_per_gpu,
            steps_per_batch=config.batching.steps_per_pass,
            deterministic=config.batching.deterministic,
            current_step=plan.first_step,
        )
        self._outbox = Outbox(plan.num_ranks)
        num_batches, ended = config.batching.num_training_batches, plan.first_step.batch
        turns = Turns(num_batches=num_batches, num_ended=ended)
        self._turns = turns if config.memory.colocated else None
        self._parts: dict[Key, Sample] = {}
        self._sent = [Tally()] * plan.num_ranks  # by rank, of the current step
        self._news = asyncio.Event()  # set when a further round may go out
        self._has_begun = False

    async def published(self, version: WeightsVersion) -> None:
        """Weights are published: the staleness window moves, and slots start."""
        if not self._has_begun:
            self._has_begun = True
            self._begin(self._send_rounds(), name="rounds")
        await self._pipeline.scoring.published(version)
        if version.batches > self._window.batches_published:
            self._window.batch_published(version.batches)
        self._slots.start()
        if self._turns is not None:
            self._turns.published(version.batches)
            self._news.set()

    def control_asked(self) -> None:
        """Controls have changed: a larger staleness opens the window now."""
        self._window.max_staleness = max(self._controls.staleness)
        if self._has_begun:
            self._slots.start()

    async def next_items(self, rank: int, index: int) -> StreamItems:
        """Answer `index` of a rank's stream; a repeated call gets the same answer."""
        return await self._outbox.take(rank, index)

    async def taught_again(self, rank: int, index: int, keys: Sequence[RowKey]) -> Minibatch:
        """Item `index` of a rank, with new tickets for these samples, whose payloads are lost."""
        item, *end = await self._outbox.take(rank, index)
        assert isinstance(item, Minibatch), "only minibatches have tickets"
        lost = tuple(sample for sample in item.samples if sample.key in keys)
        again = await self._pipeline.scoring.taught_again(lost)
        found = {sample.key: sample for sample in again}
        samples = tuple(found.get(sample.key, sample) for sample in item.samples)
        item = replace(item, samples=samples)
        self._outbox.replace(rank, index, (item, *end))
        return item

    async def hungry(self, index: int) -> None:
        """The ranks have nothing left to compute while they wait for answer `index`."""
        self._outbox.mark_hungry(index)
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """Every rank that requests an item gets `error`."""
        self._outbox.fail(error)

    def status(self) -> PipelineStatus:
        """What every stage is doing right now."""
        stages = self._pipeline.stages.counts
        reward_sum, reward_count = self._sums.current_reward()
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
            reward_sum=reward_sum,
            reward_count=int(reward_count),
        )

    def _finished(self, group: Group, step: StepKey) -> None:
        samples = without_texts(group.samples)
        fates = tuple(self._settle(sample, step) for sample in samples)
        trained = (sample for sample in samples if sample.contributes)
        self._offer([part for sample in trained for part in sample.parts()], step)
        self.log.write(group, batch=step.batch, fates=fates)
        for sample in group.left_out:
            self._ledger.settle(
                sample.ordinal,
                fate="discarded",
                num_samples=1,
                num_tokens=sample.episode.num_sampled_tokens,
                reason=LENGTH_LIMIT,
            )
        for others, fate in ((group.left_out, "discarded"), (group.references, "statistics")):
            if others:
                apart = replace(group, samples=others)
                self.log.write(apart, batch=step.batch, fates=(fate,) * len(others))

    def _settled(self, step: StepKey, is_last: bool) -> None:
        if is_last:
            self._rounds.step_complete(step)
        self._news.set()

    def _settle(self, sample: Sample, step: StepKey) -> str:
        if sample.contributes:
            return "trained"
        self._ledger.settle(
            sample.ordinal,
            fate="zero_contribution",
            num_samples=1,
            num_tokens=sample.episode.num_sampled_tokens,
        )
        self._sums.count_denominator(step, sample)
        return "zero_contribution"

    def _offer(self, parts: Sequence[Sample], step: StepKey) -> None:
        items = items_of(
            parts,
            attention_ratio=self._plan.attention_ratio,
            shares_prefixes=self._plan.shares_prefixes,
        )
        for part, item in zip(parts, items, strict=True):
            self._parts[item.key] = part
            self._rounds.offer(step, item=item)

    async def _send_rounds(self) -> None:
        while True:
            await self._outbox.wait_for_demand()
            await self._payloads.fetched()  # ranks that request an item have fetched the last one
            if self._turns is not None:
                await self._ranks_turn(self._turns)
            self._news.clear()
            now_s = asyncio.get_running_loop().time()
            formed = self._rounds.next_round(now_s, hungry=self._outbox.is_hungry)
            items: list[Sequence[StreamItem]] = []  # each for all ranks
            if isinstance(formed, Round):
                items.append(self._minibatches(formed))
                formed = self._rounds.end_step()  # goes out with the last round: one request less
            if formed is not None:
                items.append(await self._ends_of_step(formed))
            if items:
                self._outbox.put(list(zip(*items, strict=True)))
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._rounds.due_in(now_s)):
                        await self._news.wait()

    async def _ranks_turn(self, turns: Turns) -> None:
        """Return when the engines have sampled all that they may, and sleep."""
        while not turns.is_of_ranks:
            self._news.clear()
            if turns.engines_are_done(num_unsettled=self._slots.num_unsettled):
                await self._evaluations.ended()
                await self._pipeline.rest()
                turns.slept()
            else:
                await self._news.wait()

    def _minibatches(self, formed: Round) -> tuple[Minibatch, ...]:
        minibatches, config = [], self._plan.config
        for rank, keys in enumerate(formed.bins):
            parts = tuple(self._parts.pop(key) for key in keys)
            for part in parts:
                is_first = part.row == 0  # a sample is counted with its first row
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
            self._payloads.sent(parts)
        self.log.sent(minibatches)
        return tuple(minibatches)

    async def _ends_of_step(self, step: StepKey) -> list[EndOfStep]:
        """One for each rank; only rank 0's has the resume point and the evaluations."""
        await self.log.flush()  # the dump must have all samples that a checkpoint counts
        await self._payloads.step_ended()
        end = self._end_of_step(step)
        config = self._plan.config
        await self.log.end_step(end, config.batching, ratio_mode=config.mode)
        return [end] + [replace(end, resume=None, evaluations=())] * (self._plan.num_ranks - 1)

    def _end_of_step(self, step: StepKey) -> EndOfStep:
        self._ledger.check()
        num_samples, num_tokens, sums = self._sums.close(step)
        sent, self._sent = tuple(self._sent), [Tally()] * self._plan.num_ranks
        ended = self._ledger.close_step(step)
        is_last = step.step_in_batch + 1 == self._plan.config.batching.steps_per_pass
        controls = self._controls.take() if is_last else ()
        if is_last and self._turns is not None:
            self._turns.batch_ended()
        if any(control.action == "evaluate" for control in controls):
            self._evaluations.ask(step.batch + 1)
        self._window.max_staleness = max(self._controls.staleness)
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
            clock=self._pipeline.take_clock()
            | {"unwritten_samples": self.log.num_lost, "refused_lines": self._plan.take_refused()},
            notices=self.log.take_notices(),
            evaluations=self._evaluations.take(),
            resume=self._resume_point(),
            controls=controls,
            settings=self._controls.settings,
        )

    def _resume_point(self) -> ResumePoint:
        """The point between the step that has just ended and the next one."""
        first = self._rounds.current_step
        ledger = self._ledger.rolled_back(first=first, reason="restart")
        excluded = tuple(sorted(self._pipeline.workers.quarantine.questions))
        return ResumePoint(first.batch, first.step_in_batch, ledger.state(), excluded)
