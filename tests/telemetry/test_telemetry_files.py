import json
import os

import numpy as np
import pytest
from full_disk import no_file_beyond

from async_grpo.telemetry.jsonl import JsonlWriter, to_json, write_json_atomic
from async_grpo.util.errors import ConfigError


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_lines_are_appended_to_what_is_there(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    for step in (1, 2):
        JsonlWriter(path).write({"step": step})
    assert rows(path) == [{"step": 1}, {"step": 2}]


def test_a_line_is_visible_at_once_and_one_that_the_disk_refuses_is_told(tmp_path, caplog):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write({"text": "x" * 100_000})
    assert len(rows(writer.path)) == 1
    with no_file_beyond(100_020):
        writer.write({"step": 1})
    writer.write({"step": 2})
    assert rows(writer.path)[1:] == [{"step": 2}]
    writer.close()
    refused, lacking = caplog.messages
    assert refused.startswith(f"{writer.path} cannot be written (File too large): the run goes on")
    assert lacking == f"{writer.path} lacks 1 lines"


def test_numbers_that_are_not_finite_become_null_at_any_depth():
    value = {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": np.float32("nan")}}
    assert json.loads(to_json(value)) == {"a": None, "b": [1.5, None], "c": {"d": None}}


def test_numpy_numbers_and_paths_are_written_as_what_they_are(tmp_path):
    value = {"i": np.int64(3), "f": np.float32(0.5), "p": tmp_path, "t": (True, None)}
    assert json.loads(to_json(value)) == {"i": 3, "f": 0.5, "p": str(tmp_path), "t": [True, None]}


def test_broken_text_of_a_model_survives_the_round_trip():
    text = 'a\udc80b \u2028 "né\n'
    encoded = to_json({"text": text})
    assert b"\n" not in encoded
    assert json.loads(encoded.decode("utf-8"))["text"] == text


def test_what_json_cannot_hold_is_refused_by_type():
    with pytest.raises(TypeError, match="not set"):
        to_json({"a": {1, 2}})


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "params.json"
    write_json_atomic(path, {"a": 1})
    write_json_atomic(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert os.listdir(tmp_path) == ["params.json"]


def test_a_failed_atomic_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "params.json"
    write_json_atomic(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json_atomic(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["params.json"]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    for attempt in (
        lambda: JsonlWriter(blocker / "metrics.jsonl"),
        lambda: write_json_atomic(blocker / "params.json", {}),
    ):
        with pytest.raises(ConfigError, match=r"cannot write .*: choose another --output-dir"):
            attempt()
