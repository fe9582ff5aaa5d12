"""Raises and clears alarms of a run, from its metrics and its numbers of workers. Pure.

An alarm is raised when its condition has held for a number of steps in a row, and cleared when the
condition has not held for `NUM_CLEAN` steps. A step that lacks the metric changes neither count.
`AlarmLog` writes each change to the run's log and to `alarms.jsonl`, and keeps the active alarms.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from async_grpo.telemetry.alarm_conditions import CONDITIONS, Row
from async_grpo.telemetry.jsonl import JsonlWriter

logger = logging.getLogger(__name__)
ALARMS_FILE = "alarms.jsonl"
NUM_CLEAN = 5  # steps in a row after which an alarm is cleared
NUM_KEPT = 200  # rows that conditions are given
SHRUNK_S = 60.0  # time for workers to restart before their absence is an alarm
SETTLED_S = 3600.0  # after which the smaller number of workers is taken for intended
GROUPS_FAIL = "groups_fail"  # the alarm of every kind of failure


@dataclass(frozen=True, slots=True)
class AlarmChange:
    """An alarm that is raised or cleared."""

    alarm: str  # its name
    is_raised: bool
    sentence: str  # what was wrong when it was raised


@dataclass(slots=True)
class Alarms:
    """The alarms of a run; `active` holds the sentences of those that are raised, by alarm."""

    active: dict[str, str] = field(default_factory=dict)
    _rows: deque[Row] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))
    _held: Counter[str] = field(default_factory=Counter)  # {alarm: steps in a row that it held}
    _clean: Counter[str] = field(default_factory=Counter)  # {alarm: steps in a row that it did not}
    # {role: its usual number of workers, and since when there are fewer}
    _workers: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    _failures: set[str] = field(default_factory=set)  # kinds that have been raised

    def see_row(self, row: Row) -> list[AlarmChange]:
        """Take the metrics of the step that has just ended."""
        self._rows.append(row)
        changes = []
        for name, (num_steps, tell) in CONDITIONS.items():
            sentence = tell(self._rows)
            if sentence is None:
                continue
            self._held[name] = self._held[name] + 1 if sentence else 0
            self._clean[name] = 0 if sentence else self._clean[name] + 1
            if self._held[name] >= num_steps:
                changes += self._raise(name, sentence)
            elif self._clean[name] >= NUM_CLEAN:
                changes += self._clear(name)
        return changes + self._see_failed(row.get("perc_failed_samples"))

    def see_failures(self, failures: Mapping[str, str]) -> list[AlarmChange]:
        """Take why groups were dropped, {kind: sentence}; each kind is raised once in a run."""
        new = {kind: failures[kind] for kind in failures if kind not in self._failures}
        self._failures |= new.keys()
        self._clean[GROUPS_FAIL] = 0 if new else self._clean[GROUPS_FAIL]
        return [change for kind in new for change in self._raise(kind, new[kind], GROUPS_FAIL)]

    def _see_failed(self, share: float | int | None) -> list[AlarmChange]:
        """Clear all kinds when no group has failed for `NUM_CLEAN` steps."""
        self._clean[GROUPS_FAIL] = 0 if share else self._clean[GROUPS_FAIL] + (share is not None)
        if self._clean[GROUPS_FAIL] < NUM_CLEAN:
            return []
        return [change for kind in self._failures for change in self._clear(kind, GROUPS_FAIL)]

    def see_workers(self, workers: Mapping[str, int], *, now_s: float) -> list[AlarmChange]:
        """Take the number of workers by role; times are of one clock."""
        changes = []
        for role in {*self._workers, *workers}:
            name, count = f"fleet_shrank_{role}", workers.get(role, 0)
            usual, shrunk_at_s = self._workers.get(role, (0, None))
            shrunk_at_s = now_s if shrunk_at_s is None else shrunk_at_s
            if count >= usual or now_s - shrunk_at_s >= SETTLED_S:
                self._workers[role] = count, None
                changes += self._clear(name)
            else:
                self._workers[role] = usual, shrunk_at_s
                if now_s - shrunk_at_s >= SHRUNK_S:
                    changes += self._raise(name, _shrunk(role, usual, count))
        return changes

    def _raise(self, name: str, sentence: str, alarm: str = "") -> list[AlarmChange]:
        if name in self.active:
            return []
        self.active[name] = sentence
        return [AlarmChange(alarm or name, True, sentence)]

    def _clear(self, name: str, alarm: str = "") -> list[AlarmChange]:
        sentence = self.active.pop(name, None)
        return [] if sentence is None else [AlarmChange(alarm or name, False, sentence)]


def _shrunk(role: str, size: int, count: int) -> str:
    return (
        f"of {size} {role} workers {count or 'none'} "
        f"{'is' if count < 2 else 'are'} left since {SHRUNK_S:g} s: the log of their dispatcher "
        "says why; a run goes on with fewer, more slowly"
    )


class AlarmLog:
    """Logs and writes the alarms of a run. The training thread and the watching one may call it.

    Raises `ConfigError` when its file cannot be opened; a later disk error loses lines only.
    """

    def __init__(self, folder: Path, *, num_raised: int = 0, metrics: Path | None = None) -> None:
        """`num_raised`: alarms of earlier parts of the run, whose file of metrics is `metrics`."""
        self.num_raised = num_raised
        self.file = JsonlWriter(folder / ALARMS_FILE)
        self._alarms = Alarms()
        self._step: float | int | None = None
        self._lock = threading.Lock()
        for row in _last_rows(metrics) if metrics else ():
            self._alarms.see_row(row)  # logged and written by the earlier part

    @property
    def active(self) -> tuple[str, ...]:
        """The sentences of the active alarms."""
        with self._lock:
            return tuple(self._alarms.active.values())

    def see_row(self, row: Row) -> dict[str, int]:
        """Take the metrics of a step; returns the metrics of the alarms."""
        with self._lock:
            self._step = row.get("step")
            self._tell(self._alarms.see_row(row))
            return {"alarms": len(self._alarms.active), "alarms_raised": self.num_raised}

    def see_workers(self, workers: Mapping[str, int], *, now_s: float) -> None:
        """Take the number of workers by role; times are of one clock."""
        with self._lock:
            self._tell(self._alarms.see_workers(workers, now_s=now_s))

    def see_failures(self, failures: Mapping[str, str]) -> None:
        """Take why groups were dropped, {kind: sentence}."""
        with self._lock:
            self._tell(self._alarms.see_failures(failures))

    def _tell(self, changes: Sequence[AlarmChange]) -> None:
        for change in changes:
            self.num_raised += change.is_raised
            if change.is_raised:
                logger.warning("%s", change.sentence)
            else:
                logger.info("no longer so, by step %s: %s", self._step, change.sentence)
            self.file.write(
                {
                    "time": datetime.now(UTC).isoformat(timespec="seconds"),
                    "step": self._step,  # the last one that has ended
                    "alarm": change.alarm,
                    "event": "raised" if change.is_raised else "cleared",
                    "sentence": change.sentence,
                }
            )


def _last_rows(path: Path) -> Iterator[Row]:
    """The last rows that conditions need, and as many before: an alarm may have held for long."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in deque(file, maxlen=2 * NUM_KEPT):
            with contextlib.suppress(ValueError):  # a line cut by a full disk
                yield json.loads(line)
