"""What a folder tells of its run."""

import json
import os
from pathlib import Path

import pytest

from async_grpo import Result
from async_grpo.util.errors import DataError


@pytest.fixture
def folder(tmp_path):
    """Of a run with three steps, two exports and two checkpoints."""
    for step in (1, 2, 3):
        add(tmp_path / "training_metrics.jsonl", step=step, avg_reward=step / 4, entropy=1.0)
    for samples, accuracy in ((0, 0.1), (16, 0.5), (32, 0.4)):
        add(
            tmp_path / "evaluation_metrics.jsonl", step=1,
            total_samples_accumulated=samples, eval_accuracy=accuracy,
        )  # fmt: skip
    for samples in (16, 32, 128):
        (tmp_path / "hf_format" / f"samples_{samples}").mkdir(parents=True)
    for number, (name, is_whole) in enumerate({"9": True, "10": True, "11": False}.items()):
        checkpoint = tmp_path / "checkpoints" / f"batch_{name}"
        checkpoint.mkdir(parents=True)
        if is_whole:
            (checkpoint / "COMMITTED").touch()
            os.utime(checkpoint / "COMMITTED", ns=(number, number))
    return tmp_path


def add(file, **row):
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def test_rows_exports_and_checkpoints_are_found(folder):
    result = Result.read(folder)
    assert [row["avg_reward"] for row in result.history] == [0.25, 0.5, 0.75]
    assert result.model == folder / "hf_format" / "samples_128"
    assert result.best_model == folder / "hf_format" / "samples_16"
    assert result.checkpoint == folder / "checkpoints" / "batch_10"
    assert "3 steps, reward 0.75, held-out accuracy 0.4" in repr(result)


def test_the_best_of_fine_tuning_has_the_lowest_loss(folder):
    (folder / "evaluation_metrics.jsonl").unlink()
    for samples, loss in ((16, 2.0), (32, 1.5), (128, 1.7)):
        add(folder / "evaluation_metrics.jsonl", total_samples_accumulated=samples, eval_loss=loss)
    assert Result.read(folder).best_model == folder / "hf_format" / "samples_32"


def test_of_several_sets_the_first_counts(folder):
    (folder / "evaluation_metrics.jsonl").unlink()
    for samples, first in ((16, 0.2), (32, 0.3)):
        named = {"eval_accuracy/sums": first, "eval_accuracy/odes": 1.0 - first}
        add(folder / "evaluation_metrics.jsonl", total_samples_accumulated=samples, **named)
    assert Result.read(folder).best_model == folder / "hf_format" / "samples_32"


def test_without_evaluations_the_newest_export_is_the_best(folder):
    (folder / "evaluation_metrics.jsonl").unlink()
    result = Result.read(folder)
    assert result.best_model == result.model and result.evaluations == ()


def test_an_empty_folder_has_nothing(tmp_path):
    result = Result.read(str(tmp_path))
    assert (result.history, result.model, result.best_model) == ((), None, None)
    assert result.checkpoint is None


def test_a_half_written_line_is_left_for_the_next_look(folder):
    with Path(folder, "training_metrics.jsonl").open("a") as lines:
        lines.write('{"step": 4')
    assert len(Result.read(folder).history) == 3


def test_a_plot_is_a_picture_that_notebooks_show(folder):
    picture = Result.read(folder).plot("avg_reward", "eval_accuracy")
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert len([axes for axes in picture.axes if axes.get_visible()]) == 2
    with pytest.raises(DataError, match="did you mean avg_reward"):
        Result.read(folder).plot("avg_rewrd")
