import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from async_grpo.cli.train import check_at_once, main, resolved
from async_grpo.config.train_config import TrainConfig
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError, UnfitModel

TINY = str(Path(__file__).parents[2] / "sample-data" / "tiny-countdown")
REQUIRED = ("--model-name-or-path", "model", "--data-path", "data.jsonl")
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--batch-size", "0"), "--batch-size must be positive, got 0: give a positive number"),
        (("--temperature", "0"), "--temperature must be positive for training, got 0.0"),
        (
            ("--train-minibatch-size", "5"),
            "--train-minibatch-size counts questions and must divide --batch-size (32), got 5",
        ),
        (("--samples-per-question", "1"), "--samples-per-question must be at least 2"),
        (
            ("--max-tokens-per-gpu", "512"),
            "--max-tokens-per-gpu must exceed --max-generation-tokens (512) plus a prompt, got 512",
        ),
        (("--learning-rate", "nan"), "--learning-rate must not be negative, got nan"),
        (("--aggregation", "constant"), "--constant-length-samples goes with"),
    ],
)
def test_options_that_cannot_work_are_one_sentence_before_anything_is_imported(options, sentence):
    result = CliRunner().invoke(main, [*REQUIRED, *options])
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {sentence}")


def test_models_and_adapters_are_told_apart_before_anything_loads(tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "/its/base"}')
    options = {"data_path": "d", "output_dir": str(tmp_path), "trackers": ""}
    remedy = (
        f"an adapter of /its/base alone: give that model, and --adapter-path {adapter} to train"
    )
    with pytest.raises(UnfitModel, match=remedy):
        check_at_once(resolved(TrainConfig(model_name_or_path=str(adapter), **options)))
    said = f"--adapter-path must be the folder of an adapter in peft's format, .* got '{TINY}'"
    with pytest.raises(ConfigError, match=said):
        check_at_once(resolved(TrainConfig(model_name_or_path=TINY, adapter_path=TINY, **options)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--batch-size", "0"), "error: --batch-size must be positive, got 0"),
        (("--batch-size", "x"), "error: Invalid value for '--batch-size': 'x' is not a valid int"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_speaks_and_all_leave_the_cause_for_torchrun(
    rank, options, sentence, monkeypatch, tmp_path
):
    monkeypatch.setattr(deadlines, "OTHERS_ENDED_S", 0.0)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    result = CliRunner().invoke(main, [*REQUIRED, *options])
    assert result.exit_code != 0
    assert bool(result.stderr) == (rank == 0)
    cause = json.loads((tmp_path / "error.json").read_text())["message"]
    assert cause["message"].startswith(sentence)
    assert int(cause["extraInfo"]["timestamp"]) > 0


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("samples.jsonl", "samples.jsonl"),  # in the output folder
        ("", ""),
        ("out/dump.jsonl", "{here}/out/dump.jsonl"),
        ("./dump.jsonl", "{here}/dump.jsonl"),
        ("/tmp/dump.jsonl", "/tmp/dump.jsonl"),
    ],
)
def test_a_dump_with_a_folder_is_a_path_from_here(typed, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(
        model_name_or_path=".", data_path="d", output_dir="out", dump_samples_filename=typed
    )
    assert resolved(config).recording.dump_samples_filename == path.format(here=tmp_path)


WAITING_THREAD = """
import threading
from async_grpo.cli.boundary import command_boundary
from async_grpo.launch.local_ranks import ends_at_once, rank0_only_errors
from async_grpo.util.errors import WorkerError
threading.Thread(target=threading.Event().wait).start()
with ends_at_once(), command_boundary(), rank0_only_errors():
    raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code", "last_line"),
    [
        ("WorkerError('no worker is left')", 1, "error: no worker is left"),
        ("KeyboardInterrupt", 130, "interrupted"),
        ("ValueError('a bug')", 1, "ValueError: a bug"),
    ],
)
def test_no_thread_keeps_a_failed_rank_alive(error, code, last_line):
    finished = subprocess.run(
        [sys.executable, "-c", WAITING_THREAD.format(error=error)],
        cwd=REPOSITORY,
        env=os.environ | {"RANK": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == code
    assert finished.stderr.splitlines()[-1] == last_line


@pytest.mark.parametrize(("typed", "is_refused"), [((), True), (("--overwrite",), False)])
def test_a_file_alone_has_no_run_with_a_checkpoint_removed(
    typed, is_refused, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("async_grpo.cli.train.algorithm_of", _is_passed)
    Path("run/checkpoints/batch_3").mkdir(parents=True)
    Path("run/checkpoints/batch_3/COMMITTED").touch()
    Path("run.toml").write_text('[train]\noverwrite = true\noutput_dir = "run"\n')
    result = CliRunner().invoke(main, [*REQUIRED, "--config", "run.toml", *typed])
    said = (
        "--overwrite must be typed to remove a run with a checkpoint, got run/checkpoints/batch_3"
    )
    assert (said in result.stderr, result.exit_code) == (is_refused, 1 if is_refused else 7)


def _is_passed(_):
    raise SystemExit(7)
