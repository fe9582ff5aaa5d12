"""What a run leaves behind while it trains: metrics, evaluations, trackers, the display."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Self

from async_grpo.batching.records import EvaluationResult
from async_grpo.config.train import TrainConfig
from async_grpo.telemetry.console import Console
from async_grpo.telemetry.files import JsonlWriter, write_json_atomic
from async_grpo.telemetry.metrics import StepFacts, metrics_row
from async_grpo.telemetry.trackers import Trackers
from async_grpo.training.replay import REPLAY_FOLDER
from async_grpo.training.step import NO_SAMPLES, NON_FINITE, StepResult
from async_grpo.types import EndOfStep
from async_grpo.weight_sync.sync_report import SyncReport

logger = logging.getLogger(__name__)
METRICS_FILE = "training_metrics.jsonl"
EVALUATIONS_FILE = "evaluation_metrics.jsonl"
PARAMETERS_FILE = "training_params.json"


class Report:
    """Rank 0's record of the run; every other rank has none."""

    def __init__(self, config: TrainConfig) -> None:
        folder = Path(config.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS_FILE, EVALUATIONS_FILE, config.dump_samples_filename):
            if name:
                (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / REPLAY_FOLDER, ignore_errors=True)
        write_json_atomic(folder / PARAMETERS_FILE, dataclasses.asdict(config))
        self._metrics = JsonlWriter(folder / METRICS_FILE)
        self._evaluations = JsonlWriter(folder / EVALUATIONS_FILE)
        self._trackers = Trackers(
            config.tracker_names,
            run_name=config.run_name,
            output_dir=folder,
            config=dataclasses.asdict(config),
        )
        self.console = Console(num_batches=config.num_training_batches)
        self._open = contextlib.ExitStack()
        self._num_steps = 0
        self._skipped: Counter[str] = Counter()
        self._num_samples = 0
        self._num_tokens = 0
        self._step_started = time.monotonic()
        self._seconds_publishing = 0.0
        self._sync: SyncReport | None = None

    def __enter__(self) -> Self:
        self._open.enter_context(self.console)
        self._open.callback(self._trackers.finish)
        self._open.callback(self._metrics.close)
        self._open.callback(self._evaluations.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def publishing(self, seconds: float) -> None:
        """This rank stood still to gather weights, which the next step's line will tell."""
        self._seconds_publishing += seconds

    def synced(self, sync: SyncReport) -> None:
        """The latest sync has finished, which every line tells until the next one has."""
        self._sync = sync

    def step(self, end: EndOfStep, result: StepResult, *, denominator: int, waited: float) -> None:
        """One line of metrics for one gradient step, taken or skipped.

        `waited`: seconds in which rank 0 stood still for want of samples.
        """
        if result.skipped:
            logger.warning("gradient step %d was skipped: %s", self._num_steps + 1, result.skipped)
            self._skipped[result.skipped] += 1
        now = time.monotonic()
        self._num_steps += 1
        self._num_samples += end.num_samples
        self._num_tokens += end.num_tokens
        facts = StepFacts(
            step=self._num_steps,
            iteration=end.batch,
            total_samples_accumulated=self._num_samples,
            total_tokens=self._num_tokens,
            optimizer_steps=result.clocks.steps,
            optimizer_samples=result.clocks.samples,
            skipped_steps_no_samples=self._skipped[NO_SAMPLES],
            skipped_steps_non_finite=self._skipped[NON_FINITE],
            loss_denominator=denominator,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            seconds=now - self._step_started,
            seconds_waiting=waited,
            seconds_publishing=self._seconds_publishing,
            **(dataclasses.asdict(self._sync) if self._sync else {}),
        )
        row = metrics_row(
            step=facts,
            pipeline_sums={**end.sums, **end.clock},
            trainer_sums={**result.metrics, "num_minibatches": result.num_minibatches},
            fates=end.fates,
        )
        self._metrics.write(row)
        self._trackers.log(row, step=self._num_steps)
        self.console.step(row)
        self._step_started, self._seconds_publishing = now, 0.0

    def evaluation(self, result: EvaluationResult) -> None:
        """One line for one pass over the held-out questions."""
        row = {
            "step": self._num_steps,
            "total_samples_accumulated": self._num_samples,
            "eval_accuracy": result.num_correct / max(result.num_samples, 1),
            "eval_reward": result.reward_sum / max(result.num_samples, 1),
            "eval_solved": result.num_solved / max(result.num_questions, 1),
            **dataclasses.asdict(result),
        }
        self._evaluations.write(row)
        self._trackers.log(row, step=self._num_steps)
        logger.info(
            "held-out accuracy %.3f, mean reward %.3f, solved at least once %.3f",
            row["eval_accuracy"],
            row["eval_reward"],
            row["eval_solved"],
        )
