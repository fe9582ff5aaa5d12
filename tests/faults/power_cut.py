"""A disk in memory that forgets what a real one may forget when the power goes.

The model is the weakest that POSIX allows: bytes of a file last once the file was synced, names in
a folder once the folder was, each rename happens or does not, and of everything else any subset may
have reached the platter, in any order, files torn at any byte or full of zeros.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from async_grpo.checkpoint.disk import Kind

TOP = 0  # the number of the folder "/"
MAX_EXHAUSTIVE = 6  # names not yet synced of which every subset is tried


@dataclass(slots=True)
class Image:
    """What is on a disk: files and folders by number, as names in a folder point to them."""

    files: dict[int, bytes] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {TOP: {}})

    def copy(self) -> Image:
        return Image(dict(self.files), {i: dict(names) for i, names in self.folders.items()})

    def tree(self, number: int = TOP) -> object:
        """What can be reached, to tell images apart."""
        if number in self.files:
            return self.files[number]
        names = self.folders.get(number, {})
        return tuple((name, self.tree(names[name])) for name in sorted(names))


@dataclass(frozen=True, slots=True)
class Operation:
    """One entry of the log; `number` is the file or folder that `name` in `folder` leads to."""

    kind: Literal["make_folder", "write", "sync", "rename", "remove", "remove_folder"]
    path: Path
    folder: int
    name: str
    number: int
    new_name: str = ""
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class Cut:
    """What of the unsynced survives: names by index into the log, and bytes of files likewise."""

    names: frozenset[int]
    contents: tuple[tuple[int, bytes], ...]


class MemoryDisk:
    """Logs every change; `cut` gives the disk as the next start finds it."""

    def __init__(self, image: Image | None = None) -> None:
        self._before = (image or Image()).copy()  # lasts
        self._now = self._before.copy()
        self._numbers = itertools.count(1 + max([*self._now.files, *self._now.folders]))
        self.log: list[Operation] = []

    def make_folder(self, path: Path) -> None:
        folder, number = self._place_for(path), next(self._numbers)
        self._now.folders[number] = {}
        self._now.folders[folder][path.name] = number
        self.log.append(Operation("make_folder", path, folder, path.name, number))

    def make_tree(self, folder: Path) -> None:
        """A folder at a time."""
        for path in [*reversed(folder.parents), folder][1:]:
            with contextlib.suppress(FileExistsError):
                self.make_folder(path)

    def remove_tree(self, folder: Path) -> None:
        """What lies in a folder goes before it."""
        for name, kind in self.entries(folder).items():
            (self.remove_tree if kind == "folder" else self.remove)(folder / name)
        self.remove_folder(folder)

    def write(self, path: Path, content: bytes) -> None:
        folder, number = self._place_for(path), next(self._numbers)
        self._now.files[number] = content
        self._now.folders[folder][path.name] = number
        self.log.append(Operation("write", path, folder, path.name, number, content=content))

    def sync(self, path: Path) -> None:
        self.log.append(Operation("sync", path, TOP, path.name, self._find(path)))

    def rename(self, old: Path, new: Path) -> None:
        number, folder = self._find(old), self._place_for(new)
        del self._now.folders[folder][old.name]
        self._now.folders[folder][new.name] = number
        self.log.append(Operation("rename", old, folder, old.name, number, new_name=new.name))

    def remove(self, path: Path) -> None:
        self._take_away(path, "remove")

    def remove_folder(self, path: Path) -> None:
        if self._now.folders[self._find(path)]:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        self._take_away(path, "remove_folder")

    def entries(self, folder: Path) -> dict[str, Kind]:
        number = self._find(folder)
        if number in self._now.files:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        names = self._now.folders[number].items()
        return {name: "folder" if n in self._now.folders else "file" for name, n in names}

    def read(self, path: Path) -> bytes:
        return self._now.files[self._find(path)]

    def sha256(self, paths: Sequence[Path]) -> list[str]:
        return [hashlib.sha256(self.read(path)).hexdigest() for path in paths]

    def files(self, folder: Path) -> list[int]:
        """Numbers of the files below a folder."""
        inner = [(folder / name, kind) for name, kind in self.entries(folder).items()]
        own = [self._find(path) for path, kind in inner if kind == "file"]
        return own + [n for path, kind in inner if kind == "folder" for n in self.files(path)]

    def settled(self) -> Image:
        """The disk as it is, all of it lasting."""
        return self._now.copy()

    def cut(self, after: int, what: Cut) -> Image:
        """The disk when the power goes after that many operations and leaves `what` of the rest."""
        image = self._before.copy()
        synced = self._last_syncs(after)
        torn = dict(what.contents)
        for index, operation in enumerate(self.log[:after]):
            _apply_content(image, operation, torn.get(index, operation.content))
            if index < synced.get(operation.folder, -1) or index in what.names:
                _apply_name(image, operation)
        return image

    def unsynced(self, after: int) -> tuple[list[int], list[int]]:
        """Indices of operations whose names, and of writes whose bytes, may be lost by then."""
        synced = self._last_syncs(after)
        names, contents = [], []
        for index, operation in enumerate(self.log[:after]):
            if operation.kind != "sync" and index > synced.get(operation.folder, -1):
                names.append(index)
            if operation.kind == "write" and index > synced.get(operation.number, -1):
                contents.append(index)
        return names, contents

    def _last_syncs(self, after: int) -> dict[int, int]:
        syncs = enumerate(self.log[:after])
        return {op.number: index for index, op in syncs if op.kind == "sync"}

    def _take_away(self, path: Path, kind: Literal["remove", "remove_folder"]) -> None:
        number, folder = self._find(path), self._find(path.parent)
        del self._now.folders[folder][path.name]
        self.log.append(Operation(kind, path, folder, path.name, number))

    def _find(self, path: Path) -> int:
        number = TOP
        for name in path.parts[1:]:
            names = self._now.folders.get(number, {})
            if name not in names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            number = names[name]
        return number

    def _place_for(self, path: Path) -> int:
        """The folder of something new."""
        folder = self._find(path.parent)
        if path == path.parent or path.name in self._now.folders[folder]:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        return folder


def cuts(
    disk: MemoryDisk, after: int, *, rng: random.Random, num_random: int, torn_every: int = 1
) -> Iterator[Cut]:
    """What a power cut may leave: all of it where few names are open, else the extremes and some.

    Every write that is open is tried lost, as zeros, and torn at each byte with and without zeros.
    """
    names, contents = disk.unsynced(after)
    sizes = {index: len(disk.log[index].content) for index in contents}
    lost = tuple((index, b"") for index in contents)
    for chosen in _subsets(names, rng=rng, num_random=num_random):
        yield Cut(chosen, ())
        yield Cut(chosen, lost)
        yield Cut(chosen, tuple((index, bytes(sizes[index])) for index in contents))
    for index in contents:
        content = disk.log[index].content
        for size in range(0, len(content), torn_every):
            yield Cut(frozenset(names), ((index, content[:size]),))
            yield Cut(frozenset(names), ((index, content[:size].ljust(len(content), b"\0")),))


def random_cut(disk: MemoryDisk, after: int, *, rng: random.Random) -> Cut:
    """One of all that are possible."""
    names, contents = disk.unsynced(after)
    return Cut(
        frozenset(index for index in names if rng.random() < 0.5),
        tuple((index, _torn(disk.log[index].content, rng)) for index in contents),
    )


def _torn(content: bytes, rng: random.Random) -> bytes:
    size = rng.randint(0, len(content))
    return rng.choice([content, content[:size], content[:size].ljust(len(content), b"\0")])


def _subsets(
    names: Sequence[int], *, rng: random.Random, num_random: int
) -> Iterator[frozenset[int]]:
    if len(names) <= MAX_EXHAUSTIVE:
        for size in range(len(names) + 1):
            yield from map(frozenset, itertools.combinations(names, size))
        return
    for number in range(len(names) + 1):
        yield frozenset(names[:number])
        yield frozenset(names[number:])
    for name in names:
        yield frozenset([name])
        yield frozenset(names) - {name}
    for _ in range(num_random):
        yield frozenset(name for name in names if rng.random() < 0.5)


def _apply_content(image: Image, operation: Operation, content: bytes) -> None:
    if operation.kind == "write":
        image.files[operation.number] = content
    elif operation.kind == "make_folder":
        image.folders.setdefault(operation.number, {})


def _apply_name(image: Image, operation: Operation) -> None:
    names = image.folders[operation.folder]
    if operation.kind in ("make_folder", "write"):
        names[operation.name] = operation.number
    elif operation.kind != "sync" and names.get(operation.name) == operation.number:
        del names[operation.name]
    if operation.kind == "rename":
        names[operation.new_name] = operation.number
