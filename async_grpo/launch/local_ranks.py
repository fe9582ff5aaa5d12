"""Trainer ranks of this machine: the command of this process again, once a rank.

What torchrun does on one machine, without its restarts: no torch is imported here. A failing rank
writes its cause into its error file, and its launcher, this one or torchrun, prints the cause of
the first that failed last on the screen: one sentence, once. Other ranks' messages about the same
failure, or about losing rank 0, would hide it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import FrameType

import click

from async_grpo.launch.child_processes import ended_within
from async_grpo.launch.interrupts import NUMBERS, leave
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, RankLostError
from async_grpo.util.ports import free_port, interface_to
from async_grpo.verification import namespaces

POLL_INTERVAL_S = 0.05
# Of `launch` where several machines train: which this is, how many there are, and where rank 0
# listens, as in "1 2 10.0.0.4 23456".
TRAINER_NODE = "ASYNC_GRPO_TRAINER_NODE"
LATER_S = 5  # dates an error that follows from another rank's, as the launcher names the first one


def run_ranks(num_ranks: int) -> int:
    """Run `num_ranks` ranks to their end; return one exit code for all of them."""
    with tempfile.TemporaryDirectory(prefix="async-grpo-") as folder:
        return LocalRanks(num_ranks, Path(folder)).run()


class LocalRanks:
    """Rank processes in this process's group, so that a terminal sends them Ctrl-C too."""

    def __init__(self, num_ranks: int, folder: Path) -> None:
        """`folder`: takes a file from each rank that fails, with the cause."""
        node, num_nodes, self._host, port = os.environ.get(TRAINER_NODE, "0 1 127.0.0.1 0").split()
        self._port = int(port) or free_port()
        self._num_ranks, self._world_size = num_ranks, int(num_nodes) * num_ranks
        self._first = int(node) * num_ranks
        self._folder = folder
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._asked = 0  # the first signal to this process

    def run(self) -> int:
        """Start the ranks, wait for their end, and print the cause if no rank has printed it."""
        for number in NUMBERS:
            signal.signal(number, self._pass_on)
        command = [sys.executable, *sys.orig_argv[1:]]
        for rank in range(self._num_ranks):
            self._ranks.append(subprocess.Popen(command, env=self._environment(rank)))
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

    def _environment(self, rank: int) -> dict[str, str]:
        own = {
            "RANK": self._first + rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self._world_size,
            "LOCAL_WORLD_SIZE": self._num_ranks,
            "MASTER_ADDR": self._host,
            "MASTER_PORT": self._port,
            "TORCHELASTIC_ERROR_FILE": self._cause_of(rank),
        }
        # A thread each, as torchrun has it: more of them would fight for the cores.
        return {"OMP_NUM_THREADS": "1"} | os.environ | {k: str(v) for k, v in own.items()}

    def _first_failed(self) -> int | None:
        """The local number of the first rank to fail, None when all have ended well."""
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
            is_main = self._first + failed == 0
            ended_within(0.0 if is_main else deadlines.RANKS_LEAVING_S, *self._ranks)
            self._send(signal.SIGTERM)
        ended_within(deadlines.RANKS_ENDED_S, *self._ranks)
        self._send(signal.SIGKILL)
        ended_within(deadlines.RANKS_ENDED_S, *self._ranks)

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            rank.send_signal(number)  # none to one that has ended

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._asked = self._asked or number
        self._send(number)

    def _unprinted_cause(self, failed: int) -> str:
        """Why rank `failed` has failed; empty if it printed the cause itself, as rank 0 does."""
        rank = self._first + failed
        try:
            cause = str(json.loads(self._cause_of(failed).read_text())["message"]["message"])
        except (OSError, ValueError):
            code = self._ranks[failed].returncode
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return (
                f"trainer rank {rank} has ended {how} and without a word: look at the memory of "
                "this machine, and at what stands above"
            )
        return f"trainer rank {rank}: {cause.removeprefix('error: ')}" if rank else ""

    def _cause_of(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.json"


def is_main_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def choose_interfaces(environ: MutableMapping[str, str], *, meets_workers: bool = False) -> None:
    """Make gloo and NCCL use the loopback interface if all ranks are here and none is set.

    Else gloo uses that which leads to rank 0's machine: it would take the address of this machine's
    name, which may be one of loopback. NCCL looks for itself, as it does where a run
    `meets_workers` over NCCL, on any machine.

    >>> environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    >>> choose_interfaces(environ, meets_workers=True)
    >>> environ["GLOO_SOCKET_IFNAME"], "NCCL_SOCKET_IFNAME" in environ
    ('lo', False)
    >>> choose_interfaces(environ)
    >>> environ["NCCL_SOCKET_IFNAME"]
    'lo'
    """
    if environ.get("WORLD_SIZE", "1") == environ.get("LOCAL_WORLD_SIZE", "1"):
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not meets_workers:
            environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif "GLOO_SOCKET_IFNAME" not in environ and (
        name := interface_to(environ.get("MASTER_ADDR", ""))
    ):
        environ["GLOO_SOCKET_IFNAME"] = name


def end_with_agent() -> None:
    """Have the kernel send SIGTERM to this rank when its launcher dies (Linux only).

    A launcher that is killed sends nothing itself.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def rank0_only_errors() -> Iterator[None]:
    """Around code that every rank runs: only rank 0 raises an error for the user.

    Another rank writes its error into its error file and exits with 1.
    """
    try:
        yield
    except (AsyncGrpoError, click.UsageError) as error:
        is_first = not isinstance(error, RankLostError)
        if is_first and not is_main_rank():
            # If rank 0 has failed too, the launcher ends this rank during the sleep.
            time.sleep(deadlines.OTHERS_ENDED_S)
        sentence = error.format_message() if isinstance(error, click.UsageError) else str(error)
        _leave_cause(f"error: {sentence}", is_first=is_first)
        if is_main_rank():
            raise
        sys.exit(1)


@contextmanager
def ends_at_once(stop: Event | None = None) -> Iterator[None]:
    """A process boundary: after an error or Ctrl-C, exit without joining threads.

    A thread may still be announcing weights, for minutes. `stop`: the launcher asked this rank to
    end.
    """
    try:
        yield
        return
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        if not is_main_rank():
            (stop or Event()).wait(deadlines.OTHERS_ENDED_S)
        _leave_cause(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        code = 1
    leave(code)


def _leave_cause(message: str, *, is_first: bool = True) -> None:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        stamp = {"timestamp": str(int(time.time()) + (0 if is_first else LATER_S))}
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": stamp}}))
