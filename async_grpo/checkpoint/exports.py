"""When the model is exported, counted in samples; every rank decides the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from async_grpo.checkpoint.export import export_hf
from async_grpo.checkpoint.resume import Start
from async_grpo.checkpoint.tensors import restore_learner
from async_grpo.config.train import TrainConfig
from async_grpo.errors import CheckpointError
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Ranks
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
        self._refusal = ""  # why the disk did not take the last one

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
        """Collective: write the policy as it is, unless it has been written already.

        A disk that refuses costs the export, not the run.
        """
        if self._last_export == self._num_samples and not self._refusal:
            return
        self._doing("exporting the model")
        target = export_folder(self._config, self._num_samples)
        self._refusal = export_hf(
            self._learner.policy,
            source_folder=self._config.model_name_or_path,
            target=str(target),
        )
        self._last_export = self._num_samples
        if self._refusal:
            logger.warning("the export to %s FAILED, the run goes on: %s", target, self._refusal)
        else:
            logger.info("exported the model to %s", target)

    def check_last(self, *, is_saved: bool) -> None:
        """At the end of a run whose last batch `is_saved` in a checkpoint, or not.

        Raises `CheckpointError` when the trained model is nowhere.
        """
        if not self._refusal:
            return
        if not is_saved:
            raise CheckpointError(
                f"the disk of --output-dir {self._config.output_dir} refused the trained model "
                f"({self._refusal}), and no checkpoint holds it: make room, and train again what "
                "comes after the last good checkpoint"
            )
        logger.error(
            "the last checkpoint alone holds the trained model: make room, and give the same "
            "command again to export it"
        )


def export_finished(config: TrainConfig, ranks: Ranks, start: Start) -> None:
    """Collective: the last export of a run that is trained, if it is not there."""
    state = start.state["exports"]
    if ranks.share(export_folder(config, state["samples"]).exists):
        return
    learner = Learner.build(config, ranks)
    restore_learner(learner, start)
    exports = Exports(config, learner, doing=logger.info)
    exports.restore({**state, "last_export": -1})
    exports.export()
    ranks.on_main(lambda: exports.check_last(is_saved=True))


def export_folder(config: TrainConfig, num_samples: int) -> Path:
    return Path(config.output_dir) / "hf_format" / f"samples_{num_samples}"
