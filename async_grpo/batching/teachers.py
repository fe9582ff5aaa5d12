"""The teachers of a run, and the buffer of payloads that ranks fetch."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from async_grpo.config.roles import TEACHER, teacher
from async_grpo.types import LogprobRequest, Sample, WorkerInfo
from async_grpo.util.errors import WorkerError

if TYPE_CHECKING:
    from async_grpo.batching.records import BatcherPlan, RegistryOf

Samples = tuple[Sample, ...]


class Teachers:
    """Routes samples to teachers, and computes the sizes of their answers."""

    def __init__(self, plan: BatcherPlan, registry_of: RegistryOf) -> None:
        self.vocab_size = plan.vocab_size  # of the student
        self._registry_of = registry_of
        self._roles = [teacher(name) for name in plan.config.teacher_names]
        self._name_of = plan.config.teacher_of
        self._is_direct = bool(plan.config.teaching.express)  # then there is one teacher
        self._infos: dict[str, WorkerInfo] = {}  # the latest known worker of each role

    def by_role(self, samples: Samples) -> Mapping[str, Samples]:
        """{role of a teacher: its samples}, by the samples' tickets or `dataset_type`."""
        found: dict[str, Samples] = {}
        for sample in samples:
            role = sample.tickets[0].teacher if sample.tickets else self._role_of(sample)
            found[role] = (*found.get(role, ()), sample)
        return found

    def answer_directly(self, samples: Samples) -> bool:
        """Whether the ranks that train the samples get all scores from the teacher directly.

        Not if one of the models lacks a token of them: the teacher refuses such a request.
        """
        if not self._is_direct:
            return False
        width, _ = self._direct_row()
        rows = [row for sample in samples for row in sample.episode.rows]
        ids = (ids for row in rows for ids in (row.prompt_token_ids, row.token_ids))
        return all(array.max(initial=0) < width for array in ids)

    def sums(self, samples: Sequence[Sample]) -> dict[str, float]:
        """The sums of a finished group for its step; empty if no teacher scores it."""
        direct = [s for s in samples if self._is_direct and s.contributes and s.num_trained_tokens]
        unasked = [sample for sample in direct if TEACHER not in sample.scores]
        taught = (*unasked, *(sample for sample in samples if TEACHER in sample.scores))
        num_tokens = sum(len(row.token_ids) for sample in taught for row in sample.episode.rows)
        if not num_tokens:
            return {}
        num_bytes = sum(ticket.num_bytes for sample in samples for ticket in sample.tickets)
        if unasked:
            num_trained = sum(sample.num_trained_tokens for sample in unasked)
            num_bytes += num_trained * math.prod(self._direct_row())
        return {"teacher_tokens": num_tokens, "teacher_bytes": num_bytes}

    def sizes(self, role: str, request: LogprobRequest) -> list[int]:
        """Bytes of the payload of each row; empty if the request asks for no payload."""
        if request.payload is None:
            return []
        info = self._info(role)
        of_hidden = info.hidden_size * info.item_size if info else 0
        of_logits = min(info.vocab_size, self.vocab_size) * info.item_size if info else 0
        per_token = request.payload.bytes_per_token(hidden=of_hidden, logits=of_logits)
        return [per_token * len(ids) for ids in request.output_token_ids]

    def _direct_row(self) -> tuple[int, int]:
        """(logits of a token, bytes of each); those of the policy until a teacher is known."""
        info = self._info(self._roles[0])
        own = (self.vocab_size, 2)
        return (min(info.vocab_size, self.vocab_size), info.item_size) if info else own

    def _info(self, role: str) -> WorkerInfo | None:
        """The info of a worker of the role: of a present one, or else the latest known."""
        if members := self._registry_of(role).members:
            self._infos[role] = members[0].info
        return self._infos.get(role)

    def _role_of(self, sample: Sample) -> str:
        if self._is_direct:  # one teacher; a sample that a rank sends back has no columns
            return self._roles[0]
        kind = sample.question.dataset_type
        name = self._name_of(kind)
        if name is None:  # cannot happen: the trainer has checked every line
            raise WorkerError(f"--teacher-for names no teacher of the dataset_type {kind!r}")
        return teacher(name)


@dataclass(slots=True, eq=False, kw_only=True)
class PayloadBuffer:
    """Room for payloads that wait in object stores; a group that needs more waits.

    The step that trains and the steps after it have half of the room each, so that neither waits
    for the other: the payloads of the first are fetched as its rounds go out.
    """

    limit_bytes: int = field(kw_only=False)
    questions_per_step: int
    step: int = 0  # of the run; it trains now
    # The rounds of a step go out once its samples are complete, so that it must have room.
    is_whole_step: bool = False
    seconds_waiting: float = 0.0  # of all groups since the last `take_seconds_waiting`
    _held: Counter[int] = field(default_factory=Counter)  # bytes by step
    _sent: list[Sample] = field(default_factory=list)  # with tickets that ranks may yet fetch
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def num_bytes(self) -> int:
        """Bytes of payloads that the ranks have not fetched yet."""
        return self._held.total()

    @contextlib.asynccontextmanager
    async def room_for(self, num_bytes: int, *, ordinal: int) -> AsyncIterator[None]:
        """Hold so many bytes until they are `fetched`, or the body raises."""
        step = self._step_of(ordinal)
        await self.hold(num_bytes, step=step)
        try:
            yield
        except BaseException:
            await self.release(num_bytes, step=step)
            raise

    def sent(self, samples: Samples) -> None:
        """These samples have been sent to a rank."""
        self._sent += [sample for sample in samples if sample.tickets]

    async def fetched(self) -> None:
        """The ranks have fetched the payloads of all samples that were sent."""
        samples, self._sent = self._sent, []
        for sample in samples:
            num_bytes = sum(ticket.num_bytes for ticket in sample.tickets)
            await self.release(num_bytes, step=self._step_of(sample.ordinal))

    async def hold(self, num_bytes: int, *, step: int) -> None:
        """Wait for room for so many bytes, and hold it.

        A payload larger than the limit gets room once no other is held; 0 bytes need no room.
        """
        began = time.monotonic()
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_room(num_bytes, step))
            self._held[step] += num_bytes
        self.seconds_waiting += time.monotonic() - began

    async def release(self, num_bytes: int, *, step: int) -> None:
        """So many bytes are fetched, or dropped."""
        async with self._changed:
            self._held[step] -= num_bytes
            self._changed.notify_all()

    async def step_ended(self) -> None:
        """The next step trains now."""
        async with self._changed:
            self._held += Counter()  # drops zeros
            self.step += 1
            self._changed.notify_all()

    def take_seconds_waiting(self) -> float:
        """Seconds that groups have waited for room since the last call."""
        seconds, self.seconds_waiting = self.seconds_waiting, 0.0
        return seconds

    def _step_of(self, ordinal: int) -> int:
        return ordinal // self.questions_per_step

    def _has_room(self, num_bytes: int, step: int) -> bool:
        if step <= self.step:
            if self.is_whole_step:
                return True
            held = sum(amount for other, amount in self._held.items() if other <= self.step)
        else:
            held = sum(amount for other, amount in self._held.items() if other > self.step)
        return 0 in (held, num_bytes) or held + num_bytes <= self.limit_bytes // 2
