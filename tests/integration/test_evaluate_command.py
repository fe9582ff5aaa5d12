"""A run that evaluates beside its training, and its exports evaluated alone: the same numbers."""

import json
import math

import pytest
from commands import Command, dispatcher
from loops import read_lines, wait_until_registered
from private_cluster import environment

pytestmark = [pytest.mark.integration, pytest.mark.slow]
MODEL = "sample-data/tiny-countdown"
NAMESPACE = "evaluated"
TIMEOUT_S = 500
BATCHES, BATCH, GROUP = 3, 4, 4
WORKERS = (
    *("--namespace", NAMESPACE, "--num-workers", 2, "--max-model-len", 128, "--max-num-seqs", 32),
    *("--reward-fns", "countdown"),
)
FILE = """
[launch]
ray_address = "{address}"

[train]
namespace = "{namespace}"
model_name_or_path = "{model}"
data_path = "{folder}/questions.jsonl"
eval_data_path = "{folder}/held_out.jsonl"
eval_every_batches = 1
keep_best_checkpoint = "eval_reward"
keep_checkpoints = 1
output_dir = "{folder}/run"
num_training_batches = {batches}
batch_size = {batch}
samples_per_question = {group}
max_generation_tokens = 32
max_tokens_per_gpu = 1024
learning_rate = 1e-3
min_samples_per_checkpoint = 1
trackers = ""

[[eval]]
name = "hard"
path = "{folder}/held_out.jsonl"
samples = 2
temperature = 0.7
top_p = 0.95
max_tokens = 24
limit = 8
seed = 5
every = 0
"""


def done(*arguments):
    command = Command("-m", "async_grpo.cli.main", *arguments, env=environment())
    with command:
        assert command.wait(timeout_s=TIMEOUT_S) == 0, command.out + command.err
        return command.out


def write(path, numbers):
    rows = (
        {"input": f"use {a} {b} {c} to make {a + b - c}\n", "nums": [a, b, c], "target": a + b - c}
        for a, b, c in numbers
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def folder(ray_cluster, tmp_path_factory):
    """Of a run that begins with both engines: with the first alone it would share that one."""
    folder = tmp_path_factory.mktemp("evaluated")
    write(folder / "questions.jsonl", [(a, b, 1) for a in range(2, 8) for b in range(2, 8)])
    write(folder / "held_out.jsonl", [(a, 9, c) for a in range(3, 9) for c in (2, 4)])
    text = FILE.format(
        address=ray_cluster, namespace=NAMESPACE, model=MODEL, folder=folder,
        batches=BATCHES, batch=BATCH, group=GROUP,
    )  # fmt: skip
    (folder / "run.toml").write_text(text)
    with dispatcher(ray_cluster, MODEL, *WORKERS, env=environment()) as workers:
        wait_until_registered(workers, 2)
        done("launch", folder / "run.toml")
    return folder


def rows_of(folder, name):
    rows = read_lines(folder / "run" / "evaluation_metrics.jsonl")
    return {row["batch"]: row for row in rows if row["set"] == name}


def alone(folder, export, *options):
    output = folder / "alone.json"
    told = done(
        *("evaluate", export, folder / "held_out.jsonl", "--reward-fns", "countdown"),
        *("--max-model-len", 128, "--max-num-seqs", 32, "--output", output, *options),
    )
    assert told.splitlines()[-1].startswith("held-out accuracy ")
    return json.loads(output.read_text())


def figures(row, *, of=""):
    """All that was measured, but for how long it took."""
    ending = f"/{of}" if of else ""
    counts = ("num_samples", "num_failed", "num_correct", "num_solved", "reward_sum", "failures")
    measured = {
        key.removesuffix(ending): row[key]
        for key in row
        if key.startswith("eval_") and key.endswith(ending) and ("/" in key) == bool(of)
    }
    assert len(measured) >= 15
    return measured | {key: row[key] for key in counts}


def test_every_evaluation_that_was_due_has_one_line(folder):
    assert sorted(rows_of(folder, "")) == [0, 1, 2, 3]
    assert sorted(rows_of(folder, "hard")) == [0, 3]
    kept = [row for row in rows_of(folder, "").values() if "skipped" not in row]
    assert {0, 3} <= {row["batch"] for row in kept}
    for row in kept:  # of one version, to the last token
        assert row["weights"].endswith(f".{row['batch']}") and ".." not in row["weights"]
        assert (row["num_samples"], row["step"]) == (48, row["batch"])


def test_the_best_checkpoint_is_there_beside_the_newest(folder):
    best = json.loads((folder / "run" / "best_checkpoint.json").read_text())
    kept = [row for row in rows_of(folder, "").values() if "skipped" not in row]
    assert best["value"] == max(row["eval_reward"] for row in kept)
    there = {path.name for path in (folder / "run" / "checkpoints").iterdir()}
    saved = {f"batch_{batch}" for batch in (best["batch"], BATCHES) if batch}
    assert saved <= there


def test_an_export_alone_gives_the_numbers_of_its_line_bit_for_bit(folder):
    samples = BATCH * GROUP
    export = folder / "run" / "hf_format"
    lines, limit = rows_of(folder, ""), ("--max-generation-tokens", 32)
    last = alone(folder, export / f"samples_{BATCHES * samples}", *limit)
    assert figures(last) == figures(lines[BATCHES])
    held = max(b for b in lines if 0 < b < BATCHES and "skipped" not in lines[b])
    export_of_held = alone(folder, export / f"samples_{held * samples}", *limit)
    assert figures(export_of_held) == figures(lines[held])
    assert figures(last) != figures(lines[0])


def test_so_it_does_of_a_set_with_its_own_sampling(folder):
    export = folder / "run" / "hf_format" / f"samples_{BATCHES * BATCH * GROUP}"
    found = alone(
        folder, export, "--samples", 2, "--temperature", 0.7, "--top-p", 0.95,
        "--max-generation-tokens", 24, "--limit", 8, "--seed", 5,
    )  # fmt: skip
    assert figures(found) == figures(rows_of(folder, "hard")[BATCHES], of="hard")


def test_the_example_from_nothing_learns_and_its_export_alone_has_the_run_s_loss(tmp_path):
    run, start = tmp_path / "run", tmp_path / "start"
    done(
        *("launch", "examples/from_nothing.toml", "--output-dir", run, "--trackers", ""),
        *("--prepare", f"python sample-data/create_small_gpt2.py --output {start}"),
        *("--model-name-or-path", start / "model", "--data-path", start / "text.jsonl"),
        *("--eval-data-path", start / "held_out.jsonl", "--num-training-batches", 40),
        *("--num-warmup-steps", 10),
    )
    first, last = read_lines(run / "evaluation_metrics.jsonl")
    assert first["eval_loss"] == pytest.approx(math.log(257), abs=0.1)
    assert last["eval_loss"] < 3.5
    output = tmp_path / "loss.json"
    export = run / "hf_format" / "samples_640"
    of_data = start / "held_out.jsonl", "--loss", "--block-size", 128, "--output", output
    told = done("evaluate", export, *of_data)
    alone = json.loads(output.read_text())
    assert alone["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    assert alone["num_tokens"] == last["num_tokens"]
    assert f"loss {last['eval_loss']:.4f} a token" in told
