"""Which waiting requests share the reference model's next packed forward. Pure.

Nothing waits for company: when the model is idle, whatever is there goes at once. While it
computes, requests gather, so forwards fill themselves under load.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from async_grpo.types import WeightsVersion


class Request(Protocol):
    """One output to score."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def version(self) -> WeightsVersion: ...


R = TypeVar("R", bound=Request)


def take_forward(line: list[R], *, max_tokens: int) -> list[R]:
    """The requests of the next forward, removed from `line`, in which each fits by itself.

    Oldest weights go first, then who came first; later ones with the same weights fill the room
    that is left.

    >>> from types import SimpleNamespace
    >>> line = [SimpleNamespace(num_tokens=n, version=WeightsVersion(0, 0)) for n in (60, 50, 40)]
    >>> [[request.num_tokens for request in take_forward(line, max_tokens=100)] for _ in range(3)]
    [[60, 40], [50], []]
    """
    version = min((request.version for request in line), default=None)
    room, taken, left = max_tokens, [], []
    for request in line:
        if request.version == version and request.num_tokens <= room:
            taken.append(request)
            room -= request.num_tokens
        else:
            left.append(request)
    line[:] = left
    return taken
