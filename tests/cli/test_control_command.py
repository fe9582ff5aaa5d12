"""What `async-grpo control` refuses before it asks anybody, or when nobody answers."""

import json
import time

import pytest
from click.testing import CliRunner

from async_grpo.cli.main import main
from async_grpo.config.train_config import TrainConfig
from async_grpo.util.ports import free_port


@pytest.fixture
def run(tmp_path):
    """The folder of a run whose cluster has ended."""
    config = TrainConfig(
        model_name_or_path="m", data_path="d", ray_address=f"127.0.0.1:{free_port()}"
    )
    write(tmp_path, config.options() | {"parts": []})
    return tmp_path


def write(folder, options):
    (folder / "training_params.json").write_text(json.dumps(options))


def refused(*arguments):
    finished = CliRunner().invoke(main, ["control", *map(str, arguments)])
    assert finished.exit_code == 1, finished.output
    (line,) = finished.output.splitlines()
    return line


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["set"], "set needs what is set, got nothing"),
        (["set", "learning_rate=3"], "--learning-rate must be at most 0.01"),
        (["set", "batch_size=3"], "--batch-size cannot be set while a run trains"),
        (["set", "max_staleness=0"], "must keep the ratio's denominator"),
        (["drain"], "drain needs the id of one worker, got 0"),
        (["stop", "now"], "stop takes nothing more, got now"),
    ],
)
def test_what_no_run_can_be_asked_is_refused_at_once(run, arguments, sentence):
    assert sentence in refused(run, *arguments)


def test_a_folder_without_a_run_is_refused(tmp_path):
    assert "must be the folder of a run" in refused(tmp_path, "show")


def test_a_supervised_run_is_refused(run):
    write(run, {"algorithm": "sft"})
    assert "it is a supervised one, which has no controller" in refused(run, "show")


def test_a_run_whose_cluster_has_ended_is_refused_within_seconds(run):
    started = time.monotonic()
    assert "Ray" in refused(run, "stop")
    assert time.monotonic() - started < 60  # of a machine that is full
