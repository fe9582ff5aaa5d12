"""A rank's end of the run's stream: fetches one answer ahead, and measures the waiting.

consumes:     answers with minibatches and ends of steps, by index
produces:     the items of these, in order, as an iterator that ends on every rank at the same item
waits for:    the controller, as long as anything moves; else it names what was waited for
unblocked by: a round going out, a request to stop, the controller's loss
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any

import ray

from async_grpo.cluster import cluster
from async_grpo.training.express import Express
from async_grpo.training.payloads import fetch_payloads
from async_grpo.training.standstill import Standstill
from async_grpo.types import EndOfStep, Minibatch, StreamItem, StreamItems
from async_grpo.util import deadlines
from async_grpo.util.errors import ClusterError, ProcessLostError, RunLost

if TYPE_CHECKING:
    from async_grpo.controller.client import RunClient

POLL_INTERVAL_S = 0.5  # after which a rank that waits looks whether it is to stop
READY, STOP, LOST = range(3)  # what a rank proposes to the others for its next answer


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
        self._next = client.next_items(rank, 0)
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
        self._next = self.client.next_items(self._rank, self._index)
        items = self._by_express(items)
        self._seconds_waiting += time.monotonic() - started
        self._items.extend(items)
        return self._items.popleft()

    def take_seconds_waiting(self) -> float:
        """Seconds that this rank has waited since the last call."""
        seconds, self._seconds_waiting = self._seconds_waiting, 0.0
        return seconds

    def _take_next(self) -> tuple[StreamItems | None, int]:
        """The next answer, or none when this rank was asked to stop or has lost the controller."""
        reference = self._next
        if self._rank == 0 and not ray.wait([reference], timeout=0)[0]:
            # Only now are the ranks idle, which go in step: a round may go out that is not full.
            self.client.hungry(self._index)
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

    def _wait_while_it_moves(self, reference: Any) -> StreamItems | None:
        """The answer; None when this rank is asked to stop before it comes."""
        standstill = Standstill(self.client, timeout_s=self._stall_timeout_s)
        while not self._stop.is_set():
            if ray.wait([reference], timeout=POLL_INTERVAL_S)[0]:
                items: StreamItems = cluster.wait(
                    reference, timeout_s=deadlines.STATUS_S, who="the controller"
                )
                return items
            standstill.check()
        return None
