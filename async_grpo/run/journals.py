"""What `async-grpo control` has asked of a run, and what became of it, through all resumed parts.

`control.jsonl` has a line when a request is heard of and another when it holds. Rank 0 writes it;
whoever begins the run again reads it.

{"state": "asked", "id": …, "action": "set", "by": …, "at": …, "settings": {"learning_rate": 1e-6}}
{"state": "done", "id": …, …, "from_batch": 8}
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from async_grpo.telemetry.jsonl import to_json
from async_grpo.types import AT_ONCE, Control
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
