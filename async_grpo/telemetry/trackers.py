"""The metrics in TensorBoard, W&B, MLflow and whatever else accelerate can talk to."""

from __future__ import annotations

import errno
import importlib.metadata
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.errors import ConfigError

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

logger = logging.getLogger(__name__)

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# Those that accelerate can talk to; one package of each is enough.
PACKAGES_BY_TRACKER = {
    "aim": ("aim",),
    "clearml": ("clearml",),
    "comet_ml": ("comet-ml",),
    "dvclive": ("dvclive",),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}


class Trackers:
    """Sends every metrics row to the named trackers; on the main rank, elsewhere does nothing.

    In a distributed run, make it after `torch.distributed.init_process_group`: accelerate looks at
    that group, and would make one of its own if there were none. Raises `ConfigError` for a name
    that accelerate does not know, whose package is missing, or that cannot start.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        run_name: str,
        output_dir: str | Path,
        config: Mapping[str, Any],
        is_main_rank: bool = True,
        first_step: int = 1,
    ) -> None:
        """`first_step`: what an earlier life of the run has logged from there on is undone."""
        self._trackers: list[GeneralTracker] = []
        if not is_main_rank or not names:
            return
        _look_at_process_group()
        _silence_writer_threads()
        hyperparameters = {key: _hyperparameter(value) for key, value in config.items()}
        for name in dict.fromkeys(names):
            try:
                tracker = _start(name, run_name, Path(output_dir), hyperparameters, first_step)
            except OSError as error:
                logger.warning("the run goes on without the tracker %s: %s", name, error)
            else:
                self._trackers.append(tracker)

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
        if name not in PACKAGES_BY_TRACKER:
            known = ", ".join(sorted(PACKAGES_BY_TRACKER))
            raise ConfigError(f"--trackers must be among {known}, got {name!r}: choose from these")
        packages = PACKAGES_BY_TRACKER[name]
        if not any(map(_is_installed, packages)):
            raise ConfigError(
                f"--trackers {name} needs a package that is not installed: pip install "
                f"{packages[0]}"
            )


def _silence_writer_threads() -> None:
    """TensorBoard's thread raises its error at the next call: print no traceback of it before."""
    print_traceback = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if getattr(arguments.thread, "exception", None) is not arguments.exc_value:
            print_traceback(arguments)

    threading.excepthook = hook


def _is_installed(package: str) -> bool:
    """As pip knows it: a run may have left a folder of that name, which could be imported."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _look_at_process_group() -> None:
    """Make the process state that accelerate's trackers ask for, out of the group that exists."""
    import torch
    from accelerate import PartialState

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and not torch.distributed.is_initialized():
        raise RuntimeError("Trackers must be made after init_process_group")
    PartialState()


def _start(
    name: str,
    run_name: str,
    output_dir: Path,
    hyperparameters: Mapping[str, Any],
    first_step: int,
) -> GeneralTracker:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    tracker_class = LOGGER_TYPE_TO_CLASS[name]
    arguments = _arguments(name, output_dir, first_step)
    if tracker_class.requires_logging_directory:
        folder = output_dir / name
        folder.mkdir(parents=True, exist_ok=True)
        arguments["logging_dir"] = str(folder)
    try:
        tracker = tracker_class(run_name, **arguments)
        tracker.start()
        tracker.store_init_configuration(dict(hyperparameters))
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


def _hyperparameter(value: object) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
