"""A request to end a run in order: between two items of its stream, on every rank at the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import TypeVar

T = TypeVar("T")


class StopRequest(Event):
    """A signal handler sets it; `is_polled` says whether the run polls it at the moment.

    `is_in_order`: the run itself has set it, at the end of a batch, and ends well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_polled = False
        self.is_in_order = False


def stop_in_order(stop: Event) -> None:
    """End the run as one that has done what it was asked; every rank calls it at the same place."""
    if isinstance(stop, StopRequest):
        stop.is_in_order = True
    stop.set()


@contextmanager
def polled(stop: Event) -> Iterator[None]:
    """Around the loop of a run that polls `stop` before each item."""
    if not isinstance(stop, StopRequest):
        yield
        return
    stop.is_polled = True
    try:
        yield
    finally:
        stop.is_polled = False


def until_stopped(items: Iterable[T], *, agree: Callable[[int], int], stop: Event) -> Iterator[T]:
    """The items until any rank has been asked to stop; for a stream that every rank makes itself.

    `agree` is `Ranks.agree`: the ranks end before the same item, and `stop` is set on all of them.
    """
    for item in items:
        if agree(int(stop.is_set())):
            stop.set()
            return
        yield item
