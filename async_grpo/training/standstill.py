"""When a rank that waits for the batcher gives up: nothing has moved, anywhere, for too long."""

from __future__ import annotations

import time
from typing import Any

from async_grpo import cluster, deadlines
from async_grpo.errors import DeadlineError
from async_grpo.types import PipelineStatus


class Standstill:
    """For one wait. An output of any length moves: workers tell of its tokens while they come."""

    def __init__(self, batcher: Any, *, timeout_s: float) -> None:
        self._batcher = batcher
        self._timeout_s = timeout_s
        self._look_at = time.monotonic() + timeout_s
        self._before: PipelineStatus | None = None

    def check(self) -> None:
        """Raise `DeadlineError` when no answer and no token has come between two looks."""
        if time.monotonic() < self._look_at:
            return
        now: PipelineStatus = cluster.wait(
            self._batcher.status.remote(),
            timeout_s=deadlines.STATUS_S,
            who="the experience batcher",
        )
        if self._before is not None and now.moves == self._before.moves:
            raise DeadlineError(
                f"nothing has moved for --stall-timeout-s {self._timeout_s:g}: {_describe(now)}"
            )
        self._before, self._look_at = now, time.monotonic() + self._timeout_s


def _describe(status: PipelineStatus) -> str:
    if status.problem:
        return str(status.problem)
    return (
        f"{status.generating} samples generating, {status.verifying} verifying, "
        f"{status.in_reference} in reference, {status.ready} ready; workers: "
        f"{dict(status.workers)}"
    )
