"""Ending a run early: every rank stops before the same item of its stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import TypeVar

T = TypeVar("T")


class StopRequest(Event):
    """An event that a signal handler sets; `is_polled` says whether the run polls it now.

    `is_in_order`: the run itself has set it, at the end of a batch, and ends successfully.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_polled = False
        self.is_in_order = False


def stop_in_order(stop: Event) -> None:
    """End the run successfully; every rank calls this at the same point."""
    if isinstance(stop, StopRequest):
        stop.is_in_order = True
    stop.set()


@contextmanager
def polled(stop: Event) -> Iterator[None]:
    """Mark `stop` as polled during the loop of a run."""
    if not isinstance(stop, StopRequest):
        yield
        return
    stop.is_polled = True
    try:
        yield
    finally:
        stop.is_polled = False


def until_stopped(items: Iterable[T], *, agree: Callable[[int], int], stop: Event) -> Iterator[T]:
    """Yield items until any rank is asked to stop; every rank iterates over the same stream.

    `agree` is `Ranks.agree`: all ranks end before the same item, with `stop` set on each.
    """
    for item in items:
        if agree(int(stop.is_set())):
            stop.set()
            return
        yield item
