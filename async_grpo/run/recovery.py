"""The batcher's process may die: it is made anew, and the step that it leaves unfinished redone.

consumes:     the streams of one batcher after the other
produces:     one stream, in which each gradient step that is ended was begun by the same batcher
waits for:    the announcement that is on its way, then a new batcher in the old one's place
unblocked by: Ray, which gives back a dead actor's name

What a new batcher starts from is the latest `EndOfStep.resume`, given to rank 0 alone. Samples
that the dead one had admitted after it are known to nobody: they are admitted again, and counted
once; those that it had finished of later steps by then are `discarded: restart`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

from async_grpo import cluster, deadlines
from async_grpo.batching.records import EvaluationResult
from async_grpo.config.train import TrainConfig
from async_grpo.errors import BatcherLostError, ClusterError, ProcessLostError
from async_grpo.run.preparation import Run
from async_grpo.run.weights import WeightSync
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Ranks
from async_grpo.training.standstill import Standstill
from async_grpo.training.stream import RankStream
from async_grpo.types import EndOfStep, ResumePoint, StreamItem

logger = logging.getLogger(__name__)
MAX_BATCHER_RESTARTS = 3  # a run
STOP_POLL_S = 0.2
MEANWHILE_S = 60.0  # much less than any rank waits for another
FIND_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.5


class BatcherKeeper:
    """Rank 0's: has the run go on with another batcher, as often as the run allows."""

    def __init__(self, run: Run, sync: WeightSync, on_restart: Callable[[], None], /) -> None:
        self.run = run
        self._sync = sync
        self._on_restart = on_restart
        self._resume: ResumePoint | None = None
        self._num_restarts = 0

    @property
    def batcher(self) -> Any:
        """The batcher of this moment."""
        return self.run.batcher

    def step_ended(self, resume: ResumePoint | None) -> None:
        """A gradient step has been trained: a new batcher would begin with the next one."""
        self._resume = resume

    def evaluate(
        self, *, stall_timeout_s: float, stop: Event, meanwhile: Callable[[], object]
    ) -> EvaluationResult | None:
        """The batcher's answer; asked again of the next batcher when this one dies meanwhile.

        None when the run is asked to stop before it has come. `meanwhile` is called every minute.
        """
        while True:
            batcher = self.batcher
            call = batcher.evaluate.remote()
            standstill = Standstill(batcher, timeout_s=stall_timeout_s)
            try:
                return self._answer_or_stop(call, standstill, stop, meanwhile)
            except ProcessLostError as error:
                self.replace(batcher, str(error))

    def _answer_or_stop(
        self, call: Any, standstill: Standstill, stop: Event, meanwhile: Callable[[], object]
    ) -> EvaluationResult | None:
        due_at = time.monotonic() + MEANWHILE_S
        while not cluster.is_ready(call):
            if stop.wait(STOP_POLL_S):
                return None
            standstill.check()
            if time.monotonic() >= due_at:
                meanwhile()
                due_at = time.monotonic() + MEANWHILE_S
        result: EvaluationResult = cluster.wait(
            call, timeout_s=deadlines.STATUS_S, who="the evaluation of held-out questions"
        )
        return result

    def replace(self, dead: Any, reason: str) -> None:
        """Make a batcher in the place of `dead`, unless that has been done.

        Raises `ClusterError` when the batchers of this run have died too often.
        """
        if self.run.batcher is not dead:
            return
        if self._num_restarts == MAX_BATCHER_RESTARTS:
            raise ClusterError(
                f"the experience batcher died {MAX_BATCHER_RESTARTS + 1} times in this run, the "
                f"last time: {reason}; look at the memory of rank 0's machine"
            )
        self._num_restarts += 1
        logger.warning("%s: its unfinished gradient step is done again", reason)
        self._sync.wait()  # a version on its way is told to nobody else
        self.run.restart_batcher(self._resume)
        self._sync.tell_batcher()
        self._on_restart()


class LastingStream(Iterator[StreamItem]):
    """A rank's stream over the deaths of batchers; every rank must have one."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        *,
        learner: Learner,
        keeper: BatcherKeeper | None,
        stop: Event | None = None,
    ) -> None:
        """`keeper`: on rank 0 alone."""
        self._config = config
        self._ranks = ranks
        self._learner = learner
        self._keeper = keeper
        self._stop = stop
        self._seconds_waited = 0.0  # for batchers that have died
        self._batcher, self._stream = self._open()

    @property
    def is_stopped(self) -> bool:
        return self._stream.is_stopped

    def __next__(self) -> StreamItem:
        while True:
            try:
                item = next(self._stream)
            except BatcherLostError as error:
                self._recover(str(error))
            else:
                if self._keeper is not None and isinstance(item, EndOfStep):
                    self._keeper.step_ended(item.resume)
                return item

    def take_seconds_waiting(self) -> float:
        """Seconds that this rank has waited since the last call."""
        seconds, self._seconds_waited = self._seconds_waited, 0.0
        return seconds + self._stream.take_seconds_waiting()

    def _recover(self, reason: str) -> None:
        """Collective: all ranks have lost the batcher before the same item."""
        self._seconds_waited += self._stream.take_seconds_waiting()
        self._learner.discard()
        keeper, dead = self._keeper, self._batcher
        self._ranks.on_main(lambda: keeper.replace(dead, reason) if keeper else None)
        self._batcher, self._stream = self._open()

    def _open(self) -> tuple[Any, RankStream]:
        """Collective: a rank that took a dead batcher for rank 0's would hold up the others."""
        keeper = self._keeper
        actor_id = self._ranks.share(lambda: _actor_id(keeper.batcher) if keeper else "")
        batcher = keeper.batcher if keeper else find_batcher(actor_id)
        stream = RankStream(
            batcher,
            rank=self._ranks.rank,
            stall_timeout_s=self._config.stall_timeout_s,
            agree=self._ranks.agree,
            stop=self._stop,
        )
        return batcher, stream


def find_batcher(actor_id: str) -> Any:
    """The run's batcher, for a rank that did not make it."""
    deadline = time.monotonic() + FIND_TIMEOUT_S
    while time.monotonic() < deadline:
        batcher = cluster.find_actor(cluster.BATCHER)
        if batcher is not None and _actor_id(batcher) == actor_id:
            return batcher
        time.sleep(POLL_INTERVAL_S)
    raise ClusterError("rank 0's experience batcher has gone: look at rank 0's error")


def _actor_id(batcher: Any) -> str:
    return str(batcher._actor_id.hex())
