"""Decides, on rank 0 and before loading, where a run starts: anew, or after a checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_grpo.algorithms.find import find_algorithm
from async_grpo.checkpoint.folder import CheckpointFolder
from async_grpo.checkpoint.reader import MANIFEST_NAME, Manifest, read_checkpoint
from async_grpo.config.option import flag, require
from async_grpo.config.train_config import FIXED, INCIDENTAL, PLACES, TrainConfig
from async_grpo.training.schedule import Clocks
from async_grpo.types import GivenPair, Question, ResumePoint, TrainingPair
from async_grpo.util.errors import CheckpointError, ConfigError
from async_grpo.util.run_folder import CHECKPOINTS_FOLDER, METRICS_FILE, PARAMETERS_FILE, is_restart

logger = logging.getLogger(__name__)
Record = Question | TrainingPair | GivenPair


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run starts: at its first question, or after a checkpoint's last batch."""

    folder: Path | None = None  # of the checkpoint; None: a new run
    manifest: Manifest | None = None
    is_finished: bool = False  # nothing is left to train

    @property
    def batches(self) -> int:
        """Completed batches."""
        return self.manifest.batches if self.manifest else 0

    @property
    def state(self) -> Mapping[str, Any]:
        return self.manifest.state if self.manifest else {}

    @property
    def clocks(self) -> Clocks:
        if not self.manifest:
            return Clocks()
        # Clocks of release 0.1 lack tokens; the report's count includes skipped steps.
        tokens = (self.state.get("report") or {}).get("tokens", 0)
        return Clocks(**{"tokens": tokens, **self.state["clocks"]})

    @property
    def point(self) -> ResumePoint | None:
        """Where the batcher continues; None for a supervised run."""
        saved = self.state.get("resume")
        if saved is None:
            return None
        return ResumePoint(**{**saved, "quarantined": tuple(saved["quarantined"])})

    def settings(self, config: TrainConfig) -> dict[str, object]:
        """{option: value} that were set while the run trained, and still apply.

        Where the command line has changed the option since, the command line's value applies.
        """
        saved: Mapping[str, Mapping[str, object]] = self.state.get("settings", {})
        own = config.options()
        return {name: change["is"] for name, change in saved.items() if own[name] == change["was"]}

    @property
    def source(self) -> Path | None:
        """The folder of the run that wrote the checkpoint."""
        return self.folder.parent.parent if self.folder else None


def find_start(config: TrainConfig) -> Start:
    """Decide where this command line's run starts; `check_contents` compares data and model later.

    Raises `ConfigError` where an existing run would be overwritten or the options do not fit the
    checkpoint, `CheckpointError` where no checkpoint can be read.
    """
    recording = config.recording
    output = Path(recording.output_dir)
    replaces = recording.overwrite and not is_restart()
    names_checkpoint = recording.resume not in ("auto", "never")
    if replaces or not _holds_run(output):
        start = _named(config) if names_checkpoint else Start()
        if replaces and start.source and start.source.resolve() == output.resolve():
            raise ConfigError(
                f"--resume {recording.resume} must not lie in the run that --overwrite removes: "
                "leave out --overwrite, or name another --output-dir"
            )
        if not replaces and not is_restart():
            _check_dump_is_new(config, output)
    elif recording.resume == "never" and not is_restart():
        raise _occupied(config, "--resume never was given")
    else:
        start = _own(config, output)
    return _checked(start, config)


def check_contents(start: Start, hashes: Mapping[str, str], paths: Mapping[str, str]) -> None:
    """Raise `CheckpointError` when a hash differs from the checkpoint's of the same name."""
    for name, saved in (start.manifest.hashes if start.manifest else {}).items():
        found = hashes.get(name)
        if found is not None and found != saved:
            raise CheckpointError(
                f"the {name} of {paths[name]} must be what {start.folder} was trained with, whose "
                f"sha256 is {saved}, got {found}: give the same one, or start a new run in another "
                "--output-dir"
            )


def changed_options(start: Start, config: TrainConfig) -> dict[str, dict[str, object]]:
    """{option: {"was": the checkpoint's value, "is": this command line's}}, without places."""
    saved = start.manifest.config if start.manifest else {}
    return {
        name: {"was": saved[name], "is": value}
        for name, value in config.options().items()
        if name in saved and saved[name] != value and name not in PLACES
    }


def _own(config: TrainConfig, output: Path) -> Start:
    """The start of a run whose output folder holds a run already."""
    recording = config.recording
    if recording.resume not in ("auto", "never"):
        named = _named(config)
        newest = _newest(output, keep=recording.keep_checkpoints)
        if newest.folder and _saved_options(output).get("resume") == recording.resume:
            return newest  # the same command line has resumed from there before
        if named.source is None or named.source.resolve() != output.resolve():
            if newest.folder is None and differing_options(config, output, INCIDENTAL) == []:
                return named
            raise _occupied(config, "it is not the run of --resume")
        if newest.folder is None or newest.folder.resolve() != Path(str(named.folder)).resolve():
            raise ConfigError(
                f"--resume {recording.resume} must be the newest checkpoint of its own folder "
                f"({newest.folder}): to go back further, name another --output-dir"
            )
        return named
    newest = _newest(output, keep=recording.keep_checkpoints)
    if newest.folder is None:
        _check_nothing_due(config, output)
        logger.info(
            "--output-dir %s holds a run that has left no checkpoint yet: it starts again from "
            "its first batch",
            output,
        )
    return newest


def _check_dump_is_new(config: TrainConfig, output: Path) -> None:
    """Refuse an existing dump outside the output folder: a new run would overwrite it."""
    dump = output / config.recording.dump_samples_filename
    is_own = dump.resolve().is_relative_to(output.resolve())
    require(
        not dump.exists() or is_own, "dump_samples_filename", "must name a new file",
        config.recording.dump_samples_filename, "name another, or replace it with --overwrite",
    )  # fmt: skip


def _named(config: TrainConfig) -> Start:
    """The checkpoint that `--resume PATH` names, or the newest of the run that it names."""
    path = Path(config.recording.resume)
    if (path / MANIFEST_NAME).exists():
        return Start(path, read_checkpoint(path))
    if not (path / CHECKPOINTS_FOLDER).is_dir():
        raise ConfigError(
            f"--resume must be auto, never, or the folder of a checkpoint or of a run, "
            f"{config.recording.resume} is none of these: correct the path"
        )
    start = _newest(path, keep=config.recording.keep_checkpoints)
    if start.folder is None:
        raise CheckpointError(
            f"--resume {config.recording.resume} holds no checkpoint yet: name another"
        )
    return start


def _newest(output: Path, *, keep: int) -> Start:
    """The newest good checkpoint of a run; warns of those passed over."""
    newest = CheckpointFolder(output / CHECKPOINTS_FOLDER, keep=keep).newest()
    if newest.path is None and newest.passed_over:
        reasons = "; ".join(reason for _, reason in newest.passed_over)
        raise CheckpointError(
            f"no checkpoint of {output} can be read ({reasons}): restore one from a copy, or "
            "give up the run with --overwrite"
        )
    for _, reason in newest.passed_over:
        logger.warning("a damaged checkpoint is passed over: %s", reason)
    return Start(newest.path, newest.manifest)


def _checked(start: Start, config: TrainConfig) -> Start:
    """`start`, if these options can resume from it; logs those that differ."""
    if start.manifest is None:
        return start
    saved, own = start.manifest.config, config.options()
    for name in FIXED:
        if name in saved and saved[name] != own[name]:
            raise ConfigError(
                f"{flag(name)} must be {saved[name]}, as in {start.folder}, got {own[name]}: give "
                f"{flag(name)} {saved[name]}, or start a new run in another --output-dir"
            )
    if start.batches >= config.batching.num_training_batches:
        logger.info(
            "all %d batches of %s are trained, nothing is left to do: give a larger "
            "--num-training-batches to go on",
            start.batches,
            start.source,
        )
        return dataclasses.replace(start, is_finished=True)
    _check_references(start, config)
    logger.info("the run goes on after batch %d, from %s", start.batches, start.folder)
    if changes := changed_options(start, config).items():
        told = (f"{flag(name)} {change['was']} -> {change['is']}" for name, change in changes)
        logger.info("options that differ from the checkpoint's: %s", ", ".join(told))
    return start


def _check_references(start: Start, config: TrainConfig) -> None:
    """Raise unless the checkpoint has every moved reference that the next batches need."""
    batches = range(start.batches, start.batches + config.sampling.max_staleness + 1)
    needed = {config.sampling.reference_of(batch) for batch in batches} - {0, start.batches}
    missing = sorted(needed - set(start.state["references"]))
    if find_algorithm(config).needs_reference and missing:
        raise ConfigError(
            f"{start.folder} must hold the weights of the reference after batch {missing[0]}, it "
            "was saved without a reference: leave --kl-coefficient at 0, or start a new run"
        )


def _holds_run(output: Path) -> bool:
    checkpoints = output / CHECKPOINTS_FOLDER
    return (output / METRICS_FILE).exists() or any(checkpoints.glob("batch_*"))


def _check_nothing_due(config: TrainConfig, output: Path) -> None:
    """Raise unless the folder's run had the same options, and no checkpoint of it was due."""
    if not _saved_options(output):
        raise _occupied(config, f"no {PARAMETERS_FILE} says how it was started")
    if differing := differing_options(config, output, INCIDENTAL):
        raise _occupied(config, f"it was started with another {flag(differing[0])}")
    saves = config.recording.checkpoint_every_batches
    if not saves or _two_were_due(config, output / METRICS_FILE):
        raise _occupied(config, "it has left no checkpoint to go on from")


def _two_were_due(config: TrainConfig, metrics: Path) -> bool:
    """Whether two checkpoints were due: then the first, saved in the background, is complete."""
    recording = config.recording
    rows = metrics.read_bytes().splitlines() if metrics.exists() else []
    num_batches = len(rows) // config.batching.steps_per_batch
    if num_batches >= 2 * recording.checkpoint_every_batches:
        return True
    if num_batches < 2 or not recording.checkpoint_every_minutes:
        return False
    try:
        seconds = float(json.loads(rows[-1])["total_seconds"])
    except (ValueError, TypeError, LookupError):  # a line that a crash has cut
        return False
    return seconds >= 2 * 60 * recording.checkpoint_every_minutes


def differing_options(config: TrainConfig, output: Path, ignored: tuple[str, ...]) -> list[str]:
    """Options whose values differ from those that the run in `output` started with."""
    saved, own = _saved_options(output), config.options()
    return [name for name in own if name not in ignored and saved.get(name) != own[name]]


def _saved_options(output: Path) -> Mapping[str, object]:
    try:
        options: dict[str, Any] = json.loads((output / PARAMETERS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return options


def _occupied(config: TrainConfig, reason: str) -> ConfigError:
    recording = config.recording
    return ConfigError(
        f"--output-dir {recording.output_dir} holds a run already, and {reason}: name another "
        "folder, or replace it with --overwrite"
    )


def hash_data(records: Sequence[Record]) -> str:
    """The sha256 of the loaded data: ids, texts and columns of every record, in order.

    A change of any line changes it; another path or file format of the same data does not.
    """
    digest = hashlib.sha256()
    for record in records:
        for part in _parts(record):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _parts(record: Record) -> Iterable[bytes]:
    if isinstance(record, GivenPair):
        return *_parts(record.question), _ids(record.completion_token_ids)
    if isinstance(record, TrainingPair):
        return _ids(record.prompt_token_ids), _ids(record.completion_token_ids)
    # Columns may hold any object that a dataset decodes to: its `str` is hashed.
    text = json.dumps([record.input, record.answer, record.columns], sort_keys=True, default=str)
    return _ids(record.input_token_ids), text.encode()


def _ids(values: NDArray[np.int32]) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()
