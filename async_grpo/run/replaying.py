"""Replays recorded batches of a run, and compares them with the recording bit for bit.

The model is restored from a checkpoint before the batch, and trains the recorded minibatches in
their order, with the code of training: `training.learner`. Neither Ray nor workers are needed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from async_grpo.checkpoint.folder import CHECKPOINT_NAME
from async_grpo.checkpoint.reader import read_checkpoint
from async_grpo.checkpoint.resume import PLACES, Start
from async_grpo.checkpoint.tensors import restore_learner
from async_grpo.config.train_config import TrainConfig
from async_grpo.training.learner import Learner
from async_grpo.training.minibatch_log import (
    DIGEST_FORM,
    LOG_FOLDER,
    LoggedStep,
    Sums,
    TrainedStep,
    last_batch,
    logged_minibatch,
    logged_runs,
    logged_steps,
    machine,
)
from async_grpo.training.ranks import Ranks
from async_grpo.training.recorder import StepWriter
from async_grpo.types import Minibatch
from async_grpo.util.errors import CheckpointError, ConfigError, DataError
from async_grpo.util.run_folder import CHECKPOINTS_FOLDER

Say = Callable[[str], object]
# The compared values, in the order in which they are computed.
OF_MINIBATCH = {
    "num_tokens": "the number of trained tokens",
    "weight": "the sum of weights",
    "loss": "the sum of losses",
    "gradients": "the digest of summed gradients",
}
OF_STEP = {
    "grad_norm": "the gradient's norm",
    "skipped": "why it was skipped",
    "learning_rate": "the learning rate",
    "clocks": "the clocks of the schedule",
    "digest": "the digest of the parameters",
}
LAST = sys.maxsize  # sorts after all rounds


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run as the log of its rank 0 describes it."""

    folder: Path  # of the run
    config: TrainConfig
    world_size: int
    machine: Mapping[str, object]
    batches: range  # those recorded with these options


@dataclass(frozen=True, slots=True)
class Difference:
    """The first value of a replay that differs from the recording."""

    place: str
    what: str
    was: object
    now: object

    def __str__(self) -> str:
        return f"{self.place}: {self.what} was {self.was}, and is {self.now} now"


Found = tuple[tuple[int, int], Difference]  # (round, index of the value) first, for sorting


def read_record(folder: Path, *, batch: int | None) -> Recorded:
    """The recording of a run around `batch`; None: around its last batch.

    Raises `ConfigError` where that batch is not recorded.
    """
    log = folder / LOG_FOLDER
    runs = logged_runs(log, rank=0)
    last = last_batch(log)
    if last is None:
        raise ConfigError(
            f"{folder} must be the folder of a run that records its minibatches, {log} holds no "
            "whole batch: name another, or train with --replay-max-gib above 0"
        )
    wanted = last if batch is None else batch
    if not runs[0]["batch"] <= wanted <= last:
        raise ConfigError(
            f"--batch must be one that {log} records, from {runs[0]['batch']} to {last}, got "
            f"{wanted}: later ones were not trained, and earlier ones made room (--replay-max-gib)"
        )
    number = max(n for n, run in enumerate(runs) if run["batch"] <= wanted)
    own, first, end = runs[number], number, number + 1
    while first and _is_same(runs[first - 1], own):
        first -= 1
    while end < len(runs) and _is_same(runs[end], own):
        end += 1
    batches = range(runs[first]["batch"], runs[end]["batch"] if end < len(runs) else last + 1)
    if (form := _digests(own)) != DIGEST_FORM:
        raise ConfigError(
            f"digests in {log} must be of form {DIGEST_FORM}, which this release compares, those "
            f"of batches {batches.start} to {batches[-1]} are of form {form}: replay them with the "
            "code that trained them"
        )
    try:
        config = TrainConfig(**own["config"])
    except TypeError as error:
        raise ConfigError(
            f"{log} must be of this release, {own['machine']['release']} wrote it: replay with "
            f"that one ({error})"
        ) from error
    return Recorded(folder, config, own["world_size"], own["machine"], batches)


def find_checkpoint(record: Recorded, batch: int) -> Start:
    """The latest checkpoint up to `batch` after which every batch is recorded.

    Raises `ConfigError` where there is none.
    """
    root = record.folder / CHECKPOINTS_FOLDER
    found = [
        (int(named[1]), path)
        for path in (root.iterdir() if root.is_dir() else ())
        if (named := CHECKPOINT_NAME.fullmatch(path.name))
    ]
    usable = [(n, path) for n, path in found if record.batches.start <= n <= batch]
    for _, path in sorted(usable, reverse=True):
        try:
            return Start(path, read_checkpoint(path))
        except CheckpointError:  # a damaged one: an earlier one is tried
            continue
    if record.batches.start == 0:
        return Start()  # the model as it was before training
    raise ConfigError(
        f"--batch {batch} needs a checkpoint after {record.batches.start} to {batch} batches, for "
        f"earlier ones are not recorded; {root} has those after "
        f"{sorted(n for n, _ in found) or 'none'}: choose a later batch"
    )


def check_ranks(record: Recorded, ranks: Ranks) -> None:
    """Raise `ConfigError` where another number of ranks would sum in another order."""
    if ranks.world_size != record.world_size:
        raise ConfigError(
            f"a replay must have the {record.world_size} ranks that trained these batches, got "
            f"{ranks.world_size}: let async-grpo start them, or give torchrun that number"
        )


def replay(
    record: Recorded, batch: int, ranks: Ranks, *, start: Start, say: Say
) -> Difference | None:
    """Train the batches from `start` to `batch` again; collective.

    Returns the first difference from the recording, the same on every rank; None: there is none.
    """
    if record.machine["device"] == "cpu":
        torch.set_num_threads(record.machine["threads"])
    config = record.config.but(peak_tflops="auto")
    learner = Learner.build(config, ranks)
    if start.folder:
        restore_learner(learner, start)
    learner.set(start.settings(config))
    batches = range(start.batches, batch + 1)
    steps = logged_steps(record.folder / LOG_FOLDER, rank=ranks.rank, batches=batches)
    while (step := _agreed(ranks, lambda: next(steps, None))) is not None:
        if difference := replay_step(step, learner, ranks):
            return difference
        if step.end.is_last_of_batch:
            learner.set(step.end.settings)
            say(f"batch {step.end.batch}: equal")
    return None


def machine_notes(record: Recorded, ranks: Ranks) -> list[str]:
    """How this machine differs from the recording one, which may change bits."""
    here = machine(ranks.device)
    if here["device"] == "cpu":
        here["threads"] = record.machine["threads"]  # as they are set for the replay
    return [
        f"{name} was {was} where the run was trained, and is {here[name]} here"
        for name, was in record.machine.items()
        if here[name] != was
    ]


class Comparison(StepWriter):
    """Compares a replayed step with the recording."""

    needs_digests = True

    def __init__(self, rank: int, step: LoggedStep, recorded: Sequence[Sums]) -> None:
        self._rank = rank
        self._facts = step.facts
        self._recorded = recorded
        self.found: list[Found] = []  # this rank's first difference

    def write(self, step: TrainedStep) -> None:
        """Compare the values in the order in which a step computes them."""
        name = f"gradient step {step.number} (batch {step.end.batch})"
        for trained, was in zip(step.minibatches, self._recorded, strict=True):
            index, now = trained.minibatch.round_index, trained.sums
            place = f"{name}, round {index}, rank {self._rank}"
            for order, (field, what) in enumerate(OF_MINIBATCH.items()):
                self._compare((index, order), place, what, getattr(was, field), getattr(now, field))
        own, place = step.outcome, f"{name}, rank {self._rank}"
        for order, (field, what) in enumerate(OF_STEP.items()):
            self._compare((LAST, order), place, what, self._facts[field], own[field])

    def _compare(
        self, at: tuple[int, int], place: str, what: str, was: object, now: object
    ) -> None:
        if not self.found and not _is_equal(was, now):
            self.found.append((at, Difference(place, what, was, now)))


def replay_step(step: LoggedStep, learner: Learner, ranks: Ranks) -> Difference | None:
    """Train one step again; returns the earliest difference of any rank; collective."""
    loaded = _agreed(ranks, lambda: _loaded(step, ranks.rank))
    comparison = Comparison(ranks.rank, step, [sums for _, sums in loaded])
    learner.recorder.begin(comparison)
    for minibatch, _ in loaded:
        learner.accumulate(minibatch)
    learner.update(step.end)
    found = [each for of_rank in ranks.gather(comparison.found) for each in of_rank]
    return min(found, key=lambda each: each[0])[1] if found else None


def _loaded(step: LoggedStep, rank: int) -> list[tuple[Minibatch, Sums]]:
    pairs = []
    for record in step.minibatches:
        try:
            pairs.append(logged_minibatch(record))
        except DataError as error:
            facts = record.facts
            raise DataError(
                f"the minibatch of round {facts['round']}, rank {rank}, in step "
                f"{facts['step_in_batch']} of batch {facts['batch']} cannot be read: {error}"
            ) from error
    return pairs


def _agreed(ranks: Ranks, prepare: Callable[[], object]) -> Any:
    """What `prepare` returns on this rank; a `DataError` on any rank is raised on all."""
    value, complaint = None, ""
    try:
        value = prepare()
    except DataError as error:
        complaint = str(error)
    if found := [each for each in ranks.gather(complaint) if each]:
        raise DataError(found[0])
    return value


def _is_equal(was: object, now: object) -> bool:
    """Whether values are equal to the bit, where NaN equals NaN."""
    return json.dumps(was, sort_keys=True) == json.dumps(now, sort_keys=True)


def _digests(run: Mapping[str, Any]) -> int:
    return int(run.get("digests", 1))  # records of form 1 do not name it


def _is_same(run: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two parts of a run had the same options, number of ranks and form of digests."""
    options = [
        {k: v for k, v in each["config"].items() if k not in PLACES} for each in (run, other)
    ]
    forms = [(each["world_size"], _digests(each)) for each in (run, other)]
    return options[0] == options[1] and forms[0] == forms[1]
