"""Where a run's alarms go: its log, once each, `alarms.jsonl`, and whoever shows them."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from async_grpo.telemetry.alarms import NUM_KEPT, Alarms, Change, Row
from async_grpo.telemetry.jsonl import JsonlWriter

logger = logging.getLogger(__name__)
ALARMS_FILE = "alarms.jsonl"


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

    def _tell(self, changes: Sequence[Change]) -> None:
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
