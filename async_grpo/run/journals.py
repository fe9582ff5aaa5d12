"""What a run still owes while it trains, and what became of it, through all of its resumed parts.

Requests have `control.jsonl`, a line when one is heard of and another when it holds. Rank 0 writes
it; whoever begins the run again reads it.

{"state": "asked", "id": …, "action": "set", "by": …, "at": …, "settings": {"learning_rate": 1e-6}}
{"state": "done", "id": …, …, "from_batch": 8}

Evaluations that are due have one line each in the end, in `evaluation_metrics.jsonl`, of the step
whose weights they tell of.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.config.evaluation_sets import EvaluationSet
from async_grpo.telemetry.estimates import Row, evaluation_row, in_words
from async_grpo.telemetry.jsonl import to_json
from async_grpo.types import AT_ONCE, Control, EvaluationResult, WeightsVersion
from async_grpo.util.files import LineFile

logger = logging.getLogger(__name__)
CONTROL_FILE = "control.jsonl"


class ControlJournal:
    """Two threads of rank 0 write it: one hears of requests, the other of their batches."""

    def __init__(self, folder: Path, pending: Iterable[Control] = ()) -> None:
        """`pending`: what an earlier part of the run has heard of, and not done."""
        self._file = LineFile(folder / CONTROL_FILE, unit="requests", say=logger.warning)
        self._lock = threading.Lock()
        self._pending = {control.id: control for control in pending}
        self._known = set(self._pending)

    @property
    def pending(self) -> tuple[Control, ...]:
        """What waits for the end of a batch."""
        with self._lock:
            return tuple(self._pending.values())

    def heard(self, controls: Iterable[Control]) -> None:
        """These were asked; those that are known already are not written again."""
        with self._lock:
            for control in controls:
                if control.id not in self._known:
                    self._hear(control)

    def done(self, controls: Iterable[Control], *, from_batch: int) -> None:
        """These hold from a batch on."""
        with self._lock:
            for control in controls:
                if control.id not in self._known:
                    self._hear(control)
                self._pending.pop(control.id, None)
                self._write(control, "done", from_batch=from_batch)
                logger.info("%s, asked by %s: done from batch %d on", control, control.by,
                            from_batch)  # fmt: skip

    def _hear(self, control: Control) -> None:
        self._known.add(control.id)
        if control.action in AT_ONCE:
            self._write(control, "done")
        else:
            self._pending[control.id] = control
            self._write(control, "asked")

    def _write(self, control: Control, state: str, **more: int) -> None:
        line = {"state": state, **dataclasses.asdict(control), **more}
        self._file.append(to_json(line) + b"\n")


def pending_after(path: Path, batches: int) -> tuple[Control, ...]:
    """What a run that goes on after so many batches still has to do, in the order of asking.

    Settings that were made after them are made again. A stop is not: the run has been started
    since.
    """
    asked: dict[str, Control] = {}
    for line in _lines(path):
        control = Control(**{f.name: line[f.name] for f in dataclasses.fields(Control)})
        holds_already = line["state"] == "done" and line.get("from_batch", 0) <= batches
        is_lost = control.action == "set" or line["state"] == "asked"
        if control.action in (*AT_ONCE, "stop") or holds_already or not is_lost:
            asked.pop(control.id, None)
        else:
            asked[control.id] = control
    return tuple(asked.values())


def _lines(path: Path) -> list[Mapping[str, Any]]:
    """Those that are whole."""
    if not path.exists():
        return []
    whole = (line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n"))
    return [json.loads(line) for line in whole]


@dataclass(frozen=True, slots=True)
class Mark:
    """An evaluation that is due, and where the run was with its weights."""

    set: str
    batch: int
    step: int
    total_samples_accumulated: int
    total_tokens: int
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far, as best_checkpoint.json tells it."""

    metric: str
    value: float
    batch: int  # batches in its weights


class EvaluationRecord:
    """Of rank 0; kept in checkpoints, so that a resumed run knows what was left undone."""

    def __init__(
        self,
        sets: Iterable[EvaluationSet],
        *,
        is_due: Callable[[EvaluationSet, int], bool],
        best_set: EvaluationSet | None,
        metric: str,
        has_types: bool,
        saved: Mapping[str, Any],
        write: Callable[[Row], None],
        write_best: Callable[[Best], None],
    ) -> None:
        """`is_due`: a set after so many batches. `metric`, of `best_set`, tells the best one.

        `saved`: the `state` of the run that goes on. `write_best` hears of a new best one.
        """
        self._is_due, self._best_set, self._metric = is_due, best_set, metric
        self._has_types = has_types
        self._best = Best(**saved["best"]) if saved.get("best") else None
        self._write_best = write_best
        self._sets = {found.name: found for found in sets}
        self._write = write
        self._open = {(mark["set"], mark["batch"]): Mark(**mark) for mark in saved.get("open", ())}
        self.newest = 0  # batches in the weights that were published last
        # Batches whose checkpoints stay: the best one, and whatever may turn out to be. It is made
        # anew with every change, for another thread reads it.
        self.spared = self._to_spare()

    def state(self) -> dict[str, object]:
        """What is due and has no line, and the best so far."""
        best = dataclasses.asdict(self._best) if self._best else None
        return {"open": [dataclasses.asdict(mark) for mark in self._open.values()], "best": best}

    def published(self, batches: int, *, evaluates: bool = False, **totals: Any) -> None:
        """Weights go out; those of an evaluation that is due are marked with the run's `totals`.

        `evaluates`: all sets are due, for somebody has asked for it.
        """
        self.newest = batches
        for name, found in self._sets.items():
            if evaluates or self._is_due(found, batches):
                self._open[name, batches] = Mark(name, batches, **totals)
        self.spared = self._to_spare()

    def ended(self, result: EvaluationResult) -> Row | None:
        """The line of a result, which is written; None where it has one already.

        A controller that takes another's place evaluates the weights again that it is given.
        """
        mark = self._open.pop((result.name, result.version.batches), None)
        if mark is None:
            return None
        found = self._sets[result.name]
        measured = evaluation_row(result, found, has_types=self._has_types)
        row = dataclasses.asdict(mark) | measured
        self._write(row)
        self._compare(row)
        logger.log(logging.WARNING if result.skipped else logging.INFO, "%s", in_words(row))
        return row

    def lost(self, reason: str, *, but: int | None = None) -> None:
        """What is open has come to nothing; `but` these batches, which are evaluated again."""
        for mark in list(self._open.values()):
            found = self._sets.get(mark.set)
            if found and (mark.batch != but or not self._is_due(found, mark.batch)):
                version, samples = WeightsVersion(0, mark.batch), found.samples
                lost = EvaluationResult(
                    mark.set, version, version, version, samples, (), 0.0, reason
                )
                self.ended(lost)

    def _compare(self, row: Row) -> None:
        """Of two equal ones the earlier stays the best."""
        metric = self._metric
        value = row.get(metric) if metric else None
        if value is not None and (
            self._best is None or self._best.metric != metric or value > self._best.value
        ):
            self._best = Best(metric, float(value), row["batch"])
            self._write_best(self._best)
            logger.info("the best checkpoint so far is after batch %d: %s %.4g",
                        row["batch"], metric, value)  # fmt: skip
        self.spared = self._to_spare()

    def _to_spare(self) -> frozenset[int]:
        found = self._best_set
        if found is None:
            return frozenset()
        waiting = {mark.batch for mark in self._open.values() if mark.set == found.name}
        return frozenset(waiting | ({self._best.batch} if self._best else set()))
