"""A run's files: as they were at a checkpoint, and sentences where they cannot be written."""

import logging

import pytest

from async_grpo.config.train_config import TrainConfig
from async_grpo.run.report import Report
from async_grpo.util.errors import ConfigError
from async_grpo.util.run_folder import METRICS_FILE, clear, cut_back


def test_files_are_cut_back_to_their_sizes(tmp_path):
    (tmp_path / METRICS_FILE).write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    cut_back(tmp_path, {METRICS_FILE: 12, "evaluations": 0}, source=tmp_path)
    assert (tmp_path / METRICS_FILE).read_bytes() == b'{"step": 1}\n'
    assert not (tmp_path / "evaluations").exists()


def test_another_runs_files_are_copied_and_stay_as_they_are(tmp_path):
    source, own = tmp_path / "old", tmp_path / "new"
    source.mkdir()
    (source / METRICS_FILE).write_bytes(b"first\nsecond\n")
    cut_back(own, {METRICS_FILE: 6}, source=source)
    assert (own / METRICS_FILE).read_bytes() == b"first\n"
    assert (source / METRICS_FILE).read_bytes() == b"first\nsecond\n"


def test_lost_lines_are_told_and_what_is_left_stays(tmp_path, caplog):
    (tmp_path / METRICS_FILE).write_bytes(b"first\n")
    with caplog.at_level(logging.WARNING):
        cut_back(tmp_path, {METRICS_FILE: 12}, source=tmp_path)
    assert "has lost lines" in caplog.text
    assert (tmp_path / METRICS_FILE).read_bytes() == b"first\n"


def test_a_new_run_begins_without_the_old_ones_checkpoints(tmp_path):
    (tmp_path / "checkpoints" / "batch_1").mkdir(parents=True)
    (tmp_path / "hf_format").mkdir()
    (tmp_path / METRICS_FILE).write_bytes(b"first\n")
    clear(tmp_path, files=(METRICS_FILE, "samples.jsonl"), folders=("checkpoints",))
    assert [path.name for path in tmp_path.iterdir()] == ["hf_format"]


def test_a_report_in_an_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    config = TrainConfig(
        model_name_or_path="m", data_path="d", output_dir=str(tmp_path / "file" / "run")
    )
    with pytest.raises(ConfigError, match=r"cannot write .*another --output-dir"):
        Report(config)
