"""How often one piece of work may be tried on leased workers, and what came of the tries. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

from async_grpo.batching.quarantine import Quarantine
from async_grpo.types import Problem
from async_grpo.types.roles import ENVIRONMENT
from async_grpo.util.errors import (
    AsyncGrpoError,
    LeaseLost,
    LossCause,
    StaleAnswerError,
    WorkerError,
)

Reason = Literal["worker died", "lease revoked", "stalled", "stale answer", "worker error"]
QUARANTINE = "quarantine"  # the stage that loses a question which kills workers
# Seconds before each try that the worker's answer was to blame for the one before.
TRIES_AFTER_S = (0.0, 1.0, 8.0)
# Workers that are lost are no fault of the work: deaths are bounded by the quarantine, these here.
MAX_REVOCATIONS = 16
AFTER_LOSS_S = 1.0
MAX_KINDS = 50  # told; what fails in ever new ways is told often enough by then


class SlotFailed(WorkerError):
    """A group that could not be finished; `stage` says where it was lost."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage

    def __reduce__(self) -> tuple[type[SlotFailed], tuple[str, str]]:
        return type(self), (self.stage, str(self))


class Progress:
    """What has moved, and what is in the way: shared by the stages of a pipeline."""

    def __init__(self) -> None:
        self.answers = 0  # good ones, of workers
        self.failures: dict[str, str] = {}  # why groups were dropped: the first of each kind
        self.problem: Problem | None = None  # why work is being tried again; empty when all is well

    @property
    def reason(self) -> str:
        """Of the problem, for people."""
        return self.problem.reason if self.problem else ""

    def failed(self, kind: str, sentence: str) -> None:
        if len(self.failures) < MAX_KINDS:
            self.failures.setdefault(kind, sentence)

    def moved(self) -> None:
        self.answers += 1
        self.problem = None


class Attempts:
    """Of one piece of work: its own faults, lost workers and deaths count apart."""

    def __init__(self, stage: str, slot: Hashable, quarantine: Quarantine | None) -> None:
        """`quarantine` counts the slot's deaths; None: they are no fault of this kind of work."""
        self._stage = stage
        self._slot = slot
        self._quarantine = quarantine
        self._num_faults = 0
        self._num_losses = 0

    def pause_after(self, error: AsyncGrpoError) -> tuple[Reason, float]:
        """What a try was lost to, and the seconds before the next one.

        Raises `SlotFailed` when there is none, or when workers keep dying of the work.
        """
        reason = _reason(error)
        if reason == "worker died" and self._quarantine is not None:
            if self._quarantine.died(self._slot, weight=2 if self._stage == ENVIRONMENT else 1):
                raise SlotFailed(QUARANTINE, f"workers keep dying of it: {error}")
            return reason, AFTER_LOSS_S
        is_loss = reason in ("worker died", "lease revoked")
        self._num_losses += is_loss
        self._num_faults += not is_loss
        if self._num_faults >= len(TRIES_AFTER_S) or self._num_losses >= MAX_REVOCATIONS:
            number = self._num_losses if is_loss else self._num_faults
            raise SlotFailed(
                self._stage, f"{self._stage} failed {number} times, the last time: {error}"
            )
        return reason, AFTER_LOSS_S if is_loss else TRIES_AFTER_S[self._num_faults]


def _reason(error: AsyncGrpoError) -> Reason:
    if isinstance(error, LeaseLost):
        if error.cause is LossCause.DIED:
            return "worker died"
        return "stalled" if error.cause is LossCause.STALLED else "lease revoked"
    return "stale answer" if isinstance(error, StaleAnswerError) else "worker error"
