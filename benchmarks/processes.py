"""The commands that a benchmark starts, and looks at while they run."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from async_grpo.config.roles import GENERATION
from async_grpo.launch import child_processes
from async_grpo.util.errors import DeadlineError, WorkerError


class Process(child_processes.ChildProcess):
    """A child that ends with the `with` block."""

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def is_running(self) -> bool:
        return self.child.poll() is None

    def wait_for_worker(self, role: str = GENERATION, *, timeout_s: float) -> None:
        """Until this dispatcher's worker of a role has registered; its verifiers are sooner."""
        said, deadline = re.compile(rf"worker {role}-\w+ registered"), time.monotonic() + timeout_s
        while not said.search(self.log.read_text(errors="replace")):
            self.check()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{self.name} must register within {timeout_s:g} s, it did not: see {self.log}"
                )
            time.sleep(child_processes.POLL_INTERVAL_S)

    def wait(self, *, watched: Sequence[child_processes.ChildProcess] = ()) -> None:
        """Until the child ends well. Raises when it fails, or when one of `watched` ends."""
        if self.exit_code(watched=watched):
            raise WorkerError(self.failure)
