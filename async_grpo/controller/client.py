"""The controller as one run calls it: each call names the run, and returns its answer's reference.

Whoever calls waits with `cluster.wait` and a deadline. `RunLost` says that the run has ended there,
or goes on under another epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_grpo.controller.handles import ControllerHandle
    from async_grpo.types import RowKey, RunId, WeightsSnapshot, WeightsVersion

WHO = "the controller"


@dataclass(frozen=True, slots=True, eq=False)
class RunClient:
    """One epoch of a run at one life of the controller."""

    controller: ControllerHandle
    run: RunId

    def next_items(self, rank: int, index: int) -> Any:
        return self.controller.next_items.remote(self.run, rank, index)

    def taught_again(self, rank: int, index: int, keys: Sequence[RowKey]) -> Any:
        return self.controller.taught_again.remote(self.run, rank, index, keys)

    def teacher_head(self, role: str) -> Any:
        return self.controller.teacher_head.remote(self.run, role)

    def hungry(self, index: int) -> Any:
        return self.controller.hungry.remote(self.run, index)

    def status(self) -> Any:
        return self.controller.status.remote(self.run)

    def evaluated(self) -> Any:
        return self.controller.evaluated.remote(self.run)

    def publish(self, snapshot: WeightsSnapshot, roles: tuple[str, ...], timeout_s: float) -> Any:
        return self.controller.publish.remote(self.run, snapshot, roles, timeout_s)

    def published(self, version: WeightsVersion) -> Any:
        return self.controller.published.remote(self.run, version)

    def receivers(self, role: str) -> Any:
        return self.controller.receivers.remote(role)

    def heard(self) -> Any:
        return self.controller.heard.remote(self.run)

    def abort(self, reason: str) -> Any:
        return self.controller.abort.remote(self.run, reason)

    def end_run(self) -> Any:
        return self.controller.end_run.remote(self.run)
