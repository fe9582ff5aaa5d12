"""Two cores: an engine on one, a trainer's rank on the other, everybody else on whichever is free.

Three that want to compute on two cores get two thirds each on the average of a fair scheduler, but
the first two never leave theirs: each keeps three quarters, and the others have half a core.
"""

from __future__ import annotations

from benchmarks.scaling.clock import Runner
from benchmarks.scaling.engine import Engine

PINNED_SPEED, FLOATING_SPEED = 0.75, 0.5


class SharedCores:
    """Sets everybody's speed whenever somebody begins or ends to compute."""

    def __init__(self, *, background: float = 0.0) -> None:
        """`background`: share of a core that is always taken, by what serves no sample."""
        self._background = background
        self._engine_busy = self._trainer_busy = self._services_busy = False
        self._parts: tuple[Engine, Runner, Runner] | None = None

    def connect(self, engine: Engine, trainer: Runner, services: Runner) -> None:
        self._parts = (engine, trainer, services)

    def engine(self, is_busy: bool) -> None:
        self._engine_busy = is_busy
        self._share()

    def trainer(self, is_busy: bool) -> None:
        self._trainer_busy = is_busy
        self._share()

    def services(self, is_busy: bool) -> None:
        self._services_busy = is_busy
        self._share()

    def _share(self) -> None:
        if self._parts is None:
            return
        engine, trainer, services = self._parts
        both = self._engine_busy and self._trainer_busy
        # With a free core the background is there.
        left = 1 - self._background / 2 if both else 1.0
        crowded = both and self._services_busy
        engine.set_speed(left * (PINNED_SPEED if crowded else 1.0))
        trainer.set_speed(left * (PINNED_SPEED if crowded else 1.0))
        services.set_speed(FLOATING_SPEED if crowded else 1.0)
