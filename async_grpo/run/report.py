"""Rank 0's report of a run: metrics, evaluations, trackers, the display."""

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

import torch

from async_grpo.algorithms.find import find_algorithm
from async_grpo.checkpoint.resume import Start, changed_options
from async_grpo.config.train_config import TrainConfig
from async_grpo.run.journals import CONTROL_FILE
from async_grpo.telemetry.alarms import ALARMS_FILE, AlarmLog
from async_grpo.telemetry.evaluation_record import EvaluationRecord
from async_grpo.telemetry.gauges import RayGauges
from async_grpo.telemetry.jsonl import JsonlWriter, write_json_atomic
from async_grpo.telemetry.metrics_row import metrics_row
from async_grpo.telemetry.progress import HELD_OUT, Console, number
from async_grpo.telemetry.sample_dump import all_files
from async_grpo.training.learner import HeldOutLoss
from async_grpo.training.minibatch_log import LOG_FOLDER, SUSPECTS_FOLDER
from async_grpo.training.ranks import Absent
from async_grpo.training.step import NO_SAMPLES, NON_FINITE, StepResult
from async_grpo.types import EndOfStep, EvaluationResult, PipelineStatus, WorkerInfo
from async_grpo.types.worker_info import confinement_in_words
from async_grpo.util import files, run_folder
from async_grpo.util.add_ons import add_on
from async_grpo.util.errors import ConfigError
from async_grpo.weight_sync.sync_report import SyncReport

logger = logging.getLogger(__name__)
STALLS = (
    "seconds_waiting", "seconds_publishing", "seconds_checkpointing", "seconds_evaluating",
)  # fmt: skip


@dataclass(slots=True)
class _Totals:
    """The counters that a checkpoint keeps; one of version 0.1.0 lacks some, hence the defaults."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training, up to the end of the last step
    skipped: dict[str, int] = field(default_factory=dict)  # {reason: number of steps}
    failed_checkpoints: int = 0
    skipped_checkpoints: int = 0
    batcher_restarts: int = 0
    alarms_raised: int = 0
    # {name: [first, last]}, for `conclude`
    ends: dict[str, list[float]] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)  # where options or code changed


class Report:
    """Writes and shows what a run does; rank 0 has one, other ranks have an `Absent`."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        start: Start | None = None,
        code: Mapping[str, str] | None = None,
        gauges: RayGauges | None = None,
    ) -> None:
        """`start`: where the run starts; None: at its first question.

        `code`: {what a user's file is for: its sha256}. `gauges` export metrics to Prometheus.
        """
        start = start or Start()
        self._folder = folder = Path(config.recording.output_dir)
        _prepare(folder, config, start)
        dump = config.recording.dump_samples_filename
        self._dump = folder / dump if dump else None  # the recorder writes it
        if self._dump:
            self._dump.parent.mkdir(parents=True, exist_ok=True)
        saved = copy.deepcopy(start.state.get("report", {}))
        saved.pop("file_bytes", None)
        evaluations = saved.pop("evaluations", {})
        self._totals = _Totals(**saved)
        self._metrics = JsonlWriter(folder / run_folder.METRICS_FILE)
        self._evaluations = JsonlWriter(folder / run_folder.EVALUATIONS_FILE)
        self.evaluations = EvaluationRecord(
            config.evaluation_sets,
            is_due=config.evaluates,
            best_set=config.best_set,
            metric=config.evaluation.keep_best_checkpoint,
            has_types=bool(config.data.types),
            saved=evaluations,
            write=self._evaluations.write,
            write_best=lambda it: _write(folder / run_folder.BEST_FILE, dataclasses.asdict(it)),
        )
        self.evaluations.lost("the run was resumed after it", but=start.batches)
        self._trackers: tuple[Any, ...] = ()  # none, or the object for all: an add-on
        if config.recording.trackers:
            first_step, options = self._totals.steps + 1, config.options()
            make = add_on("trackers").Trackers
            self._trackers = (make(config.recording, options, first_step=first_step),)
        self._gauges = gauges or Absent()
        self._declared = find_algorithm(config).metrics
        self._alarms = AlarmLog(
            folder, num_raised=self._totals.alarms_raised, metrics=self._metrics.path
        )
        self.console = Console(num_batches=config.batching.num_training_batches)
        self._open = contextlib.ExitStack()
        self._num_minibatches = 0  # of this rank, in the current step
        self._usual_minibatches = 0  # in the previous step
        self._step_started = time.monotonic()
        self._stood_still = dict.fromkeys(STALLS, 0.0)  # seconds in the current step
        self._sync: SyncReport | None = None
        self._pass_of, self._timeouts = config.batching.pass_of, config.sampling.timeouts
        self._has_warned_of_bias = False
        self._begin_part(start, config, code or {})
        self._confinement: dict[str, str] = {}  # {worker: description}
        kept = {"parts": self._totals.parts, "confinement": self._confinement}
        self._parameters = config.options() | kept | {"threads": torch.get_num_threads()}
        _write(folder / run_folder.PARAMETERS_FILE, self._parameters)

    def _begin_part(self, start: Start, config: TrainConfig, code: Mapping[str, str]) -> None:
        """Note options and user's files that differ from those of the resumed checkpoint."""
        parts, changed = self._totals.parts, changed_options(start, config)
        known = [part["code"] for part in parts if "code" in part]
        before = known[-1] if known else code  # a checkpoint of version 0.1.0 has none
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
        ends = [each.finish for each in self._trackers]
        for end in (*ends, *(file.close for file in self._files)):
            self._open.callback(end)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def _files(self) -> tuple[JsonlWriter, ...]:
        """The files that grow with the run, without the dump, which the recorder writes."""
        return self._metrics, self._evaluations, self._alarms.file

    def workers(self, workers: Sequence[WorkerInfo]) -> None:
        """Log of each new worker whether it confines users' code. Called from a thread."""
        for worker in workers:
            if not worker.confinement or worker.worker_id in self._confinement:
                continue
            words = self._confinement[worker.worker_id] = confinement_in_words(worker.confinement)
            level = logging.WARNING if any(worker.confinement.values()) else logging.INFO
            logger.log(level, "%s: %s", worker.worker_id, words)
            _write(self._folder / run_folder.PARAMETERS_FILE, self._parameters)

    def status(self, status: PipelineStatus) -> None:
        """Show the status of every stage and worker. Called from a thread."""
        self._gauges.repeat()
        self._alarms.see_workers(status.workers, now_s=time.monotonic())
        self._alarms.see_failures(status.failures)
        self.console.alarms(self._alarms.active)
        self.console.status(status)

    def doing(self, what: str) -> None:
        """Show what this rank computes or waits for."""
        self.console.doing(what)

    def minibatch(self) -> None:
        """Show that this rank begins another minibatch of the current step."""
        self._num_minibatches += 1
        usual = max(self._usual_minibatches, self._num_minibatches)
        about = f" of about {usual}" if self._usual_minibatches else ""
        step = self._totals.steps + 1
        self.doing(f"training step {step}: minibatch {self._num_minibatches}{about}")

    def stood_still(self, metric: str, seconds: float) -> None:
        """Add seconds that this rank waited to `metric`, one of `STALLS`."""
        self._stood_still[metric] += seconds

    def synced(self, sync: SyncReport) -> None:
        """Take the latest sync, whose values are in every row until the next one."""
        self._sync = sync

    def recovered(self) -> None:
        """Count a recovery: the controller was lost, and the run continues at another."""
        self._totals.batcher_restarts += 1
        self.evaluations.lost("the controller was lost", but=self.evaluations.newest)

    def spared_checkpoints(self) -> frozenset[int]:
        """Batches whose checkpoints rotation must keep. Called from a thread."""
        return self.evaluations.spared

    def unevaluated(self, reason: str) -> None:
        """Close the evaluations that are still due: they will not be done."""
        self.evaluations.lost(reason)

    def published(self, batches: int, *, evaluates: bool = False) -> None:
        """Note the evaluations due with the weights after `batches`; all if `evaluates`."""
        self.evaluations.published(batches, evaluates=evaluates, **self._clocks)

    def checkpoint_failed(self) -> None:
        """Count a failed checkpoint. Called from a thread too."""
        self._totals.failed_checkpoints += 1

    def checkpoint_skipped(self) -> None:
        """Count a checkpoint that is left out, because the one before is still being written."""
        self._totals.skipped_checkpoints += 1

    def state(self) -> dict[str, object]:
        """The counters and the files' sizes in bytes, for a checkpoint."""
        file_bytes = {file.path.name: file.path.stat().st_size for file in self._files}
        own = {"file_bytes": file_bytes, "evaluations": self.evaluations.state()}
        return dataclasses.asdict(self._totals) | own

    def sync_files(self) -> None:
        """Sync the files, so that they survive a power cut; a disk that fails is warned of."""
        dumped = all_files(self._dump) if self._dump else ()
        for path in (*(file.path for file in self._files), *dumped):
            try:
                files.sync(path)
            except OSError as error:
                logger.warning("a power cut may cost lines of %s: %s", path, error)

    def step(self, end: EndOfStep, result: StepResult, *, denominator: int) -> None:
        """Write the row of a gradient step, taken or skipped."""
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
        facts = {
            **self._count(end),
            "iteration": end.batch,
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
            "skipped_checkpoints": totals.skipped_checkpoints,
            "failed_trackers": sum(each.num_failed for each in self._trackers),
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
        for each in self._trackers:
            each.log_row(row, step=totals.steps)
        self.console.alarms(self._alarms.active)
        self.console.step(row)
        self._see("reward", row.get("avg_reward"))
        self._see("loss", row["loss"])
        self._usual_minibatches, self._num_minibatches = self._num_minibatches, 0
        self._warn_of_bias(row["perc_timed_out_samples"])
        self._stood_still = dict.fromkeys(STALLS, 0.0)
        self._step_started = now

    def _count(self, end: EndOfStep) -> dict[str, float]:
        """Count a step's samples, once in all passes; the clocks, and its place in its batch."""
        number = self._pass_of(end.step_in_batch)
        if number == 1:
            self._totals.samples += end.num_samples
            self._totals.tokens += end.num_tokens
        return {**self._clocks, "pass_number": number, "drift_steps": end.step_in_batch}

    def _rank_time(self, meters: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Seconds of all ranks, and the Tflop that their peak would compute in this time."""
        if "num_ranks" not in meters:
            return {}
        peak = meters.get("peak_tflops", 0.0)  # of all ranks together
        return {
            "rank_seconds": seconds * meters["num_ranks"],
            "peak_tflop": peak * seconds,
            "busy_peak_tflop": peak * (seconds - sum(self._stood_still.values())),
        }

    def _warn_of_bias(self, timed_out: float | None) -> None:
        if timed_out is None or self._has_warned_of_bias:
            return
        self._has_warned_of_bias = True
        logger.warning(
            "%.1f %% of the samples of gradient step %d took longer than %s and were dropped: "
            "training favours short outputs; without a limit none is dropped",
            100 * timed_out,
            self._totals.steps,
            self._timeouts,
        )

    def evaluation(self, result: EvaluationResult) -> None:
        """Write the line of an evaluated set of held-out questions."""
        if row := self.evaluations.ended(result):
            wanted = (key for key in row if key.startswith("eval_") or key == "batch")
            self._chart({key: row[key] for key in wanted if isinstance(row[key], int | float)})

    def held_out_loss(self, result: HeldOutLoss) -> None:
        """Write the line of an evaluation on the held-out pairs."""
        measured = {"eval_loss": result.mean, **dataclasses.asdict(result)}
        seconds = self._totals.seconds + time.monotonic() - self._step_started
        self._evaluations.write(self._clocks | {"total_seconds": seconds} | measured)
        self._chart(measured)
        self._see("held-out loss", result.mean)
        logger.info("%s loss %.4f a token, of %d", HELD_OUT, result.mean, result.num_tokens)

    def conclude(self) -> None:
        """Log what the run took and came to, earlier parts included."""
        rate = self._totals.tokens / self._totals.seconds if self._totals.seconds else None
        parts = [
            f"trained {self._totals.steps} steps in {self._totals.seconds:,.0f} seconds: "
            f"{self._totals.tokens:,} tokens, throughput {number(rate)} tok/s"
        ]
        parts += [
            f"{name} {number(first)} first, {number(last)} last"
            for name, (first, last) in self._totals.ends.items()
        ]
        logger.info("%s", "; ".join(parts))

    @property
    def _clocks(self) -> dict[str, float]:
        """The run's progress, which is in every row of metrics and evaluations."""
        return {
            "step": self._totals.steps,
            "total_samples_accumulated": self._totals.samples,
            "total_tokens": self._totals.tokens,
            "total_seconds": self._totals.seconds,
        }

    def _chart(self, measured: Mapping[str, float]) -> None:
        """Chart at the current step: not every tracker accepts an earlier one."""
        self._gauges.see_evaluation(measured)
        charts = {f"evaluation/{name}": value for name, value in measured.items()}
        for each in self._trackers:
            each.log(charts, step=self._totals.steps)

    def _see(self, name: str, value: float | int | None) -> None:
        if value is not None:
            self._totals.ends[name] = [self._totals.ends.get(name, [value])[0], value]


def _write(path: Path, values: Mapping[str, object]) -> None:
    try:
        write_json_atomic(path, values)
    except ConfigError as error:  # the run can do without the file
        logger.warning("%s", error)


def _prepare(folder: Path, config: TrainConfig, start: Start) -> None:
    """Remove an older run's files, or cut those of a resumed run back to its checkpoint."""
    if start.source:
        run_folder.cut_back(folder, start.state["report"]["file_bytes"], source=start.source)
        return
    dump = config.recording.dump_samples_filename
    dumped = [str(path) for path in all_files((folder / dump).absolute())] if dump else []
    folders = (run_folder.CHECKPOINTS_FOLDER, SUSPECTS_FOLDER, LOG_FOLDER)
    written = (run_folder.METRICS_FILE, run_folder.EVALUATIONS_FILE, run_folder.BEST_FILE)
    own = (*written, ALARMS_FILE, CONTROL_FILE)
    run_folder.clear(folder, files=(*own, *dumped), folders=folders)
