"""Time that jumps to whatever happens next, and the two kinds of things that take it."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Runs actions in order of their time; those of one moment in the order of their planning.

    >>> clock, seen = Clock(), []
    >>> clock.at(2.0, lambda: seen.append(clock.now_s))
    >>> clock.at(1.0, lambda: seen.append(clock.now_s))
    >>> clock.run(until=lambda: False)
    >>> seen
    [1.0, 2.0]
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._planned: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def at(self, time_s: float, action: Action) -> None:
        heapq.heappush(self._planned, (time_s, next(self._order), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now_s + seconds, action)

    def run(self, *, until: Callable[[], bool]) -> None:
        """Until that is so, or nothing is planned any more."""
        while self._planned and not until():
            self.now_s, _, action = heapq.heappop(self._planned)
            self.num_events += 1
            action()


class Runner:
    """Does one piece of work at a time, at a speed that may change meanwhile."""

    def __init__(
        self, clock: Clock, *, on_busy: Callable[[bool], None] = lambda busy: None
    ) -> None:
        self._clock = clock
        self._on_busy = on_busy
        self._speed = 1.0
        self._left_s = 0.0  # of the work, at full speed
        self._since_s = 0.0
        self._plan = 0  # whatever was planned before the last change does not count
        self._done: Action | None = None
        self.worked_s = 0.0  # at full speed: what the work needed, not how long it took

    @property
    def is_busy(self) -> bool:
        return self._done is not None

    def start(self, seconds: float, done: Action) -> None:
        """Work for `seconds` at full speed, then tell."""
        self._left_s, self._since_s, self._done = seconds, self._clock.now_s, done
        self.worked_s += seconds
        self._on_busy(True)
        self._replan()

    def set_speed(self, speed: float) -> None:
        """Share of a core, or whatever the work runs on, from now on."""
        if speed == self._speed:
            return
        if self.is_busy:
            self._left_s -= (self._clock.now_s - self._since_s) * self._speed
            self._since_s = self._clock.now_s
        self._speed = speed
        if self.is_busy:
            self._replan()

    def _replan(self) -> None:
        self._plan += 1
        plan = self._plan
        self._clock.after(max(self._left_s, 0.0) / self._speed, lambda: self._finish(plan))

    def _finish(self, plan: int) -> None:
        if plan != self._plan or self._done is None:
            return
        done, self._done = self._done, None
        self._on_busy(False)
        done()


class Actor:
    """A process that serves one call after the other: an actor's event loop."""

    def __init__(
        self, clock: Clock, *, on_busy: Callable[[bool], None] = lambda busy: None
    ) -> None:
        self.runner = Runner(clock, on_busy=on_busy)
        self._line: deque[tuple[float, Action]] = deque()
        self.num_calls = 0
        self.longest_line = 0

    def call(self, seconds: float, done: Action) -> None:
        """`done` when its turn has come and `seconds` of the process have been spent on it."""
        self._line.append((seconds, done))
        self.num_calls += 1
        self.longest_line = max(self.longest_line, len(self._line))
        if not self.runner.is_busy:
            self._next()

    def _next(self) -> None:
        seconds, done = self._line.popleft()

        def finished() -> None:
            done()
            if self._line and not self.runner.is_busy:
                self._next()

        self.runner.start(seconds, finished)


class Slots:
    """Processes that share one line: verifiers."""

    def __init__(self, clock: Clock, number: int) -> None:
        self._clock = clock
        self._free_at = [0.0] * number
        self.worked_s = 0.0
        self.number = number

    def do(self, num_pieces: int, *, seconds: float, done: Action) -> None:
        """Each piece on whichever slot is free first; `done` with the last of them."""
        end = self._clock.now_s
        for _ in range(num_pieces):
            start = max(self._clock.now_s, self._free_at[0])
            heapq.heapreplace(self._free_at, start + seconds)
            end = max(end, start + seconds)
        self.worked_s += num_pieces * seconds
        self._clock.at(end, done)
