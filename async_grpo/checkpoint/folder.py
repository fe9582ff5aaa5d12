"""The checkpoints of one run on disk: each is whole or absent, verified by reading it back, and the
last good one is never lost.

    <output_dir>/checkpoints/batch_12/           {shards, manifest.json, COMMITTED}
                             .batch_14.partial/  being written; begin() removes one of a crash
                             .batch_8.removed/   being removed; likewise

A save is: all ranks write shards into the temporary folder; each hashes its own while it writes
them, syncs them and reads them back → sync and sha256 of the other files there, and manifest.json →
sync of the folders → rename → sync of the parent → COMMITTED → verification as a resume does it,
except of the ranks' shards → rotation. A good checkpoint is never renamed or written to, only
removed, once a newer one has been verified: a batch that is saved again (after a resume from an
earlier one) gets a new folder, `batch_12.2`, and `saved_at_ns` gives their order.

Why a marker beside the rename: COMMITTED is written after the new name is on disk, so its presence
proves that everything before it is too, also where renaming a folder is not atomic (network and
object-store mounts) or where a copy was interrupted. It holds the sha256 of manifest.json, which
holds those of the shards: one flipped bit anywhere breaks this chain.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

from async_grpo.checkpoint import disk
from async_grpo.checkpoint.reader import (
    MANIFEST_NAME,
    MARKER_NAME,
    Manifest,
    file_names,
    hash_files,
    read_checkpoint,
    read_manifest,
    to_json,
)
from async_grpo.util.errors import CheckpointError

logger = logging.getLogger(__name__)
CHECKPOINT_NAME = re.compile(r"batch_(\d+)(\.\d+)?")
LEFTOVER = re.compile(r"\.batch_\d+(\.\d+)?\.(partial|removed)")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest checkpoint that verifies, if any, and those that were passed over.

    A save that a crash cut short was never a checkpoint, and is not among the latter.
    """

    path: Path | None
    manifest: Manifest | None
    passed_over: tuple[tuple[Path, str], ...]  # with the reason


@dataclass(frozen=True, slots=True)
class _Saved:
    """Checkpoints by the state of their manifest; shards are not read."""

    sound: list[tuple[Manifest, Path]]
    damaged: list[tuple[Path, str]]  # with the reason
    untouchable: list[tuple[Path, str]]  # unreadable now and perhaps good, or not ours
    unfinished: list[Path]  # a crash came between rename and COMMITTED


class CheckpointFolder:
    """One run's checkpoints. One process uses it, for one save at a time."""

    def __init__(
        self, root: Path, *, keep: int, spared: Callable[[], frozenset[int]] = frozenset
    ) -> None:
        """`spared` returns the batches whose checkpoints stay beside the `keep` newest."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}: the last good one stays")
        self._root = Path(os.path.abspath(root))
        self._keep = keep
        self._spared = spared

    def begin(self, batches: int) -> Path:
        """Make an empty folder for the shards of a save, and remove what crashes left behind.

        Raises:
            CheckpointError: the disk fails.
        """
        with self._explained(f"batch_{batches}", "written to"):
            self._make_root()
            self._clean()
            temporary = self._root / f".{self._free_name(batches)}.partial"
            disk.make_tree(temporary)
        return temporary

    def commit(self, temporary: Path, manifest: Manifest) -> Path:
        """Make the shards in `temporary` a checkpoint; on return it survives a power cut.

        `manifest.files`: {name: sha256} of shards that their ranks have synced and read back. This
        method hashes and syncs the other files.

        Raises:
            CheckpointError: the disk fails, or returns other bytes. Nothing is left of this save,
                and older checkpoints stay as they were.
        """
        final = self._root / temporary.name.removeprefix(".").removesuffix(".partial")
        folder = temporary
        with self._explained(final.name, "written to"):
            try:
                text = self._seal(temporary, manifest)
                disk.rename(temporary, final)
                folder = final
                disk.sync(self._root)
                self._mark(final, text)
                read_checkpoint(final, proven=manifest.files)
            except BaseException:
                self.abandon(folder)
                raise
        self._rotate(final, manifest.batches)
        return final

    def abandon(self, temporary: Path) -> None:
        """Remove a save's folder; where the disk fails, the next save does it."""
        try:
            if temporary.name in disk.entries(self._root):
                self._remove(temporary)
        except OSError as error:
            logger.warning("%s could not be removed: %s", temporary, error)

    def newest(self) -> Newest:
        """Verify from the newest down until one is whole; the disk is not changed.

        Raises:
            CheckpointError: the folder that holds the checkpoints cannot be read.
        """
        with self._explained("a checkpoint", "read from"):
            saved = self._saved()
        for path in saved.unfinished:
            logger.warning("%s was not finished, by a crash: the next save removes it", path)
        passed_over = [*saved.damaged, *saved.untouchable]
        for _, path in sorted(saved.sound, key=_age):
            try:
                return Newest(path, read_checkpoint(path), tuple(passed_over))
            except CheckpointError as error:
                passed_over.append((path, str(error)))
        return Newest(None, None, tuple(passed_over))

    def _seal(self, temporary: Path, manifest: Manifest) -> bytes:
        """Sync all files of the folder, before it is renamed; returns the manifest's text."""
        names = [name for name in file_names(temporary) if name not in manifest.files]
        for name in names:
            disk.sync(temporary / name)
        files = {**manifest.files, **hash_files(temporary, names)}
        text = to_json(replace(manifest, files=files, saved_at_ns=self._next_time()))
        self._write_synced(temporary / MANIFEST_NAME, text)
        disk.sync(temporary)
        return text

    def _mark(self, final: Path, text: bytes) -> None:
        partial = final / f".{MARKER_NAME}.partial"
        self._write_synced(partial, hashlib.sha256(text).hexdigest().encode())
        disk.rename(partial, final / MARKER_NAME)
        disk.sync(final)

    def _write_synced(self, path: Path, content: bytes) -> None:
        disk.write(path, content)
        disk.sync(path)

    def _rotate(self, newest: Path, batches: int) -> None:
        """Remove what exceeds `keep`. A disk that fails costs space, not the save."""
        try:
            for path in self._surplus(newest, batches):
                self._remove(path)
        except OSError as error:
            logger.warning("an old checkpoint in %s could not be removed: %s", self._root, error)

    def _surplus(self, newest: Path, batches: int) -> list[Path]:
        """The checkpoints to remove.

        Kept beside the newest are, latest save first, those of earlier batches, then those of later
        ones (which a resume has undone), and all that are spared. Damaged ones go when enough good
        ones are there.
        """
        saved = self._saved()
        spared = self._spared() - {batches}
        others = [
            item for item in saved.sound if item[1] != newest and item[0].batches not in spared
        ]
        others.sort(key=lambda item: (item[0].batches >= batches, *_age(item)))
        num_kept = self._keep - 1
        surplus = [path for _, path in others[num_kept:]]
        damaged = [path for path, _ in saved.damaged if path != newest]
        return surplus + (damaged if len(others) >= num_kept else [])

    def _next_time(self) -> int:
        """Nanoseconds since 1970, later than every checkpoint's."""
        return max([time.time_ns(), *(older.saved_at_ns + 1 for older, _ in self._saved().sound)])

    def _remove(self, path: Path) -> None:
        """Hide the folder before the first file goes, so that no half of it bears the name."""
        hidden = path
        if not path.name.startswith("."):
            hidden = self._root / f".{path.name}.removed"
            disk.rename(path, hidden)
            disk.sync(self._root)
        disk.remove_tree(hidden)

    def _clean(self) -> None:
        """Remove what crashes left: hidden folders, and renamed ones without a marker."""
        for name, kind in disk.entries(self._root).items():
            if kind == "folder" and LEFTOVER.fullmatch(name):
                self._remove(self._root / name)
        for path in self._saved().unfinished:
            self._remove(path)

    def _make_root(self) -> None:
        """Make the root, and sync its parents, which the run may have just made."""
        disk.make_tree(self._root)
        for folder in self._root.parents:
            with suppress(PermissionError):  # not ours, so older than the run
                disk.sync(folder)

    def _saved(self) -> _Saved:
        saved = _Saved([], [], [], [])
        for path, kind in self._named():
            if kind != "folder":
                saved.untouchable.append((path, f"{path} must be a folder, is a file or a link"))
                continue
            try:
                names = disk.entries(path)
                if MANIFEST_NAME in names and MARKER_NAME not in names:
                    saved.unfinished.append(path)
                else:
                    saved.sound.append((read_manifest(path), path))
            except CheckpointError as error:
                # `commit` renames only folders with a manifest: others are not ours.
                is_ours = MANIFEST_NAME in names
                (saved.damaged if is_ours else saved.untouchable).append((path, str(error)))
            except OSError as error:
                saved.untouchable.append((path, f"{path} must be readable: {error}"))
        return saved

    def _named(self) -> list[tuple[Path, disk.Kind]]:
        """Entries of the root that have a checkpoint's name, sorted by it."""
        try:
            entries = disk.entries(self._root)
        except FileNotFoundError:
            return []
        return sorted(
            (self._root / n, kind) for n, kind in entries.items() if CHECKPOINT_NAME.fullmatch(n)
        )

    def _free_name(self, batches: int) -> str:
        taken = {path.name for path, _ in self._named()}
        names = (f"batch_{batches}{suffix}" for suffix in chain([""], map(".{}".format, count(2))))
        return next(name for name in names if name not in taken)

    @contextmanager
    def _explained(self, name: str, done: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "free space" if error.errno in NO_SPACE else "check that disk"
            raise CheckpointError(
                f"{name} must be {done} {self._root}, the disk refused: {error}; {remedy}. Older "
                "checkpoints stay as they are"
            ) from error


def _age(item: tuple[Manifest, Path]) -> tuple[int, int]:
    """The newest sorts first."""
    return (-item[0].saved_at_ns, -item[0].batches)
