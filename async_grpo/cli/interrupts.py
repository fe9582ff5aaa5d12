"""Ctrl-C and SIGTERM, answered alike."""

from __future__ import annotations

import signal
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def interrupt_once() -> None:
    """Raise `KeyboardInterrupt` at the first signal; later ones do not disturb the clean-up."""
    for number in NUMBERS:
        signal.signal(number, _interrupt)


def end_at_once() -> None:
    """End the process at the first signal, without a word: for ranks with nothing to clean up."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_DFL)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
