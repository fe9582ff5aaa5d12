"""Which dispatchers need a verifier pool: each says so again and again. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """A dispatcher of generation workers, as it makes itself known to the pool."""

    host: str
    pid: int
    failed_samples: str = ""  # file for samples that could not be graded; empty: none is wanted

    def __str__(self) -> str:
        return f"dispatcher process {self.pid} on {self.host}"


class Dispatchers:
    """Whoever is silent for more than `patience` ticks has left.

    Time is counted in ticks of the pool's loop: a loop that stood still has heard nobody.

    >>> dispatchers, one = Dispatchers(patience=2), Dispatcher("box", 7)
    >>> dispatchers.heard(one)
    >>> for _ in range(2): dispatchers.tick()
    >>> list(map(str, dispatchers))
    ['dispatcher process 7 on box']
    >>> dispatchers.tick()
    >>> list(dispatchers)
    []
    """

    def __init__(self, *, patience: int) -> None:
        self._patience = patience
        self._heard: dict[Dispatcher, int] = {}  # the tick at which each was heard last
        self.now = 0

    def __iter__(self) -> Iterator[Dispatcher]:
        return iter(self._heard)

    def __contains__(self, dispatcher: Dispatcher) -> bool:
        return dispatcher in self._heard

    def __len__(self) -> int:
        return len(self._heard)

    def heard(self, dispatcher: Dispatcher) -> None:
        """It lives."""
        self._heard[dispatcher] = self.now

    def left(self, dispatcher: Dispatcher) -> None:
        """It said so."""
        self._heard.pop(dispatcher, None)

    def tick(self) -> None:
        self.now += 1
        oldest = self.now - self._patience
        self._heard = {who: at for who, at in self._heard.items() if at >= oldest}

    def unheard_since(self, tick: int) -> bool:
        """Whether somebody may live or not: it has said nothing after that tick, nor left."""
        return any(at <= tick for at in self._heard.values())
