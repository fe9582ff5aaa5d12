"""Saves a run: all ranks copy their tensors, then train on while threads write the checkpoint.

consumes:     the end of a batch: policy, optimizer and counters between two gradient steps
produces:     checkpoints, which rank 0 commits
waits for:    the save before this one, up to `deadlines.CHECKPOINT_ROOM_S`; the last save and
              those that evaluations ask for as long as a save may take
unblocked by: the disk

A save that fails is logged as an error and counted. It does not end the run: the last good
checkpoint stays.

Before and after they write, the ranks verify that they share one folder: on machines without a
shared disk each would write to its own, and a resume would find only a part.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from async_grpo.checkpoint import disk
from async_grpo.checkpoint.export import Exports
from async_grpo.checkpoint.folder import CheckpointFolder
from async_grpo.checkpoint.reader import Manifest, file_names
from async_grpo.checkpoint.tensors import Staging, Tensors, save_reference, save_tensors
from async_grpo.devices.current import use_device
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Absent, Ranks
from async_grpo.training.schedule import Clocks
from async_grpo.types import EndOfStep
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, CheckpointError
from async_grpo.util.run_folder import CHECKPOINTS_FOLDER
from async_grpo.util.waiting import in_background, poll

logger = logging.getLogger(__name__)

LEAST_INTERVAL = 10  # between two saves by the clock, in durations of the latest
T = TypeVar("T")
Read = Callable[[], Iterable[tuple[str, torch.Tensor]]]
References = Callable[[int], Mapping[int, Read] | None]
TOKEN_NAME = ".token"
POLL_INTERVAL_S = 0.1
REMEDY = "give an --output-dir on a disk that all machines of the trainer share"


class RunReport(Protocol):
    """The methods of `run.report.Report` that saving calls."""

    def spared_checkpoints(self) -> frozenset[int]: ...
    def state(self) -> dict[str, Any]: ...
    def sync_files(self) -> None: ...
    def doing(self, what: str) -> None: ...
    def stood_still(self, metric: str, seconds: float) -> None: ...
    def checkpoint_failed(self) -> None: ...
    def checkpoint_skipped(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Cut:
    """A run between two batches, without tensors and files; only rank 0's counters are used."""

    manifest: Manifest  # without hashes
    references: Mapping[int, Read]  # of the moved reference, by batches in its weights

    @property
    def batches(self) -> int:
        return self.manifest.batches


class Checkpoints:
    """Saves a run; every rank has one. Rank 0's has the run's counters, and commits."""

    def __init__(
        self,
        learner: Learner,
        ranks: Ranks,
        *,
        exports: Exports,
        report: RunReport | Absent,
        hashes: Future[Mapping[str, str]] | None,
        references: References,
    ) -> None:
        """`hashes`: for the manifest, on rank 0. `references` returns readers of moved weights."""
        self._config = config = learner.config
        self._learner = learner
        self._ranks = ranks
        self._exports = exports
        self._report = report
        self._hashes = hashes
        self._references = references
        self._folder = CheckpointFolder(
            Path(config.recording.output_dir) / CHECKPOINTS_FOLDER,
            keep=config.recording.keep_checkpoints,
            spared=lambda: report.spared_checkpoints() or frozenset(),
        )
        # Float32: policy, two moments, and a reference that has moved.
        size_bytes = 4 * sum(4 * each.numel() for each in learner.policy.parameters())
        self._timeout_s = deadlines.for_bytes(deadlines.CHECKPOINT_S, size_bytes)
        timeout = timedelta(seconds=self._timeout_s)
        # A group for the threads: their collectives must not mix with those of the training loop.
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._staging = Staging()
        self._last: _Cut | None = None
        self._saved = -1  # batches in the latest checkpoint that was begun
        self._saved_at = time.monotonic()  # or the run began
        self._seconds = 0.0  # that the latest save took; each rank's own
        self._is_owed = False  # a save was left out
        self._running: Future[None] | None = None
        self._committed = -1  # batches in the latest committed checkpoint; rank 0 only

    def check_folder(self) -> None:
        """Check, before the first batch, that all ranks can save to rank 0's folder; collective.

        Raises `NotSharedError` on all ranks where they do not share it. Other errors are warned of:
        a disk that is full now may have room later.
        """
        if self._ranks.world_size == 1 or not self._config.recording.checkpoint_every_batches:
            return
        try:
            temporary = self._ranks.share(lambda: self._folder.begin(0), group=self._group)
            try:
                check_shared(temporary, self._ranks, group=self._group)
            finally:
                self._ranks.on_main(lambda: self._folder.abandon(temporary), group=self._group)
        except NotSharedError:
            raise
        except AsyncGrpoError as error:
            logger.warning("%s", error)

    def batch_ended(self, end: EndOfStep) -> None:
        """Save after a batch if a checkpoint is due; collective.

        `save_last` saves the last batch of the run, after the final export: a checkpoint of it says
        that nothing is left to do.
        """
        if not self._config.recording.checkpoint_every_batches:
            return
        self._last = self._cut(end)
        if self._last.batches >= self._config.batching.num_training_batches:
            return
        best = self._config.best_set
        is_asked = best is not None and self._config.evaluates(best, self._last.batches)
        if is_asked or self._is_due(self._last):
            self._save(self._last, is_asked=is_asked)

    def _is_due(self, cut: _Cut) -> bool:
        """Whether a save is due by the number of batches or rank 0's clock; same on all ranks."""
        by_number = cut.batches % self._config.recording.checkpoint_every_batches == 0
        interval_s = 60 * self._config.recording.checkpoint_every_minutes
        if by_number or self._is_owed or not interval_s:
            return by_number or self._is_owed
        interval_s = max(interval_s, LEAST_INTERVAL * self._seconds)
        is_late = self._ranks.is_main and time.monotonic() - self._saved_at >= interval_s
        return bool(self._ranks.agree(int(is_late)))

    def save_last(self) -> None:
        """Save at the end of a run that is done or was asked to stop; collective."""
        if self._last is None or self._last.batches == self._saved:
            return
        if self._learner.step.clocks != Clocks(**self._last.manifest.state["clocks"]):
            logger.info(
                "batch %d has begun to move the policy: the run will go on from its last "
                "checkpoint, and do this batch again",
                self._last.batches,
            )
            return
        self._save(self._last, is_asked=True)

    def wait(self) -> None:
        """Return once the latest save has ended, failed or not, or its deadline has passed."""
        if self._is_busy(within_s=self._timeout_s):
            logger.error("the checkpoint was not written within %g s", self._timeout_s)

    def _is_busy(self, *, within_s: float) -> bool:
        """Whether this rank's thread still writes, after at most so long."""
        if self._running is not None:
            with suppress(TimeoutError):
                self._running.result(within_s)
        return self._running is not None and not self._running.done()

    @property
    def is_complete(self) -> bool:
        """Whether the last batch that ended is in a checkpoint; on rank 0."""
        return self._last is not None and self._last.batches == self._committed

    def _cut(self, end: EndOfStep) -> _Cut:
        references = self._references(end.batch + 1) or {}  # `Absent` returns None
        options = self._config.options()
        state = {
            "clocks": dataclasses.asdict(self._learner.step.clocks),
            "expert_shares": self._learner.step.expert_shares,
            "report": self._report.state(),
            "exports": self._exports.state(),
            "resume": dataclasses.asdict(end.resume) if end.resume else None,
            "references": list(references),
            "settings": {
                name: {"was": options[name], "is": value}
                for name, value in self._learner.settings.items()
            },
        }
        manifest = Manifest(
            batches=end.batch + 1,
            world_size=self._ranks.world_size,
            config=options,
            hashes={},
            state=state,
        )
        return _Cut(manifest, references)

    def _save(self, cut: _Cut, *, is_asked: bool) -> None:
        """Begin a save; one that is not `is_asked` waits for the next batch where one runs."""
        started = time.monotonic()
        self._report.doing(f"saving the checkpoint after batch {cut.batches}")
        within_s = 0.0 if self._is_owed else deadlines.CHECKPOINT_ROOM_S
        is_busy = self._is_busy(within_s=self._timeout_s if is_asked else within_s)
        is_over = is_asked or started - self._saved_at > self._timeout_s
        found = self._ranks.agree(int(is_busy) * (1 + is_over))  # the worst of any rank
        if not found:
            tensors = self._staging.copy(self._learner)
            self._saved, self._saved_at, self._is_owed = cut.batches, started, False
            self._running = in_background(lambda: self._write(cut, tensors), name="checkpoint")
        elif found > 1:
            self._is_owed = False
            self._failed(cut, "the one before it is still being written")
        else:
            self._skipped(cut)
        self._report.stood_still("seconds_checkpointing", time.monotonic() - started)

    def _skipped(self, cut: _Cut) -> None:
        """Count a save that is left out, once until it is made up for; rank 0 logs it."""
        if self._is_owed:
            return
        self._is_owed = True
        self._report.checkpoint_skipped()
        if self._ranks.is_main:
            logger.warning(
                "the checkpoint after batch %d is left out, the one before it is still being "
                "written: the first batch that ends after that is saved",
                cut.batches,
            )

    def _write(self, cut: _Cut, tensors: Tensors) -> None:
        """Write a checkpoint, in a thread of every rank; logs errors and raises none."""
        temporary: Path | None = None
        try:
            use_device(self._learner.device)
            temporary = self._ranks.share(
                lambda: self._folder.begin(cut.batches), group=self._group
            )
            if self._ranks.world_size > 1:
                check_shared(temporary, self._ranks, group=self._group)
            own = save_tensors(tensors, temporary, group=self._group)
            files = files_of_all(own, temporary, self._ranks, group=self._group)
            if self._ranks.is_main:
                for batches, read in cut.references.items():
                    save_reference(read(), temporary, batches=batches)
                self._report.sync_files()  # the checkpoint holds their sizes
                hashes = self._hashes.result() if self._hashes else {}
                manifest = dataclasses.replace(cut.manifest, hashes=hashes, files=files)
                path = self._folder.commit(temporary, manifest)
                self._committed = cut.batches
                logger.info("saved %s", path)
                self._exports.push(cut.manifest.state["exports"]["last_export"])
        except Exception as error:  # the boundary of a thread: a run goes on without a checkpoint
            if self._ranks.is_main and temporary:
                self._folder.abandon(temporary)
            self._failed(cut, f"{error}" if isinstance(error, CheckpointError) else repr(error))
        self._seconds = time.monotonic() - self._saved_at

    def _failed(self, cut: _Cut, reason: str) -> None:
        """Count a failed save; rank 0 logs it once for all ranks."""
        self._report.checkpoint_failed()
        if self._ranks.is_main:
            logger.error(
                "the checkpoint after batch %d FAILED, training goes on and what was saved before "
                "stands: %s",
                cut.batches,
                reason,
            )


class NotSharedError(CheckpointError):
    """The ranks would save to different folders."""


def check_shared(folder: Path, ranks: Ranks, *, group: dist.ProcessGroup) -> None:
    """Raise `NotSharedError` on all ranks unless each reads in `folder` what rank 0 writes there.

    Collective. `folder` exists on rank 0. A disk that fails raises `CheckpointError`.
    """
    token = ranks.share(lambda: _leave_token(folder), group=group)
    sees = ranks.is_main or _is_seen(folder / TOKEN_NAME, token)
    found = ranks.gather((socket.gethostname(), sees), group=group)
    ranks.on_main(lambda: _take_token(folder), group=group)
    if blind := [rank for rank, (_, sees) in enumerate(found) if not sees]:
        hosts = [host for host, _ in found]
        raise NotSharedError(
            f"checkpoints must lie in one folder for all ranks, {folder} of rank 0 on {hosts[0]} "
            f"is not that of {_in_words(blind, hosts)}: {REMEDY}"
        )


def files_of_all(
    own: Mapping[str, str], folder: Path, ranks: Ranks, *, group: dist.ProcessGroup
) -> Mapping[str, str]:
    """{name: sha256} of all ranks' files, of which `own` are this rank's; collective.

    Raises `CheckpointError` on all ranks when one has written none, or rank 0 does not see a file.
    """
    found = ranks.gather((socket.gethostname(), dict(own)), group=group)
    ranks.on_main(lambda: _check_here(folder, found), group=group)
    return {name: digest for _, files in found for name, digest in files.items()}


def _leave_token(folder: Path) -> str:
    token = secrets.token_hex()
    try:
        disk.write(folder / TOKEN_NAME, token.encode())
    except OSError as error:
        raise CheckpointError(f"{folder} could not be written to: {error}") from error
    return token


def _take_token(folder: Path) -> None:
    try:
        disk.remove(folder / TOKEN_NAME)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be written to: {error}") from error


def _is_seen(path: Path, token: str) -> bool:
    """Whether this rank reads the token at `path`, within `deadlines.FILE_SEEN_S`."""
    for _ in poll(every_s=POLL_INTERVAL_S, within_s=deadlines.FILE_SEEN_S):
        with suppress(OSError):  # it is not there, or not yet
            if disk.read(path) == token.encode():
                return True
    return False


def _check_here(folder: Path, found: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    try:
        here = {*file_names(folder)}
    except OSError as error:
        raise CheckpointError(f"{folder} must be readable: {error}") from error
    hosts = [host for host, _ in found]
    absent = [rank for rank, (_, files) in enumerate(found) if not files or files.keys() - here]
    if absent:
        raise CheckpointError(
            f"a checkpoint must hold the shards of all {len(found)} ranks, {folder} lacks those of "
            f"{_in_words(absent, hosts)}: {REMEDY}"
        )


def _in_words(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """
    >>> _in_words([1, 2, 3], ["a", "a", "b", "b"])
    'rank 1 on a, ranks 2, 3 on b'
    """
    parts = []
    for host, members in groupby(ranks, key=lambda rank: hosts[rank]):
        numbers = [str(rank) for rank in members]
        parts.append(f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)} on {host}")
    return ", ".join(parts)
