"""A sampled run's minibatches on every rank, over all losses of the controller."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

from async_grpo.checkpoint.resume import Start
from async_grpo.config.train import TrainConfig
from async_grpo.errors import RunLost
from async_grpo.run.main_rank import MainRank, OtherRank
from async_grpo.run.weights import Weights
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Ranks
from async_grpo.training.stream import RankStream
from async_grpo.types import EndOfStep, StreamItem


class SampledData(Iterator[StreamItem]):
    """What a rank trains, and what it does for it: publish weights, evaluate, recover.

    Every rank has one; each gradient step that is ended was begun under the same epoch of the run.
    """

    def __init__(
        self, config: TrainConfig, ranks: Ranks, learner: Learner, main: MainRank | OtherRank,
        stop: Event,
    ) -> None:  # fmt: skip
        self._config = config
        self._ranks = ranks
        self._learner = learner
        self._main = main
        self._stop = stop
        self._weights = Weights(learner, main)
        self._stream: RankStream | None = None
        self.references_to_save = main.references_to_save

    @property
    def is_stopped(self) -> bool:
        """Whether the ranks have agreed to end before the run is trained."""
        return self._stream is not None and self._stream.is_stopped

    def __next__(self) -> StreamItem:
        while True:
            stream = self._stream or self._open()
            try:
                item = next(stream)
            except RunLost as error:
                self._recover(stream, str(error))
                continue
            finally:
                self._main.report.stood_still("seconds_waiting", stream.take_seconds_waiting())
            if isinstance(item, EndOfStep):
                self._main.step_agreed(item)
            return item

    def restore(self, start: Start) -> None:
        """Restore what the reference serves; collective, before the learner is restored."""
        self._weights.restore_references(start)

    def publish(self, num_batches: int) -> float:
        """Publish the policy after `num_batches` batches; returns the seconds it stood still."""
        self._main.report.doing("publishing weights")
        return self._weights.publish(num_batches)

    def evaluate(self) -> None:
        """Have the held-out questions graded, if there are any; collective."""
        if self._config.eval_data_path:
            self._main.evaluate(self._ranks, self._stop)

    def finish(self) -> None:
        """Return when the last weights are served."""
        self._main.wait_announced()

    def _open(self) -> RankStream:
        self._stream = RankStream(
            self._main.connect(self._ranks),
            rank=self._ranks.rank,
            stall_timeout_s=self._config.stall_timeout_s,
            agree=self._ranks.agree,
            stop=self._stop,
        )
        return self._stream

    def _recover(self, stream: RankStream, reason: str) -> None:
        """All ranks have lost the run before the same item."""
        self._learner.discard()
        self._ranks.on_main(lambda: self._main.recover(stream.client, reason))
        self._stream = None
