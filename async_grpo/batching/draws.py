"""What a slot asks at each of its attempts, unless the question is known to kill workers."""

from __future__ import annotations

import logging

from async_grpo.batching.leased_work import QUARANTINE, SlotFailed
from async_grpo.batching.pipeline import JoinStep, OnDiscard, SlotPipeline
from async_grpo.batching.quarantine import Quarantine
from async_grpo.batching.records import BatcherPlan
from async_grpo.types import Group, WeightsVersion

logger = logging.getLogger(__name__)
NUM_SHOWN = 80  # characters of a question's beginning


class Draws:
    """The groups of slots, by attempt."""

    def __init__(self, plan: BatcherPlan, pipeline: SlotPipeline, quarantine: Quarantine) -> None:
        self._plan = plan
        self._pipeline = pipeline
        self._quarantine = quarantine

    @property
    def quarantined(self) -> tuple[int, ...]:
        """Indices of the questions that are not asked any more."""
        return self._quarantine.questions

    async def group(
        self,
        ordinal: int,
        attempt: int,
        *,
        oldest: WeightsVersion,
        on_discard: OnDiscard,
        join_step: JoinStep,
    ) -> Group:
        """The finished group of a slot at one attempt; raises `SlotFailed` where there is none."""
        index = self._plan.index(ordinal, attempt=attempt)
        if index in self._quarantine:
            raise SlotFailed(QUARANTINE, f"its question, number {index}, is in quarantine")
        question, request = self._plan.draw(ordinal, attempt=attempt)
        period = self._plan.config.num_batches_per_ref_model_update
        reference = oldest._replace(batches=oldest.batches // period * period)
        try:
            return await self._pipeline.run(
                question,
                request,
                oldest=oldest,
                reference=reference,
                on_discard=on_discard,
                join_step=join_step,
            )
        except SlotFailed as failure:
            if failure.stage == QUARANTINE and index not in self._quarantine:
                self._quarantine.exclude(index)
                shown = question.input[:NUM_SHOWN]
                logger.error(
                    "question %d is not asked any more in this run: %s; it begins with %r",
                    index, failure, shown,
                )  # fmt: skip
            raise
