"""Whether a checkpoint survives: power cuts, refusing disks, flipped bits, SIGKILLs.

A sequence of saves with rotation and repeated batches is recorded on a disk in memory. Then, for
every prefix of the record and everything that a power cut there may leave (`power_cut`), the newest
checkpoint must be the last one whose commit had returned, or the complete one in the making, byte
by byte, and the next save must succeed. The same for errors injected into every operation, for
histories of several cuts, and for a real process on the real disk, killed at random moments.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_grpo.util.errors import CheckpointError
from faults.failing_disk import FailingDisk
from faults.power_cut import Image, MemoryDisk, cuts, random_cut
from faults.saves import KEEP, newest_on, number_of, save

ROOT = Path("/run/checkpoints")
SCHEDULE = (10, 20, 30, 40, 30, 40, 40, 50)  # twice resumed from further back
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Saves in a row, numbered from `first`; save `first + i` had returned after `ends[i]`."""

    disk: MemoryDisk
    ends: tuple[int, ...]  # operations
    first: int

    def last(self, after: int) -> int:
        """The last save that had returned by then, or the one before the first."""
        return self.first - 1 + sum(end <= after for end in self.ends)


def record(schedule: Sequence[int], *, disk: MemoryDisk | None = None, first: int = 0) -> Recorded:
    """Save once for each number of batches."""
    disk = disk or MemoryDisk()
    ends = []
    for number, batches in enumerate(schedule, first):
        save(disk, number, batches, root=ROOT)
        ends.append(len(disk.log))
    return Recorded(disk, tuple(ends), first)


def outcome(image: Image, *, last: int) -> str:
    """What a start on this disk finds, in a word.

    `last`: the last save that had returned. `newer`: the one after, complete. Else there is a bug.
    """
    disk = MemoryDisk(image)
    number = number_of(newest_on(disk, ROOT), disk=disk)
    if number is None:
        return "broken"
    if number not in (last, last + 1):
        return "lost"
    if not _saves_again(disk, last + 2):
        return "stuck"
    return "last" if number == last else "newer"


def _saves_again(disk: MemoryDisk, number: int) -> bool:
    """The next save succeeds, is the newest, and leaves no litter."""
    path = save(disk, number, 30, root=ROOT)
    newest = newest_on(disk, ROOT)
    names = disk.entries(ROOT)
    is_tidy = len(names) <= KEEP and not any(name.startswith(".") for name in names)
    return newest.path == path and newest.passed_over == () and is_tidy


def power_cuts(
    recorded: Recorded, *, seed: int, num_random: int, torn_every: int = 1
) -> Counter[str]:
    """Outcomes over every different state that a cut after any operation may leave."""
    rng = random.Random(seed)
    seen: set[object] = set()
    outcomes: Counter[str] = Counter()
    disk = recorded.disk
    for after in range(len(disk.log) + 1):
        last = recorded.last(after)
        for cut in cuts(disk, after, rng=rng, num_random=num_random, torn_every=torn_every):
            image = disk.cut(after, cut)
            state = (last, image.tree())
            if state not in seen:
                seen.add(state)
                outcomes[outcome(image, last=last)] += 1
    return outcomes


def history(rng: random.Random, *, num_cuts: int) -> Counter[str]:
    """Outcomes of cuts in a row, each on the disk that the one before left."""
    outcomes: Counter[str] = Counter()
    image, last = Image(), -1
    for _ in range(num_cuts):
        schedule = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
        recorded = record(schedule, disk=MemoryDisk(image), first=last + 2)
        after = rng.randint(0, len(recorded.disk.log))
        image = recorded.disk.cut(after, random_cut(recorded.disk, after, rng=rng))
        expected = recorded.last(after) if after >= recorded.ends[0] else last
        disk = MemoryDisk(image)
        found = number_of(newest_on(disk, ROOT), disk=disk)
        allowed = {expected: "last", recorded.last(after) + 1: "newer"}
        outcomes["broken" if found is None else allowed.get(found, "lost")] += 1
        last = expected if found is None else found
    return outcomes


def refusals(schedule: Sequence[int]) -> Counter[str]:
    """Outcomes when one operation of the last save fails, reads too, or all from there on do."""
    outcomes: Counter[str] = Counter()
    before = record(schedule[:-1]).disk.settled()
    for code in ERRORS:
        for lasting in (False, True):
            at = 0
            while (word := _refused(before, schedule, at=at, code=code, lasting=lasting)) != "none":
                outcomes[word] += 1
                at += 1
    return outcomes


def _refused(before: Image, schedule: Sequence[int], *, at: int, code: int, lasting: bool) -> str:
    number = len(schedule) - 1
    disk = FailingDisk(before, at=at, code=code, lasting=lasting)
    try:
        save(disk, number, schedule[-1], root=ROOT)
    except CheckpointError:
        names = MemoryDisk(disk.settled()).entries(ROOT)
        is_tidy = lasting or not any(name.startswith(".") for name in names)
        return outcome(disk.settled(), last=number - 1) if is_tidy else "litter"
    return outcome(disk.settled(), last=number) if disk.refused else "none"


def damages(image: Image, *, stride: int = 1) -> Counter[str]:
    """Outcomes of each bit flipped, and each file cut short, in the newest of two checkpoints."""
    outcomes: Counter[str] = Counter()
    disk = MemoryDisk(image)
    newest = newest_on(disk, ROOT)
    last = number_of(newest, disk=disk)
    assert newest.path is not None and last is not None
    for file in disk.files(newest.path):
        for damaged in _damaged(image.files[file], stride=stride):
            changed = Image(image.files | {file: damaged}, image.folders)
            is_found = outcome(changed, last=last - 1) == "last"
            outcomes["last" if is_found else "lost"] += 1
    return outcomes


def _damaged(content: bytes, *, stride: int) -> Iterator[bytes]:
    number = int.from_bytes(content, "big")
    for bit in range(0, 8 * len(content), stride):
        yield (number ^ 1 << bit).to_bytes(len(content), "big")
    for size in range(0, len(content), stride):
        yield content[:size]
