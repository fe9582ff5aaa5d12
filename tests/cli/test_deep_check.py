"""The short runs of `async-grpo check --deep`: what they train, and what is said of each end."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from async_grpo.check.data_read import DataRead
from async_grpo.check.facts import Facts
from async_grpo.cli.check import Trials, check, deep_findings
from async_grpo.cli.local_run import read_run
from async_grpo.config.data_files import DataSource
from async_grpo.model.model_folder import ModelFacts
from async_grpo.types import Question

MODEL = str(Path(__file__).parents[2] / "sample-data" / "tiny-countdown")
RUN = """
[[worker]]
mode = "generation"
model_path = "{model}"
max_model_len = 256
reward_fns = "majority"
[train]
model_name_or_path = "{model}"
data_path = "{folder}/data.jsonl"
output_dir = "{folder}/run"
batch_size = 4
samples_per_question = 4
max_generation_tokens = 64
max_tokens_per_gpu = 512
learning_rate = 1e-4
"""
# In the place of `async-grpo train`; `{name}` are what a test wants of the run of that name.
TRAINER = """
import json, pathlib, sys, tomllib
options = tomllib.loads(pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).read_text())["train"]
folder = pathlib.Path(options["output_dir"])
asked = json.loads(pathlib.Path("asked.json").read_text()).get(folder.name, {})
with open("runs.jsonl", "a") as file:
    pairs = pathlib.Path(options["data_path"]).read_text().splitlines()
    file.write(json.dumps(options | {"name": folder.name, "pairs": len(pairs),
               "tokens": len(json.loads(pairs[0])["completion_token_ids"])}) + "\\n")
if "error" in asked:
    sys.exit("error: " + asked["error"])
(folder / "hf_format" / "samples_1").mkdir(parents=True)
(folder / "hf_format" / "samples_1" / "model.safetensors").write_text(asked.get("weights", "same"))
losses = asked.get("losses", [2.0] + [1.0] * (options["num_training_batches"] - 1))
rows = [json.dumps({"loss": loss, "seconds": 0.5}) + "\\n" for loss in losses]
(folder / "training_metrics.jsonl").write_text("".join(rows))
"""


@pytest.fixture
def deep(tmp_path, monkeypatch):
    """The findings of a run of 2 ranks, with what the stand-in is asked to do."""
    monkeypatch.chdir(tmp_path)
    Path("trainer.py").write_text(TRAINER)
    monkeypatch.setattr("async_grpo.cli.check.COMMAND", (sys.executable, "trainer.py"))
    options = ["--model-name-or-path", "m", "--data-path", "d", "--max-tokens-per-gpu", "1000",
               "--max-generation-tokens", "90", "--nproc-per-node", "2", "--learning-rate", "1e-6",
               "--activation-checkpointing"]  # fmt: skip
    run = read_run(config="", train_options=options, prepare="", num_cpus=0, ray_address="")
    question = Question(np.asarray([5, 6, 7], np.int32), "x", None, {}, "")
    read = DataRead(
        purpose="train", source=DataSource("d", "train", ""), num_lines=1,
        lengths=np.asarray([3, 10]), firsts={"": question},
    )  # fmt: skip

    def findings(max_positions=512, **asked):
        model = ModelFacts("m", 128, max_positions, (1,), "hash")
        Path("asked.json").write_text(json.dumps(asked))
        return list(deep_findings(run, Facts(model=model, data=(read,))))

    return findings


def test_the_largest_minibatch_then_one_batch_then_its_second_half(deep):
    worst, batch, again = deep()
    assert {worst.level, batch.level, again.level} == {"ok"}
    assert worst.text == (
        "10 sequences of 100 tokens on each rank went forward, backward and stepped in 0.5 s"
    )
    assert batch.text == "the loss of one batch went from 2 to 1 in 20 steps"
    assert "batches 11 to 20 again from their checkpoint came to the same weights" in again.text
    runs = [json.loads(line) for line in Path("runs.jsonl").read_text().splitlines()]
    assert [(run["name"], run["pairs"], run["tokens"]) for run in runs] == [
        ("worst", 20, 99), ("batch", 8, 3), ("again", 8, 3),
    ]  # fmt: skip
    assert {(run["nproc_per_node"], run["learning_rate"]) for run in runs} == {(2, 0.0001)}
    assert {run["algorithm"] for run in runs} == {"sft"}
    assert runs[2]["resume"].endswith("batch/checkpoints/batch_10")
    assert not Path(runs[0]["output_dir"]).exists()


def test_no_sequence_is_longer_than_the_model(deep):
    assert deep(max_positions=40)[0].text.startswith("25 sequences of 40 tokens on each rank went")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"worst": {"error": "out of memory"}}, "out of memory"),
        ({"batch": {"losses": [1.0] * 20}}, "nothing is learnt, look at --learning-rate"),
        ({"batch": {"error": "the disk is full"}}, "one batch 20 times: the trainer failed"),
        ({"again": {"error": "no checkpoint"}}, "resumed after batch 10: the trainer failed"),
    ],
)
def test_the_first_that_fails_is_the_last_and_says_why(asked, said, deep):
    *before, last = deep(**asked)
    assert [finding.level for finding in before] == ["ok"] * len(before)
    assert last.level == "error" and said in last.text


def test_other_weights_after_a_resume_are_an_error(deep):
    *_, again = deep(again={"weights": "others"})
    assert again.level == "error" and "came to other weights" in again.text


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("fault", ["", "learning rate"])
def test_a_real_run_trains_resumes_and_exits_1_where_the_resumed_half_differs(
    fault, tmp_path, monkeypatch
):
    """The command itself, whose trainers are real; the fault is one that no run should have."""
    train = Trials._train

    def with_fault(trials, name, pairs, **options):
        if fault and name == "again":
            options["learning_rate"] = 2e-4
        return train(trials, name, pairs, **options)

    monkeypatch.setattr(Trials, "_train", with_fault)
    numbers = [(2, 9, 8, 15), (1, 2, 3, 6), (5, 4, 3, 6), (9, 1, 1, 7)]
    lines = [
        {"input": f"use {a} {b} {c} to make {goal}\n", "answer": str(goal), "numbers": [a, b, c]}
        for a, b, c, goal in numbers
    ]
    data, file = tmp_path / "data.jsonl", tmp_path / "run.toml"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file.write_text(RUN.format(model=MODEL, folder=tmp_path))
    result = CliRunner().invoke(check, [str(file), "--deep"])
    assert "went forward, backward and stepped" in result.output
    assert "the loss of one batch went from" in result.output
    end = "came to other weights" if fault else "came to the same weights, bit for bit"
    assert f"batches 11 to 20 again from their checkpoint {end}" in result.output
    assert result.exit_code == bool(fault), result.output


def test_without_a_model_it_waits(deep):
    [finding] = deep_findings(None, Facts())
    assert finding.level == "waits"
