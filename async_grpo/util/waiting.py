"""Looking again and again for something that will be there soon, or will not come."""

from __future__ import annotations

import time
from collections.abc import Iterator


def poll(*, every_s: float, within_s: float) -> Iterator[None]:
    """Yield for each look; what follows the loop is said of something that did not come in time.

    The first look is at once, however little time there is; the last one is at its end, or after.

    Example:
        >>> looks = 0
        >>> for _ in poll(every_s=60, within_s=0):
        ...     looks += 1
        >>> looks
        1
    """
    deadline = time.monotonic() + within_s
    yield
    while time.monotonic() < deadline:
        time.sleep(every_s)
        yield
