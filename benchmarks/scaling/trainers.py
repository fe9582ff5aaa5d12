"""The trainer's ranks: rounds in lock step, the step's end, and new weights behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from async_grpo.batching.packing import Item
from async_grpo.batching.rounds import Round, StepMarker
from benchmarks.scaling.clock import Clock, Runner
from benchmarks.scaling.rounds import Formed, Rounds
from benchmarks.scaling.scenario import Scenario


@dataclass(slots=True)
class TrainerBooks:
    """Seconds and counts since the start of the run."""

    computing_s: float = 0.0  # in rounds: as long as the slowest rank
    useful_s: float = 0.0  # of an average rank in these: the rest is imbalance
    gathering_s: float = 0.0
    waiting_for_sync_s: float = 0.0  # the publication before was not through
    num_rounds: int = 0
    num_samples: int = 0
    num_tokens: int = 0


class Trainers:
    """Trains whatever comes, one item ahead of what it computes."""

    def __init__(
        self,
        clock: Clock,
        scenario: Scenario,
        *,
        trained: Callable[[Sequence[Item]], None],
        publish: Callable[[int], None],
        on_busy: Callable[[bool], None],
    ) -> None:
        """`trained` hears of the samples of a round, `publish` of batches that are completed."""
        self._clock = clock
        self._scenario = scenario
        self._trained = trained
        self._publish = publish
        self.runner = Runner(clock, on_busy=on_busy)
        self.rounds: Rounds | None = None
        self.books = TrainerBooks()
        self._next: Formed | None = None
        self._is_idle = True
        self._is_publishing = False
        self._batches = 0  # completed
        self._blocked_since_s: float | None = None

    def receive(self, formed: Formed) -> None:
        """The item that was asked for."""
        self._next = formed
        if self._is_idle:
            self._go_on()

    def start(self) -> None:
        """The ranks are there, and have nothing to do yet."""
        self._stream.hunger()

    def published(self) -> None:
        """The weights that were published last are served everywhere."""
        self._is_publishing = False
        if self._blocked_since_s is not None:
            self.books.waiting_for_sync_s += self._clock.now_s - self._blocked_since_s
            self._blocked_since_s = None
            self._gather()

    @property
    def _stream(self) -> Rounds:
        assert self.rounds is not None, "rounds and trainers know each other"
        return self.rounds

    def _go_on(self) -> None:
        formed, self._next = self._next, None
        if formed is None:
            self._is_idle = True
            self._stream.hunger()
            return
        self._is_idle = False
        self._stream.ask()
        if all(isinstance(one, StepMarker) for one in formed):
            self.runner.start(self._scenario.trainer.step_s, self._end_batch)
        else:
            self.runner.start(self._seconds_of(formed), self._go_on)

    def _seconds_of(self, formed: Formed) -> float:
        bins = [
            items for one in formed if isinstance(one, Round) for items in self._stream.take(one)
        ]
        rates, books = self._scenario.trainer, self.books
        costs = [sum(item.cost for item in items) for items in bins]
        slowest_s = max(costs) / rates.cost_per_second
        samples = [item for items in bins for item in items]
        seconds = rates.round_overhead_s + max(slowest_s, rates.round_floor_s)
        books.computing_s += seconds
        books.useful_s += sum(costs) / self._scenario.num_ranks / rates.cost_per_second
        books.num_rounds += 1
        books.num_samples += len(samples)
        books.num_tokens += sum(item.num_tokens for item in samples)
        self._trained(samples)
        return seconds

    def _end_batch(self) -> None:
        self._batches += 1
        if self._is_publishing:
            self._blocked_since_s = self._clock.now_s
        else:
            self._gather()

    def _gather(self) -> None:
        self._is_publishing = True
        self.books.gathering_s += self._scenario.sync.gather_s

        def gathered() -> None:
            self._publish(self._batches)
            self._go_on()

        self.runner.start(self._scenario.sync.gather_s, gathered)
