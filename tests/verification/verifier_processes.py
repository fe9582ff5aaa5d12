"""Sandboxes for tests, and the processes below them as the system sees them."""

import asyncio
import os
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.sandbox import Sandbox
from async_grpo.verification.usage import children, descendants

REPOSITORY = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Processes:
    outer: list[int]  # bwrap where the system allows it
    servers: list[int]
    requests: list[int]


def processes(parent=None):
    """Of the sandboxes of a process."""
    servers = [pid for pid in descendants(parent or os.getpid()) if _is_server(pid)]
    outer = [pid for pid in servers if _command(pid)[0].endswith("bwrap")]
    inside = [pid for pid in servers if pid not in outer]
    roots = [pid for pid in inside if not any(pid in children(other) for other in inside)]
    requests = [child for root in roots for child in children(root)]
    return Processes(outer, roots, requests)


def _is_server(pid):
    return any("verification.fork_server" in word for word in _command(pid))


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return [""]


def all_below(parent):
    return set(descendants(parent))


def are_gone(pids, *, within_s=20.0):
    """Whether processes end in time; a zombie has ended."""
    deadline = time.monotonic() + within_s
    while alive := [pid for pid in pids if _is_alive(pid)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return not alive


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def verdict_of(box, sample):
    """Of one sample alone, in a process of its own."""
    return (await box.grade([sample]))[0]


@asynccontextmanager
async def sandbox(*names, num_processes=2, **options):
    options = {"timeout_s": 2.0, "memory_mib": 2048, "search_paths": (REPOSITORY,)} | options
    config = VerifierConfig(reward_names=names, **options)
    box = Sandbox(config, num_processes=num_processes)
    try:
        await box.start()
        yield box
    finally:
        await box.close()


class Grader:
    """A started sandbox for tests that are no coroutines."""

    def __init__(self, *names, **options):
        self._runner = asyncio.Runner()
        self._context = sandbox(*names, **options)
        self.box = self.run(self._context.__aenter__())
        self.is_confined = not any(self.box.confinement.values())

    def run(self, coroutine):
        return self._runner.run(coroutine)

    def grade(self, *samples):
        async def all_of_them():
            return await asyncio.gather(*(verdict_of(self.box, sample) for sample in samples))

        verdicts = self.run(all_of_them())
        return verdicts if len(samples) > 1 else verdicts[0]

    def close(self):
        self.run(self._context.__aexit__(None, None, None))
        self._runner.close()
