"""A teacher's outputs by the command, and a student that learns from the file."""

import json

import numpy as np
import pytest
from commands import Command
from private_cluster import environment
from stand_in_hub import StandInHub

pytestmark = pytest.mark.integration
MODEL = "sample-data/tiny-countdown"
TIMEOUT_S = 240


def done(*arguments, **changes):
    env = environment() | changes
    with Command("-m", "async_grpo.cli.main", *arguments, env=env) as command:
        assert command.wait(timeout_s=TIMEOUT_S) == 0, command.err
        return command.out


def test_a_student_learns_from_what_its_teacher_wrote(tmp_path):
    questions = [
        {"input": f"use {a} {b} {c} to make {a + b - c}\n", "answer": a + b - c,
         "nums": [a, b, c], "target": a + b - c, "dataset_type": "sums"}
        for a, b, c in ((4, 9, 3), (9, 8, 8), (2, 9, 1), (7, 5, 3))
    ]  # fmt: skip
    data, pairs = tmp_path / "questions.jsonl", tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in questions))
    asked = (
        *("generate", "--model-path", MODEL, "--data-path", data, "--output", pairs),
        *("--samples-per-question", 8, "--max-generation-tokens", 48),
    )
    told = done(*asked, "--reward-fns", "countdown").splitlines()
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    assert 0 < len(rows) < 32
    assert told[-1].startswith(f"wrote {pairs}: {len(rows)} pairs of 32 outputs; rejected: ")
    for row in rows:
        assert (row["reward"], row["dataset_type"]) == (1.0, "sums")
        assert row["completion"].endswith(f"={row['target']}")
        assert row["completion_token_ids"][-1] == 1  # its end

    run = tmp_path / "run"
    with StandInHub({}) as hub:
        train_and_push(pairs, run, hub)
    losses = [
        json.loads(line)["loss"]
        for line in (run / "training_metrics.jsonl").read_text().splitlines()
    ]
    assert len(losses) == 8 and np.mean(losses[-3:]) < np.mean(losses[:3])
    last = run / "hf_format" / "samples_64"
    assert hub.pushed["me/student"] == {file.name: file.read_bytes() for file in last.iterdir()}
    assert hub.private == {"me/student"}
    assert "| loss |" in hub.pushed["me/student"]["README.md"].decode()


def train_and_push(pairs, run, hub):
    done(
        *("train", "--algorithm", "sft", "--model-name-or-path", MODEL, "--data-path", pairs),
        *("--output-dir", run, "--num-training-batches", 8, "--batch-size", 8),
        *("--max-tokens-per-gpu", 1024, "--learning-rate", 1e-3, "--trackers", ""),
        *("--push-to-hub", "student", "--checkpoint-every-batches", 4),
        *("--min-samples-per-checkpoint", 32),
        HF_ENDPOINT=hub.endpoint, HF_TOKEN="hf_x", HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1",
    )  # fmt: skip
