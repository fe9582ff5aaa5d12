"""Whatever a crash leaves on the disk, the last checkpoint that was reported is found whole."""

import random
from pathlib import Path

import pytest
from effort import FULL, histories
from hypothesis import given, settings
from hypothesis import strategies as st
from replaced_disk import Disk

from faults.crash_points import (
    ROOT,
    SCHEDULE,
    damages,
    history,
    power_cuts,
    record,
    refusals,
)
from faults.kill_writer import kill_writers
from faults.power_cut import Cut, MemoryDisk
from faults.saves import save

SHORT = (10, 20, 30, 20)  # with rotation, and a batch that is saved again


class RecordingDisk(Disk):
    """The real disk, and what was asked of it, below one folder."""

    def __init__(self, top):
        self.top, self.log = top, []

    def make_tree(self, folder):
        for path in [*reversed(folder.parents), folder]:
            if not path.exists():
                self._note("make_folder", path)
        super().make_tree(folder)

    def remove_tree(self, folder):
        for name in super().entries(folder):
            self._note("remove", folder / name)
        self._note("remove_folder", folder)
        super().remove_tree(folder)

    def write(self, path, content):
        self._note("write", path)
        super().write(path, content)

    def sync(self, path):
        self._note("sync", path)
        super().sync(path)

    def rename(self, old, new):
        self._note("rename", old, new.name)
        super().rename(old, new)

    def _note(self, kind, path, new_name=""):
        if path.is_relative_to(self.top):
            self.log.append((kind, path.relative_to(self.top), new_name))


def test_any_power_cut_leaves_the_last_checkpoint_or_the_complete_one_after_it():
    recorded = record(SCHEDULE if FULL else SHORT)
    outcomes = power_cuts(
        recorded, seed=0, num_random=32 if FULL else 4, torn_every=1 if FULL else 8
    )
    assert set(outcomes) == {"last", "newer"}
    assert outcomes["last"] > 500 and outcomes["newer"] > 20


@given(st.integers(0, 2**32))
@settings(max_examples=histories(40), deadline=None)
def test_cuts_in_a_row_never_lose_a_checkpoint(seed):
    assert set(history(random.Random(seed), num_cuts=6)) <= {"last", "newer"}


def test_a_disk_that_refuses_any_operation_costs_no_checkpoint_and_leaves_no_litter():
    outcomes = refusals(SCHEDULE)
    assert set(outcomes) == {"last", "newer"}
    assert outcomes.total() > 300


def test_every_flipped_bit_and_every_short_file_is_found():
    outcomes = damages(record(SHORT).disk.settled(), stride=1 if FULL else 7)
    assert set(outcomes) == {"last"} and outcomes.total() > 500


def test_the_disk_in_memory_sees_the_operations_of_a_real_one(tmp_path):
    disk, memory = RecordingDisk(tmp_path), MemoryDisk()
    memory.make_folder(ROOT.parent)
    start = len(memory.log)
    for number, batches in enumerate(SHORT):
        save(disk, number, batches, root=tmp_path / ROOT.name)
        save(memory, number, batches, root=ROOT)
    in_memory = [
        (operation.kind, operation.path.relative_to(ROOT.parent), operation.new_name)
        for operation in memory.log[start:]
        if operation.path.is_relative_to(ROOT.parent)
    ]
    assert sorted(disk.log) == sorted(in_memory)  # a folder lists its files in any order
    kept = [entry for entry in disk.log if not entry[0].startswith("remove")]
    assert kept == [entry for entry in in_memory if not entry[0].startswith("remove")]


def test_the_marker_is_written_once_the_name_of_its_checkpoint_would_survive_a_power_cut():
    log = record((10,)).disk.log
    kinds = [(operation.kind, operation.path.name) for operation in log]
    marked = kinds.index(("write", ".COMMITTED.partial"))
    assert kinds[marked - 2 : marked] == [("rename", ".batch_10.partial"), ("sync", ROOT.name)]
    assert kinds[-1] == ("sync", "batch_10") and kinds[-2] == ("rename", ".COMMITTED.partial")


def test_a_cut_forgets_what_was_not_synced():
    disk = MemoryDisk()
    disk.make_folder(Path("/a"))
    disk.write(Path("/a/b"), b"123")
    disk.sync(Path("/a"))
    assert disk.unsynced(3) == ([0], [1])  # the name /a, and the bytes of /a/b
    assert disk.cut(3, Cut(frozenset(), ())).tree() == ()
    assert disk.cut(3, Cut(frozenset([0]), ((1, b"1"),))).tree() == (("a", (("b", b"1"),)),)
    disk.sync(Path("/a/b"))
    disk.sync(Path("/"))
    disk.rename(Path("/a/b"), Path("/a/c"))
    assert disk.unsynced(6) == ([5], [])
    assert disk.cut(6, Cut(frozenset(), ())).tree() == (("a", (("b", b"123"),)),)
    assert disk.cut(6, Cut(frozenset([5]), ())).tree() == (("a", (("c", b"123"),)),)


@pytest.mark.integration
def test_a_killed_writer_loses_no_checkpoint_that_it_reported(tmp_path):
    num_kills = 20 if FULL else 5
    outcomes = kill_writers(tmp_path / "checkpoints", num_kills=num_kills, seed=3)
    assert outcomes["last"] + outcomes["newer"] == num_kills
