"""Scores of a group's samples by other models: the reference's log-probabilities, and teachers'.

consumes:     groups whose samples are to be trained
produces:     the same groups with scores, and with tickets for payloads that the ranks fetch
waits for:    the weights that the reference must serve, room for payloads, leases
unblocked by: a published batch, payloads that ranks have fetched, free workers
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo.batching.leased_work import (
    LeasedWork,
    LeasedWorkers,
    Reason,
    Scores,
    check_scores,
)
from async_grpo.batching.teachers import PayloadBuffer, Teachers
from async_grpo.config.roles import REFERENCE, TEACHER
from async_grpo.types import (
    Group,
    LogprobRequest,
    RowKey,
    Sample,
    Ticket,
    WeightsVersion,
)

if TYPE_CHECKING:
    from async_grpo.algorithms.base import ScoreNeed
    from async_grpo.batching.records import BatcherPlan

logger = logging.getLogger(__name__)
Samples = tuple[Sample, ...]
InStage = Callable[[str, int], AbstractContextManager[None]]


@dataclass(slots=True, eq=False)
class SampleScoring:
    """Asks the models that an algorithm needs; holds counts and the latest published batch."""

    plan: BatcherPlan
    workers: LeasedWorkers
    in_stage: InStage
    teachers: Teachers
    payloads: PayloadBuffer
    _batches_published: int = 0
    _has_published: asyncio.Condition = field(default_factory=asyncio.Condition)
    _num_scored_again: int = 0  # samples
    _num_lost: int = 0  # samples whose payload was lost with a node

    def take_clock(self) -> dict[str, float]:
        """Counts of repeated work since the last call, and the seconds of waiting for room."""
        sums = {
            "reference_retries": self._num_scored_again,
            "teacher_buffer_seconds": self.payloads.take_seconds_waiting(),
            "lost_payloads": self._num_lost,
        }
        self._num_scored_again = self._num_lost = 0
        return sums

    async def published(self, version: WeightsVersion) -> None:
        """The trainer has completed another batch, and its weights are served."""
        async with self._has_published:
            self._batches_published = version.batches
            self._has_published.notify_all()

    async def with_scores(
        self, group: Group, *, before_advantages: bool, version: WeightsVersion
    ) -> Group:
        """The group with the scores that its algorithm needs at this point, before advantages or
        after, of the samples that are trained; `version` is the reference's.
        """
        for need in self.plan.rules.needs:
            wanted = tuple(
                sample
                for sample in group.samples
                if sample.num_trained_tokens and sample.contributes
                if need.of_given or not sample.episode.is_given
            )
            if wanted and need.before_advantages == before_advantages:
                scored = await self._scored(need, wanted, version)
                found = {sample.index: sample for sample in scored}
                samples = tuple(found.get(sample.index, sample) for sample in group.samples)
                group = replace(group, samples=samples)
        return group

    async def taught_again(self, samples: Samples) -> Samples:
        """New payloads for samples that have lost theirs; the buffer still holds room for them."""
        number = len(samples)
        self._num_lost += number
        logger.warning("what teachers said of %d samples is lost: they are asked again", number)
        need = next(need for need in self.plan.rules.needs if need.role == TEACHER)
        return await self._scored(need, samples, is_again=True)

    async def _scored(
        self,
        need: ScoreNeed,
        samples: Samples,
        version: WeightsVersion | None = None,
        *,
        is_again: bool = False,
    ) -> Samples:
        """The samples with the scores of workers; `version` is the reference's."""
        if need.role == TEACHER and not is_again and self.teachers.answer_directly(samples):
            return samples  # the ranks get the scores themselves, unless they report a loss
        own = version if need.role == REFERENCE else None  # a teacher's weights never change
        asked = [*self._requests(need, samples, own)]
        # Given pairs may have several teachers. Room for the whole group is held at once: groups
        # that hold room for a part each could wait for each other without end.
        num_bytes = 0 if is_again else sum(sum(sizes) for *_, sizes in asked)
        found: dict[RowKey, Sample] = {}
        with self.in_stage("in_reference", len(samples)):
            if own:
                await self._until_reference_is_due(own)
            async with self.payloads.room_for(num_bytes, ordinal=samples[0].ordinal):
                for role, members, request, sizes in asked:
                    answer = await self._asked(role, members, request, num_objects=len(sizes))
                    scores, references = answer if sizes else (answer, ())
                    tickets = map(Ticket, zip(references), itertools.repeat(role), sizes)
                    scored = _with_scores(members, need.role, scores, tickets)
                    found |= {sample.key: sample for sample in scored}
        return tuple(found[sample.key] for sample in samples)

    def _requests(
        self, need: ScoreNeed, samples: Samples, version: WeightsVersion | None
    ) -> Iterator[tuple[str, Samples, LogprobRequest, Sequence[int]]]:
        """(role, the samples that it scores, the request, bytes of each payload)."""
        is_taught = need.role == TEACHER
        by_role = self.teachers.by_role(samples) if is_taught else {need.role: samples}
        for role, members in by_role.items():
            rows = [row for sample in members for row in sample.episode.rows]
            request = LogprobRequest(
                tuple(row.prompt_token_ids for row in rows),
                tuple(row.token_ids for row in rows),
                self.plan.sampling.temperature,
                version,
                payload=need.payload,
                vocab_size=self.teachers.vocab_size if is_taught else 0,
            )
            yield role, members, request, self.teachers.sizes(role, request)

    async def _asked(
        self, role: str, samples: Samples, request: LogprobRequest, *, num_objects: int
    ) -> Any:
        """Scores of a row each, by workers of `role`; with `num_objects`: (scores, references)."""

        def on_retry(_: Reason) -> None:
            self._num_scored_again += len(samples)

        work: LeasedWork[Any] = LeasedWork(
            role=role,
            method="teach" if num_objects else "logprobs",
            request=request,
            cost=request.num_tokens,
            version=request.version,
            num_objects=num_objects,
            slot=samples[0].ordinal,
            check=lambda found: check_scores(request, found[0] if num_objects else found),
            on_retry=on_retry,
        )
        return await self.workers.answer(work)

    async def _until_reference_is_due(self, version: WeightsVersion) -> None:
        """Wait until v + S batches are completed, which is when the reference loads version v.

        Not earlier: older batches need the version before. It has no deadline: the trainer may
        compute for as long as it needs, and a silent trainer ends the run, and this wait with it.
        """
        max_staleness = self.plan.config.sampling.max_staleness
        due = version.batches + max_staleness if version.batches else 0
        async with self._has_published:
            await self._has_published.wait_for(lambda: self._batches_published >= due)


def _with_scores(
    samples: Samples, name: str, scores: Sequence[Scores], tickets: Iterable[Ticket]
) -> Iterator[Sample]:
    """Each sample with the concatenated scores of its rows, and the tickets of its rows, if any."""
    scores_of_rows, tickets_of_rows = iter(scores), iter(tickets)
    for sample in samples:
        num_rows = len(sample.episode.rows)
        own = [*itertools.islice(scores_of_rows, num_rows)]
        yield replace(
            sample,
            scores={**sample.scores, name: own[0] if num_rows == 1 else np.concatenate(own)},
            tickets=tuple(itertools.islice(tickets_of_rows, num_rows)),
        )
