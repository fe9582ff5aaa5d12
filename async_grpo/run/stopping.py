"""A request to end a run in order: between two items of its stream, on every rank at the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_grpo.types import StreamItem


class StopRequest(Event):
    """Set by whoever wants the run to end; `is_observed` says whether anybody looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_observed = False


@contextmanager
def observed(stop: Event | None) -> Iterator[None]:
    """Within, a run looks at `stop` before each item; outside it can only be broken off."""
    if not isinstance(stop, StopRequest):
        yield
        return
    stop.is_observed = True
    try:
        yield
    finally:
        stop.is_observed = False


def until_stopped(
    items: Iterable[StreamItem], *, agree: Callable[[int], int], stop: Event | None
) -> Iterator[StreamItem]:
    """The items until any rank has been asked to stop; for a stream that every rank makes itself.

    `agree` is `Ranks.agree`: the ranks end before the same item, and `stop` is set on all of them.
    """
    stop = stop or Event()
    for item in items:
        if agree(int(stop.is_set())):
            stop.set()
            return
        yield item
