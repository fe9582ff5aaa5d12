"""The identity of a run, its status, and requests to it while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from async_grpo.types.message import Message


class RunId(NamedTuple):
    """A run, and how often a trainer has begun or resumed one at this controller."""

    incarnation: int
    epoch: int  # grows each time: a call with an earlier one is refused

    def __str__(self) -> str:
        return f"{self.incarnation}, epoch {self.epoch}"


ControlAction = Literal["set", "evaluate", "stop", "drain", "undrain"]
AT_ONCE: tuple[ControlAction, ...] = ("drain", "undrain")  # the others take effect between batches


@dataclass(frozen=True, slots=True)
class Control(Message):
    """A user's request to a run; two with the same `id` are carried out once."""

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
    """The state of a run in training, for a user who may control it."""

    batch: int  # the oldest that is not completed
    num_batches: int
    options: Mapping[str, object]  # present values of the options that can be set
    waiting: tuple[Control, ...]  # for the end of the batch
    workers: Mapping[str, tuple[str, bool]]  # {id: (role, whether it is drained)}


class Problem(NamedTuple):
    """Why work is tried again."""

    stage: str
    reason: str
    worker_id: str = ""  # of the worker that failed; empty: none did

    def __str__(self) -> str:
        return f"{self.stage}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """What every stage does now, for users; counts are of samples."""

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
    worker_tokens: int = 0  # made by workers, those of unfinished answers included
    problem: Problem | None = None  # what the pipeline waits for, when it is stalled
    warnings: tuple[str, ...] = ()  # of the rewards: the first of each kind
    failures: Mapping[str, str] = field(default_factory=dict)  # why groups were dropped, by kind
    controls: tuple[Control, ...] = ()  # users' requests, the latest last

    @property
    def moves(self) -> tuple[int, int]:
        """Counters that change while any work progresses, however long an output is."""
        return self.answers, self.worker_tokens
