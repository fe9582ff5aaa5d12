"""Checkpoints on the real disk; crashes are in tests/faults, damage in test_checkpoint_damage."""

import errno
import hashlib
import os

import pytest
from checkpoints_on_disk import REFERENCE, SHARD, a_manifest, names, newest, save
from replaced_disk import Disk, used

from async_grpo.checkpoint.folder import CheckpointFolder
from async_grpo.checkpoint.reader import from_json, read_checkpoint
from async_grpo.util.errors import CheckpointError


def test_a_checkpoint_holds_its_shards_their_hashes_and_a_marker_with_the_manifest_s(tmp_path):
    path = save(tmp_path / "checkpoints", 12)
    assert names(path) == ["COMMITTED", "manifest.json", SHARD, REFERENCE]
    manifest = read_checkpoint(path)
    assert (path.name, manifest.batches, manifest.state) == ("batch_12", 12, {"rng": [1]})
    assert manifest.files == {
        SHARD: hashlib.sha256(b"weights").hexdigest(),
        REFERENCE: hashlib.sha256(b"reference").hexdigest(),
    }
    text = (path / "manifest.json").read_bytes()
    assert (path / "COMMITTED").read_text() == hashlib.sha256(text).hexdigest()
    assert from_json(text) == manifest


def test_a_run_without_checkpoints_has_no_newest_and_gets_no_folder(tmp_path):
    found = newest(tmp_path / "checkpoints")
    assert (found.path, found.manifest, found.passed_over) == (None, None, ())
    assert names(tmp_path) == []


def test_rotation_keeps_as_many_as_asked_for(tmp_path):
    for batches in (1, 2, 3, 4):
        save(tmp_path, batches, keep=3)
    assert names(tmp_path) == ["batch_2", "batch_3", "batch_4"]
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["batch_5"]
    with pytest.raises(ValueError, match="at least 1"):
        CheckpointFolder(tmp_path, keep=0)


def test_after_a_resume_from_further_back_the_newest_is_the_last_that_was_saved(tmp_path):
    for batches in (5, 9, 10):
        save(tmp_path, batches, keep=3)
    assert save(tmp_path, 6, keep=3).name == "batch_6"
    assert newest(tmp_path).path.name == "batch_6"
    assert names(tmp_path) == ["batch_10", "batch_5", "batch_6"]  # a future undone goes first
    save(tmp_path, 7, keep=3)
    assert names(tmp_path) == ["batch_5", "batch_6", "batch_7"]


def test_a_batch_saved_again_gets_a_folder_of_its_own_until_the_older_may_go(tmp_path):
    first = save(tmp_path, 3, content=b"first")
    second = save(tmp_path, 3, content=b"second")
    assert (first.name, second.name) == ("batch_3", "batch_3.2")
    assert newest(tmp_path).path == second
    third = save(tmp_path, 3, content=b"third")
    assert third.name == "batch_3.3" and newest(tmp_path).path == third
    assert (third / SHARD).read_bytes() == b"third"


def test_order_of_saves_survives_a_clock_that_goes_back(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr("time.time_ns", lambda: 5)
    save(tmp_path, 2)
    save(tmp_path, 1)
    assert newest(tmp_path).path.name == "batch_1.2"


def test_what_was_not_finished_was_never_a_checkpoint_and_is_told_of(tmp_path, caplog):
    path = save(tmp_path, 1)
    (path / "COMMITTED").unlink()
    found = newest(tmp_path)
    assert (found.path, found.passed_over) == (None, ())
    assert f"{path} was not finished, by a crash" in caplog.text
    with pytest.raises(CheckpointError, match="must hold COMMITTED, without it is not finished"):
        read_checkpoint(path)
    assert save(tmp_path, 1) == path == newest(tmp_path).path


def test_leftovers_of_a_crash_go_and_what_is_not_ours_stays(tmp_path):
    good = save(tmp_path, 1)
    (save(tmp_path, 2) / "COMMITTED").unlink()
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_bytes(b"")
    (tmp_path / ".batch_3.partial").mkdir()
    (tmp_path / ".batch_3.partial" / "link").symlink_to(elsewhere)
    (tmp_path / ".batch_1.removed" / "reference").mkdir(parents=True)
    (tmp_path / "batch_4").symlink_to(elsewhere)
    (tmp_path / "batch_5").mkdir()
    (tmp_path / "batch_5" / "notes.txt").write_bytes(b"")
    (tmp_path / "batch_6").write_bytes(b"")
    (tmp_path / ".hidden").mkdir()
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == [".hidden", "batch_3", "batch_4", "batch_5", "batch_6"]
    assert names(elsewhere) == ["precious"] and names(tmp_path / "batch_5") == ["notes.txt"]
    assert not good.exists()


def test_a_folder_that_takes_the_name_meanwhile_is_left_alone(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=2)
    temporary = folder.begin(7)
    (tmp_path / "batch_7").mkdir()
    (tmp_path / "batch_7" / "precious").write_bytes(b"")
    with pytest.raises(CheckpointError, match="batch_7 must be written"):
        folder.commit(temporary, a_manifest(7))
    assert names(tmp_path) == ["batch_7"] and names(tmp_path / "batch_7") == ["precious"]


def test_an_abandoned_save_leaves_nothing(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=2)
    temporary = folder.begin(1)
    (temporary / SHARD).write_bytes(b"half")
    folder.abandon(temporary)
    folder.abandon(temporary)
    assert names(tmp_path) == []


class FullDisk(Disk):
    def write(self, path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_full_disk_costs_the_save_alone_and_is_named(tmp_path):
    good = save(tmp_path, 1)
    with pytest.raises(
        CheckpointError, match=r"batch_2 must be written to .*No space left on device.*free space"
    ) as caught:
        save(tmp_path, 2, disk=FullDisk())
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert names(tmp_path) == ["batch_1"] and newest(tmp_path).path == good
    assert save(tmp_path, 2).name == "batch_2"


class ScratchedDisk(Disk):
    def read(self, path):
        if path.parent.name == "batch_2":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return super().read(path)


def test_a_checkpoint_that_cannot_be_read_for_now_is_not_removed(tmp_path):
    for batches in (1, 2):
        save(tmp_path, batches)
    save(tmp_path, 3, disk=ScratchedDisk())
    assert names(tmp_path) == ["batch_1", "batch_2", "batch_3"]
    with used(ScratchedDisk()):
        found = newest(tmp_path)
    assert found.path.name == "batch_3"
    [(path, reason)] = found.passed_over
    assert path.name == "batch_2" and "batch_2 must be readable: [Errno 5]" in reason
    save(tmp_path, 4)
    assert names(tmp_path) == ["batch_3", "batch_4"]


class ForgetfulDisk(Disk):
    """Returns other bytes than were written, from the second reading on."""

    readings = 0

    def sha256(self, paths):
        self.readings += 1
        return ["0" * 64 for _ in paths] if self.readings > 1 else super().sha256(paths)


def test_a_disk_that_gives_back_other_bytes_is_found_before_an_older_checkpoint_goes(tmp_path):
    good = save(tmp_path, 1, keep=1)
    with pytest.raises(CheckpointError, match=f"{SHARD} must have the sha256"):
        save(tmp_path, 2, keep=1, disk=ForgetfulDisk())
    assert names(tmp_path) == ["batch_1"] and newest(tmp_path).path == good


class FadingDisk(ForgetfulDisk):
    """Gives all files back as written until the second time that they are hashed."""

    def sha256(self, paths):
        self.readings += 1
        return Disk.sha256(paths)

    def read(self, path):
        return b"" if self.readings > 1 else super().read(path)


def test_rotation_never_takes_the_newest_whatever_it_reads(tmp_path):
    save(tmp_path, 1, keep=1)
    save(tmp_path, 2, keep=1, disk=FadingDisk())
    assert names(tmp_path) == ["batch_2"] and newest(tmp_path).path.name == "batch_2"


def test_a_root_that_cannot_be_read_is_an_error_not_an_empty_one(tmp_path):
    root = tmp_path / "checkpoints"
    root.write_bytes(b"")
    with pytest.raises(CheckpointError, match="read from"):
        newest(root)


def test_what_is_spared_stays_beside_the_newest_until_it_is_spared_no_more(tmp_path):
    for batches in range(1, 7):
        save(tmp_path, batches, spared={2, batches})
    assert names(tmp_path) == ["batch_2", "batch_5", "batch_6"]
    save(tmp_path, 7, spared={4, 5})
    assert names(tmp_path) == ["batch_5", "batch_6", "batch_7"]
