"""The same work at several staleness bounds, on two cores: how long a batch takes, and who waits.

The weights stay what they are (a learning rate that float32 cannot see), so that every run does the
same work: the same questions, the same distribution of lengths, every sample trained. Rows of the
metrics from FIRST_ROW on, less the last ones for which nothing is generated any more, are counted.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import stack as stacks
from benchmarks.cores import cpu_seconds, family, queued_seconds, titled
from benchmarks.processes import Process
from benchmarks.stack import MODEL, Stack

SERVICES = {
    "controller": "ray::Controller",
    "verifiers": "ray::VerifierPool",
}
FROZEN = 0.0  # learning rate: both sides work, and nothing moves
FIRST_ROW = 3
POLL_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Work:
    """What every run of a comparison does."""

    batch_size: int = 32
    samples_per_question: int = 8
    num_batches: int = 12

    def last_row(self, max_staleness: int) -> int:
        """The first row that is not counted: generation has ended before it."""
        return self.num_batches - max_staleness - 1


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over the counted batches of one run; seconds a batch."""

    wall: float
    generator: float  # its processes computed
    trainer: float  # its process computed
    services: float  # Ray, the controller and verifiers computed
    controller: float  # of the services
    verifiers: float  # the pool and its processes
    generator_queued: float  # its threads were ready to run, but others had its core
    trainer_queued: float
    waiting: float  # the trainer waited for samples
    publishing: float  # the trainer gathered weights
    output_tokens: float  # a batch, not seconds
    max_lag: int

    @property
    def generator_idle(self) -> float:
        """Share of the time in which the generator's core had nothing of it to run."""
        return 1 - self.generator / self.wall

    @property
    def trainer_idle(self) -> float:
        return self.waiting / self.wall

    @property
    def both_busy(self) -> float:
        """Share of the two cores' time in which they computed for the run."""
        return (self.generator + self.trainer + self.services) / (2 * self.wall)


class _Meter(threading.Thread):
    """Notes the CPU seconds of each role when a run reaches its first and last counted row."""

    def __init__(self, stack: Stack, trainer: Process, metrics: Path, *, at: Sequence[int]) -> None:
        super().__init__(name="meter", daemon=True)
        self._stack = stack
        self._trainer = trainer
        self._metrics = metrics
        self._at = at
        self._ended = threading.Event()
        self.notes: list[dict[str, float]] = []

    def run(self) -> None:
        while len(self.notes) < len(self._at) and not self._ended.wait(POLL_INTERVAL_S):
            if len(read_rows(self._metrics)) >= self._at[len(self.notes)]:
                generator = self._stack.generator_pids()  # its engine may have started meanwhile
                trainer = family(self._trainer.pid)
                services = family(self._stack.head.pid) - generator - trainer
                self.notes.append(
                    {
                        name: cpu_seconds(family(*titled(services, title)))
                        for name, title in SERVICES.items()
                    }
                    | {
                        "generator": cpu_seconds(generator),
                        "trainer": cpu_seconds(trainer),
                        "services": cpu_seconds(services),
                        "generator_queued": queued_seconds(generator),
                        "trainer_queued": queued_seconds(trainer),
                    }
                )

    def stop(self) -> None:
        self._ended.set()
        self.join()


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file that may still be written, or not be there yet."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def even_lengths(folder: Path, model: Path = MODEL) -> Path:
    """The model with an end token that it never samples, so that every output has full length."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    for name, change in (
        ("config.json", {"eos_token_id": 0}),
        ("generation_config.json", {"eos_token_id": 0}),
        ("tokenizer_config.json", {"eos_token": "<pad>"}),
    ):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    return folder


def run_work(
    stack: Stack,
    model: Path,
    puzzles: Path,
    *,
    name: str,
    work: Work,
    max_staleness: int,
    worker: Process,
) -> Measured:
    """One run of the comparison; raises what a command of it raised."""
    output = stack.folder / name
    options: Mapping[str, object] = {
        "data_path": puzzles,
        "batch_size": work.batch_size,
        "samples_per_question": work.samples_per_question,
        "num_training_batches": work.num_batches,
        "learning_rate": FROZEN,
        "max_staleness": max_staleness,
    }
    rows_at = (FIRST_ROW, work.last_row(max_staleness))
    with stacks.trainer(stack, model, output=output, options=options) as process:
        metrics = output / "training_metrics.jsonl"
        meter = _Meter(stack, process, metrics, at=rows_at)
        meter.start()
        try:
            process.wait(watched=[worker])
        finally:
            meter.stop()
    rows = read_rows(metrics)
    if len(meter.notes) != len(rows_at) or len(rows) != work.num_batches:
        raise RuntimeError(f"{output} has {len(rows)} rows, {work.num_batches} were expected")
    return summarise(rows[slice(*rows_at)], meter.notes)


def summarise(rows: Sequence[Mapping[str, Any]], notes: Sequence[Mapping[str, float]]) -> Measured:
    """Means a batch over the counted rows and between the two notes of CPU seconds."""
    means = {
        key: sum(row[key] for row in rows) / len(rows)
        for key in ("seconds", "seconds_waiting", "seconds_publishing")
    }
    spent = {name: (notes[1][name] - notes[0][name]) / len(rows) for name in notes[0]}
    tokens = sum(row["avg_output_tokens"] * row["num_samples"] for row in rows)
    return Measured(
        wall=means["seconds"],
        **spent,
        waiting=means["seconds_waiting"],
        publishing=means["seconds_publishing"],
        output_tokens=tokens / len(rows),
        max_lag=max(row["max_lag"] for row in rows),
    )
