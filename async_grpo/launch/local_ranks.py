"""Trainer ranks of this machine: the command of this process again, once a rank.

What torchrun does on one machine, without its restarts: no torch is imported here, and what ended
the run is said last.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import click

from async_grpo.launch.interrupts import NUMBERS
from async_grpo.util import deadlines
from async_grpo.util.ports import free_port

POLL_INTERVAL_S = 0.05


def run_ranks(num_ranks: int) -> int:
    """Run so many ranks to their end; the exit code that stands for all of them."""
    with tempfile.TemporaryDirectory(prefix="async-grpo-") as folder:
        return LocalRanks(num_ranks, Path(folder)).run()


class LocalRanks:
    """Processes in the group of this one, so that Ctrl-C reaches them from the terminal too."""

    def __init__(self, num_ranks: int, folder: Path) -> None:
        """`folder`: for what each rank leaves as the cause of its failure."""
        self._num_ranks = num_ranks
        self._folder = folder
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._asked = 0  # the first signal to this process

    def run(self) -> int:
        """Start the ranks, wait for their end, and print a cause that no rank has printed."""
        for number in NUMBERS:
            signal.signal(number, self._pass_on)
        command = [sys.executable, *sys.orig_argv[1:]]
        port = free_port()
        for rank in range(self._num_ranks):
            self._ranks.append(subprocess.Popen(command, env=self._environment(rank, port)))
        if self._asked:  # before there were all of them
            self._send(self._asked)
        failed = self._first_failed()
        if failed is None:
            return 0
        self._end(failed)
        if self._asked:
            return max(self._ranks[0].returncode, 0) or 128 + self._asked
        if sentence := self._unprinted_cause(failed):
            click.echo(f"error: {sentence}", err=True)
        return 1

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        own = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self._num_ranks,
            "LOCAL_WORLD_SIZE": self._num_ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_ERROR_FILE": self._cause_of(rank),
        }
        # A thread each, as torchrun has it: more of them would fight for the cores.
        return {"OMP_NUM_THREADS": "1"} | os.environ | {k: str(v) for k, v in own.items()}

    def _first_failed(self) -> int | None:
        """The rank that was the first to fail, None when all have ended well."""
        while True:
            codes = [rank.poll() for rank in self._ranks]
            # Rank 0 last: it also fails when another rank has failed.
            for rank in reversed(range(self._num_ranks)):
                if codes[rank]:
                    return rank
            if None not in codes:
                return None
            time.sleep(POLL_INTERVAL_S)

    def _end(self, failed: int) -> None:
        """End the other ranks: wait, then SIGTERM, then SIGKILL."""
        if not self._asked:
            self._wait(deadlines.RANKS_LEAVING_S if failed else 0.0)
            self._send(signal.SIGTERM)
        self._wait(deadlines.RANKS_ENDED_S)
        self._send(signal.SIGKILL)
        self._wait(deadlines.RANKS_ENDED_S)

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(deadline - time.monotonic(), 0.0))

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.send_signal(number)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._asked = self._asked or number
        self._send(number)

    def _unprinted_cause(self, failed: int) -> str:
        """Why that rank has failed; empty if it printed the cause itself, as rank 0 does."""
        try:
            cause = str(json.loads(self._cause_of(failed).read_text())["message"]["message"])
        except (OSError, ValueError):
            code = self._ranks[failed].returncode
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return (
                f"trainer rank {failed} has ended {how} and without a word: look at the memory of "
                "this machine, and at what stands above"
            )
        return f"trainer rank {failed}: {cause.removeprefix('error: ')}" if failed else ""

    def _cause_of(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.json"
