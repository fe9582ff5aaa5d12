"""The metrics in TensorBoard, W&B, MLflow and whatever else accelerate can talk to."""

from __future__ import annotations

import dataclasses
import errno
import logging
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.config.train import TrainConfig
from async_grpo.errors import ConfigError

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

logger = logging.getLogger(__name__)

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# Those that accelerate can talk to, by their packages, and packages that will do as well.
TRACKERS = (
    "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb",
)  # fmt: skip
ALTERNATIVES = {"mlflow": "mlflow-skinny", "tensorboard": "tensorboardX"}


class Trackers:
    """Sends every metrics row to the named trackers; rank 0 has them.

    In a distributed run, make it after `torch.distributed.init_process_group`: accelerate looks at
    that group, and would make one of its own if there were none. Raises `ConfigError` for a tracker
    that cannot start.
    """

    def __init__(self, config: TrainConfig, *, first_step: int = 1) -> None:
        """`first_step`: what an earlier life of the run has logged from there on is undone."""
        self._trackers: list[GeneralTracker] = []
        if config.tracker_names:
            _silence_writer_threads()
        for name in dict.fromkeys(config.tracker_names):
            try:
                self._trackers.append(_start(name, config, first_step))
            except OSError as error:
                logger.warning("the run goes on without the tracker %s: %s", name, error)

    def log(self, row: Mapping[str, float | int | None], *, step: int) -> None:
        """Send the numbers of `row`; a tracker that fails is given up, training goes on."""
        numbers = {key: value for key, value in row.items() if value is not None}
        for tracker in tuple(self._trackers):
            try:
                tracker.log(numbers, step=step)
            except Exception as error:  # a service outside this process, of any kind
                self._trackers.remove(tracker)
                logger.warning(
                    "Tracker %s failed at step %d and gets no more metrics (%s: %s); the run goes "
                    "on without it",
                    tracker.name, step, type(error).__name__, error,
                )  # fmt: skip

    def finish(self) -> None:
        """Flush and close every tracker."""
        for tracker in self._trackers:
            try:
                tracker.finish()
            except Exception as error:  # as in log
                logger.warning("Tracker %s did not close cleanly: %s", tracker.name, error)
        self._trackers.clear()


def check_trackers(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a tracker that is unknown or not installed; imports nothing of it."""
    for name in names:
        if name not in TRACKERS:
            known = ", ".join(TRACKERS)
            raise ConfigError(f"--trackers must be among {known}, got {name!r}: choose from these")
        # As pip knows it: a run may have left a folder of that name, which could be imported.
        packages = (name, ALTERNATIVES.get(name, name))
        if not any(any(distributions(name=package)) for package in packages):
            raise ConfigError(
                f"--trackers {name} needs a package that is not installed: pip install "
                f"{name.replace('_', '-')}"
            )


def _silence_writer_threads() -> None:
    """TensorBoard's thread raises its error at the next call: print no traceback of it before."""
    print_traceback = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if getattr(arguments.thread, "exception", None) is not arguments.exc_value:
            print_traceback(arguments)

    threading.excepthook = hook


def _start(name: str, config: TrainConfig, first_step: int) -> GeneralTracker:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    tracker_class = LOGGER_TYPE_TO_CLASS[name]
    output_dir = Path(config.output_dir)
    arguments = _arguments(name, output_dir, first_step)
    if tracker_class.requires_logging_directory:
        folder = output_dir / name
        folder.mkdir(parents=True, exist_ok=True)
        arguments["logging_dir"] = str(folder)
    try:
        tracker = tracker_class(config.run_name, **arguments)
        tracker.start()
        tracker.store_init_configuration(dataclasses.asdict(config))
    except Exception as error:  # a service outside this process, of any kind
        if getattr(error, "errno", None) in DISK_ERRORS:
            raise  # as it is: an OSError
        raise ConfigError(
            f"--trackers {name} could not start ({type(error).__name__}: {error}): "
            "set it up as its documentation says, or leave it out"
        ) from error
    return tracker


def _arguments(name: str, output_dir: Path, first_step: int) -> dict[str, Any]:
    """Arguments that keep a tracker's files in the output folder and name its run."""
    run = output_dir.resolve().name
    arguments: dict[str, dict[str, Any]] = {
        "tensorboard": {"purge_step": first_step} if first_step > 1 else {},
        "wandb": {"dir": str(output_dir), "name": run},
        "mlflow": {"run_name": run},
        "dvclive": {"dir": str(output_dir / "dvclive")},
    }
    return arguments.get(name, {})
