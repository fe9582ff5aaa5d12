"""When a rank that waits for the controller gives up: nothing has moved, anywhere, for too long."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from async_grpo.cluster import cluster
from async_grpo.types import PipelineStatus
from async_grpo.util import deadlines
from async_grpo.util.errors import DeadlineError

if TYPE_CHECKING:
    from async_grpo.controller.client import RunClient


class Standstill:
    """For one wait. An output of any length moves: workers tell of its tokens while they come."""

    def __init__(self, client: RunClient, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._look_at = time.monotonic() + timeout_s
        self._before: PipelineStatus | None = None

    def check(self) -> None:
        """Raise `DeadlineError` when no answer and no token has come between two looks."""
        if time.monotonic() < self._look_at:
            return
        now: PipelineStatus = cluster.wait(
            self._client.status(), timeout_s=deadlines.STATUS_S, who="the controller"
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
