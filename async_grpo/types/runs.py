"""Which run, what it is doing, and what somebody has asked of it while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from async_grpo.types.message import Message


class RunId(NamedTuple):
    """A run, and how often a trainer has begun or gone on with one at this controller."""

    incarnation: int
    epoch: int  # grows with each beginning: a call of an earlier one is refused

    def __str__(self) -> str:
        return f"{self.incarnation}, epoch {self.epoch}"


ControlAction = Literal["set", "evaluate", "stop", "drain", "undrain"]
AT_ONCE: tuple[ControlAction, ...] = ("drain", "undrain")  # the others wait for a batch's end


@dataclass(frozen=True, slots=True)
class Control(Message):
    """One request; what is asked twice under the same `id` is done once."""

    id: str
    action: ControlAction
    by: str  # user, host and process, for people
    at: str  # UTC, ISO 8601
    settings: Mapping[str, object] = field(default_factory=dict)  # of `set`: value by option
    worker: str = ""  # of `drain` and `undrain`: its id

    def __str__(self) -> str:
        values = (f"{name}={value:g}" for name, value in self.settings.items())
        return " ".join(filter(None, (self.action, *values, self.worker)))


@dataclass(frozen=True, slots=True)
class RunStatus(Message):
    """A run that trains, for whoever would have it do something else."""

    batch: int  # the oldest that is not completed
    num_batches: int
    options: Mapping[str, object]  # those that may be set, as they are now
    waiting: tuple[Control, ...]  # for the end of the batch
    workers: Mapping[str, tuple[str, bool]]  # by id: role, and whether it gets no new work


class Problem(NamedTuple):
    """Why work is being tried again."""

    stage: str
    reason: str
    worker_id: str = ""  # whose answer was no good; empty: nobody's

    def __str__(self) -> str:
        return f"{self.stage}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """What every stage is doing right now, for people; counts are of samples."""

    batch: int  # the oldest batch that is not completed
    generating: int
    verifying: int
    in_reference: int
    ready: int  # finished, waiting for a round
    training: int  # sent to trainers in the current gradient step
    done: int  # reached a fate since the start of the run
    output_tokens: int  # received since the start of the run
    answers: int  # of workers and verifiers, since the start of the run
    reward_sum: float  # over reward_count graded samples since the start of the current batch
    reward_count: int
    workers: Mapping[str, int] = field(default_factory=dict)  # healthy workers by role
    worker_tokens: int = 0  # that workers have made, of answers that have come and that will
    problem: Problem | None = None  # what the pipeline is waiting for, when it cannot move
    warnings: tuple[str, ...] = ()  # of the rewards: the first trouble of each kind
    failures: Mapping[str, str] = field(default_factory=dict)  # why groups were dropped, by kind
    controls: tuple[Control, ...] = ()  # what was asked of the run, the latest last

    @property
    def moves(self) -> tuple[int, int]:
        """What changes as long as anything moves, however long an output is."""
        return self.answers, self.worker_tokens
