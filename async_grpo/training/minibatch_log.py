"""The files in which each rank records its minibatches and what became of them.

    <output_dir>/replay/rank_0.batch_0.log, rank_0.batch_12.log, … rank_1.batch_0.log, …
    <output_dir>/non_finite/step_12_rank_0.log, …

A file holds records of one rank (`training.minibatch_codec`): first `run`, with the options and
the machine; then for each gradient step its minibatches, and an `end` with the step's denominators,
its gradient norm and a digest of the parameters. `training.recorder` writes them. `async-grpo
replay` reads the newest batches, in `replay/`. A file of `non_finite/` holds the minibatches of one
step whose loss or gradient was not finite; they can be trained again:

    learner = Learner.build(config, ranks)  # the weights that the skipped step left untouched
    for minibatch in suspected_minibatches("runs/latest/non_finite/step_12_rank_0.log"):
        learner.accumulate(minibatch)
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_grpo.training import minibatch_codec as codec
from async_grpo.training.ranks import Ranks
from async_grpo.training.step import StepResult, TokenTerms
from async_grpo.types import EndOfStep, Minibatch, Tally
from async_grpo.util import RELEASE
from async_grpo.util.errors import DataError

logger = logging.getLogger(__name__)
Options = Mapping[str, Any]  # of a run, by name
LOG_FOLDER, SUSPECTS_FOLDER = "replay", "non_finite"
# The fields of `EndOfStep` that are recorded.
OF_END = ("batch", "step_in_batch", "is_last_of_batch", "num_samples", "num_tokens", "incarnation",
          "sent", "settings")  # fmt: skip
NAME = re.compile(r"rank_(\d+)\.batch_(\d+)\.log")
DIGESTS = 1 << 64
DIGEST_FORM = 2  # grows when `bit_sums` or `as_digest` makes other numbers of the same bits
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over one minibatch of one rank."""

    loss: float  # plain sum, before the division by D
    weight: float  # Σ w_i m_it
    num_tokens: int  # unmasked
    # Digest of this rank's gradients, summed so far; 0: they are not reduced yet or, with --offload
    # parameters, others follow in the step.
    gradients: int


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """One minibatch that was back-propagated. Its tensors stay on the device until `sums`."""

    minibatch: Minibatch
    left_out: Sequence[str]  # names of scores that it had and that are not recorded
    num_tokens: int
    weight: Tensor  # []
    loss: Tensor  # []
    gradients: Tensor  # [K] int64, see `bit_sums`; [0]: no writer needs a digest
    terms: TokenTerms | None  # None: no writer needs them

    @property
    def sums(self) -> Sums:
        """The sums that are recorded; waits for the device."""
        digest = as_digest(self.gradients)
        return Sums(float(self.loss), float(self.weight), self.num_tokens, digest)

    def record(self, place: Mapping[str, int]) -> bytes:
        """Its record; `place` is that of its step."""
        facts = {
            "kind": "minibatch",
            **place,
            "round": self.minibatch.round_index,
            "sums": dataclasses.asdict(self.sums),
            "left_out": self.left_out,
        }
        return codec.frame(facts, codec.encode(self.minibatch))


@dataclass(frozen=True, slots=True, eq=False)
class TrainedStep:
    """One gradient step of one rank, taken or skipped."""

    number: int  # in the run, from 1
    end: EndOfStep
    minibatches: Sequence[Trained]
    result: StepResult
    digest: int  # of the rank's parameters after it

    @property
    def outcome(self) -> dict[str, object]:
        """The step's results in JSON values; a replay computes the same, to the bit."""
        return {
            "skipped": self.result.skipped,
            "grad_norm": self.result.grad_norm,
            "learning_rate": self.result.learning_rate,
            "clocks": dataclasses.asdict(self.result.clocks),
            "digest": self.digest,
        }

    def records(self, minibatches: Sequence[Trained]) -> bytes:
        """The records of these minibatches and of the end of the step."""
        place = {"batch": self.end.batch, "step_in_batch": self.end.step_in_batch}
        facts = {name: getattr(self.end, name) for name in OF_END}
        end = codec.frame({"kind": "end", **facts, **self.outcome})
        return b"".join([*(each.record(place) for each in minibatches), end])


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One gradient step of one rank, read from its log."""

    minibatches: tuple[codec.Frame, ...]
    facts: dict[str, Any]  # of the record `end`

    @property
    def end(self) -> EndOfStep:
        """The end of the step as this rank received it, without its notices and metrics."""
        facts = {name: self.facts[name] for name in OF_END}
        return EndOfStep(**(facts | {"sent": tuple(Tally(*each) for each in facts["sent"])}))


def logged_minibatch(record: codec.Frame) -> tuple[Minibatch, Sums]:
    """A minibatch and its sums. Raises `DataError` when it is damaged, or lacks scores."""
    facts, arrays = record.facts, record.load()
    if facts["left_out"]:
        raise DataError(
            f"the log has not kept {', '.join(facts['left_out'])} of it, which would be many times "
            "the rest: such a batch cannot be replayed"
        )
    return codec.decode(arrays, round_index=facts["round"]), Sums(**facts["sums"])


def logged_runs(folder: Path, *, rank: int) -> list[dict[str, Any]]:
    """The record `run` of each file of a rank, the oldest file first."""
    firsts = (next(codec.read_frames(path), None) for path in log_files(folder, rank=rank))
    return [first.checked() for first in firsts if first is not None]


def logged_steps(folder: Path, *, rank: int, batches: range) -> Iterator[LoggedStep]:
    """Yield the gradient steps of a rank in these batches, in order.

    Raises `DataError` where one is missing.
    """
    expected = (batches.start, 0)
    kept: list[codec.Frame] = []
    for record in chain.from_iterable(map(codec.read_frames, log_files(folder, rank=rank))):
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
        batch, step = found
        expected = (batch + 1, 0) if facts["is_last_of_batch"] else (batch, step + 1)
    if expected[0] < batches.stop:
        raise DataError(
            f"{folder} lacks step {expected[1]} of batch {expected[0]} of rank {rank}: the disk "
            "refused it, or the run had not come so far"
        )


def suspected_minibatches(path: str | Path) -> tuple[Minibatch, ...]:
    """The minibatches in a file of `non_finite/`, without scores that are too large to be kept.

    Raises `DataError` for any other file, and for one that is damaged or truncated.
    """
    records = [(record.checked(), record) for record in codec.read_frames(Path(path))]
    if not records or records[-1][0]["kind"] != "end":
        raise DataError(f"{path} must hold the minibatches of a step and its end, it is cut short")
    return tuple(
        codec.decode(record.load(), round_index=facts["round"])
        for facts, record in records
        if facts["kind"] == "minibatch"
    )


def last_batch(folder: Path) -> int | None:
    """The last batch that rank 0 has recorded to its end, or None."""
    for path in reversed(log_files(folder, rank=0)):
        ended = [
            record.checked()["batch"]
            for record in codec.read_frames(path)
            if record.facts.get("kind") == "end" and record.facts.get("is_last_of_batch")
        ]
        if ended:
            return int(ended[-1])
    return None


def log_files(folder: Path, *, rank: int | None = None) -> list[Path]:
    """The files of a rank, or of all ranks, the oldest first."""
    return [path for owner, _, path in numbered_files(folder) if rank in (None, owner)]


def numbered_files(folder: Path) -> list[tuple[int, int, Path]]:
    """(rank, first batch, path) of each file of the log, sorted."""
    if not folder.is_dir():
        return []
    found = ((NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), int(match[2]), path) for match, path in found if match)


def cut_back(folder: Path, first: int, *, rank: int, world_size: int) -> None:
    """Remove from a rank's files all records from batch `first` on, and a truncated record.

    Rank 0 also does so for ranks >= `world_size`, which an earlier part of the run may have had. A
    damaged file is renamed: a run can go on without it.
    """
    for owner, begins_at, path in numbered_files(folder):
        if owner != rank and (rank or owner < world_size):
            continue
        if begins_at >= first:
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
    """Truncate a file behind the batches before `first`. Raises `DataError` if it is damaged."""
    end = 0
    for record in codec.read_frames(path):
        if record.checked()["batch"] >= first:
            break
        end = record.end
    else:
        with path.open("rb") as file:
            file.seek(end)
            rest = file.read()
        if codec.MAGIC in rest[1:]:  # a killed process leaves one truncated record at the end
            raise DataError(f"{path} is damaged at byte {end}: its record has no end")
        if rest:
            logger.warning("%s ends in a record that was cut short, which is removed", path)
    os.truncate(path, end)


def run_record(options: Options, ranks: Ranks, *, batch: int) -> bytes:
    """The record with which a file begins; the file's first step is of `batch`."""
    model = os.path.abspath(options["model_name_or_path"])
    facts = {
        "kind": "run",
        "batch": batch,
        "config": {**options, "model_name_or_path": model},
        "world_size": ranks.world_size,
        "digests": DIGEST_FORM,
        "machine": machine(ranks.device),
    }
    return codec.frame(facts)


def machine(device: torch.device) -> dict[str, object]:
    """What the bits of a sum depend on besides options and data."""
    is_cuda = device.type == "cuda"
    return {
        "release": RELEASE,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def bit_sums(tensors: Iterable[Tensor]) -> Tensor:
    """[K] int64, on their device: for each of K flat tensors the sum of its words of 8 bytes.

    The order of the additions cannot change a sum of integers; each tensor is read once, on a CPU
    thirty times as fast as in words of 4.
    """
    sums = [_bit_sum(tensor) for tensor in tensors]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


def _bit_sum(tensor: Tensor) -> Tensor:
    size = tensor.element_size()
    end = tensor.numel() - tensor.numel() % (8 // size)
    if tensor.storage_offset() * size % 8:  # torch views no words across words of memory
        tensor = tensor.clone()
    rest = tensor[end:].view(INTEGERS[size])
    return tensor[:end].view(torch.int64).sum() + rest.sum(dtype=torch.int64)


def as_digest(sums: Tensor) -> int:
    """A polynomial of `bit_sums`: the order of the tensors counts.

    >>> def digest(*tensors):
    ...     return as_digest(bit_sums(tensors))
    >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])
    >>> digest(one) == digest(one.clone())
    True
    >>> digest(one) == digest(other)
    False
    >>> digest(one, other) == digest(other, one)
    False
    """
    digest = 0
    for own in sums.tolist():
        digest = (digest * 0x9E3779B97F4A7C15 + own) % DIGESTS
    return digest
