"""Which beginning of which run a call belongs to."""

from __future__ import annotations

from typing import NamedTuple


class RunId(NamedTuple):
    """A run, and how often a trainer has begun or gone on with one at this controller."""

    incarnation: int
    epoch: int  # grows with each beginning: a call of an earlier one is refused

    def __str__(self) -> str:
        return f"{self.incarnation}, epoch {self.epoch}"
