"""Which processes belong to one run, even after they have lost their parents."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from benchmarks import procfs
from benchmarks.cores import family

MARK = "ASYNC_GRPO_FAULTS_RUN"
POLL_INTERVAL_S = 0.05


class Members:
    """Known by a variable that all inherit, by their ancestors, or by having been seen before.

    Nothing else on the machine can become a victim.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._seen: dict[int, int] = {}  # pid -> when it was started

    def living(self, *roots: int) -> set[int]:
        """Those that run at this moment, zombies excepted."""
        own = os.getpid()
        found = {pid for pid, _ in procfs.processes() if self._is_marked(pid)} - {own}
        found |= family(*roots, *found) - {own} if found or roots else set()
        self._seen |= {pid: procfs.birth(pid) for pid in found}
        self._seen = {p: born for p, born in self._seen.items() if procfs.birth(p) == born}
        return {pid for pid in self._seen if procfs.is_running(pid)}

    def end(self, *, timeout_s: float = 20.0) -> set[int]:
        """Kill all, also those that appear meanwhile; the result is what could not be."""
        deadline = time.monotonic() + timeout_s
        while left := self.living():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_INTERVAL_S)
        return left

    def _is_marked(self, pid: int) -> bool:
        known = self._seen.get(pid)
        if known is not None and known == procfs.birth(pid):
            return True
        return procfs.variables(pid).get(MARK) == self._mark
