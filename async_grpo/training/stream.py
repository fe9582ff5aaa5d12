"""A rank's end of the run's stream: asks for one answer ahead, and measures how long it waits.

consumes:     the controller's answers, by index: minibatches and ends of steps; the payloads that
              their tickets refer to
produces:     these items in order, as an iterator that ends at the same item on every rank;
              payloads become scores: `teacher.ids` and so on
waits for:    the controller, until nothing has moved for --stall-timeout-s; the object stores of
              the teachers' nodes
unblocked by: a round that goes out, a request to stop, the loss of the controller; payloads, or
              their loss: then the controller has them computed again
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from threading import Event
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from async_grpo.cluster.handles import WHO, RunClient
from async_grpo.config.roles import TEACHER
from async_grpo.training.minibatch_codec import TOO_LARGE
from async_grpo.types import (
    Arrays,
    EndOfStep,
    Minibatch,
    PipelineStatus,
    Sample,
    StreamItem,
    StreamItems,
)
from async_grpo.util import deadlines, errors

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.5  # between two checks of a waiting rank whether it must stop
READY, STOP, LOST = range(3)  # what a rank proposes to the others; the largest is agreed
MAX_LOSSES = 5  # of payloads of one minibatch
GONE = (errors.ProcessLostError, errors.ClusterError)  # a process, or what its node held


class Express(Protocol):
    """Adds a teacher's logits to minibatches without the object store: `ExpressReceiver`."""

    def fill(self, item: Minibatch) -> Minibatch | None:
        """The minibatch with its logits, or None on every rank: use tickets; collective."""
        ...

    def step_ended(self) -> None:
        """Called on every rank when a gradient step has ended; a new group may then be formed."""
        ...


class RankStream(Iterator[StreamItem]):
    """Iterates over a rank's items; all ranks get as many, in the same order.

    Ends on every rank when any has been asked to stop. Raises `RunLost` on every rank when one has
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
        """`agree` is `Ranks.agree`; the default is for a single rank.

        `teachers`: roles of the teachers whose payloads come by tickets or by `express`.
        """
        self._express = express
        self._teachers = teachers
        self.client = client
        self._rank = rank
        self._stall_timeout_s = stall_timeout_s
        self._agree = agree
        self._stop = stop or Event()
        self._index = 0
        self._next = self._ask()
        self._items: deque[StreamItem] = deque()  # of the latest answer, which all ranks have
        self._seconds_waiting = 0.0
        self._loss = "the controller is lost"  # unless this rank knows the cause
        self.is_stopped = False

    def __next__(self) -> StreamItem:
        if self._items:  # the end of a step, right behind its last minibatch
            return self._items.popleft()
        started = time.monotonic()
        items, proposal = self._take_next()
        agreed = self._agree(proposal)
        if agreed == LOST:
            raise errors.RunLost(self._loss)
        if agreed == STOP or items is None:
            self.is_stopped = True
            self._stop.set()  # also on ranks that were not asked to stop
            raise StopIteration
        self._index += 1
        self._next = self._ask()
        items = self._by_express(items)
        self._seconds_waiting += time.monotonic() - started
        self._items.extend(items)
        return self._items.popleft()

    def _ask(self) -> Awaitable[StreamItems]:
        """Request the answer `_index`."""
        client = self.client
        return client.controller.next_items.remote(client.run, self._rank, self._index)

    def take_seconds_waiting(self) -> float:
        """Seconds that this rank has waited since the last call."""
        seconds, self._seconds_waiting = self._seconds_waiting, 0.0
        return seconds

    def _take_next(self) -> tuple[StreamItems | None, int]:
        """The next answer and what this rank proposes: READY, or STOP or LOST without an answer."""
        reference = self._next
        if self._rank == 0 and not self.client.cluster.is_ready(reference):
            # Ranks go in step, so all are idle: the controller may send a round that is not full.
            self.client.controller.hungry.remote(self.client.run, self._index)
        try:
            items = self._wait(reference)
            if items is not None:
                items = tuple(map(self._with_payloads, items))
        except GONE as error:
            self._loss = str(error)
            return None, LOST
        return (None, STOP) if self._stop.is_set() else (items, READY)

    def _with_payloads(self, item: StreamItem) -> StreamItem:
        """The item with its payloads, which are fetched before this rank agrees to train it."""
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
        """The agreed items with the logits that come by express; collective.

        Raises `RunLost` on every rank when they must come by tickets and a rank does not get them.
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
        except GONE as error:
            self._loss, proposal = str(error), LOST
        if self._agree(proposal) == LOST:
            raise errors.RunLost(self._loss)
        return item

    def _wait(self, reference: Awaitable[StreamItems]) -> StreamItems | None:
        """The answer; None when this rank is asked to stop before it comes."""
        standstill = Standstill(self.client, timeout_s=self._stall_timeout_s)
        while not self._stop.is_set():
            if self.client.cluster.is_ready(reference, within_s=POLL_INTERVAL_S):
                return self.client.wait(reference, timeout_s=deadlines.STATUS_S)
            standstill.check()
        return None


def fetch_payloads(
    item: Minibatch,
    client: RunClient,
    *,
    rank: int,
    index: int,
    timeout_s: float,
    teachers: Sequence[str],
) -> Minibatch:
    """Item `index` of the rank with the payloads that its tickets refer to.

    The controller is asked to have payloads scored again that are lost, or have no ticket, within
    `timeout_s`. `teachers` are roles, in the order of `teacher.index`. Raises `WorkerError` when
    payloads are lost `MAX_LOSSES` times.
    """
    lost = [sample.key for sample in item.samples if not sample.tickets]
    for _ in range(MAX_LOSSES):
        if lost:
            logger.warning("the payloads of %d samples are lost, and asked for again", len(lost))
            taught_again = client.controller.taught_again
            item = client.answer(timeout_s, taught_again, client.run, rank, index, lost)
        references = [sample.tickets[0].reference[0] for sample in item.samples]
        found = client.cluster.fetch(references, timeout_s=deadlines.PAYLOADS_FETCHED_S, owner=WHO)
        lost = [s.key for s, arrays in zip(item.samples, found, strict=True) if arrays is None]
        if not lost:
            whole = [arrays for arrays in found if arrays is not None]
            return with_payloads(item, whole, teachers=teachers)
    raise errors.WorkerError(
        f"what teachers said of minibatch {index} was lost {MAX_LOSSES} times: look at the memory "
        "of the teachers' object stores"
    )


def with_payloads(
    item: Minibatch, found: Sequence[Arrays], *, teachers: Sequence[str]
) -> Minibatch:
    """The minibatch whose samples have the arrays `found`, one set each, among their scores.

    Hidden states and logits are its `dense` ones.
    """
    large = [name for name in TOO_LARGE if found and _own(name) in found[0]]
    samples = [
        replace(sample, tickets=(), scores={**sample.scores, **_scores(sample, own, teachers)})
        for sample, own in zip(item.samples, found, strict=True)
    ]
    dense = {name: _dense(samples, [arrays[_own(name)] for arrays in found]) for name in large}
    return replace(item, samples=tuple(samples), dense=dense)


def _own(name: str) -> str:
    return name.removeprefix(f"{TEACHER}.")


def _scores(
    sample: Sample, arrays: Arrays, teachers: Sequence[str]
) -> dict[str, NDArray[np.generic]]:
    named = {f"{TEACHER}.{name}": array for name, array in arrays.items()}
    scores = {name: array for name, array in named.items() if name not in TOO_LARGE}
    if len(teachers) > 1:
        (row,) = sample.episode.rows
        number = teachers.index(sample.tickets[0].teacher)
        scores[f"{TEACHER}.index"] = np.full(len(row.token_ids), number, np.int32)
    return scores


def _dense(samples: Sequence[Sample], arrays: Sequence[NDArray[np.generic]]) -> Tensor:
    """[N, K] out of [L, K] for each sample; uint16 holds the bits of bfloat16.

    Those of narrower teachers are padded with zeros, which no divergence reads.
    """
    widest, parts = max(array.shape[1] for array in arrays), []
    for sample, array in zip(samples, arrays, strict=True):
        (row,) = sample.episode.rows
        rows = torch.from_numpy(array[np.flatnonzero(row.loss_mask)])
        rows = rows.view(torch.bfloat16) if array.dtype == np.uint16 else rows
        parts.append(pad(rows, (0, widest - rows.shape[1])))
    return torch.cat(parts)


class Standstill:
    """Ends one wait of a rank for the controller when nothing has moved for `timeout_s`.

    Workers report the tokens of an unfinished output, so that a long one counts as moving.
    """

    def __init__(self, client: RunClient, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._due = time.monotonic() + timeout_s
        self._before: PipelineStatus | None = None

    def check(self) -> None:
        """Raise `DeadlineError` when the status, asked every `timeout_s`, shows no progress."""
        if time.monotonic() < self._due:
            return
        client = self._client
        now = client.answer(deadlines.STATUS_S, client.controller.status, client.run)
        if self._before is not None and now.moves == self._before.moves:
            raise errors.DeadlineError(
                f"nothing has moved for --stall-timeout-s {self._timeout_s:g}: {_describe(now)}"
            )
        self._before, self._due = now, time.monotonic() + self._timeout_s


def _describe(status: PipelineStatus) -> str:
    if status.problem:
        return str(status.problem)
    return (
        f"{status.generating} samples generating, {status.verifying} verifying, "
        f"{status.in_reference} in reference, {status.ready} ready; workers: "
        f"{dict(status.workers)}"
    )
