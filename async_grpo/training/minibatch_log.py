"""What every rank was given to train and what it made of it, kept for `async-grpo replay`.

    <output_dir>/replay/rank_0.batch_0.log, rank_0.batch_12.log, … rank_1.batch_0.log, …

Each rank has files of its own, of records (`training.minibatch_codec`): first `run`, the options
and the machine; then for each gradient step its minibatches, and an `end` with the step's
denominators, its gradient norm and a digest of the parameters. A step is written when it has ended,
all at once. The oldest file goes when there is no room, so what is there is always the newest
batches.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_grpo import __version__
from async_grpo.config.train_config import TrainConfig
from async_grpo.training.audit import StepSums, Sums
from async_grpo.training.minibatch_codec import (
    MAGIC,
    Frame,
    decode,
    encode,
    frame,
    left_out,
    read_frames,
)
from async_grpo.training.ranks import Ranks
from async_grpo.training.step import StepResult
from async_grpo.types import EndOfStep, Minibatch, PackedMinibatch, Tally
from async_grpo.util.errors import DataError
from async_grpo.util.files import LineFile

logger = logging.getLogger(__name__)
LOG_FOLDER = "replay"
NUM_FILES = 8  # a rank, among which its room is divided
NAME = re.compile(r"rank_(\d+)\.batch_(\d+)\.log")


class MinibatchLog:
    """Writes one rank's log; a disk that refuses costs minibatches of it, not the run."""

    def __init__(self, config: TrainConfig, ranks: Ranks, *, first: int) -> None:
        """What is there from batch `first` on is removed: it is trained again."""
        self._config = config
        self._ranks = ranks
        self._folder = Path(config.recording.output_dir, LOG_FOLDER)
        self._max_bytes = config.recording.replay_max_gib * 2**30 / ranks.world_size
        self._kept: list[Minibatch] = []
        self._sums = StepSums()
        self._file: LineFile | None = None
        self._num_lost = 0
        try:
            cut_back(self._folder, first, rank=ranks.rank, world_size=ranks.world_size)
        except OSError as error:
            logger.warning("what %s holds of later batches stays there: %s", self._folder, error)

    @classmethod
    def of(cls, config: TrainConfig, ranks: Ranks, *, first: int) -> MinibatchLog | None:
        """None where the run keeps none."""
        return cls(config, ranks, first=first) if config.recording.replay_max_gib else None

    def keep(
        self, minibatch: Minibatch, packed: PackedMinibatch, gradients: Sequence[Tensor]
    ) -> None:
        """Remember a minibatch until its step has ended."""
        self._kept.append(minibatch)
        self._sums.keep(packed, gradients)

    def discard(self) -> None:
        """The step is not finished: all of it will come again."""
        self._kept = []
        self._sums.discard()

    def end_step(
        self, end: EndOfStep, result: StepResult, *, losses: Sequence[Tensor], digest: int
    ) -> None:
        """Write the step, whole or not at all."""
        kept, self._kept = self._kept, []
        place = {"batch": end.batch, "step_in_batch": end.step_in_batch}
        records = [
            _record(minibatch, sums, place)
            for minibatch, sums in zip(kept, self._sums.take(losses), strict=True)
        ]
        records.append(frame({"kind": "end", **place, **_end(end), **outcome(result, digest)}))
        file = self._file_for(end)
        num_lost = file.num_lost
        file.append(b"".join(records), number=len(kept))
        self._num_lost += file.num_lost - num_lost

    def take_lost(self) -> int:
        """How many minibatches the disk has refused since the last call."""
        lost, self._num_lost = self._num_lost, 0
        return lost

    def _file_for(self, end: EndOfStep) -> LineFile:
        """The newest file, or another one where a batch begins and it is full."""
        is_full = (
            self._file is not None
            and not end.step_in_batch
            and self._file.path.exists()
            and self._file.path.stat().st_size >= self._max_bytes / NUM_FILES
        )
        if self._file is None or is_full:
            path = self._folder / f"rank_{self._ranks.rank}.batch_{end.batch}.log"
            self._file = LineFile(path, unit="minibatches", say=logger.warning)
            self._file.append(frame(self._run(end.batch)), number=0)
            self._make_room()
        return self._file

    def _run(self, batch: int) -> dict[str, Any]:
        model = os.path.abspath(self._config.places.model_name_or_path)
        return {
            "kind": "run",
            "batch": batch,
            "config": self._config.options() | {"model_name_or_path": model},
            "world_size": self._ranks.world_size,
            "machine": machine(self._ranks.device),
        }

    def _make_room(self) -> None:
        """Remove the oldest files, so that another one may grow to its share."""
        files = log_files(self._folder, rank=self._ranks.rank)
        sizes = {path: path.stat().st_size for path in files}
        room = self._max_bytes * (1 - 1 / NUM_FILES)
        for oldest, following in pairwise(files):
            if sum(sizes.values()) <= room:
                return
            oldest.unlink()
            del sizes[oldest]
            first = NAME.fullmatch(following.name)
            assert first, "as it was found"
            logger.info(
                "batches before %s can no longer be replayed, so that --replay-max-gib is kept",
                first[2],
            )


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One gradient step of one rank, as its log tells."""

    minibatches: tuple[Frame, ...]
    facts: dict[str, Any]  # of its end

    @property
    def end(self) -> EndOfStep:
        """What closed it on this rank."""
        names = ("batch", "step_in_batch", "is_last_of_batch", "num_samples", "num_tokens",
                 "incarnation", "settings")  # fmt: skip
        sent = tuple(Tally(*each) for each in self.facts["sent"])
        return EndOfStep(**{name: self.facts[name] for name in names}, sent=sent)


def logged_minibatch(record: Frame) -> tuple[Minibatch, Sums]:
    """A minibatch and what was made of it. Raises `DataError` when it is damaged, or not whole."""
    facts, arrays = record.facts, record.load()
    if facts["left_out"]:
        raise DataError(
            f"the log has not kept {', '.join(facts['left_out'])} of it, which would be many times "
            "the rest: such a batch cannot be replayed"
        )
    minibatch = decode(arrays, round_index=facts["round"])
    return minibatch, Sums(**facts["sums"])


def logged_runs(folder: Path, *, rank: int) -> list[dict[str, Any]]:
    """What each file of a rank begins with, the oldest first."""
    firsts = (next(read_frames(path), None) for path in log_files(folder, rank=rank))
    return [first.checked() for first in firsts if first is not None]


def logged_steps(folder: Path, *, rank: int, batches: range) -> Iterator[LoggedStep]:
    """The gradient steps of a rank in these batches, in order.

    Raises `DataError` where one is missing.
    """
    expected = (batches.start, 0)
    kept: list[Frame] = []
    for record in _records(folder, rank=rank):
        facts = record.facts
        if facts.get("kind") == "run" or facts.get("batch") not in batches:
            continue
        if facts.get("kind") == "minibatch":
            kept.append(record)
            continue
        facts = record.checked()
        found = facts["batch"], facts["step_in_batch"]
        if found != expected:
            break
        yield LoggedStep(tuple(kept), facts)
        kept = []
        last = facts["is_last_of_batch"]
        expected = (found[0] + 1, 0) if last else (found[0], found[1] + 1)
    if expected[0] < batches.stop:
        raise DataError(
            f"{folder} lacks step {expected[1]} of batch {expected[0]} of rank {rank}: the disk "
            "refused it, or the run had not come so far"
        )


def last_batch(folder: Path) -> int | None:
    """The last batch that rank 0 has recorded to its end; None: there is none."""
    for path in reversed(log_files(folder, rank=0)):
        ended = [
            record.checked()["batch"]
            for record in read_frames(path)
            if record.facts.get("kind") == "end" and record.facts.get("is_last_of_batch")
        ]
        if ended:
            return int(ended[-1])
    return None


def log_files(folder: Path, *, rank: int | None = None) -> list[Path]:
    """The files of a rank, or of all of them, the oldest first."""
    if not folder.is_dir():
        return []
    found = ((NAME.fullmatch(path.name), path) for path in folder.iterdir())
    numbered = [(int(m[1]), int(m[2]), path) for m, path in found if m]
    return [path for own, _, path in sorted(numbered) if rank in (None, own)]


def cut_back(folder: Path, first: int, *, rank: int, world_size: int) -> None:
    """Remove what a rank's files hold from batch `first` on, and a record that was cut short.

    Rank 0 does so for ranks beyond the `world_size` too, of which an earlier part of the run had
    more. A file that is damaged is set aside: a run needs none of them to go on.
    """
    for path in log_files(folder):
        named = NAME.fullmatch(path.name)
        assert named, "as it was found"
        owner = int(named[1])
        if owner != rank and (rank or owner < world_size):
            continue
        if int(named[2]) >= first:
            path.unlink()
            continue
        try:
            _cut_file(path, first)
        except DataError as error:
            aside = path.rename(f"{path}.damaged").name
            logger.warning(
                "%s: it is set aside as %s, its batches cannot be replayed", error, aside
            )


def _cut_file(path: Path, first: int) -> None:
    """Remove what follows the batches before `first`. Raises `DataError` for a damaged file."""
    end = 0
    for record in read_frames(path):
        if record.checked()["batch"] >= first:
            break
        end = record.end
    else:
        with path.open("rb") as file:
            file.seek(end)
            rest = file.read()
        if MAGIC in rest[1:]:  # a process that is killed leaves one record that is cut short
            raise DataError(f"{path} is damaged at byte {end}: its record has no end")
        if rest:
            logger.warning("%s ends in a record that was cut short, which is removed", path)
    os.truncate(path, end)


def outcome(result: StepResult, digest: int) -> dict[str, object]:
    """What a step came to on this rank, in JSON values; the same in a replay, to the bit."""
    return {
        "skipped": result.skipped,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "clocks": dataclasses.asdict(result.clocks),
        "digest": digest,
    }


def machine(device: torch.device) -> dict[str, object]:
    """What the bits of a sum depend on, beside options and data."""
    is_cuda = device.type == "cuda"
    return {
        "release": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _records(folder: Path, *, rank: int) -> Iterator[Frame]:
    for path in log_files(folder, rank=rank):
        yield from read_frames(path)


def _record(minibatch: Minibatch, sums: Sums, place: dict[str, int]) -> bytes:
    names = left_out(minibatch)
    facts = {
        "kind": "minibatch",
        **place,
        "round": minibatch.round_index,
        "sums": dataclasses.asdict(sums),
        "left_out": names,
    }
    return frame(facts, b"" if names else encode(minibatch))


def _end(end: EndOfStep) -> dict[str, object]:
    return {
        "is_last_of_batch": end.is_last_of_batch,
        "num_samples": end.num_samples,
        "num_tokens": end.num_tokens,
        "incarnation": end.incarnation,
        "sent": end.sent,
        "settings": dict(end.settings),
    }
