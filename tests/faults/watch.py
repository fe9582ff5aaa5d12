"""What a run makes of a fault: when something noticed, when it went on, when it was whole again."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import procfs
from faults.live import LiveRun
from faults.roles import cast

POLL_INTERVAL_S = 0.1
BATCHER_RESTARTS = 3  # of one trainer: the next death is meant to end it
TELLING = re.compile(
    r"fenc|died|dead|\blost\b|kill|fail|restart|revok|reach|respawn|error|exclu|again|ended|exit|"
    r"interrupt|SIGTERM|stopp|replac|answer",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Sight:
    """Seconds from the fault to each event; None: it did not happen."""

    detected_s: float | None = None
    by: str = ""  # what noticed first
    goes_on_s: float | None = None  # the first batch admitted after the fault was trained
    whole_s: float | None = None  # every role is played by as many as before
    ended_s: float | None = None  # all processes of the trainer
    stood_still_s: float = 0.0  # the longest time between two batches


class Watch:
    """Made just before the fault; `look` as often as possible after it."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._before = cast(run)
        self._trainer = run.family_of("trainer")
        self._members = run.probe.status().get("workers", {})
        self._log_sizes = {log: _size(log) for log in run.logs()}
        self._num_rows = len(run.rows())
        rows = run.rows()
        restarts = rows[-1].get("batcher_restarts", 0) if rows else 0
        self.is_batcher_budget_spent = restarts >= BATCHER_RESTARTS
        self.sight = Sight()
        self.begin()

    def begin(self) -> None:
        """The fault happens now."""
        self._at = self._last_row_at = time.monotonic()
        self._rows_then = self._num_rows = len(self._run.rows())

    @property
    def before(self) -> Mapping[str, list[int]]:
        """Who played which role."""
        return self._before

    def expects(self, members: Mapping[str, int], players: Mapping[str, int]) -> None:
        """Whole is now something else, since somebody joins or leaves."""
        self._members = {role: n + members.get(role, 0) for role, n in self._members.items()}
        for role, change in players.items():
            names = self._before[role]
            self._before[role] = names + [0] * change if change > 0 else names[:change]

    def look(self, *, is_frozen: bool = False) -> Sight:
        """Bring the sight up to date; nobody is whole while a process is frozen unnoticed."""
        now, sight = time.monotonic() - self._at, self.sight
        self._look_at_rows(now)
        if sight.ended_s is None and not any(map(procfs.is_running, self._trainer)):
            sight.ended_s, sight.goes_on_s = now, None  # another trainer has to get further
            self._rows_then = len(self._run.rows())
        players = cast(self._run)
        if sight.detected_s is None:
            sight.by = self._who_noticed(players)
            sight.detected_s = now if sight.by else None
        may_be_whole = sight.detected_s is not None or not is_frozen
        if not (may_be_whole and self._is_whole(players)):
            sight.whole_s = None
        elif sight.whole_s is None:
            sight.whole_s = now
        return sight

    def _look_at_rows(self, now: float) -> None:
        number = len(self._run.rows())
        gap = time.monotonic() - self._last_row_at
        self.sight.stood_still_s = max(self.sight.stood_still_s, gap)
        if number > self._num_rows:
            self._num_rows, self._last_row_at = number, time.monotonic()
        # Up to S + 1 batches were in the window when it happened; the next was admitted later.
        needed = self._rows_then + self._run.shape.work.max_staleness + 2
        if self.sight.goes_on_s is None and number >= needed:
            self.sight.goes_on_s = now

    def _who_noticed(self, players: Mapping[str, list[int]]) -> str:
        if self.sight.ended_s is not None:
            return "the trainer ended"
        for log in self._run.logs():
            start = self._log_sizes.get(log, 0)
            if _size(log) > start:
                for line in _tail(log, start).splitlines():
                    if TELLING.search(line):
                        return f"{log.name.split('-')[0].split('.')[0]} log: {line.strip()[:160]}"
        for role, pids in players.items():
            if set(pids) - set(self._before.get(role, [])):
                return f"a new {role}"
        return ""

    def _is_whole(self, players: Mapping[str, list[int]]) -> bool:
        if any(len(players.get(role, [])) != len(pids) for role, pids in self._before.items()):
            return False
        return bool(self._run.probe.status().get("workers") == self._members)


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except FileNotFoundError:
        return 0


def _tail(log: Path, start: int) -> str:
    try:
        with log.open("rb") as file:
            file.seek(start)
            return file.read(1 << 16).decode(errors="replace")
    except FileNotFoundError:
        return ""
