"""What this rank trains of a gradient step, held until its end and written there.

`replay/` has every step, `non_finite/` the minibatches behind one that could not be taken, and with
`--dump-token-columns` there is a line for each row beside the dump of samples.
"""

from __future__ import annotations

import base64
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from async_grpo.config.run_options import RecordingOptions
from async_grpo.model.policy import PolicyModel
from async_grpo.telemetry.sample_dump import UNLIMITED, SampleDump, tokens_file
from async_grpo.training.audit import audit_step, bit_sums, weights_digest
from async_grpo.training.fsdp import local_gradients, local_shards
from async_grpo.training.minibatch_codec import without_too_large
from async_grpo.training.minibatch_log import (
    LOG_FOLDER,
    NAME,
    SUSPECTS_FOLDER,
    Options,
    Trained,
    TrainedStep,
    cut_back,
    log_files,
    run_record,
)
from async_grpo.training.ranks import Ranks
from async_grpo.training.step import GradientStep, StepResult
from async_grpo.types import EndOfStep, Minibatch, PackedMinibatch, Tally, digest_of
from async_grpo.util.files import LineFile, replacing

logger = logging.getLogger(__name__)
NUM_FILES = 8  # of a rank's log, among which its room is divided
MAX_SUSPECTS = 8  # files a rank; the first ones tell the most


class StepWriter(ABC):
    """Takes each step at its end; a disk that refuses costs what it writes, not the run."""

    needs_digests = False  # of gradients after each minibatch, and of the parameters
    needs_terms = False
    num_lost = 0  # minibatches that a replay will lack

    @abstractmethod
    def write(self, step: TrainedStep) -> None:
        """The step was taken, or skipped."""


class Recorder:
    """Holds the minibatches of the current step, and hands them to writers at its end."""

    def __init__(self, policy: PolicyModel, step: GradientStep) -> None:
        """Nothing is written before whoever trains says by whom: `begin`."""
        self._policy = policy
        self._step = step
        self._kept: list[Trained] = []
        self.begin()

    def begin(self, *writers: StepWriter) -> None:
        """These take the steps from now on."""
        self._writers, self._num_lost = writers, 0
        self._needs_digests = any(each.needs_digests for each in writers)
        self._step.keeps_terms = any(each.needs_terms for each in writers)

    def keep(self, minibatch: Minibatch, packed: PackedMinibatch) -> None:
        """Add a minibatch that was just back-propagated, as it was packed for the model."""
        small, left_out = without_too_large(minibatch)
        trained = Trained(
            small,
            left_out,
            num_tokens=packed.target_ids.numel(),
            weight=packed.weights.double().sum(),
            loss=self._step.losses[-1],
            gradients=bit_sums(local_gradients(self._policy) if self._needs_digests else ()),
            terms=self._step.terms[-1] if self._step.keeps_terms else None,
        )
        self._kept.append(trained)

    def discard(self) -> None:
        """The step is not finished: all of it will come again."""
        self._kept = []

    def audit(self, end: EndOfStep, *, number: int, by_tokens: bool = False) -> None:
        """Compare the step with what was sent, and with D, which may count tokens; collective.

        Raises `AuditError` on every rank when one of them has trained anything else.
        """
        keys = [part.key for each in self._kept for part in each.minibatch.parts()]
        digest = digest_of(keys, incarnation=end.incarnation)
        weight = sum(float(each.weight) for each in self._kept)
        own = Tally(*self._step.backpropagated, digest, weight)
        collectives = self._step.collectives
        audit_step(end, own, step=number, collectives=collectives, by_tokens=by_tokens)

    def end_step(self, end: EndOfStep, result: StepResult, *, number: int) -> None:
        """The step was taken, or skipped: hand it to the writers."""
        kept, self._kept = self._kept, []
        digest = weights_digest(local_shards(self._policy)) if self._needs_digests else 0
        step = TrainedStep(number, end, kept, result, digest)
        for writer in self._writers:
            writer.write(step)

    def take_lost(self) -> int:
        """How many minibatches could not be written since the last call."""
        before, self._num_lost = self._num_lost, sum(each.num_lost for each in self._writers)
        return self._num_lost - before


def writers_of(
    recording: RecordingOptions, ranks: Ranks, *, first: int, options: Options
) -> Iterator[StepWriter]:
    """Yield what writes the steps of a run with these `options` from batch `first` on."""
    yield Suspects(recording.output_dir, ranks, options=options)
    if recording.dump_token_columns and recording.dump_samples_filename:
        yield TokenDump(recording, ranks, first_ordinal=first * options["batch_size"])
    if recording.replay_max_gib:
        yield MinibatchLog(recording, ranks, first=first, options=options)


class MinibatchLog(StepWriter):
    """Writes one rank's log; the oldest file goes for new batches when there is no room."""

    needs_digests = True

    def __init__(
        self, recording: RecordingOptions, ranks: Ranks, *, first: int, options: Options
    ) -> None:
        """What is there from batch `first` on is removed: it is trained again."""
        self._options = options
        self._ranks = ranks
        self._folder = Path(recording.output_dir, LOG_FOLDER)
        self._max_bytes = recording.replay_max_gib * 2**30 / ranks.world_size
        self._file: LineFile | None = None
        try:
            cut_back(self._folder, first, rank=ranks.rank, world_size=ranks.world_size)
        except OSError as error:
            logger.warning("what %s holds of later batches stays there: %s", self._folder, error)

    def write(self, step: TrainedStep) -> None:
        """Append the step, whole or not at all."""
        file = self._file_for(step.end)
        before = file.num_lost
        file.append(step.records(step.minibatches), number=len(step.minibatches))
        self.num_lost += file.num_lost - before

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
            self._file.append(run_record(self._options, self._ranks, batch=end.batch), number=0)
            self._make_room()
        return self._file

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


class Suspects(StepWriter):
    """Keeps the minibatches behind a step that was not finite, in a file that stays."""

    def __init__(self, output_dir: str, ranks: Ranks, *, options: Options) -> None:
        self._options = options
        self._ranks = ranks
        self._folder = Path(output_dir, SUSPECTS_FOLDER)

    def write(self, step: TrainedStep) -> None:
        """Write the suspects, if there are any, but for fillers."""
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
                file.write(run_record(self._options, self._ranks, batch=step.end.batch))
                file.write(step.records(chosen))
        except OSError as error:
            logger.error("the minibatches of step %d could not be kept: %s", step.number, error)
        else:
            logger.warning("kept %d minibatches of step %d in %s", len(chosen), step.number, path)


class TokenDump(StepWriter):
    """Writes what was computed of each token: what becomes of its weight follows from that.

    Beside the dump of samples lies a file a rank, `samples.rank_0.jsonl`, with a line for each row,
    for people and for `async-grpo rollouts`.
    """

    needs_terms = True

    def __init__(self, recording: RecordingOptions, ranks: Ranks, *, first_ordinal: int) -> None:
        """All ranks' files together may be as large as the dump.

        What is there from `first_ordinal` on goes when it is trained again.
        """
        self._cut_at: int | None = first_ordinal
        self._rank = ranks.rank
        path = tokens_file(Path(recording.output_dir, recording.dump_samples_filename), ranks.rank)
        max_bytes = recording.dump_max_gib * 2**30 / ranks.world_size or UNLIMITED
        self._dump = SampleDump(path, max_bytes=max_bytes, unit="rows")

    def write(self, step: TrainedStep) -> None:
        """Append a line a row, in the order of minibatches."""
        if self._cut_at is not None:
            self._dump.cut_back(self._cut_at)
            self._cut_at = None
        for trained in step.minibatches:
            if trained.minibatch.samples:
                self._dump.write(self._lines(trained, step))
        for notice in self._dump.take_notices():
            logger.warning("%s", notice)

    def _lines(self, trained: Trained, step: TrainedStep) -> list[dict[str, object]]:
        """`viewing.page.dump` reads the first five fields without the rest."""
        terms, parts = trained.terms, trained.minibatch.parts()
        assert terms is not None, "they were asked for"
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
    """Float32 in base64, as exact as they are, at 6 bytes each: text would cost a step seconds.

    >>> as_text(torch.tensor([1.0, -0.5]))
    'AACAPwAAAL8='
    """
    return base64.b64encode(values.to(torch.float32).numpy().tobytes()).decode()
