"""A bound on the processor time of mathematics, for whatever no rule about texts foresees.

math-verify's grammar takes time exponential in a dozen kinds of repetition (`a_a_a`, `9:9:9`,
`{{{9}}}`, `9/9/9`), each of which is short and looks harmless.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from async_grpo.verification.graders.boxed import UnscorableError

AGAIN_S = 0.05
T = TypeVar("T")


class _SpentError(BaseException):
    """No `Exception`: libraries of mathematics catch those, and go on."""


def within_cpu(seconds: float, compute: Callable[[], T]) -> T:
    """What `compute` returns; raises `UnscorableError` once it has used so much processor time.

    Signals reach the main thread only, in which verifiers grade; in others there is no bound.
    """
    if threading.current_thread() is not threading.main_thread():
        return compute()
    before = signal.signal(signal.SIGPROF, _spent)
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN_S)  # again, where it was swallowed
            return compute()
        finally:  # Python looks for signals after a call: none comes before the timer is off
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _SpentError:
        reason = f"takes more than {seconds:g} s of processor time"
        raise UnscorableError(f"not computed: {reason}") from None
    finally:
        signal.signal(signal.SIGPROF, before)


def _spent(number: int, frame: FrameType | None) -> None:
    raise _SpentError
