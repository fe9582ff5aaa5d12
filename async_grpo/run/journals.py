"""The requests of `async-grpo control` to a run, and when each took effect.

Rank 0 appends a line to `control.jsonl` when a request arrives, and another when it takes effect. A
resumed run reads the file and continues it.

{"state": "asked", "id": …, "action": "set", "by": …, "at": …, "settings": {"learning_rate": 1e-6}}
{"state": "done", "id": …, …, "from_batch": 8}
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterable
from pathlib import Path

from async_grpo.telemetry.jsonl import NewRows, to_json
from async_grpo.types import AT_ONCE, Control
from async_grpo.util.files import LineFile

logger = logging.getLogger(__name__)
CONTROL_FILE = "control.jsonl"


class ControlJournal:
    """Writes `control.jsonl`. Two threads of rank 0 call it, for requests and for batches."""

    def __init__(self, folder: Path, pending: Iterable[Control] = ()) -> None:
        """`pending`: requests of an earlier part of the run that have not taken effect."""
        self._file = LineFile(folder / CONTROL_FILE, unit="requests", say=logger.warning)
        self._lock = threading.Lock()
        self._pending = {control.id: control for control in pending}
        self._known = set(self._pending)

    @property
    def pending(self) -> tuple[Control, ...]:
        """Requests that wait for the end of a batch."""
        with self._lock:
            return tuple(self._pending.values())

    def received(self, controls: Iterable[Control]) -> None:
        """Note requests that have arrived; known ones are not written again."""
        with self._lock:
            for control in controls:
                if control.id not in self._known:
                    self._note(control)

    def done(self, controls: Iterable[Control], *, from_batch: int) -> None:
        """Note requests that take effect with batch `from_batch`."""
        with self._lock:
            for control in controls:
                if control.id not in self._known:
                    self._note(control)
                self._pending.pop(control.id, None)
                self._write(control, "done", from_batch=from_batch)
                logger.info("%s, asked by %s: done from batch %d on", control, control.by,
                            from_batch)  # fmt: skip

    def _note(self, control: Control) -> None:
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
    """Requests that a run resumed after `batches` batches still has to fulfil, in their order.

    Settings that took effect later are made again. A stop is not: the run was started since.
    """
    asked: dict[str, Control] = {}
    for line in NewRows(path).read():
        control = Control(**{f.name: line[f.name] for f in dataclasses.fields(Control)})
        holds_already = line["state"] == "done" and line.get("from_batch", 0) <= batches
        is_lost = control.action == "set" or line["state"] == "asked"
        if control.action in (*AT_ONCE, "stop") or holds_already or not is_lost:
            asked.pop(control.id, None)
        else:
            asked[control.id] = control
    return tuple(asked.values())
