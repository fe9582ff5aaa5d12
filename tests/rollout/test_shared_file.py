"""Bytes reach another process, and nothing is left of them."""

import os
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from async_grpo.rollout.weights_update import SharedFile
from async_grpo.util.errors import WeightSyncError

READ = "import sys; f = open(sys.argv[1], 'rb'); f.seek(int(sys.argv[2])); print(f.read(3).hex())"


def test_another_process_reads_what_was_written():
    with closing(SharedFile(10)) as file:
        file.write(np.array([7, 8, 9], dtype=np.uint8), 4)
        file.write(np.arange(4, dtype=np.uint8), 0)
        command = [sys.executable, "-c", READ, file.path, "4"]
        assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "070809"


def test_nothing_is_left_after_a_failure():
    with pytest.raises(KeyError), closing(SharedFile(10)) as file:
        path = file.path
        raise KeyError
    assert not os.path.exists(path)


def test_nothing_is_written_once_it_is_closed():
    with closing(SharedFile(4)) as file:
        file.write(np.arange(4, dtype=np.uint8), 0)
    with pytest.raises(WeightSyncError, match="Bad file descriptor"):
        file.write(np.arange(4, dtype=np.uint8), 0)


def test_bytes_are_read_back_where_they_lie():
    with closing(SharedFile(6)) as file:
        file.write(np.arange(6, dtype=np.uint8), 0)
        found = np.zeros(3, dtype=np.uint8)
        file.read(found, 2)
    assert found.tolist() == [2, 3, 4]


def test_a_mapping_outlives_the_file():
    with closing(SharedFile(4)) as file:
        file.write(np.arange(4, dtype=np.uint8), 0)
        mapped = np.memmap(file.path, dtype=np.uint8, mode="c", shape=(4,))
    assert mapped.tolist() == [0, 1, 2, 3]


def test_memory_that_the_system_refuses_is_an_error_of_weight_sync(monkeypatch):
    def refuse(*_args):
        raise OSError(28, "No space left on device")

    with closing(SharedFile(4)) as file, monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(WeightSyncError, match=r"4 more bytes.*No space left"):
            file.write(np.arange(4, dtype=np.uint8), 0)
