"""What a run leaves behind while it trains: metrics, evaluations, trackers, the display."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from async_grpo.algorithms.find import find_algorithm
from async_grpo.checkpoint.resume import Start, changed_options
from async_grpo.config.train_config import TrainConfig
from async_grpo.run.journals import CONTROL_FILE
from async_grpo.telemetry.alarms import ALARMS_FILE, AlarmLog
from async_grpo.telemetry.console import Console
from async_grpo.telemetry.evaluation_record import EvaluationRecord
from async_grpo.telemetry.gauges import RayGauges
from async_grpo.telemetry.jsonl import JsonlWriter, write_json_atomic
from async_grpo.telemetry.metrics_row import metrics_row
from async_grpo.telemetry.progress import duration, number
from async_grpo.telemetry.sample_dump import all_files
from async_grpo.telemetry.trackers import Trackers, as_charts
from async_grpo.training.learner import HeldOutLoss
from async_grpo.training.minibatch_log import LOG_FOLDER, SUSPECTS_FOLDER
from async_grpo.training.ranks import Absent
from async_grpo.training.step import NO_SAMPLES, NON_FINITE, StepResult
from async_grpo.types import EndOfStep, EvaluationResult, PipelineStatus, WorkerInfo
from async_grpo.types.worker_info import confinement_in_words
from async_grpo.util import files
from async_grpo.util.errors import ConfigError
from async_grpo.util.run_folder import (
    BEST_FILE,
    CHECKPOINTS_FOLDER,
    EVALUATIONS_FILE,
    METRICS_FILE,
    PARAMETERS_FILE,
    clear,
    cut_back,
)
from async_grpo.weight_sync.sync_report import SyncReport

logger = logging.getLogger(__name__)
STALLS = (
    "seconds_waiting", "seconds_publishing", "seconds_checkpointing", "seconds_evaluating",
)  # fmt: skip


@dataclass(slots=True)
class _Totals:
    """What a checkpoint keeps of a report; one of version 0.1.0 lacks what has a default here."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of the run, up to the last step's end
    skipped: dict[str, int] = field(default_factory=dict)  # steps, by why
    failed_checkpoints: int = 0
    batcher_restarts: int = 0
    alarms_raised: int = 0
    ends: dict[str, list[float]] = field(default_factory=dict)  # of what `conclude` tells
    parts: list[dict[str, Any]] = field(default_factory=list)  # with other options


class Report:
    """Rank 0's record of the run; every other rank has none."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        start: Start | None = None,
        code: Mapping[str, str] | None = None,
        gauges: RayGauges | None = None,
    ) -> None:
        """`start`: where the run begins; None, as by default: at its first question. `code`: the
        sha256 of the user's files, by what they are. `gauges` show its metrics to Prometheus; None:
        nobody does.
        """
        self._folder = folder = Path(config.recording.output_dir)
        _prepare(folder, config, start)
        dump = config.recording.dump_samples_filename
        self._dump = folder / dump if dump else None  # which the batcher writes
        if self._dump:
            self._dump.parent.mkdir(parents=True, exist_ok=True)
        saved = copy.deepcopy(start.state.get("report", {})) if start else {}
        saved.pop("file_bytes", None)
        evaluations = saved.pop("evaluations", {})
        self._totals = _Totals(**saved)
        self._metrics = JsonlWriter(folder / METRICS_FILE)
        self._evaluations = JsonlWriter(folder / EVALUATIONS_FILE)
        self.evaluations = EvaluationRecord(
            config.evaluation_sets,
            is_due=config.evaluates,
            best_set=config.best_set,
            metric=config.evaluation.keep_best_checkpoint,
            has_types=bool(config.data.types),
            saved=evaluations,
            write=self._evaluations.write,
            write_best=lambda best: _write(folder / BEST_FILE, dataclasses.asdict(best)),
        )
        if start:
            self.evaluations.lost("the run was resumed after it", but=start.batches)
        self._trackers = Trackers(
            config.recording, config.options(), first_step=self._totals.steps + 1
        )
        self._gauges = gauges or Absent()
        self._declared = find_algorithm(config).metrics
        self._alarms = AlarmLog(
            folder, num_raised=self._totals.alarms_raised, metrics=self._metrics.path
        )
        self.console = Console(num_batches=config.batching.num_training_batches)
        self._open = contextlib.ExitStack()
        self._num_minibatches = 0  # this rank's, of the step being trained
        self._usual_minibatches = 0  # of the step before
        self._step_started = time.monotonic()
        self._stood_still = dict.fromkeys(STALLS, 0.0)  # seconds of the step being trained
        self._sync: SyncReport | None = None
        self._timeouts = config.sampling.timeouts
        self._is_bias_told = False
        self._begin_part(start or Start(), config, code or {})
        self._confinement: dict[str, str] = {}  # in words, by worker
        kept = {"parts": self._totals.parts, "confinement": self._confinement}
        self._parameters = config.options() | kept
        _write(folder / PARAMETERS_FILE, self._parameters)

    def _begin_part(self, start: Start, config: TrainConfig, code: Mapping[str, str]) -> None:
        """Note with which options and files the run goes on, where these are not what they were."""
        parts, changed = self._totals.parts, changed_options(start, config)
        known = [part["code"] for part in parts if "code" in part]
        before = known[-1] if known else code  # a checkpoint of version 0.1.0 knows none
        edited = {
            name: {"was": before.get(name, "absent"), "is": code.get(name, "absent")}
            for name in sorted({*code, *before})
            if before.get(name) != code.get(name)
        }
        if edited:
            told = [f"{n} {each['was'][:12]} -> {each['is'][:12]}" for n, each in edited.items()]
            logger.warning("code that differs from the checkpoint's: %s", ", ".join(told))
        if changed or edited or (code and not known):
            part = {"from_batch": start.batches, "changed": changed | edited}
            parts.append(part | ({"code": dict(code)} if code else {}))

    def __enter__(self) -> Self:
        self._open.enter_context(self.console)
        closes = [file.close for file in self._files]
        for end in (self._trackers.finish, *closes):
            self._open.callback(end)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def _files(self) -> tuple[JsonlWriter, ...]:
        """Those that grow with the run, but for the dump, which the batcher writes."""
        return self._metrics, self._evaluations, self._alarms.file

    def workers(self, workers: Sequence[WorkerInfo]) -> None:
        """Tell of new ones whether they confine what they run, once; heard from a thread."""
        for worker in workers:
            if not worker.confinement or worker.worker_id in self._confinement:
                continue
            words = self._confinement[worker.worker_id] = confinement_in_words(worker.confinement)
            level = logging.WARNING if any(worker.confinement.values()) else logging.INFO
            logger.log(level, "%s: %s", worker.worker_id, words)
            _write(self._folder / PARAMETERS_FILE, self._parameters)

    def status(self, status: PipelineStatus) -> None:
        """What every stage is doing, and who works; heard from a thread."""
        self._gauges.repeat()
        self._alarms.see_workers(status.workers, now_s=time.monotonic())
        self._alarms.see_failures(status.failures)
        self.console.alarms(self._alarms.active)
        self.console.status(status)

    def doing(self, what: str) -> None:
        """What this rank computes or waits for from now on."""
        self.console.doing(what)

    def minibatch(self) -> None:
        """Another minibatch of the current step is computed from now on."""
        self._num_minibatches += 1
        usual = max(self._usual_minibatches, self._num_minibatches)
        about = f" of about {usual}" if self._usual_minibatches else ""
        step = self._totals.steps + 1
        self.doing(f"training step {step}: minibatch {self._num_minibatches}{about}")

    def stood_still(self, metric: str, seconds: float) -> None:
        """This rank waited; the metric, one of `STALLS`, says for what."""
        self._stood_still[metric] += seconds

    def synced(self, sync: SyncReport) -> None:
        """The latest sync has finished, which every line tells until the next one has."""
        self._sync = sync

    def recovered(self) -> None:
        """The controller was lost, and the run goes on at another."""
        self._totals.batcher_restarts += 1
        self.evaluations.lost("the controller was lost", but=self.evaluations.newest)

    def spared_checkpoints(self) -> frozenset[int]:
        """After which batches they stay, whatever is newer; asked by a thread."""
        return self.evaluations.spared

    def unevaluated(self, reason: str) -> None:
        """Nobody waits for evaluations any longer."""
        self.evaluations.lost(reason)

    def published(self, batches: int, *, evaluates: bool = False) -> None:
        """Weights after so many batches go out: what is due with them will be evaluated, or all."""
        self.evaluations.published(batches, evaluates=evaluates, **self._clocks)

    def checkpoint_failed(self) -> None:
        """A checkpoint was given up; heard from a thread."""
        self._totals.failed_checkpoints += 1

    def state(self) -> dict[str, object]:
        """The counters and how far the files go, for a checkpoint."""
        file_bytes = {file.path.name: file.path.stat().st_size for file in self._files}
        evaluations = self.evaluations.state()
        return dataclasses.asdict(self._totals) | {
            "file_bytes": file_bytes,
            "evaluations": evaluations,
        }

    def sync_files(self) -> None:
        """What is in the files by now survives a power cut, unless the disk refuses."""
        dumped = all_files(self._dump) if self._dump else ()
        for path in (*(file.path for file in self._files), *dumped):
            try:
                files.sync(path)
            except OSError as error:
                logger.warning("a power cut may cost lines of %s: %s", path, error)

    def step(self, end: EndOfStep, result: StepResult, *, denominator: int) -> None:
        """One line of metrics for one gradient step, taken or skipped."""
        for evaluation in end.evaluations:
            self.evaluation(evaluation)
        totals = self._totals
        totals.steps += 1
        if why := result.skipped:
            logger.warning("gradient step %d was skipped: %s", totals.steps, why)
            totals.skipped[why] = totals.skipped.get(why, 0) + 1
        for notice in end.notices:
            logger.warning("%s", notice)
        now = time.monotonic()
        seconds = now - self._step_started
        totals.seconds += seconds
        totals.samples += end.num_samples
        totals.tokens += end.num_tokens
        facts = {
            "step": totals.steps,
            "iteration": end.batch,
            "total_samples_accumulated": totals.samples,
            "total_tokens": totals.tokens,
            "total_seconds": totals.seconds,
            "optimizer_steps": result.clocks.steps,
            "optimizer_samples": result.clocks.samples,
            "optimizer_tokens": result.clocks.tokens,
            "skipped_steps_no_samples": totals.skipped.get(NO_SAMPLES, 0),
            "skipped_steps_non_finite": totals.skipped.get(NON_FINITE, 0),
            "loss_denominator": denominator,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "seconds": seconds,
            "failed_checkpoints": totals.failed_checkpoints,
            "failed_trackers": self._trackers.num_failed,
            "batcher_restarts": totals.batcher_restarts,
            "parts": len(totals.parts),
            "num_minibatches": result.num_minibatches,
            **result.meters,
            **self._rank_time(result.meters, seconds),
            **self._stood_still,
            **(dataclasses.asdict(self._sync) if self._sync else {}),
        }
        row = metrics_row(
            {**end.sums, **end.clock, **result.metrics, **facts},
            fates=end.fates,
            reasons=end.reasons,
            tokens=end.tokens,
            declared=self._declared,
        )
        row |= self._alarms.see_row(row)
        totals.alarms_raised = self._alarms.num_raised
        self._metrics.write(row)
        self._gauges.see_step(row)
        self._trackers.log(as_charts(row), step=self._totals.steps)
        self.console.alarms(self._alarms.active)
        self.console.step(row)
        self._see("loss", row["loss"])
        self._usual_minibatches, self._num_minibatches = self._num_minibatches, 0
        self._warn_of_bias(row["perc_timed_out_samples"])
        self._stood_still = dict.fromkeys(STALLS, 0.0)
        self._step_started = now

    def _rank_time(self, meters: Mapping[str, float], seconds: float) -> dict[str, float]:
        """What arithmetic is told by: time of all ranks, and what their peaks would do in it."""
        if "num_ranks" not in meters:
            return {}
        peak = meters.get("peak_tflops", 0.0)  # the sum of the ranks'
        return {
            "rank_seconds": seconds * meters["num_ranks"],
            "peak_tflop": peak * seconds,
            "busy_peak_tflop": peak * (seconds - sum(self._stood_still.values())),
        }

    def _warn_of_bias(self, timed_out: float | None) -> None:
        if timed_out is None or self._is_bias_told:
            return
        self._is_bias_told = True
        logger.warning(
            "%.1f %% of the samples of gradient step %d took longer than %s and were dropped: "
            "training favours short outputs; without a limit none is dropped",
            100 * timed_out,
            self._totals.steps,
            self._timeouts,
        )

    def evaluation(self, result: EvaluationResult) -> None:
        """One line for one set of held-out questions."""
        if row := self.evaluations.ended(result):
            self._chart({key: row[key] for key in row if _is_chart(key, row[key])})

    def held_out_loss(self, result: HeldOutLoss) -> None:
        """One line for one pass over the held-out pairs."""
        self._evaluated({"eval_loss": result.mean, **dataclasses.asdict(result)})
        self._see("held-out loss", result.mean)
        logger.info("held-out loss %.4f a token, of %d", result.mean, result.num_tokens)

    def conclude(self) -> None:
        """Sum up a supervised run, resumed parts included."""
        rate = self._totals.tokens / self._totals.seconds if self._totals.seconds else None
        parts = [
            f"{self._totals.steps} steps of {number(self._totals.tokens)} trained tokens in "
            f"{duration(self._totals.seconds)}, {number(rate)} tok/s"
        ]
        parts += [
            f"{name} {number(first)} first, {number(last)} last"
            for name, (first, last) in self._totals.ends.items()
        ]
        logger.info("%s", "; ".join(parts))

    def _evaluated(self, measured: Mapping[str, float]) -> None:
        seconds = self._totals.seconds + time.monotonic() - self._step_started
        self._evaluations.write(self._clocks | {"total_seconds": seconds} | dict(measured))
        self._chart(measured)

    @property
    def _clocks(self) -> dict[str, float]:
        """Where the run is, as every line of an evaluation says."""
        return {
            "step": self._totals.steps,
            "total_samples_accumulated": self._totals.samples,
            "total_tokens": self._totals.tokens,
            "total_seconds": self._totals.seconds,
        }

    def _chart(self, measured: Mapping[str, float]) -> None:
        """At the step of this moment: not every tracker takes one that is past."""
        self._gauges.see_evaluation(measured)
        charts = {f"evaluation/{name}": value for name, value in measured.items()}
        self._trackers.log(charts, step=self._totals.steps)

    def _see(self, name: str, value: float | int | None) -> None:
        if value is not None:
            self._totals.ends[name] = [self._totals.ends.get(name, [value])[0], value]


def _write(path: Path, values: Mapping[str, object]) -> None:
    try:
        write_json_atomic(path, values)
    except ConfigError as error:  # of a run that goes on: nothing but a checkpoint is needed
        logger.warning("%s", error)


def _is_chart(name: str, value: object) -> bool:
    return (name.startswith("eval_") or name == "batch") and isinstance(value, int | float)


def _prepare(folder: Path, config: TrainConfig, start: Start | None) -> None:
    """The files of the run as they are where it begins."""
    if start and start.source:
        cut_back(folder, start.state["report"]["file_bytes"], source=start.source)
        return
    dump = config.recording.dump_samples_filename
    dumped = [str(path) for path in all_files((folder / dump).absolute())] if dump else []
    folders = (CHECKPOINTS_FOLDER, SUSPECTS_FOLDER, LOG_FOLDER)
    own = (METRICS_FILE, EVALUATIONS_FILE, ALARMS_FILE, CONTROL_FILE, BEST_FILE)
    clear(folder, files=(*own, *dumped), folders=folders)
