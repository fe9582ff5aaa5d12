"""What is wrong with places is found before a model is read."""

import os

import pytest

from async_grpo.config.train import TrainConfig
from async_grpo.errors import ConfigError, ModelError
from async_grpo.training.preparation import check_run


def check(tmp_path, **options):
    options = {"output_dir": str(tmp_path / "run"), "trackers": ""} | options
    check_run(TrainConfig(model_name_or_path="/no/model", data_path="d", **options))


def test_folders_that_can_be_made_are_no_obstacle(tmp_path):
    with pytest.raises(ModelError, match="'/no/model' is neither"):
        check(tmp_path, dump_samples_filename=str(tmp_path / "new" / "dump.jsonl"))
    assert list(tmp_path.iterdir()) == []


def test_a_place_below_a_file_or_a_folder_as_dump_is_named_by_its_option(tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    with pytest.raises(ConfigError, match=rf"--output-dir must lie in a folder .*, {file} cannot"):
        check(tmp_path, output_dir=str(file / "run"))
    with pytest.raises(ConfigError, match=rf"--dump-samples-filename must lie in .*, {file} can"):
        check(tmp_path, dump_samples_filename=str(file / "dump.jsonl"))
    with pytest.raises(ConfigError, match=f"--dump-samples-filename must not be .*{folder}"):
        check(tmp_path, dump_samples_filename=str(folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match=r"--dump-samples-filename must lie in .*locked cannot"):
        check(tmp_path, dump_samples_filename=str(tmp_path / "locked" / "dump.jsonl"))
