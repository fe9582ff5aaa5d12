"""A rank's end of the run's stream: fetches one answer ahead, and measures the waiting.

consumes:     answers with minibatches and ends of steps, by index; what their tickets stand for
produces:     the items of these, in order, as an iterator that ends on every rank at the same item;
              what teachers said is among their scores: `teacher.ids` and so on
waits for:    the controller, as long as anything moves, else it names what was waited for; the
              object stores of the teachers' nodes
unblocked by: a round going out, a request to stop, the controller's loss; payloads, or their loss,
              after which the controller has them made again
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Event
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from async_grpo.cluster.handles import WHO, RunClient
from async_grpo.config.roles import TEACHER
from async_grpo.types import (
    Arrays,
    EndOfStep,
    Minibatch,
    PipelineStatus,
    RowKey,
    Sample,
    StreamItem,
    StreamItems,
)
from async_grpo.util import deadlines
from async_grpo.util.errors import (
    ClusterError,
    DeadlineError,
    ProcessLostError,
    RunLost,
    WorkerError,
)

POLL_INTERVAL_S = 0.5  # after which a rank that waits looks whether it is to stop
READY, STOP, LOST = range(3)  # what a rank proposes to the others for its next answer
MAX_LOSSES = 5  # of payloads of one minibatch


class Express(Protocol):
    """What fills minibatches with a teacher's logits, without the object store."""

    def fill(self, item: Minibatch) -> Minibatch | None:
        """Collective; None on every rank: they must come another way."""
        ...

    def step_ended(self) -> None:
        """Collective: a gradient step has ended, after which it may try anew."""
        ...


class RankStream(Iterator[StreamItem]):
    """Iterates over the items that every rank gets in the same number and order.

    Ends when any rank has been asked to stop; raises `RunLost` on every rank when one of them has
    lost the controller, so that none trains an item that another cannot have.
    """

    def __init__(
        self,
        client: RunClient,
        *,
        rank: int,
        stall_timeout_s: float,
        agree: Callable[[int], int] = int,
        stop: Event | None = None,
        teachers: Sequence[str] = (),
        express: Express | None = None,
    ) -> None:
        """`agree` is `Ranks.agree`; the default serves a rank that is alone.

        `teachers`: the roles whose payloads minibatches have tickets for, or come by `express`.
        """
        self._express = express
        self._teachers = teachers
        self.client = client
        self._rank = rank
        self._stall_timeout_s = stall_timeout_s
        self._agree = agree
        self._stop = stop or Event()
        self._index = 0
        self._next = self._asked_next()
        self._items: deque[StreamItem] = deque()  # of the latest answer, which all ranks have
        self._seconds_waiting = 0.0
        self._loss = "the controller is lost"  # another rank may have seen it first
        self.is_stopped = False

    def __next__(self) -> StreamItem:
        if self._items:  # the end of a step, right behind its last minibatch
            return self._items.popleft()
        started = time.monotonic()
        items, proposal = self._take_next()
        agreed = self._agree(proposal)
        if agreed == LOST:
            raise RunLost(self._loss)
        if agreed == STOP or items is None:
            self.is_stopped = True
            self._stop.set()  # whichever rank was asked, all of them end
            raise StopIteration
        self._index += 1
        self._next = self._asked_next()
        items = self._by_express(items)
        self._seconds_waiting += time.monotonic() - started
        self._items.extend(items)
        return self._items.popleft()

    def _asked_next(self) -> Awaitable[StreamItems]:
        client = self.client
        return client.controller.next_items.remote(client.run, self._rank, self._index)

    def take_seconds_waiting(self) -> float:
        """Seconds that this rank has waited since the last call."""
        seconds, self._seconds_waiting = self._seconds_waiting, 0.0
        return seconds

    def _take_next(self) -> tuple[StreamItems | None, int]:
        """The next answer, or none when this rank was asked to stop or has lost the controller."""
        reference = self._next
        if self._rank == 0 and not self.client.cluster.is_ready(reference):
            # Only now are the ranks idle, which go in step: a round may go out that is not full.
            self.client.controller.hungry.remote(self.client.run, self._index)
        try:
            items = self._wait_while_it_moves(reference)
            if items is not None:
                items = tuple(map(self._with_payloads, items))
        except (ProcessLostError, ClusterError) as error:  # its process, or what its node held
            self._loss = str(error)
            return None, LOST
        return (None, STOP) if self._stop.is_set() else (items, READY)

    def _with_payloads(self, item: StreamItem) -> StreamItem:
        """The item with what its teachers said, fetched before this rank agrees to train it."""
        if not isinstance(item, Minibatch) or not any(sample.tickets for sample in item.samples):
            return item
        return self._fetched(item, self._index)

    def _fetched(self, item: Minibatch, index: int) -> Minibatch:
        return fetch_payloads(
            item,
            self.client,
            rank=self._rank,
            index=index,
            timeout_s=self._stall_timeout_s,
            teachers=self._teachers,
        )

    def _by_express(self, items: StreamItems) -> StreamItems:
        """Items that all ranks have agreed to, with what comes straight from teachers; collective.

        Raises `RunLost` on every rank when it must come by tickets, and one rank gets none.
        """
        if self._express is None:
            return items
        first, *others = items
        if isinstance(first, Minibatch):
            first = self._express.fill(first) or self._by_tickets(first)
        if isinstance((first, *others)[-1], EndOfStep):
            self._express.step_ended()
        return (first, *others)

    def _by_tickets(self, item: Minibatch) -> Minibatch:
        proposal = READY
        try:
            item = self._fetched(item, self._index - 1)
        except (ProcessLostError, ClusterError) as error:
            self._loss, proposal = str(error), LOST
        if self._agree(proposal) == LOST:
            raise RunLost(self._loss)
        return item

    def _wait_while_it_moves(self, reference: Awaitable[StreamItems]) -> StreamItems | None:
        """The answer; None when this rank is asked to stop before it comes."""
        standstill = Standstill(self.client, timeout_s=self._stall_timeout_s)
        while not self._stop.is_set():
            if self.client.cluster.is_ready(reference, within_s=POLL_INTERVAL_S):
                return self.client.wait(reference, timeout_s=deadlines.STATUS_S)
            standstill.check()
        return None


logger = logging.getLogger(__name__)


def fetch_payloads(
    item: Minibatch,
    client: RunClient,
    *,
    rank: int,
    index: int,
    timeout_s: float,
    teachers: Sequence[str],
) -> Minibatch:
    """Item `index` of the rank with what its tickets stand for.

    Tickets that it lacks are asked for first. `teachers` are roles, in the order of
    `teacher.index`; `timeout_s` is that of scoring again.
    Raises `WorkerError` when payloads are lost again and again.
    """
    if without := [sample.key for sample in item.samples if not sample.tickets]:
        item = _made_again(client, rank, index, without, timeout_s)
    for _ in range(MAX_LOSSES):
        tickets = [sample.tickets[0] for sample in item.samples]
        references = [ticket.reference[0] for ticket in tickets]
        found = client.cluster.fetch(references, timeout_s=deadlines.PAYLOADS_FETCHED_S, owner=WHO)
        lost = [s.key for s, arrays in zip(item.samples, found, strict=True) if arrays is None]
        if not lost:
            whole = [arrays for arrays in found if arrays is not None]
            return with_payloads(item, whole, teachers=teachers)
        item = _made_again(client, rank, index, lost, timeout_s)
    raise WorkerError(
        f"what teachers said of minibatch {index} was lost {MAX_LOSSES} times: look at the memory "
        "of the teachers' object stores"
    )


def with_payloads(
    item: Minibatch, found: Sequence[Arrays], *, teachers: Sequence[str]
) -> Minibatch:
    """The minibatch with the arrays of each of its samples among the scores.

    Hidden states and logits of several teachers are filled up with zeros to one width, which no
    divergence reads.
    """
    widest: dict[str, int] = {}
    for arrays in found:
        for name, array in arrays.items():
            if array.ndim > 1:
                widest[name] = max(widest.get(name, 0), array.shape[1])
    samples = [
        replace(
            sample, tickets=(), scores={**sample.scores, **_scores(sample, own, widest, teachers)}
        )
        for sample, own in zip(item.samples, found, strict=True)
    ]
    return replace(item, samples=tuple(samples))


def _scores(
    sample: Sample, arrays: Arrays, widest: Mapping[str, int], teachers: Sequence[str]
) -> dict[str, NDArray[np.generic]]:
    scores = {f"{TEACHER}.{name}": _filled(a, widest.get(name)) for name, a in arrays.items()}
    if len(teachers) > 1:
        (row,) = sample.episode.rows
        number = teachers.index(sample.tickets[0].teacher)
        scores[f"{TEACHER}.index"] = np.full(len(row.token_ids), number, np.int32)
    return scores


def _filled(array: NDArray[np.generic], width: int | None) -> NDArray[np.generic]:
    """[L] or [L, width]; bfloat16, which came as its bits, is float32."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if width is None or array.shape[1] == width:
        return array
    return np.pad(array, ((0, 0), (0, width - array.shape[1])))


def _made_again(
    client: RunClient, rank: int, index: int, lost: Sequence[RowKey], timeout_s: float
) -> Minibatch:
    logger.warning("the payloads of %d samples are lost, and asked for again", len(lost))
    taught_again = client.controller.taught_again
    return client.answer(timeout_s, taught_again, client.run, rank, index, lost)


class Standstill:
    """When a rank that waits for the controller gives up: nothing has moved, anywhere, too long.

    For one wait. An output of any length moves: workers tell of its tokens while they come.
    """

    def __init__(self, client: RunClient, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._look_at = time.monotonic() + timeout_s
        self._before: PipelineStatus | None = None

    def check(self) -> None:
        """Raise `DeadlineError` when no answer and no token has come between two looks."""
        if time.monotonic() < self._look_at:
            return
        client = self._client
        now = client.answer(deadlines.STATUS_S, client.controller.status, client.run)
        if self._before is not None and now.moves == self._before.moves:
            raise DeadlineError(
                f"nothing has moved for --stall-timeout-s {self._timeout_s:g}: {_describe(now)}"
            )
        self._before, self._look_at = now, time.monotonic() + self._timeout_s


def _describe(status: PipelineStatus) -> str:
    if status.problem:
        return str(status.problem)
    return (
        f"{status.generating} samples generating, {status.verifying} verifying, "
        f"{status.in_reference} in reference, {status.ready} ready; workers: "
        f"{dict(status.workers)}"
    )
