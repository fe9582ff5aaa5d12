"""Sends the metrics to TensorBoard, W&B, MLflow, Trackio and the other trackers of accelerate.

An add-on. Each tracker runs in its own thread, so that a slow or hanging one delays no step. A
tracker that fails is dropped, with one warning, and counted; the run goes on. Metrics are named
`reward/avg_reward` there, so that charts come in groups. A resumed run continues its old one.
"""

from __future__ import annotations

import errno
import json
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.config.run_options import RecordingOptions
from async_grpo.telemetry.jsonl import write_json_atomic
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

logger = logging.getLogger(__name__)

Numbers = dict[str, float | int]

RUNS_FILE = "trackers.json"  # the name or id of the run in each tracker, read on resume
MAX_BEHIND = 1000  # queued rows after which a tracker is dropped
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# The trackers of accelerate, by their packages, and packages that may stand in for these.
TRACKERS = (
    "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb",
)  # fmt: skip
ALTERNATIVES = {"mlflow": "mlflow-skinny", "tensorboard": "tensorboardX"}
NO_CHARTS = ("step", "iteration")  # the axis itself
GROUPS = (  # a metric is in the first group whose pattern matches the start of its name
    ("run", r"alarms|total_|optimizer_|skipped_|failed_(checkpoints|trackers)"),
    ("reward", r"avg_(max_|format_|replaced_)?reward|avg_\w+_penalty|perc_with|perc_unscorable"),
    ("length", r"avg_(output|prompt)_tokens|perc_truncated|perc_masked"),
    (
        "ledger",
        r"\w*fate_|perc_resampled|lost_|failed_|discarded_|num_replacements|replaced_|\w+_(retries|restarts)",
    ),
    ("lag", r"lag_|avg_lag|avg_token_lag|max_lag"),
    ("engine", r"mismatch_|effective_|corrected_|canary_"),
    ("sync", r"sync_|recomputed_"),
    ("hardware", r"mfu|tflops_|peak_|seconds_(gathering|all_g|reduce_s|agreeing|copying|updating)"),
    (
        "speed",
        r"seconds|\w+_per_second|\w+_idle_fraction|packing_|avg_(generating|verifying|scoring)",
    ),
    ("update", r""),
)


class Trackers:
    """Sends metrics to the trackers of `--tracker`, on trainer rank 0.

    In a distributed run, make it after `torch.distributed.init_process_group`: accelerate would
    otherwise make a process group itself. Raises `ConfigError` for a tracker that cannot start; a
    resumed run goes on without it instead.
    """

    def __init__(
        self, recording: RecordingOptions, options: Mapping[str, object], *, first_step: int = 1
    ) -> None:
        """`options`: all options of the run, for trackers to show.

        `first_step`: rows that an earlier part of the run logged from this step on are removed.
        """
        self._feeds: list[_Feed] = []
        names = dict.fromkeys(recording.trackers)
        if not names:
            return
        from accelerate import PartialState

        PartialState()  # the loggers of accelerate's trackers need it
        _silence_writer_threads()
        run = tracked_run(recording, first_step=first_step)
        self._feeds += [_Feed(name, partial(_start, name, options, run)) for name in names]
        due_at = time.monotonic() + deadlines.TRACKERS_START_S
        try:
            for feed in self._feeds:
                feed.wait_started(due_at, may_fail=run.goes_on)
        except ConfigError:
            for feed in self._feeds:
                feed.end()
            raise
        trackers = [feed.tracker for feed in self._feeds if feed.tracker]
        keep_names(run, {t.name: name for t in trackers if (name := name_given(t, run))})

    @property
    def num_failed(self) -> int:
        """Trackers that have been dropped."""
        return sum(feed.has_failed for feed in self._feeds)

    def log_row(self, row: Mapping[str, float | int | None], *, step: int) -> None:
        """Send a step's row of metrics under the names of `as_charts`; waits for no tracker."""
        self.log(as_charts(row), step=step)

    def log(self, row: Mapping[str, float | int | None], *, step: int) -> None:
        """Send the numbers of `row` under their names; waits for no tracker."""
        numbers = {key: value for key, value in row.items() if value is not None}
        for feed in self._feeds:
            feed.log(numbers, step=step)

    def finish(self) -> None:
        """Flush and close every tracker."""
        for feed in self._feeds:
            feed.end()
        due_at = time.monotonic() + deadlines.TRACKERS_ENDED_S
        for feed in self._feeds:
            feed.wait_ended(due_at)


class _Feed:
    """One tracker, started, fed and closed by a thread."""

    def __init__(self, name: str, start: Callable[[], GeneralTracker]) -> None:
        self.name = name
        self.has_failed = False
        self._start = start
        self.tracker: GeneralTracker | None = None  # once it has started
        self._refusal: Exception | None = None  # why it did not start
        self._has_started = threading.Event()
        self._rows: queue.Queue[tuple[Numbers, int] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def wait_started(self, due_at: float, *, may_fail: bool) -> None:
        """Wait until the tracker has started; drop one that has not, or raise why.

        `may_fail`: never raise. An `OSError`, as of a full disk, is not raised either.
        """
        if not self._has_started.wait(max(0.0, due_at - time.monotonic())):
            self._refusal = ConfigError(
                f"--trackers {self.name} did not start within {deadlines.TRACKERS_START_S:g} s: "
                "look at its service and its network, or leave it out"
            )
        if self._refusal is None:
            return
        if not may_fail and not isinstance(self._refusal, OSError):
            raise self._refusal
        self._give_up(f"the run goes on without the tracker {self.name}: {self._refusal}")

    def log(self, numbers: Numbers, *, step: int) -> None:
        if self.has_failed:
            return
        self._rows.put((numbers, step))
        if self._rows.qsize() > MAX_BEHIND:
            self._give_up(
                f"Tracker {self.name} is {MAX_BEHIND} rows behind at step {step} and gets no more "
                "metrics; the run goes on without it"
            )

    def end(self) -> None:
        """Close the tracker once it has taken the queued rows."""
        self._rows.put(None)

    def wait_ended(self, due_at: float) -> None:
        self._thread.join(max(0.0, due_at - time.monotonic()))
        if self._thread.is_alive() and not self.has_failed:
            self._give_up(f"Tracker {self.name} still has {self._rows.qsize()} rows to take")

    def _give_up(self, sentence: str) -> None:
        self.has_failed = True
        logger.warning("%s", sentence)

    def _run(self) -> None:
        try:
            self.tracker = self._start()
        except (ConfigError, OSError) as error:
            self._refusal = error
            return
        finally:
            self._has_started.set()
        while (row := self._rows.get()) is not None and not self.has_failed:
            numbers, step = row
            try:
                self.tracker.log(numbers, step=step)
            except Exception as error:  # a service outside this process, of any kind
                self._give_up(
                    f"Tracker {self.name} failed at step {step} and gets no more metrics "
                    f"({type(error).__name__}: {error}); the run goes on without it"
                )
        try:
            self.tracker.finish()
        except Exception as error:  # a service outside this process, of any kind
            if not self.has_failed:
                self._give_up(f"Tracker {self.name} did not close cleanly: {error}")


def check_trackers(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a tracker that is unknown or not installed; imports none."""
    for name in names:
        if name not in TRACKERS:
            known = ", ".join(TRACKERS)
            raise ConfigError(f"--trackers must be among {known}, got {name!r}: choose from these")
        # Asked of the installation: a run may have left a folder that can be imported by that name.
        packages = (name, ALTERNATIVES.get(name, name))
        if not any(any(distributions(name=package)) for package in packages):
            raise ConfigError(
                f"--trackers {name} needs a package that is not installed: pip install "
                f"{name.replace('_', '-')}"
            )


def _silence_writer_threads() -> None:
    """Print no traceback of TensorBoard's writer thread: the next call raises its error."""
    print_traceback = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if getattr(arguments.thread, "exception", None) is not arguments.exc_value:
            print_traceback(arguments)

    threading.excepthook = hook


def _start(name: str, options: Mapping[str, object], run: TrackedRun) -> GeneralTracker:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    tracker_class = LOGGER_TYPE_TO_CLASS[name]
    first, others = arguments(name, run)
    if tracker_class.requires_logging_directory:
        folder = run.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        others["logging_dir"] = str(folder)
    try:
        tracker = tracker_class(first, **others)
        tracker.start()
        if name not in run.known_as:  # some refuse to change the options of an existing run
            tracker.store_init_configuration(options)
    except Exception as error:  # a service outside this process, of any kind
        if getattr(error, "errno", None) in DISK_ERRORS:
            raise  # an OSError, which ends no run
        raise ConfigError(
            f"--trackers {name} could not start ({type(error).__name__}: {error}): "
            "set it up as its documentation says, or leave it out"
        ) from error
    return tracker


def as_charts(row: Mapping[str, float | int | None]) -> dict[str, float]:
    """The numbers of a metrics row under the names of their charts, GROUP/METRIC.

    >>> as_charts({"step": 3, "avg_reward": 0.5, "fate_trained": 8, "loss": 1.5, "kl": None})
    {'reward/avg_reward': 0.5, 'ledger/fate_trained': 8, 'update/loss': 1.5}
    """
    return {
        f"{_group(name)}/{name}": value
        for name, value in row.items()
        if value is not None and name not in NO_CHARTS
    }


def _group(name: str) -> str:
    return next(group for group, pattern in GROUPS if re.match(pattern, name))


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as trackers identify it."""

    folder: Path  # the output folder
    project: str
    name: str
    first_step: int  # rows of an earlier part of the run from this step on are removed
    known_as: Mapping[str, str] = field(default_factory=dict)  # {tracker: name or id of the run}

    @property
    def goes_on(self) -> bool:
        return self.first_step > 1


def tracked_run(recording: RecordingOptions, *, first_step: int) -> TrackedRun:
    """The run; a resumed one with the names that its folder keeps in `RUNS_FILE`."""
    folder = Path(recording.output_dir)
    known_as: dict[str, str] = {}
    if first_step > 1 and (folder / RUNS_FILE).exists():
        try:
            known_as = json.loads((folder / RUNS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            logger.warning("trackers begin a new run: cannot read %s (%s)", RUNS_FILE, error)
    return TrackedRun(folder, recording.tracker_project, recording.shown_name, first_step, known_as)


def arguments(tracker: str, run: TrackedRun) -> tuple[str, dict[str, object]]:
    """The first positional argument and the keyword arguments of accelerate's tracker class.

    They put its files into the run's folder, name the run, and continue a run that it knows.
    """
    folder, known = run.folder, run.known_as.get(tracker)
    match tracker:
        case "tensorboard":  # its runs are folders
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
    """The name or id of the run in a tracker that has started; None: it cannot continue a run."""
    match tracker.name:
        case "tensorboard" | "trackio":
            return run.known_as.get(tracker.name) or run.name
        case "wandb":
            return str(tracker.tracker.id)
        case "mlflow":
            return str(tracker.tracker.info.run_id)
        case _:
            return None


def keep_names(run: TrackedRun, names: Mapping[str, str]) -> None:
    """Write `names`, {tracker: name or id of the run}, for a later resume."""
    if names:
        try:
            write_json_atomic(run.folder / RUNS_FILE, {**run.known_as, **names})
        except ConfigError as error:
            logger.warning("%s; a run that goes on is a new one in trackers", error)
