"""When the model is exported, counted in samples; every rank decides the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from async_grpo.config.train import TrainConfig
from async_grpo.training.export import export_hf
from async_grpo.training.learner import Learner
from async_grpo.types import EndOfStep

logger = logging.getLogger(__name__)


class Exports:
    """Writes `hf_format/samples_N/` every `--min-samples-per-checkpoint` samples and at the end."""

    def __init__(
        self, config: TrainConfig, learner: Learner, *, doing: Callable[[str], None]
    ) -> None:
        """`doing` is told what takes time."""
        self._doing = doing
        self._config = config
        self._learner = learner
        self._num_samples = 0
        self._last_export = -1

    def state(self) -> dict[str, int]:
        """What a resumed run needs to export when this one would have."""
        return {"samples": self._num_samples, "last_export": self._last_export}

    def restore(self, state: Mapping[str, int]) -> None:
        """The inverse of `state`."""
        self._num_samples, self._last_export = state["samples"], state["last_export"]

    def count(self, end: EndOfStep) -> None:
        """A gradient step was finished."""
        self._num_samples += end.num_samples

    def export_if_due(self) -> None:
        """Collective, after a batch."""
        interval = self._config.min_samples_per_checkpoint
        if interval and self._num_samples - max(self._last_export, 0) >= interval:
            self.export()

    def export(self) -> None:
        """Collective: write the policy as it is, unless it has been written already."""
        if self._last_export == self._num_samples:
            return
        self._doing("exporting the model")
        target = Path(self._config.output_dir) / "hf_format" / f"samples_{self._num_samples}"
        export_hf(
            self._learner.policy,
            source_folder=self._config.model_name_or_path,
            target=str(target),
        )
        self._last_export = self._num_samples
        logger.info("exported the model to %s", target)
