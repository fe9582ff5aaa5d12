"""What a registry remembers of its workers' comings and goings. Pure; bounded."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

from async_grpo.types import RegistryEvent

NUM_EVENTS_KEPT = 256


class History:
    """Counts for ever, tells of the newest events only."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: deque[RegistryEvent] = deque(maxlen=NUM_EVENTS_KEPT)
        self._counts: Counter[str] = Counter()
        self._exclusions: dict[str, str] = {}

    def note(
        self, kind: str, worker_id: str = "", cause: str = "", reason: str = "", *, num: int = 1
    ) -> None:
        """Something has happened, now, to a worker, or to `num` of its leases.

        >>> history = History(clock=lambda: 7.0)
        >>> history.note("registered", "w0")
        >>> history.note("fenced", "w0", "died", "its process has ended")
        >>> history.note("revoked", "w0", "died", num=3)
        >>> history.counts
        {'registered': 1, 'fenced: died': 1, 'revoked: died': 3}
        """
        if not num:
            return
        self._counts[f"{kind}: {cause}" if cause else kind] += num
        self._events.append(RegistryEvent(self._clock(), kind, worker_id, cause, reason))
        if kind == "fenced":
            self._exclusions[worker_id] = reason
            if len(self._exclusions) > NUM_EVENTS_KEPT:
                del self._exclusions[next(iter(self._exclusions))]

    @property
    def counts(self) -> Mapping[str, int]:
        """How often each kind of event has happened, by `kind` or `kind: cause`."""
        return dict(self._counts)

    @property
    def exclusions(self) -> Mapping[str, str]:
        """The latest workers that were fenced, with the reason."""
        return self._exclusions

    @property
    def events(self) -> tuple[RegistryEvent, ...]:
        """The newest events, in their order."""
        return tuple(self._events)
