"""What a failing rank says: one sentence, once, and last on the screen.

Whoever has started the ranks, torchrun or `local_ranks`, ends its output with the cause that the
first failed rank has left in its error file; what other ranks say of the same failure, or of rank
0's silence, would only hide it.
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

from async_grpo.cli.interrupts import leave
from async_grpo.cli.options import OptionsCommand
from async_grpo.errors import AsyncGrpoError, RankLostError
from async_grpo.verification import namespaces

OTHERS_WAIT_S = 3.0  # within which the other ranks of a machine are ended
LATER_S = 5  # so much later than torchrun sees an end counts what only follows from it


def is_main_rank() -> bool:
    """Whether this process speaks for all ranks; true for one that is alone."""
    return os.environ.get("RANK", "0") == "0"


def keep_to_loopback(environ: MutableMapping[str, str]) -> None:
    """Ranks of one machine open no port to the network; a choice of the user's stays.

    >>> environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    >>> keep_to_loopback(environ)
    >>> environ["GLOO_SOCKET_IFNAME"]
    'lo'
    """
    if environ.get("WORLD_SIZE", "1") == environ.get("LOCAL_WORLD_SIZE", "1"):
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def end_with_agent() -> None:
    """Have this rank asked to end when whoever started it is gone: nobody watches over it then.

    The system's own means, because a killed process says nothing; Linux only.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        namespaces.die_with_parent(signal.SIGTERM)


@contextmanager
def one_voice() -> Iterator[None]:
    """Around what every rank does: rank 0's error for the user is raised, another's ends it."""
    try:
        yield
    except (AsyncGrpoError, click.UsageError) as error:
        is_first = not isinstance(error, RankLostError)
        if is_first and not is_main_rank():
            time.sleep(OTHERS_WAIT_S)  # if rank 0 has failed too, this one does not live to tell
        sentence = error.format_message() if isinstance(error, click.UsageError) else str(error)
        _leave_cause(f"error: {sentence}", is_first=is_first)
        if is_main_rank():
            raise
        sys.exit(1)


@contextmanager
def ends_at_once(stop: Event | None = None) -> Iterator[None]:
    """A process boundary: after an error or Ctrl-C, leave without waiting for threads.

    One of them may still announce weights, for minutes. `stop`: this rank is asked to end.
    """
    try:
        yield
        return
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        if not is_main_rank():
            (stop or Event()).wait(OTHERS_WAIT_S)
        _leave_cause(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        code = 1
    leave(code)


class RankCommand(OptionsCommand):
    """A command whose usage errors reach the screen once, however many ranks make them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with one_voice():
            return super().parse_args(ctx, args)


def _leave_cause(message: str, *, is_first: bool = True) -> None:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        stamp = {"timestamp": str(int(time.time()) + (0 if is_first else LATER_S))}
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": stamp}}))
