"""What each tracker calls a run, so that a run which goes on is one run there, too."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.config.train_config import TrainConfig
from async_grpo.telemetry.jsonl import write_json_atomic
from async_grpo.util.errors import ConfigError

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

logger = logging.getLogger(__name__)
RUNS_FILE = "trackers.json"


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as its trackers are told of it."""

    folder: Path  # where it leaves its files
    project: str
    name: str
    first_step: int  # what an earlier part of the run has logged from there on is undone
    known_as: Mapping[str, str] = field(default_factory=dict)  # {tracker: what it calls the run}

    @property
    def goes_on(self) -> bool:
        return self.first_step > 1


def tracked_run(config: TrainConfig, *, first_step: int) -> TrackedRun:
    """The run of `config`; where it goes on, with what its folder says that trackers call it."""
    folder = Path(config.output_dir)
    known_as: dict[str, str] = {}
    if first_step > 1 and (folder / RUNS_FILE).exists():
        try:
            known_as = json.loads((folder / RUNS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            logger.warning("trackers begin a new run: cannot read %s (%s)", RUNS_FILE, error)
    return TrackedRun(folder, config.tracker_project, config.shown_name, first_step, known_as)


def arguments(tracker: str, run: TrackedRun) -> tuple[str, dict[str, Any]]:
    """The first argument of accelerate's class of a tracker, and its others.

    They keep its files in the run's folder, name the run, and go on with one that it knows.
    """
    folder, known = run.folder, run.known_as.get(tracker)
    match tracker:
        case "tensorboard":  # a run is a folder
            return known or run.name, {"purge_step": run.first_step} if run.goes_on else {}
        case "wandb":
            named = {"id": known, "resume": "allow"} if known else {}
            return run.project, {"dir": str(folder), "name": run.name, **named}
        case "mlflow":
            return run.project, {"run_name": run.name, **({"run_id": known} if known else {})}
        case "trackio":
            resume = "allow" if known else "never"
            return run.project, {"name": known or run.name, "resume": resume, "embed": False}
        case "dvclive":
            return run.project, {"dir": str(folder / "dvclive"), "resume": run.goes_on}
        case _:
            return run.project, {}


def name_given(tracker: GeneralTracker, run: TrackedRun) -> str | None:
    """What a tracker that has started calls the run; None where it cannot go on with one."""
    match tracker.name:
        case "tensorboard" | "trackio":
            return run.known_as.get(tracker.name) or run.name
        case "wandb":
            return str(tracker.tracker.id)
        case "mlflow":
            return str(tracker.tracker.info.run_id)
        case _:
            return None


def keep(run: TrackedRun, names: Mapping[str, str]) -> None:
    """Leave `names`, {tracker: what it calls the run}, for when the run goes on."""
    if names:
        try:
            write_json_atomic(run.folder / RUNS_FILE, {**run.known_as, **names})
        except ConfigError as error:
            logger.warning("%s; a run that goes on is a new one in trackers", error)
