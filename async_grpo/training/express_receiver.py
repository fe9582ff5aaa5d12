"""A teacher's logits for the minibatches of all ranks, by express; every call is collective.

consumes:     one minibatch a rank, of the same index; the workers that serve the teacher
produces:     the same minibatches with the scores `teacher.logits` and, computed of these,
              `teacher`; or None if there is no group
waits for:    the group's members, while it forms and while logits travel
unblocked by: teachers that answer; a member's loss, after which there is no group until the next
              gradient step begins
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import ray
import torch
from torch import Tensor

from async_grpo.algorithms.express import ExpressGroup, Meeting, keep_in, open_meeting
from async_grpo.algorithms.express_plan import Reading, Send, plan_round
from async_grpo.config.roles import TEACHER
from async_grpo.model.scorer import CHUNK_SIZE
from async_grpo.training.ranks import Ranks
from async_grpo.types import Minibatch, Sample
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, ClusterError, ExpressLost, ProcessLostError

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster
    from async_grpo.cluster.handles import WorkerHandle
    from async_grpo.types import WorkerInfo

logger = logging.getLogger(__name__)
LOGITS = f"{TEACHER}.logits"


class ExpressReceiver:
    """One rank's membership in the express groups of a run, one after another."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        teachers: tuple[int, int],
        width: int,
        temperature: float,
        cluster: Cluster,
        workers: Callable[[], Sequence[tuple[WorkerInfo, WorkerHandle]]],
    ) -> None:
        """`teachers`: sizes of their data and tensor axes; ranks that share a model by FSDP2 lie
        on the data axis. `width`: of the policy's vocabulary. `temperature`: at which tokens are
        sampled. Rank 0 calls `workers` for those that serve the teacher now.
        """
        self._ranks = ranks
        self._teachers = teachers
        self._width = width  # columns that both models have, once a group is formed
        self._temperature = temperature
        self._cluster = cluster
        self._workers = workers
        self._may_form = True
        self._group: ExpressGroup | None = None
        # On rank 0: the store of the group, its teachers' workers, and the calls of these.
        self._store: torch.distributed.Store | None = None
        self._members: Sequence[tuple[WorkerHandle, range]] = ()  # with its ranks in the group
        self._calls: list[Awaitable[None]] = []

    @property
    def num_teachers(self) -> int:
        """The number of teacher ranks in a group."""
        return math.prod(self._teachers)

    def fill(self, item: Minibatch) -> Minibatch | None:
        """The minibatch with its logits, or None on every rank: fetch them by tickets."""
        if self._group is None and self._may_form:
            self._may_form = False
            self._form()
        if self._group is None:
            return None
        needs = self._ranks.gather(tuple(map(_reading, item.samples)))
        rounds = plan_round(needs, teachers=self._teachers, width=self._width)
        own = needs[self._ranks.rank]
        num_rows = sum(len(reading.trained) for reading in own)
        dtype = self._group.dtype
        cells = torch.empty(num_rows, self._width, dtype=dtype, device=self._ranks.device)
        self._calls = [  # only rank 0 has members
            worker.serve_express.remote(*(rounds[number] for number in own_ranks))
            for worker, own_ranks in self._members
        ]
        try:
            self._group.exchange(
                rounds[0].sends(dtype.itemsize), give=_nothing, take=keep_in(cells)
            )
        except ExpressLost as error:
            self._lose(error)
        if self._ranks.agree(int(self._group is None)):
            self.close()
            return None
        return _with_logits(item, own, cells, temperature=self._temperature)

    def step_ended(self) -> None:
        """Called when a gradient step has ended; the next `fill` may form a group."""
        self._may_form = True

    def close(self) -> None:
        """Leave the group, if any; its teachers go on as workers."""
        if self._group is not None:
            self._group.close()
        self._group = self._store = None

    def _form(self) -> None:
        """Form the group on every rank, or on none."""
        invitation = self._ranks.share(self._invite)
        if invitation is None:
            return
        meeting, width, is_sharded = invitation
        self._width = min(self._width, width)
        if is_sharded:
            self._teachers = self.num_teachers, 1
        rank = self.num_teachers + self._ranks.rank
        try:
            self._group = ExpressGroup(meeting, rank=rank, device=self._ranks.device)
        except ExpressLost as error:
            self._lose(error)
        # A teacher would refuse its first round while its call to join has not returned.
        refused = list(self._errors(timeout_s=deadlines.EXPRESS_FORMED_S))
        if self._ranks.agree(int(self._group is None or bool(refused))):
            self.close()

    def _invite(self) -> tuple[Meeting, int, bool] | None:
        """Called on rank 0: ask teachers to join.

        Returns their meeting, their vocabulary's width, and whether any of them is sharded. None:
        there are too few teachers.
        """
        try:
            workers = self._workers()
        except (ProcessLostError, ClusterError):  # the stream will raise it
            return None
        members: list[tuple[WorkerHandle, range]] = []
        here = 0
        for info, handle in workers:
            if here + info.num_ranks <= self.num_teachers:
                members.append((handle, range(here, here + info.num_ranks)))
                here += info.num_ranks
        if here < self.num_teachers:
            logger.warning(
                "express needs %d teacher ranks, %d are here: logits go by the object store",
                self.num_teachers, here,
            )  # fmt: skip
            return None
        self._members = members
        info, _ = workers[0]  # all workers of a teacher serve the same model
        meeting, self._store = open_meeting(
            ray.util.get_node_ip_address(),
            num_members=self.num_teachers + self._ranks.world_size,
            dtype=torch.bfloat16 if info.item_size == 2 else torch.float32,
        )
        self._calls = [worker.join_express.remote(meeting, own.start) for worker, own in members]
        return meeting, info.vocab_size, len(members) < here

    def _lose(self, error: ExpressLost) -> None:
        """Leave the group; log the error and, on rank 0, errors of teachers that explain it."""
        self.close()
        causes = self._errors(timeout_s=deadlines.EXPRESS_LAST_WORD_S)
        for cause in (error, *(each for each in causes if not isinstance(each, ExpressLost))):
            logger.warning("%s", cause)

    def _errors(self, *, timeout_s: float) -> Iterator[AsyncGrpoError]:
        """Yield the errors of each teacher's last call; only rank 0 has calls."""
        for number, call in enumerate(self._calls):
            try:
                self._cluster.wait(call, timeout_s=timeout_s, who=f"teacher {number} of express")
            except AsyncGrpoError as error:
                yield error


def _reading(sample: Sample) -> Reading:
    (row,) = sample.episode.rows
    return Reading(sample.key, row.prompt_token_ids, row.token_ids, np.flatnonzero(row.loss_mask))


def _with_logits(
    item: Minibatch, readings: Sequence[Reading], cells: Tensor, *, temperature: float
) -> Minibatch:
    """The minibatch with the logits `cells` [N, V] of all its trained tokens and, computed of
    these, their log-probabilities at `temperature`; other tokens have zeros of these."""
    samples = []
    by_sample = cells.split([len(reading.trained) for reading in readings])
    for sample, reading, rows in zip(item.samples, readings, by_sample, strict=True):
        ids = torch.from_numpy(reading.output[reading.trained].astype(np.int64)).to(cells.device)
        chunks = zip(rows.split(CHUNK_SIZE), ids.split(CHUNK_SIZE), strict=True)
        labels = [
            torch.log_softmax(own.float() / temperature, dim=-1).gather(-1, chosen[:, None])[:, 0]
            for own, chosen in chunks
        ]
        scores = np.zeros(len(reading.output), np.float32)
        scores[reading.trained] = torch.cat(labels).cpu().numpy()
        samples.append(replace(sample, scores={**sample.scores, TEACHER: scores}))
    return replace(item, samples=tuple(samples), dense={LOGITS: cells})


def _nothing(send: Send) -> Tensor:
    raise NotImplementedError(f"a trainer rank holds no logits, {send} asks it for some")
