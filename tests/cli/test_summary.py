"""What is said at the end of a launched run: how far it came, what was wrong with it."""

import json

import pytest

from async_grpo.cli.launch_file import conclusion
from async_grpo.cli.local_run import read_run

SENTENCE = "every sample of the last 5 steps has the same reward"


@pytest.fixture
def run(tmp_path):
    return read_run(
        config="", prepare="", num_cpus=1, ray_address="",
        train_options=["--model-name-or-path=m", "--data-path=d", f"--output-dir={tmp_path}/run",
                       "--num-training-batches=400"],
    )  # fmt: skip


def write(run, name, *rows):
    run.folder.mkdir(exist_ok=True)
    (run.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluated(batch, accuracy):
    return {"step": batch, "batch": batch, "total_samples_accumulated": 128 * batch,
            "eval_accuracy": accuracy, "weights": f"7.{batch}"}  # fmt: skip


def test_a_run_that_was_stopped_says_where_and_how_to_go_on(run):
    write(run, "training_metrics.jsonl", {"iteration": 0}, {"iteration": 297})
    write(run, "evaluation_metrics.jsonl", evaluated(0, 0.33), evaluated(283, 0.83))
    for batch in (283, 298):
        (run.folder / "checkpoints" / f"batch_{batch}").mkdir(parents=True)
        (run.folder / "checkpoints" / f"batch_{batch}" / "COMMITTED").touch()
    told = conclusion(run, seconds=90).splitlines()
    assert told[1] == (
        "held-out accuracy 33% before, 83% after 283 batches (36224 samples), 1.5 minutes in all"
    )
    assert told[2] == (
        f"stopped after batch 298 of 400: `async-grpo launch {run.folder}/run.toml` goes on after "
        f"batch 298, from {run.folder}/checkpoints/batch_298"
    )


def test_a_run_that_came_to_its_end_is_not_called_stopped(run):
    write(run, "training_metrics.jsonl", {"iteration": 399})
    told = conclusion(run, seconds=90).splitlines()
    assert told[1:] == ["1.5 minutes in all", f"metrics        {run.folder}/training_metrics.jsonl"]


def test_alarms_stand_in_the_summary_before_what_the_run_has_left(run):
    write(run, "training_metrics.jsonl", {"iteration": 399})
    cleared = {"alarm": "gradient_spike", "sentence": "the gradient is large"}
    raised = {"alarm": "no_signal", "sentence": SENTENCE, "event": "raised"}
    write(
        run, "alarms.jsonl", cleared | {"event": "raised"}, raised, cleared | {"event": "cleared"}
    )
    told = conclusion(run, seconds=90).splitlines()
    assert told[2:4] == [
        f"alarms         2 raised, 1 stand at the end ({run.folder}/alarms.jsonl)", f"  {SENTENCE}"
    ]  # fmt: skip
    write(run, "alarms.jsonl", cleared | {"event": "raised"}, cleared | {"event": "cleared"})
    assert "alarms         1 raised, none stands at the end" in conclusion(run, seconds=90)


def test_a_supervised_run_and_one_without_a_line_have_a_summary_too(run):
    assert conclusion(run, seconds=60) == "\n1.0 minutes in all"
    write(run, "evaluation_metrics.jsonl", {"step": 1, "eval_loss": 0.5})
    assert conclusion(run, seconds=60) == "\n1.0 minutes in all"
