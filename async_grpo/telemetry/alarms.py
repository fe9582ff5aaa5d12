"""Raises and clears alarms of a run, in words, from its metrics and the size of its fleets. Pure.

An alarm is raised once when its condition has held for so many steps in a row, and cleared when the
condition has not held for a few. A step that cannot tell changes neither. `AlarmLog` tells of both:
once each in the run's log, in `alarms.jsonl`, and to whoever shows them.
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
NUM_KEPT = 200  # steps that the past is made of
SHRUNK_S = 60.0  # which workers that restart may take
SETTLED_S = 3600.0  # after which a fleet is not smaller, but small
GROUPS_FAIL = "groups_fail"  # of every kind of failure


@dataclass(frozen=True, slots=True)
class AlarmChange:
    """An alarm that is raised, or that is cleared."""

    alarm: str  # its name
    is_raised: bool
    sentence: str  # what was wrong when it was raised


@dataclass(slots=True)
class _Fleet:
    """The workers of a role: how many there were, and since when there are fewer."""

    size: int = 0
    shrunk_at_s: float | None = None


@dataclass(slots=True)
class Alarms:
    """Follows a run; `active` holds the sentences of what is wrong now, by alarm."""

    active: dict[str, str] = field(default_factory=dict)
    _rows: deque[Row] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))
    _held: Counter[str] = field(default_factory=Counter)  # steps in a row, by alarm
    _clean: Counter[str] = field(default_factory=Counter)  # likewise, without its condition
    _fleets: dict[str, _Fleet] = field(default_factory=dict)  # by role
    _failures: set[str] = field(default_factory=set)  # kinds that have been told

    def see_row(self, row: Row) -> list[AlarmChange]:
        """Take in the metrics of the step that has just ended."""
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
        """Take in why groups were dropped: each kind is raised once in a run."""
        new = {kind: failures[kind] for kind in failures if kind not in self._failures}
        self._failures |= new.keys()
        self._clean[GROUPS_FAIL] = 0 if new else self._clean[GROUPS_FAIL]
        return [change for kind in new for change in self._raise(kind, new[kind], GROUPS_FAIL)]

    def _see_failed(self, share: float | int | None) -> list[AlarmChange]:
        """All kinds are over when no group has failed for a few steps."""
        self._clean[GROUPS_FAIL] = 0 if share else self._clean[GROUPS_FAIL] + (share is not None)
        if self._clean[GROUPS_FAIL] < NUM_CLEAN:
            return []
        return [change for kind in self._failures for change in self._clear(kind, GROUPS_FAIL)]

    def see_workers(self, workers: Mapping[str, int], *, now_s: float) -> list[AlarmChange]:
        """Take in how many workers each role has; times are of one clock."""
        changes = []
        for role in {*self._fleets, *workers}:
            fleet, count = self._fleets.setdefault(role, _Fleet()), workers.get(role, 0)
            name = f"fleet_shrank_{role}"
            if count >= fleet.size:
                self._fleets[role] = _Fleet(count)
                changes += self._clear(name)
                continue
            fleet.shrunk_at_s = now_s if fleet.shrunk_at_s is None else fleet.shrunk_at_s
            away_s = now_s - fleet.shrunk_at_s
            if away_s >= SETTLED_S:
                self._fleets[role] = _Fleet(count)
                changes += self._clear(name)
            elif away_s >= SHRUNK_S:
                changes += self._raise(name, _shrunk(role, fleet.size, count))
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
    """Follows a run; the thread that trains and the one that watches may both tell it.

    Raises `ConfigError` when its file cannot be opened; a disk that refuses later costs lines only.
    """

    def __init__(self, folder: Path, *, num_raised: int = 0, metrics: Path | None = None) -> None:
        """`num_raised`: in earlier parts of the run, whose `metrics` say which alarms hold."""
        self.num_raised = num_raised
        self.file = JsonlWriter(folder / ALARMS_FILE)
        self._alarms = Alarms()
        self._step: float | int | None = None
        self._lock = threading.Lock()
        for row in _last_rows(metrics) if metrics else ():
            self._alarms.see_row(row)  # which its log and its file know of

    @property
    def active(self) -> tuple[str, ...]:
        """What is wrong now, in sentences."""
        with self._lock:
            return tuple(self._alarms.active.values())

    def see_row(self, row: Row) -> dict[str, int]:
        """Take in a step's metrics; returns those of the alarms themselves."""
        with self._lock:
            self._step = row.get("step")
            self._tell(self._alarms.see_row(row))
            return {"alarms": len(self._alarms.active), "alarms_raised": self.num_raised}

    def see_workers(self, workers: Mapping[str, int], *, now_s: float) -> None:
        """Take in how many workers each role has; times are of one clock."""
        with self._lock:
            self._tell(self._alarms.see_workers(workers, now_s=now_s))

    def see_failures(self, failures: Mapping[str, str]) -> None:
        """Take in why groups were dropped, a sentence a kind."""
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
    """Those that alarms are made of, and as many before them: one may have held for long."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in deque(file, maxlen=2 * NUM_KEPT):
            with contextlib.suppress(ValueError):  # a line that a full disk has cut
                yield json.loads(line)
