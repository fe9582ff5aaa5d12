"""How a failing rank reports: one sentence, once, and last on the screen.

The launcher, torchrun or `local_ranks`, prints last the cause that the first failed rank wrote into
its error file. Other ranks' messages about the same failure, or about losing rank 0, would hide it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import click

from async_grpo.cli.options import OptionsCommand
from async_grpo.launch.interrupts import leave
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, RankLostError
from async_grpo.verification import namespaces

LATER_S = 5  # so much later than torchrun sees an end counts what only follows from it


def is_main_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def keep_to_loopback(environ: MutableMapping[str, str], *, meets_workers: bool = False) -> None:
    """Make gloo and NCCL use the loopback interface if all ranks are here and none is set.

    `meets_workers`: over NCCL, on any machine; it then chooses the interface.

    >>> environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    >>> keep_to_loopback(environ, meets_workers=True)
    >>> environ["GLOO_SOCKET_IFNAME"], "NCCL_SOCKET_IFNAME" in environ
    ('lo', False)
    >>> keep_to_loopback(environ)
    >>> environ["NCCL_SOCKET_IFNAME"]
    'lo'
    """
    if environ.get("WORLD_SIZE", "1") == environ.get("LOCAL_WORLD_SIZE", "1"):
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not meets_workers:
            environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


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
            # If rank 0 has failed too, this one does not live to tell.
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


class RankCommand(OptionsCommand):
    """A command whose usage errors reach the screen once, however many ranks make them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with rank0_only_errors():
            return super().parse_args(ctx, args)


def _leave_cause(message: str, *, is_first: bool = True) -> None:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        stamp = {"timestamp": str(int(time.time()) + (0 if is_first else LATER_S))}
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": stamp}}))
