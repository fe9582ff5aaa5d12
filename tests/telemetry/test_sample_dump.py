import json

import numpy as np
import pytest
from full_disk import no_file_beyond

from async_grpo.telemetry.sample_dump import SampleDump, dump_files


def write_groups(dump, ordinals):
    """One sample a group; lines of one length."""
    for ordinal in ordinals:
        dump.write([{"batch": 0, "ordinal": ordinal, "attempt": 0}])


def ordinals_by_file(path):
    return {
        file.name: [json.loads(line)["ordinal"] for line in file.read_text().splitlines()]
        for file in dump_files(path)
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "samples.jsonl"


def test_any_text_makes_one_line(path):
    reason = "lone surrogate \ud800,\nnew line, \u2028 separator, é"
    SampleDump(path).write([{"reason": reason}])
    (line,) = path.read_text(encoding="utf-8").split("\n")[:-1]
    assert json.loads(line)["reason"] == reason
    assert "é" in line


def test_arrays_are_lists_of_numbers(path):
    SampleDump(path).write([{"ids": np.array([3, 4], np.int32), "mask": np.array([True, False])}])
    assert json.loads(path.read_text()) == {"ids": [3, 4], "mask": [True, False]}


def test_samples_of_slots_that_are_sampled_again_are_removed(path, tmp_path):
    """Also the half line of a process that was killed; the others keep their order and bytes."""
    kept = [
        b'{"batch": 0, "ordinal": 9, "output": "\\"ordinal\\": 12"}\n',
        b'{"batch": 0, "ordinal": 2, "attempt": 0}\n',
    ]
    again = [b'{"batch": 1, "ordinal": 10, "attempt": 0}\n', b'{"batch": 0, "ordinal": 3, "out']
    path.write_bytes(kept[0] + again[0] + kept[1] + again[1])
    SampleDump(path).cut_back(10)
    assert path.read_bytes() == b"".join(kept)
    assert [file.name for file in tmp_path.iterdir()] == ["samples.jsonl"]


def test_full_files_are_numbered_and_the_oldest_goes_with_a_word(path, tmp_path):
    write_groups(SampleDump(path), [100])
    dump = SampleDump(path, max_bytes=4 * 3 * path.stat().st_size)  # three lines a file
    (tmp_path / "samples.old.jsonl").touch()  # not one of them
    dump.cut_back(100)
    write_groups(dump, range(100, 112))
    assert dump.take_notices() == ()
    write_groups(dump, range(112, 115))
    assert ordinals_by_file(path) == {
        "samples.2.jsonl": [103, 104, 105],
        "samples.3.jsonl": [106, 107, 108],
        "samples.4.jsonl": [109, 110, 111],
        "samples.jsonl": [112, 113, 114],
    }
    (notice,) = dump.take_notices()
    assert notice == f"{tmp_path}/samples.1.jsonl was removed, so that --dump-max-gib is kept"
    assert dump.take_notices() == ()
    SampleDump(path).cut_back(108)
    assert ordinals_by_file(path) == {
        "samples.2.jsonl": [103, 104, 105],
        "samples.3.jsonl": [106, 107],
        "samples.4.jsonl": [],
        "samples.jsonl": [],
    }


def test_a_full_disk_costs_samples_of_the_dump_and_is_said_once(path, tmp_path):
    dump = SampleDump(path)
    write_groups(dump, [0, 2, 1])
    with no_file_beyond(path.stat().st_size + 9):
        write_groups(dump, [3, 4])
    assert ordinals_by_file(path) == {"samples.jsonl": [0, 2, 1]}
    assert dump.num_lost == 2
    (notice,) = dump.take_notices()
    assert notice.startswith(f"{path} cannot be written (File too large): the run goes on, and cou")
    with no_file_beyond(9):
        dump.cut_back(2)
    (notice,) = dump.take_notices()
    assert notice.startswith(f"{path} could not be cut back to what was trained (File too large): ")
    assert [file.name for file in tmp_path.iterdir()] == ["samples.jsonl"]
    assert ordinals_by_file(path) == {"samples.jsonl": [0, 2, 1]}
