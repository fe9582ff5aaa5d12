"""What a failing rank says under torchrun: one sentence, once, and last on the screen.

torchrun ends its output with the cause that the first failed rank has left in its error file; what
other ranks say of the same failure, or of rank 0's silence, would only hide it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from async_grpo.cli.interrupts import leave
from async_grpo.errors import AsyncGrpoError

OTHERS_WAIT_S = 3.0  # within which torchrun ends the other ranks of its machine


def is_main_rank() -> bool:
    """Whether this process speaks for all ranks; true without torchrun."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def one_voice() -> Iterator[None]:
    """Around what every rank does: rank 0's error for the user is raised, another's ends it."""
    try:
        yield
    except (AsyncGrpoError, click.UsageError) as error:
        if not is_main_rank():
            time.sleep(OTHERS_WAIT_S)  # if rank 0 has failed too, this one does not live to tell
        sentence = error.format_message() if isinstance(error, click.UsageError) else str(error)
        _leave_cause(f"error: {sentence}")
        if is_main_rank():
            raise
        sys.exit(1)


@contextmanager
def ends_at_once() -> Iterator[None]:
    """A process boundary: after an error or Ctrl-C, leave without waiting for threads.

    One of them may still announce weights, for minutes.
    """
    try:
        yield
        return
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        if not is_main_rank():
            time.sleep(OTHERS_WAIT_S)
        _leave_cause(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        code = 1
    leave(code)


class RankCommand(click.Command):
    """A command whose usage errors reach the screen once, however many ranks make them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with one_voice():
            return super().parse_args(ctx, args)


def _leave_cause(message: str) -> None:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        stamp = {"timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": stamp}}))
