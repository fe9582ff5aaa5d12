"""What every rank was given to train and what it made of it, as files hold it.

    <output_dir>/replay/rank_0.batch_0.log, rank_0.batch_12.log, … rank_1.batch_0.log, …
    <output_dir>/non_finite/step_12_rank_0.log, …

Each rank has files of its own, of records (`training.minibatch_codec`): first `run`, the options
and the machine; then for each gradient step its minibatches, and an `end` with the step's
denominators, its gradient norm and a digest of the parameters. `training.recorder` writes them; the
newest batches, in `replay/`, are for `async-grpo replay`. A file of `non_finite/` has the
minibatches behind one step that was not finite, which can be trained again:

    learner = Learner.build(config, ranks)  # the weights that the skipped step left untouched
    for minibatch in suspected_minibatches("runs/latest/non_finite/step_12_rank_0.log"):
        learner.accumulate(minibatch)
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_grpo.training.audit import as_digest
from async_grpo.training.minibatch_codec import (
    MAGIC,
    Frame,
    decode,
    encode,
    frame,
    read_frames,
)
from async_grpo.training.ranks import Ranks
from async_grpo.training.step import StepResult, TokenTerms
from async_grpo.types import EndOfStep, Minibatch, Tally
from async_grpo.util import RELEASE
from async_grpo.util.errors import DataError

logger = logging.getLogger(__name__)
Options = Mapping[str, Any]  # of a run, by name
LOG_FOLDER, SUSPECTS_FOLDER = "replay", "non_finite"
OF_END = ("batch", "step_in_batch", "is_last_of_batch", "num_samples", "num_tokens", "incarnation",
          "sent", "settings")  # fmt: skip
NAME = re.compile(r"rank_(\d+)\.batch_(\d+)\.log")


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one minibatch on its rank."""

    loss: float  # plain sum, before the division by D
    weight: float  # Σ w_i m_it
    num_tokens: int  # unmasked
    gradients: int  # digest of this rank's summed gradients after it; 0: they are not reduced yet


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """One minibatch of a step, and what its rank has made of it; nothing waits for the device."""

    minibatch: Minibatch  # without the scores that are
    left_out: Sequence[str]
    num_tokens: int
    weight: Tensor  # []
    loss: Tensor  # []
    gradients: Tensor  # [K] int64, see `audit.bit_sums`; [0]: nobody wants a digest
    terms: TokenTerms | None  # where somebody wants them

    @property
    def sums(self) -> Sums:
        """What is recorded of it."""
        digest = as_digest(self.gradients)
        return Sums(float(self.loss), float(self.weight), self.num_tokens, digest)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedStep:
    """A gradient step of one rank that was taken, or skipped."""

    number: int  # in the run, from 1
    end: EndOfStep
    minibatches: Sequence[Trained]
    result: StepResult
    digest: int  # of the rank's parameters after it

    @property
    def outcome(self) -> dict[str, object]:
        """What it came to on its rank, in JSON values; the same in a replay, to the bit."""
        return {
            "skipped": self.result.skipped,
            "grad_norm": self.result.grad_norm,
            "learning_rate": self.result.learning_rate,
            "clocks": dataclasses.asdict(self.result.clocks),
            "digest": self.digest,
        }

    def records(self, minibatches: Sequence[Trained]) -> bytes:
        """These of its minibatches, and its end."""
        place = {"batch": self.end.batch, "step_in_batch": self.end.step_in_batch}
        facts = {name: getattr(self.end, name) for name in OF_END}
        end = frame({"kind": "end", **facts, **self.outcome})
        return b"".join([*(_record(each, place) for each in minibatches), end])


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One gradient step of one rank, as its log tells."""

    minibatches: tuple[Frame, ...]
    facts: dict[str, Any]  # of its end

    @property
    def end(self) -> EndOfStep:
        """What closed it on this rank."""
        facts = {name: self.facts[name] for name in OF_END}
        return EndOfStep(**(facts | {"sent": tuple(Tally(*each) for each in facts["sent"])}))


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


def suspected_minibatches(path: str | Path) -> tuple[Minibatch, ...]:
    """What a file of `non_finite/` holds, but for scores that are too large to be kept.

    Raises `DataError` for any other file, and for one that is damaged or cut short.
    """
    records = [(record.checked(), record) for record in read_frames(Path(path))]
    if not records or records[-1][0]["kind"] != "end":
        raise DataError(f"{path} must hold the minibatches of a step and its end, it is cut short")
    return tuple(
        decode(record.load(), round_index=facts["round"])
        for facts, record in records
        if facts["kind"] == "minibatch"
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


def run_record(options: Options, ranks: Ranks, *, batch: int) -> bytes:
    """What a file of a run with these options begins with; its first step is of `batch`."""
    model = os.path.abspath(options["model_name_or_path"])
    facts = {
        "kind": "run",
        "batch": batch,
        "config": {**options, "model_name_or_path": model},
        "world_size": ranks.world_size,
        "machine": machine(ranks.device),
    }
    return frame(facts)


def machine(device: torch.device) -> dict[str, object]:
    """What the bits of a sum depend on, beside options and data."""
    is_cuda = device.type == "cuda"
    return {
        "release": RELEASE,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _records(folder: Path, *, rank: int) -> Iterator[Frame]:
    for path in log_files(folder, rank=rank):
        yield from read_frames(path)


def _record(trained: Trained, place: dict[str, int]) -> bytes:
    facts = {
        "kind": "minibatch",
        **place,
        "round": trained.minibatch.round_index,
        "sums": dataclasses.asdict(trained.sums),
        "left_out": trained.left_out,
    }
    return frame(facts, encode(trained.minibatch))
