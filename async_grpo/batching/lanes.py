"""How work of an evaluation is leased beside that of training, and what differs of its terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from async_grpo.types import WeightsVersion

if TYPE_CHECKING:
    from async_grpo.controller.holds import Hold

LAST = 1  # the priority of evaluations in an engine: all that is trained is decoded before


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """What every request of one set of held-out questions has in common."""

    name: str = ""  # of the set
    version: WeightsVersion | None = None  # all tokens are of these weights, or of later ones
    rewards: tuple[str, ...] = ()  # that grade its outputs; none: those of a question's type
    hold: Hold | None = None  # whose worker samples it; None: any worker does

    @property
    def is_counted(self) -> bool:
        """Whether workers count its samples as taken.

        Else they come on top of what is trained, few at a time: nothing waits in line behind them.
        """
        return self.hold is None or bool(self.hold.worker_id)
