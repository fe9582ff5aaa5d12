"""What a run leaves behind while it trains: metrics, evaluations, trackers, the display."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from async_grpo import files
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.records import EvaluationResult
from async_grpo.checkpoint.resume import Start, changed_options
from async_grpo.checkpoint.run_folder import (
    CHECKPOINTS_FOLDER,
    EVALUATIONS_FILE,
    METRICS_FILE,
    PARAMETERS_FILE,
    clear,
    cut_back,
)
from async_grpo.config.train import TrainConfig
from async_grpo.errors import ConfigError
from async_grpo.telemetry.charts import as_charts
from async_grpo.telemetry.console import Console
from async_grpo.telemetry.files import JsonlWriter, write_json_atomic
from async_grpo.telemetry.health import Health
from async_grpo.telemetry.metrics import metrics_row
from async_grpo.telemetry.progress import duration, number
from async_grpo.telemetry.sample_dump import dump_files
from async_grpo.telemetry.trackers import Trackers
from async_grpo.training.held_out import HeldOutLoss
from async_grpo.training.replay import REPLAY_FOLDER
from async_grpo.training.step import NO_SAMPLES, NON_FINITE, StepResult
from async_grpo.types import EndOfStep
from async_grpo.weight_sync.sync_report import SyncReport

logger = logging.getLogger(__name__)


class Report:
    """Rank 0's record of the run; every other rank has none."""

    def __init__(self, config: TrainConfig, *, start: Start | None = None) -> None:
        """`start`: where the run begins; None, as by default: at its first question."""
        folder = Path(config.output_dir)
        state = start.state.get("report") if start else None
        _prepare(folder, config, start)
        dump = config.dump_samples_filename
        self._dump = folder / dump if dump else None  # which the batcher writes
        if self._dump:
            self._dump.parent.mkdir(parents=True, exist_ok=True)
        self._metrics = JsonlWriter(folder / METRICS_FILE)
        self._evaluations = JsonlWriter(folder / EVALUATIONS_FILE)
        self._trackers = Trackers(
            config.tracker_names,
            run_name=config.run_name,
            output_dir=folder,
            config=dataclasses.asdict(config),
            first_step=state["steps"] + 1 if state else 1,
        )
        self._declared = find_algorithm(config).metrics
        self._health = Health()
        self.console = Console(num_batches=config.num_training_batches)
        self._open = contextlib.ExitStack()
        self._num_steps = 0
        self._skipped: Counter[str] = Counter()
        self._num_samples = 0
        self._num_tokens = 0
        self._seconds = 0.0  # of the run, up to the last step's end
        self._ends: dict[str, list[float]] = {}  # first and last value of what `conclude` tells
        self._parts: list[dict[str, Any]] = []  # of a run whose options were changed on the way
        self._num_minibatches = 0  # this rank's, of the step being trained
        self._usual_minibatches = 0  # of the step before
        self._step_started = time.monotonic()
        self._seconds_publishing = 0.0
        self._seconds_waiting = 0.0
        self._sync: SyncReport | None = None
        self._batcher_restarts = 0
        self._failed_checkpoints = 0
        self._generation_timeout_s = config.generation_timeout_s
        self._is_bias_told = False
        self._seconds_checkpointing = 0.0
        if state:
            self._restore(state)
        if start and (changed := changed_options(start, config)):
            self._parts.append({"from_batch": start.batches, "changed": changed})
        parameters = dataclasses.asdict(config) | {"parts": self._parts}
        try:
            write_json_atomic(folder / PARAMETERS_FILE, parameters)
        except ConfigError as error:  # of a run that goes on: nothing but a checkpoint is needed
            logger.warning("%s", error)

    def __enter__(self) -> Self:
        self._open.enter_context(self.console)
        self._open.callback(self._trackers.finish)
        self._open.callback(self._metrics.close)
        self._open.callback(self._evaluations.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def doing(self, what: str) -> None:
        """What this rank computes or waits for from now on."""
        self.console.doing(what)

    def minibatch(self) -> None:
        """Another minibatch of the current step is computed from now on."""
        self._num_minibatches += 1
        usual = max(self._usual_minibatches, self._num_minibatches)
        about = f" of about {usual}" if self._usual_minibatches else ""
        step = self._num_steps + 1
        self.doing(f"training step {step}: minibatch {self._num_minibatches}{about}")

    def publishing(self, seconds: float) -> None:
        """This rank stood still to gather weights, which the next step's line will tell."""
        self._seconds_publishing += seconds

    def synced(self, sync: SyncReport) -> None:
        """The latest sync has finished, which every line tells until the next one has."""
        self._sync = sync

    def recovered(self) -> None:
        """The controller was lost, and the run goes on at another."""
        self._batcher_restarts += 1

    def checkpointing(self, seconds: float) -> None:
        """This rank stood still to copy its tensors, or for the save before."""
        self._seconds_checkpointing += seconds

    def checkpoint_failed(self) -> None:
        """A checkpoint was given up; heard from a thread."""
        self._failed_checkpoints += 1

    def state(self) -> dict[str, Any]:
        """The counters and how far the files go, for a checkpoint."""
        return {
            "steps": self._num_steps,
            "skipped": dict(self._skipped),
            "samples": self._num_samples,
            "tokens": self._num_tokens,
            "seconds": self._seconds,
            "ends": dict(self._ends),
            "parts": list(self._parts),
            "failed_checkpoints": self._failed_checkpoints,
            "batcher_restarts": self._batcher_restarts,
            "file_bytes": {
                writer.path.name: writer.path.stat().st_size
                for writer in (self._metrics, self._evaluations)
            },
        }

    def sync_files(self) -> None:
        """What is in the files by now survives a power cut, unless the disk refuses."""
        dumped = dump_files(self._dump) if self._dump else ()
        for path in (self._metrics.path, self._evaluations.path, *dumped):
            try:
                files.sync(path)
            except OSError as error:
                logger.warning("a power cut may cost lines of %s: %s", path, error)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._num_steps = state["steps"]
        self._skipped = Counter(state["skipped"])
        self._num_samples = state["samples"]
        self._num_tokens = state["tokens"]
        # Checkpoints of version 0.1.0 know nothing of these three.
        self._seconds = state.get("seconds", 0.0)
        self._ends = {name: list(ends) for name, ends in state.get("ends", {}).items()}
        self._parts = list(state.get("parts", ()))
        self._failed_checkpoints = state["failed_checkpoints"]
        self._batcher_restarts = state["batcher_restarts"]

    def waited(self, seconds: float) -> None:
        """This rank stood still for want of samples."""
        self._seconds_waiting += seconds

    def step(self, end: EndOfStep, result: StepResult, *, denominator: int) -> None:
        """One line of metrics for one gradient step, taken or skipped."""
        if result.skipped:
            logger.warning("gradient step %d was skipped: %s", self._num_steps + 1, result.skipped)
            self._skipped[result.skipped] += 1
        for notice in end.notices:
            logger.warning("%s", notice)
        now = time.monotonic()
        seconds = now - self._step_started
        self._num_steps += 1
        self._seconds += seconds
        self._num_samples += end.num_samples
        self._num_tokens += end.num_tokens
        facts = {
            "step": self._num_steps,
            "iteration": end.batch,
            "total_samples_accumulated": self._num_samples,
            "total_tokens": self._num_tokens,
            "total_seconds": self._seconds,
            "optimizer_steps": result.clocks.steps,
            "optimizer_samples": result.clocks.samples,
            "skipped_steps_no_samples": self._skipped[NO_SAMPLES],
            "skipped_steps_non_finite": self._skipped[NON_FINITE],
            "loss_denominator": denominator,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "seconds": seconds,
            "seconds_waiting": self._seconds_waiting,
            "seconds_publishing": self._seconds_publishing,
            "seconds_checkpointing": self._seconds_checkpointing,
            "failed_checkpoints": self._failed_checkpoints,
            "batcher_restarts": self._batcher_restarts,
            "num_minibatches": result.num_minibatches,
            **(dataclasses.asdict(self._sync) if self._sync else {}),
        }
        row = metrics_row(
            {**end.sums, **end.clock, **result.metrics, **facts},
            fates=end.fates,
            reasons=end.reasons,
            declared=self._declared,
        )
        self._metrics.write(row)
        self._trackers.log(as_charts(row), step=self._num_steps)
        self.console.step(row)
        for sentence in self._health.see_row(row):
            logger.warning("%s", sentence)
        self._see("loss", row["loss"])
        self._usual_minibatches, self._num_minibatches = self._num_minibatches, 0
        self._warn_of_bias(row["perc_timed_out_samples"])
        self._seconds_waiting = self._seconds_publishing = self._seconds_checkpointing = 0.0
        self._step_started = now

    def _warn_of_bias(self, timed_out: float | None) -> None:
        if timed_out is None or self._is_bias_told:
            return
        self._is_bias_told = True
        logger.warning(
            "%.1f %% of the samples of gradient step %d took longer than --generation-timeout-s %g "
            "and were dropped: training favours short outputs; --generation-timeout-s 0 drops none",
            100 * timed_out,
            self._num_steps,
            self._generation_timeout_s,
        )

    def evaluation(self, result: EvaluationResult) -> None:
        """One line for one pass over the held-out questions."""
        row = {
            "eval_accuracy": result.num_correct / max(result.num_samples, 1),
            "eval_reward": result.reward_sum / max(result.num_samples, 1),
            "eval_solved": result.num_solved / max(result.num_questions, 1),
        }
        self._evaluated(row | dataclasses.asdict(result))
        num_sampled = result.num_samples + result.num_failed
        logger.info(
            "held-out accuracy %.3f, mean reward %.3f, solved at least once %.3f%s",
            row["eval_accuracy"],
            row["eval_reward"],
            row["eval_solved"],
            f", graded {result.num_samples} of {num_sampled}" if result.num_failed else "",
        )

    def held_out_loss(self, result: HeldOutLoss) -> None:
        """One line for one pass over the held-out pairs."""
        self._evaluated({"eval_loss": result.mean, **dataclasses.asdict(result)})
        self._see("held-out loss", result.mean)
        logger.info("held-out loss %.4f a token, of %d", result.mean, result.num_tokens)

    def conclude(self) -> None:
        """Sum up a supervised run, resumed parts included."""
        rate = self._num_tokens / self._seconds if self._seconds else None
        parts = [
            f"{self._num_steps} steps of {number(self._num_tokens)} trained tokens in "
            f"{duration(self._seconds)}, {number(rate)} tok/s"
        ]
        parts += [
            f"{name} {number(first)} first, {number(last)} last"
            for name, (first, last) in self._ends.items()
        ]
        logger.info("%s", "; ".join(parts))

    def _evaluated(self, measured: Mapping[str, float]) -> None:
        row = {
            "step": self._num_steps,
            "total_samples_accumulated": self._num_samples,
            "total_tokens": self._num_tokens,
            "total_seconds": self._seconds + time.monotonic() - self._step_started,
            **measured,
        }
        self._evaluations.write(row)
        charts = {f"evaluation/{name}": value for name, value in measured.items()}
        self._trackers.log(charts, step=self._num_steps)

    def _see(self, name: str, value: float | int | None) -> None:
        if value is not None:
            self._ends[name] = [self._ends.get(name, [value])[0], value]


class NoReport:
    """What every other rank has in the place of a `Report`: it keeps and says nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
    def doing(self, what: str) -> None: ...
    def minibatch(self) -> None: ...
    def waited(self, seconds: float) -> None: ...
    def publishing(self, seconds: float) -> None: ...
    def synced(self, sync: SyncReport) -> None: ...
    def recovered(self) -> None: ...
    def checkpointing(self, seconds: float) -> None: ...
    def checkpoint_failed(self) -> None: ...
    def sync_files(self) -> None: ...
    def step(self, end: EndOfStep, result: StepResult, *, denominator: int) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def evaluation(self, result: EvaluationResult) -> None: ...
    def held_out_loss(self, result: HeldOutLoss) -> None: ...
    def conclude(self) -> None: ...


def _prepare(folder: Path, config: TrainConfig, start: Start | None) -> None:
    """The files of the run as they are where it begins."""
    if start and start.source:
        cut_back(folder, start.state["report"]["file_bytes"], source=start.source)
        return
    dump = config.dump_samples_filename
    dumped = [str(path) for path in dump_files((folder / dump).absolute())] if dump else []
    folders = (CHECKPOINTS_FOLDER, REPLAY_FOLDER)
    clear(folder, files=(METRICS_FILE, EVALUATIONS_FILE, *dumped), folders=folders)
