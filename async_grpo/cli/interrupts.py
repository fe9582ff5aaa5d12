"""How our processes end: Ctrl-C and SIGTERM are answered alike, and nothing is waited for twice."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def interrupt_once() -> None:
    """Raise `KeyboardInterrupt` at the first signal; later ones do not disturb the clean-up."""
    for number in NUMBERS:
        signal.signal(number, _interrupt)


def end_at_once() -> None:
    """End the process at the first signal, without a word: for ranks with nothing to clean up."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_DFL)


def leave(code: int) -> NoReturn:
    """End the process now, whatever its threads and Ray's shutdown would still wait for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
