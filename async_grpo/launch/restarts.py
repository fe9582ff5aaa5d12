"""How often, and after which pause, something that was lost is started again. Pure."""

from __future__ import annotations

from collections import deque

WINDOW_S = 3600.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class RestartBudget:
    """So many restarts in any hour, each after twice the pause of the one before."""

    def __init__(self, max_restarts: int, *, window_s: float = WINDOW_S) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._restarts: deque[float] = deque()  # when they were granted, within the window

    @property
    def num_used(self) -> int:
        """Restarts granted in the window before the latest one."""
        return len(self._restarts)

    def next_pause_s(self, now_s: float) -> float | None:
        """Grant a restart: the seconds to wait before it. None: there were too many.

        >>> budget = RestartBudget(3, window_s=100)
        >>> [budget.next_pause_s(now_s) for now_s in (0, 1, 50, 60)]
        [1.0, 2.0, 4.0, None]
        >>> budget.next_pause_s(101)  # the first two are forgotten
        2.0
        """
        while self._restarts and now_s - self._restarts[0] >= self._window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            return None
        pause_s = min(FIRST_PAUSE_S * 2 ** min(len(self._restarts), 30), LONGEST_PAUSE_S)
        self._restarts.append(now_s)
        return pause_s
