"""What somebody has asked of a run while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from async_grpo.types.message import Message

ControlAction = Literal["set", "evaluate", "stop", "drain", "undrain"]
AT_ONCE: tuple[ControlAction, ...] = ("drain", "undrain")  # the others wait for a batch's end


@dataclass(frozen=True, slots=True)
class Control(Message):
    """One request; what is asked twice under the same `id` is done once."""

    id: str
    action: ControlAction
    by: str  # user, host and process, for people
    at: str  # UTC, ISO 8601
    settings: Mapping[str, Any] = field(default_factory=dict)  # of `set`: value by option
    worker: str = ""  # of `drain` and `undrain`: its id

    def __str__(self) -> str:
        values = (f"{name}={value:g}" for name, value in self.settings.items())
        return " ".join(filter(None, (self.action, *values, self.worker)))


@dataclass(frozen=True, slots=True)
class RunStatus(Message):
    """A run that trains, for whoever would have it do something else."""

    batch: int  # the oldest that is not completed
    num_batches: int
    options: Mapping[str, Any]  # those that may be set, as they are now
    waiting: tuple[Control, ...]  # for the end of the batch
    workers: Mapping[str, tuple[str, bool]]  # by id: role, and whether it gets no new work
