"""The slots of a run: admitted as the staleness window moves, each worked on until it is settled.

consumes:     questions and given pairs by ordinal; published batches
produces:     a finished group of each slot, or its failure, which is counted
waits for:    leases, generation, verdicts, scores (see pipeline.py); the staleness window
unblocked by: free workers, a published batch
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from async_grpo.batching.admission import AdmissionWindow, StepKey
from async_grpo.batching.failures import QUARANTINE, FailureLimits, SlotFailed
from async_grpo.batching.ledger import Ledger, SlotAccount
from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.batching.records import BatcherPlan, Begin
from async_grpo.batching.sample_log import SampleLog
from async_grpo.batching.statistics import SampleSums
from async_grpo.batching.supervised import given_group
from async_grpo.types import GivenPair, Group, Question

logger = logging.getLogger(__name__)
NUM_SHOWN = 80  # characters of a question, in the log


@dataclass(slots=True, eq=False, kw_only=True)
class Slots:
    """Starts slots and counts their outcomes; the batcher sends their groups to the ranks."""

    plan: BatcherPlan
    pipeline: SlotPipeline
    window: AdmissionWindow
    ledger: Ledger
    sums: SampleSums
    log: SampleLog
    begin: Begin
    finished: Callable[[Group, StepKey], None]  # gets every finished group
    settled: Callable[[StepKey, bool], None]  # gets the step of a settled slot; if its last
    _limits: FailureLimits = field(init=False)
    _unsettled: dict[StepKey, int] = field(default_factory=dict)  # slots by step

    def __post_init__(self) -> None:
        first = self.plan.first_step
        self._limits = FailureLimits(graded=first.batch if first.step_in_batch else None)

    @property
    def num_unsettled(self) -> int:
        """Slots that have started and are in work."""
        return sum(self._unsettled.values())

    def start(self) -> None:
        """Start the slots that the window allows."""
        config = self.plan.config
        for ordinal in self.window.start():
            step = self.window.step_of(ordinal)
            self._unsettled.setdefault(step, config.batching.questions_per_step)
            if ordinal not in self.ledger.open_slots:  # a resumed ledger has admitted it already
                self.ledger.admit(ordinal, num_samples=config.samples_per_slot, step=step)
            self.begin(self._run(ordinal, step), name=f"slot-{ordinal}")

    async def _run(self, ordinal: int, step: StepKey) -> None:
        try:
            if pairs := self.plan.given(ordinal):
                group = await self._finished_group_of(pairs, ordinal, step)
            else:
                group = await self._first_group_to_keep(ordinal, step)
        except SlotFailed as failure:
            if pairs:
                question = pairs[0].question
                self.log.failed(question, failure, batch=step.batch, slot=(ordinal, 0))
            await self.pipeline.step_groups.leave(step, ordinal)
            self._fail(ordinal, step, failure)
        else:
            self.finished(group, step)
        self._unsettled[step] -= 1
        is_last = not self._unsettled[step]
        if is_last:
            del self._unsettled[step]
            self.pipeline.step_groups.close(step)
            if all(other.batch != step.batch for other in self._unsettled):
                self._limits.settled(step.batch)
        self.settled(step, is_last)

    async def _first_group_to_keep(self, ordinal: int, step: StepKey) -> Group:
        """The group that the slot trains; the groups that it replaces are counted."""
        oldest = self.window.oldest_weights(ordinal)
        quarantine = self.pipeline.workers.quarantine
        for attempt in itertools.count():
            index = self.plan.index(ordinal, attempt=attempt)
            question, request = self.plan.draw(ordinal, attempt=attempt)
            account = SlotAccount(self.ledger, ordinal)
            try:
                if index in quarantine.questions:
                    raise SlotFailed(QUARANTINE, f"its question, number {index}, is in quarantine")
                group = await self.pipeline.run(
                    question, request, step, oldest=oldest, account=account
                )
            except SlotFailed as failure:
                if failure.stage == QUARANTINE:
                    self._exclude(index, question, failure)
                self.log.failed(question, failure, batch=step.batch, slot=(ordinal, attempt))
                raise
            finally:
                self.pipeline.sampled(account)
            kind = group.samples[0].question.dataset_type
            is_forced = all(sample.episode.is_forced for sample in group.sampled)
            self._limits.sampled(step.batch, dataset_type=kind, is_forced=is_forced)
            self.sums.add(step, group)
            if not group.is_replaced:
                return group
            self.ledger.reissue(group.ordinal, fate="replaced")
            drawn = replace(group, samples=(*group.samples, *group.left_out))
            self.log.write(drawn, batch=step.batch, fates=("replaced",) * len(drawn.samples))
        raise AssertionError("attempts are counted without end")

    async def _finished_group_of(
        self, pairs: Sequence[GivenPair], ordinal: int, step: StepKey
    ) -> Group:
        await self.pipeline.step_groups.leave(step, ordinal)  # it needs no advantages of its step
        group = await self.pipeline.finish(given_group(ordinal, pairs), step)
        self._limits.given(step.batch)
        self.sums.add(step, group)
        return group

    def _exclude(self, index: int, question: Question, failure: SlotFailed) -> None:
        """The question kills workers: this run does not ask it again."""
        excluded = self.pipeline.workers.quarantine.questions
        if index in excluded:
            return
        excluded.add(index)
        shown = question.input[:NUM_SHOWN]
        logger.error(
            "question %d is not asked any more in this run: %s; it begins with %r",
            index, failure, shown,
        )  # fmt: skip

    def _fail(self, ordinal: int, step: StepKey, failure: SlotFailed) -> None:
        """Count the dropped group; raise `WorkerError` if too much fails."""
        logger.warning("question %d is dropped: %s", ordinal, failure)
        self.ledger.settle(ordinal, fate="failed", reason=failure.stage)
        num_samples = self.plan.config.samples_per_slot
        kind = self.plan.type_of(ordinal)
        self.sums.add_failed(step, ordinal, num_samples=num_samples, dataset_type=kind)
        is_given = bool(self.plan.pairs_of(ordinal))
        self._limits.failed(step.batch, failure, is_given=is_given, dataset_type=kind)
