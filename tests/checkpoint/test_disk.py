import errno
import hashlib
import os
import tracemalloc

import pytest

from async_grpo.checkpoint import disk


def test_files_are_hashed_piece_by_piece(tmp_path):
    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    try:
        [digest] = disk.sha256([path])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert digest == hashlib.sha256(bytes(64 << 20)).hexdigest()
    assert peak_bytes < 8 << 20


def test_hashes_come_in_the_order_of_the_files(tmp_path):
    paths = [tmp_path / str(number) for number in range(9)]
    for path in paths:
        path.write_text(path.name)
    expected = [hashlib.sha256(path.name.encode()).hexdigest() for path in paths]
    assert disk.sha256(paths) == expected


def test_a_tree_goes_without_what_its_links_lead_to(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_bytes(b"")
    disk.make_tree(tmp_path / "a" / "b" / "c")
    disk.make_tree(tmp_path / "a" / "b" / "c")
    disk.write(tmp_path / "a" / "b" / "file", b"")
    (tmp_path / "a" / "b" / "folder").symlink_to(kept)
    (tmp_path / "a" / "file").symlink_to(kept / "file")
    disk.remove_tree(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept / "file").exists()


def test_a_file_is_never_written_over(tmp_path):
    disk.write(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        disk.write(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"


def test_a_file_system_that_cannot_sync_folders_is_excused_for_folders_only(tmp_path, monkeypatch):
    def refuse(_descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.fsync", refuse)
    (tmp_path / "file").write_bytes(b"")
    code = errno.EINVAL
    disk.sync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        disk.sync(tmp_path / "file")
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        disk.sync(tmp_path)
