"""The commands that a benchmark starts, and looks at while they run."""

from __future__ import annotations

from collections.abc import Sequence

from async_grpo.launch import child_processes
from async_grpo.util.errors import WorkerError


class Process(child_processes.ChildProcess):
    """A child that ends with the `with` block."""

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def is_running(self) -> bool:
        return self.child.poll() is None

    def wait(self, *, watched: Sequence[child_processes.ChildProcess] = ()) -> None:
        """Until the child ends well. Raises when it fails, or when one of `watched` ends."""
        if self.exit_code(watched=watched):
            raise WorkerError(self.failure)
