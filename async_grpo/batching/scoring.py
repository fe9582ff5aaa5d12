"""What other models say of a group's samples: the reference's log-probabilities, and teachers'.

consumes:     groups whose samples are to be trained
produces:     the same with scores, and with tickets for what the training ranks fetch themselves
waits for:    the weights that a reference is due to serve, room for payloads, leases
unblocked by: a published batch, payloads that ranks have fetched, free workers
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo.batching.leased_work import (
    LeasedWork,
    LeasedWorkers,
    Reason,
    Scores,
    check_scores,
)
from async_grpo.config.roles import REFERENCE, TEACHER
from async_grpo.config.train_config import TrainConfig
from async_grpo.types import (
    Group,
    LogprobRequest,
    Payload,
    RowKey,
    Sample,
    Ticket,
    WeightsVersion,
)

if TYPE_CHECKING:
    from async_grpo.algorithms.base import ScoreNeed
    from async_grpo.batching.teachers import Teachers

Samples = tuple[Sample, ...]
InStage = Callable[[str, int], AbstractContextManager[None]]


class Scoring:
    """Asks whoever an algorithm needs; holds nothing but counts and the latest published batch."""

    def __init__(
        self,
        workers: LeasedWorkers,
        in_stage: InStage,
        *,
        config: TrainConfig,
        needs: Sequence[ScoreNeed],
        teachers: Teachers | None,
    ) -> None:
        """`teachers`: where one of the `needs` is a teacher's."""
        self._workers = workers
        self._in_stage = in_stage
        self._config = config
        self._needs = needs
        self._teachers = teachers
        self._batches_published = 0
        self._has_published = asyncio.Condition()
        self._num_scored_again = 0  # samples

    def take_clock(self) -> dict[str, float]:
        """What was done again since the last call, and what scoring waited for."""
        again, self._num_scored_again = self._num_scored_again, 0
        of_teachers = self._teachers.take_clock() if self._teachers else {}
        return {"reference_retries": again, **of_teachers}

    async def published(self, version: WeightsVersion) -> None:
        """The trainer has completed another batch, and whatever was due with it is served."""
        async with self._has_published:
            self._batches_published = version.batches
            self._has_published.notify_all()

    async def with_scores(
        self, group: Group, *, before_advantages: bool, temperature: float, version: WeightsVersion
    ) -> Group:
        """The group with what its algorithm needs at this point of the samples to be trained."""
        for need in self._needs:
            wanted = tuple(
                sample
                for sample in group.samples
                if sample.num_trained_tokens and sample.contributes
                if need.of_given or not sample.episode.is_given
            )
            if wanted and need.before_advantages == before_advantages:
                scored = await self._scored(need, wanted, temperature, version)
                found = {sample.index: sample for sample in scored}
                samples = tuple(found.get(sample.index, sample) for sample in group.samples)
                group = replace(group, samples=samples)
        return group

    async def _scored(
        self, need: ScoreNeed, samples: Samples, temperature: float, version: WeightsVersion
    ) -> Samples:
        """The samples with what the workers of `need.role` say of their tokens."""
        if need.role == TEACHER:
            return await self._taught(samples, need, temperature=temperature)
        own = version if need.role == REFERENCE else None  # a teacher's weights never change
        request = _request(samples, temperature, version=own)
        with self._in_stage("in_reference", len(samples)):
            if need.role == REFERENCE:
                await self._until_reference_is_due(version)
            scores = await self._score(samples, need.role, request)
        return tuple(_with_scores(samples, need.role, scores))

    async def taught_again(self, samples: Samples, temperature: float) -> Samples:
        """Samples whose payloads are lost, with new ones; room for them is held already."""
        need = next(need for need in self._needs if need.role == TEACHER)
        return await self._taught(samples, need, temperature=temperature, is_again=True)

    async def _taught(
        self, samples: Samples, need: ScoreNeed, *, temperature: float, is_again: bool = False
    ) -> Samples:
        """The samples with what the teacher of each says of its tokens."""
        assert self._teachers is not None, "rules that need a teacher come with teachers"
        if not is_again and self._teachers.have_express(samples):
            return samples  # the ranks get all of it themselves, unless they say that they cannot
        asked = []
        for role, members in self._teachers.by_role(samples).items():
            request = _request(members, temperature, payload=need.payload)
            request = replace(request, vocab_size=self._teachers.vocab_size)
            sizes = self._teachers.sizes(role, request)
            asked.append((role, members, request, sizes))
        # Given pairs may have several teachers. Room for all of a group is held at once: with half
        # of it held, it would wait for the other half, and nothing of it could be trained.
        num_bytes = 0 if is_again else sum(sum(sizes) for *_, sizes in asked)
        found: dict[RowKey, Sample] = {}
        with self._in_stage("in_reference", len(samples)):
            async with self._teachers.room_for(num_bytes, ordinal=samples[0].ordinal):
                for role, members, request, sizes in asked:
                    answered = await self._with_tickets(members, role, request, sizes)
                    found |= {sample.key: sample for sample in answered}
        return tuple(found[sample.key] for sample in samples)

    async def _with_tickets(
        self, samples: Samples, role: str, request: LogprobRequest, sizes: Sequence[int]
    ) -> Samples:
        """As `_taught`, of one teacher; of such sizes are the payloads, each with a ticket."""
        if not sizes:
            return tuple(_with_scores(samples, TEACHER, await self._score(samples, role, request)))
        scores, references = await self._score(samples, role, request, num_objects=len(sizes))
        tickets = (
            Ticket((reference,), role, size)
            for reference, size in zip(references, sizes, strict=True)
        )
        return tuple(
            replace(sample, tickets=tuple(next(tickets) for _ in sample.episode.rows))
            for sample in _with_scores(samples, TEACHER, scores)
        )

    async def _score(
        self, samples: Samples, role: str, request: LogprobRequest, *, num_objects: int = 0
    ) -> Any:
        """What workers of `role` say of the rows, with `num_objects` references of what more."""

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
        return await self._workers.answer(work)

    async def _until_reference_is_due(self, version: WeightsVersion) -> None:
        """Version v comes when v + S batches are completed: older batches need the one before.

        What it waits for is the trainer, which may compute for as long as it likes; one that is
        silent ends the run, and this with it.
        """
        due = version.batches + self._config.sampling.max_staleness if version.batches else 0
        async with self._has_published:
            await self._has_published.wait_for(lambda: self._batches_published >= due)


def _request(
    samples: Samples,
    temperature: float,
    *,
    version: WeightsVersion | None = None,
    payload: Payload | None = None,
) -> LogprobRequest:
    rows = [row for sample in samples for row in sample.episode.rows]
    return LogprobRequest(
        tuple(row.prompt_token_ids for row in rows),
        tuple(row.token_ids for row in rows),
        temperature,
        version,
        payload=payload,
    )


def _with_scores(samples: Samples, role: str, scores: Sequence[Scores]) -> Iterator[Sample]:
    """Each sample with the scores of its own rows, laid end to end."""
    rest = iter(scores)
    for sample in samples:
        own = [next(rest) for _ in sample.episode.rows]
        laid_out = own[0] if len(own) == 1 else np.concatenate(own)
        yield replace(sample, scores={**sample.scores, role: laid_out})
