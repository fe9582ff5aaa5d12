"""What is asked of a run while it trains, by `async-grpo control`: of whom, and from when on.

A request is kept until the batch has ended after which it holds.
"""

from __future__ import annotations

from async_grpo.batching.records import BatcherPlan
from async_grpo.config.train_config import LIVE, with_settings
from async_grpo.types import AT_ONCE, Control
from async_grpo.util.errors import ConfigError

NUM_KEPT = 100  # of what was asked, for people


class Controls:
    """Takes requests at any time, and hands them out at the ends of batches."""

    def __init__(self, plan: BatcherPlan) -> None:
        self._config = plan.config  # what the run began with
        self.settings: dict[str, object] = dict(plan.settings)
        self._pending: list[Control] = []
        self._asked: dict[str, Control] = {}
        for control in plan.pending:
            self.ask(control)

    @property
    def asked(self) -> tuple[Control, ...]:
        """The latest requests, the oldest first."""
        return tuple(self._asked.values())[-NUM_KEPT:]

    @property
    def num_batches(self) -> int:
        """Of the run."""
        return self._config.batching.num_training_batches

    @property
    def options(self) -> dict[str, object]:
        """Those that may be set, as they are now."""
        live = with_settings(self._config, self.settings).options()
        return {name: live[name] for name in LIVE}

    @property
    def waiting(self) -> tuple[Control, ...]:
        """What the end of the batch is waited for with."""
        return tuple(self._pending)

    @property
    def staleness(self) -> tuple[int, int]:
        """--max-staleness as it holds now, and from the next batch on."""
        now, following = (
            with_settings(self._config, settings).sampling
            for settings in (self.settings, self._next())
        )
        return now.max_staleness, following.max_staleness

    def ask(self, control: Control) -> None:
        """Take a request; raises `ConfigError` for one that cannot be."""
        if control.id in self._asked:
            return
        with_settings(self._config, self._next() | dict(control.settings))
        if control.action == "evaluate" and not self._config.evaluation_sets:
            raise ConfigError(
                "evaluate needs held-out questions, this run has none: start it with "
                "--eval-data-path"
            )
        if control.action == "stop" and not self._config.recording.checkpoint_every_batches:
            raise ConfigError(
                "stop needs a checkpoint to stop at, this run writes none "
                "(--checkpoint-every-batches 0): Ctrl-C ends it"
            )
        self._asked[control.id] = control
        if control.action not in AT_ONCE:
            self._pending.append(control)

    def take(self) -> tuple[Control, ...]:
        """A batch has ended: what waited for it, which holds from the next one on."""
        taken, self.settings, self._pending = tuple(self._pending), self._next(), []
        return taken

    def _next(self) -> dict[str, object]:
        settings = dict(self.settings)
        for control in self._pending:
            settings |= control.settings
        return settings
