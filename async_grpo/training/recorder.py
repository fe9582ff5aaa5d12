"""A rank's minibatches of a gradient step, kept until the step ends: audited, then written.

The audit guards D: denominators come from the batcher (`EndOfStep`), sums from the ranks, so a
sample that is lost or trained twice in between would change the gradient and nothing else. Each
rank must have trained exactly what it was sent of a step, or the run ends before the update.

`replay/` gets every step, `non_finite/` the minibatches of a step that was skipped because it was
not finite, and with `--dump-token-columns` a file beside the dump of samples gets a line a row.
"""

from __future__ import annotations

import base64
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from async_grpo.config.run_options import RecordingOptions
from async_grpo.model.policy import PolicyModel
from async_grpo.telemetry.sample_dump import UNLIMITED, SampleDump, tokens_file
from async_grpo.training import minibatch_log as log
from async_grpo.training.fsdp import local_gradients, local_shards
from async_grpo.training.minibatch_codec import without_too_large
from async_grpo.training.ranks import Ranks
from async_grpo.training.step import GradientStep, StepResult
from async_grpo.types import EndOfStep, Minibatch, PackedMinibatch, Tally, digest_of
from async_grpo.util.errors import AuditError
from async_grpo.util.files import LineFile, replacing

logger = logging.getLogger(__name__)
NUM_FILES = 8  # files that a rank's share of --replay-max-gib is divided among
MAX_SUSPECTS = 8  # files a rank in `non_finite/`; the first ones tell the most
TOLERANCE = 1e-6  # relative, of sums of weights, which are float32 where they are trained


class StepWriter(ABC):
    """Writes each step when it ends. A failing disk costs the record, not the run."""

    needs_digests = False  # of gradients after each minibatch, and of the parameters
    needs_terms = False  # `Trained.terms`
    num_lost = 0  # minibatches that could not be written

    @abstractmethod
    def write(self, step: log.TrainedStep) -> None:
        """Called once a step, when it was taken or skipped."""


class Recorder:
    """Holds the minibatches of the current step, and hands them to writers at its end."""

    def __init__(self, policy: PolicyModel, step: GradientStep) -> None:
        """A recorder without writers, until `begin` sets some."""
        self._policy = policy
        self._step = step
        self._kept: list[log.Trained] = []
        self.begin()

    def begin(self, *writers: StepWriter) -> None:
        """Set the writers of the steps that follow."""
        self._writers, self._num_lost = writers, 0
        self._needs_digests = any(each.needs_digests for each in writers)
        self._step.keeps_terms = any(each.needs_terms for each in writers)

    def keep(self, minibatch: Minibatch, packed: PackedMinibatch) -> None:
        """Add a minibatch that was just back-propagated; `packed` is its form for the model."""
        small, left_out = without_too_large(minibatch)
        needs_digest = self._needs_digests and not self._step.offloads
        trained = log.Trained(
            small,
            left_out,
            num_tokens=packed.target_ids.numel(),
            weight=packed.weights.double().sum(),
            loss=self._step.losses[-1],
            gradients=log.bit_sums(local_gradients(self._policy) if needs_digest else ()),
            terms=self._step.terms[-1] if self._step.keeps_terms else None,
        )
        self._kept.append(trained)

    def discard(self) -> None:
        """Forget the minibatches of an unfinished step, which will all come again."""
        self._kept = []

    def audit(self, end: EndOfStep, *, number: int, by_tokens: bool = False) -> None:
        """Compare what every rank has trained of the step with what it was sent; collective.

        `by_tokens`: D counts tokens, not samples. Raises `AuditError` on every rank when one of
        them has trained anything else, or when D counts less than was trained.
        """
        if self._needs_digests and self._step.offloads and self._kept:  # a core reads them all
            gradients = log.bit_sums(local_gradients(self._policy))
            self._kept[-1] = replace(self._kept[-1], gradients=gradients)
        keys = [part.key for each in self._kept for part in each.minibatch.parts()]
        digest = digest_of(keys, incarnation=end.incarnation)
        weight = sum(float(each.weight) for each in self._kept)
        own = Tally(*self._step.backpropagated, digest, weight)
        with self._step.timers.agreeing():
            trained = [own]
            if dist.is_initialized():
                trained *= dist.get_world_size()
                dist.all_gather_object(trained, own)
        _check_trained(end, trained, step=number, by_tokens=by_tokens)

    def end_step(self, end: EndOfStep, result: StepResult, *, number: int) -> None:
        """Hand the step, which was taken or skipped, to the writers."""
        kept, self._kept = self._kept, []
        shards = local_shards(self._policy) if self._needs_digests else ()
        digest = log.as_digest(log.bit_sums(shards))
        step = log.TrainedStep(number, end, kept, result, digest)
        for writer in self._writers:
            writer.write(step)

    def take_lost(self) -> int:
        """How many minibatches could not be written since the last call."""
        before, self._num_lost = self._num_lost, sum(each.num_lost for each in self._writers)
        return self._num_lost - before


def _check_trained(end: EndOfStep, trained: Sequence[Tally], *, step: int, by_tokens: bool) -> None:
    """Raise `AuditError`, with the first rank that trained anything but what it was sent."""
    if len(end.sent) != len(trained):
        raise AuditError(
            f"gradient step {step} must be sent to {len(trained)} ranks, its end tells of "
            f"{len(end.sent)}: trainer and controller must be of the same release"
        )
    for rank, (own, sent) in enumerate(zip(trained, end.sent, strict=True)):
        if own[:3] != sent[:3] or not math.isclose(own.weight, sent.weight, rel_tol=TOLERANCE):
            raise AuditError(
                f"in gradient step {step} rank {rank} must train what it was sent, "
                f"{_in_words(sent)}, but trained {_in_words(own)}: the step is not taken; "
                "go on from the last checkpoint, and report this error, which is a bug"
            )
    counted = sum(tally.num_tokens if by_tokens else tally.num_samples for tally in trained)
    divisor = end.num_tokens if by_tokens else end.num_samples
    if counted > divisor:
        raise AuditError(
            f"the divisor of gradient step {step} must count all that was trained, {counted}, "
            f"it is {divisor}: the step is not taken; go on from the last checkpoint, and "
            "report this error, which is a bug"
        )


def _in_words(tally: Tally) -> str:
    return (
        f"{tally.num_samples} samples with {tally.num_tokens} tokens and weight "
        f"{tally.weight:.9g} (digest {tally.digest:016x})"
    )


def writers_of(
    recording: RecordingOptions, ranks: Ranks, *, first: int, options: log.Options
) -> Iterator[StepWriter]:
    """Yield the writers of a run with these `options`, from batch `first` on."""
    yield Suspects(recording.output_dir, ranks, options=options)
    if recording.dump_token_columns and recording.dump_samples_filename:
        yield TokenDump(recording, ranks, first_ordinal=first * options["batch_size"])
    if recording.replay_max_gib:
        yield MinibatchLog(recording, ranks, first=first, options=options)


class MinibatchLog(StepWriter):
    """Writes one rank's log within its share of --replay-max-gib: the oldest files are removed."""

    needs_digests = True

    def __init__(
        self, recording: RecordingOptions, ranks: Ranks, *, first: int, options: log.Options
    ) -> None:
        """Remove what earlier processes recorded from batch `first` on: it is trained again."""
        self._options = options
        self._ranks = ranks
        self._folder = Path(recording.output_dir, log.LOG_FOLDER)
        self._max_bytes = recording.replay_max_gib * 2**30 / ranks.world_size
        self._file: LineFile | None = None
        try:
            log.cut_back(self._folder, first, rank=ranks.rank, world_size=ranks.world_size)
        except OSError as error:
            logger.warning("what %s holds of later batches stays there: %s", self._folder, error)

    def write(self, step: log.TrainedStep) -> None:
        """Append the step, whole or not at all."""
        file = self._file_for(step.end)
        before = file.num_lost
        file.append(step.records(step.minibatches), number=len(step.minibatches))
        self.num_lost += file.num_lost - before

    def _file_for(self, end: EndOfStep) -> LineFile:
        """The newest file, or a new one if that is full and a batch begins."""
        is_full = (
            self._file is not None
            and not end.step_in_batch
            and self._file.path.exists()
            and self._file.path.stat().st_size >= self._max_bytes / NUM_FILES
        )
        if self._file is None or is_full:
            path = self._folder / f"rank_{self._ranks.rank}.batch_{end.batch}.log"
            self._file = LineFile(path, unit="minibatches", say=logger.warning)
            self._file.append(log.run_record(self._options, self._ranks, batch=end.batch), number=0)
            self._make_room()
        return self._file

    def _make_room(self) -> None:
        """Remove the oldest files, so that another one may grow to its share."""
        files = [file for file in log.numbered_files(self._folder) if file[0] == self._ranks.rank]
        total = sum(path.stat().st_size for _, _, path in files)
        for (_, _, oldest), (_, first, _) in pairwise(files):
            if total <= self._max_bytes * (1 - 1 / NUM_FILES):
                return
            total -= oldest.stat().st_size
            oldest.unlink()
            logger.info(
                "batches before %s can no longer be replayed, so that --replay-max-gib is kept",
                first,
            )


class Suspects(StepWriter):
    """Writes the minibatches of each step that was not finite to a file that stays."""

    def __init__(self, output_dir: str, ranks: Ranks, *, options: log.Options) -> None:
        self._options = options
        self._ranks = ranks
        self._folder = Path(output_dir, log.SUSPECTS_FOLDER)

    def write(self, step: log.TrainedStep) -> None:
        """Write the step's suspects, if there are any; fillers are left out."""
        suspects = [step.minibatches[index] for index in step.result.suspects]
        chosen = [each for each in suspects if each.minibatch.samples]
        if not chosen:
            return
        rank = self._ranks.rank
        if len(list(self._folder.glob(f"step_*_rank_{rank}.log"))) >= MAX_SUSPECTS:
            logger.warning("%s holds %d files of this rank: no more", self._folder, MAX_SUSPECTS)
            return
        path = self._folder / f"step_{step.number}_rank_{rank}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(log.run_record(self._options, self._ranks, batch=step.end.batch))
                file.write(step.records(chosen))
        except OSError as error:
            logger.error("the minibatches of step %d could not be kept: %s", step.number, error)
        else:
            logger.warning("kept %d minibatches of step %d in %s", len(chosen), step.number, path)


class TokenDump(StepWriter):
    """Writes each token's log-probabilities and gradient, from which its weight follows.

    Each rank has a file beside the dump of samples, `samples.rank_0.jsonl`, with a line a row, for
    people and for `async-grpo rollouts`.
    """

    needs_terms = True

    def __init__(self, recording: RecordingOptions, ranks: Ranks, *, first_ordinal: int) -> None:
        """All ranks' files together may be as large as the dump.

        The first `write` removes lines from `first_ordinal` on, which are trained again.
        """
        self._cut_at: int | None = first_ordinal
        self._rank = ranks.rank
        path = tokens_file(Path(recording.output_dir, recording.dump_samples_filename), ranks.rank)
        max_bytes = recording.dump_max_gib * 2**30 / ranks.world_size or UNLIMITED
        self._dump = SampleDump(path, max_bytes=max_bytes, unit="rows")

    def write(self, step: log.TrainedStep) -> None:
        """Append a line a row, in the order of minibatches."""
        if self._cut_at is not None:
            self._dump.cut_back(self._cut_at)
            self._cut_at = None
        for trained in step.minibatches:
            if trained.minibatch.samples:
                self._dump.write(self._lines(trained, step))
        for notice in self._dump.take_notices():
            logger.warning("%s", notice)

    def _lines(self, trained: log.Trained, step: log.TrainedStep) -> list[dict[str, object]]:
        """A line a row; `viewing.page.dump` reads the first five fields without the rest."""
        terms, parts = trained.terms, trained.minibatch.parts()
        assert terms is not None, "see needs_terms"
        values = {"logprobs": terms.logprobs, "old": terms.old, "gradients": terms.gradients}
        lengths = [part.episode.rows[0].num_trained_tokens for part in parts]
        rows = {
            name: each.cpu().split(lengths) for name, each in values.items() if each is not None
        }
        return [
            {
                "batch": step.end.batch,
                "ordinal": part.ordinal,
                "attempt": part.attempt,
                "index": part.index,
                "row": part.row,
                "step": step.number,
                "round": trained.minibatch.round_index,
                "rank": self._rank,
                **{name: as_text(rows[name][number]) for name in rows},
            }
            for number, part in enumerate(parts)
        ]


def as_text(values: Tensor) -> str:
    """Float32 values in base64, exact, about 6 bytes each; decimal digits would take seconds.

    >>> as_text(torch.tensor([1.0, -0.5]))
    'AACAPwAAAL8='
    """
    return base64.b64encode(values.to(torch.float32).numpy().tobytes()).decode()
