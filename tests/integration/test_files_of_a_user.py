"""An algorithm and an environment of a user's, one file each, in a run through the command line.

A real teacher scores, a real environment worker plays two turns through the controller, and the
trainer, the verifiers and the rules' process are real; only the engine's tokens are drawn at
random.
"""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from commands import Command, trainer
from loops import read_lines, read_samples, recomputed_samples
from private_cluster import environment
from tiny_models import load_model, make_model

pytestmark = pytest.mark.integration
TESTS = Path(__file__).parents[1]
NAMESPACE = ("--namespace", "files")
ALGORITHM = f"{TESTS}/algorithms/opd.py:OnPolicyDistillation"
ENVIRONMENT = f"{TESTS}/environments/two_turns.py:TwoTurns"
ETA, BOUND, TEACHER = 0.5, 2.0, "teacher:math"  # of opd.py
BATCHES, BATCH, GROUP = 3, 4, 4
READY_S = 180.0  # of commands on a busy machine
TOLERANCE = 1e-5  # nats, float32: the same forward in another process


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model of other weights with the same tokens."""
    return make_model(tmp_path_factory.mktemp("teacher"), tied=False)


@pytest.fixture(scope="module")
def folder(ray_cluster, tiny_model, teacher, questions, sevens, tmp_path_factory):
    """What the run has left."""
    output = tmp_path_factory.mktemp("files")
    common = ("--ray-address", ray_cluster, *NAMESPACE)
    scripted = environment(PYTHONPATH=str(TESTS))
    workers = (
        (
            *("-m", "faults.scripted_dispatcher", "--model-path", tiny_model),
            *("--reward-fns", sevens, "--global-num-verifiers", 1),
        ),
        (
            *("worker_dispatcher.py", "--mode", "teacher", "--name", "math"),
            *("--model-path", teacher, "--max-tokens-per-gpu", 512),
        ),
        ("worker_dispatcher.py", "--mode", "environment"),
    )
    commands = [Command(*options, *common, env=scripted) for options in workers]
    run = trainer(
        *(ray_cluster, tiny_model, questions, output, *NAMESPACE),
        *("--algorithm", ALGORITHM, "--environment", ENVIRONMENT),
        *("--num-training-batches", BATCHES, "--max-staleness", 0, "--dump-token-columns", True),
    )
    try:
        for command in commands:
            command.wait_for("registered", timeout_s=READY_S)
        assert run.wait(timeout_s=READY_S) == 0, run.err[-4000:]
    finally:
        for command in (run, *commands):
            command.__exit__()
    return output


@pytest.fixture(scope="module")
def samples(folder):
    return read_samples(folder)


def test_every_step_trains_what_was_sent_with_finite_losses(folder):
    rows = read_lines(folder / "training_metrics.jsonl")
    assert [row["fate_trained"] for row in rows] == [BATCH * GROUP] * BATCHES
    for row in rows:  # a sum that was not what was sent would have ended the run
        assert row["trained_samples"] == row["num_samples"] == BATCH * GROUP
        assert all(math.isfinite(row[name]) for name in ("loss", "grad_norm", "teacher_gap"))
        assert row["grad_norm"] > 0


def test_the_run_says_which_files_of_the_user_it_was_trained_with(folder):
    """Not of rewards that its environment, which grades by itself, never asks."""
    [part] = json.loads((folder / "training_params.json").read_text())["parts"]
    own = {"algorithm": ALGORITHM, "environment": ENVIRONMENT}
    files = {name: Path(path.rpartition(":")[0]).read_bytes() for name, path in own.items()}
    assert part["code"] == {name: hashlib.sha256(text).hexdigest() for name, text in files.items()}


def test_episodes_have_the_turns_and_rewards_of_the_environment(samples):
    assert len(samples) == BATCHES * BATCH * GROUP
    for sample in samples:
        answer, mask = int(sample["answer"]), sample["loss_mask"]
        assert sample["adapter"] == "distance"
        assert sample["reward"] == 1 - abs(sample["output_token_ids"][-1] - answer) / 64
        assert mask.count(False) <= 1  # what it heard between its turns
    assert any(not all(sample["loss_mask"]) for sample in samples)


def test_a_teacher_s_scores_are_those_of_one_process(samples, teacher):
    model = load_model(teacher)
    for sample, own in zip(samples, recomputed_samples(model, samples), strict=True):
        assert np.abs(own - sample["scores"][TEACHER]).max() <= TOLERANCE


def test_the_first_loss_is_that_of_its_samples_in_one_process(folder, samples, tiny_model):
    model, losses = load_model(tiny_model), []
    first_batch = [sample for sample in samples if sample["batch"] == 0]
    scored = recomputed_samples(model, first_batch)
    for sample, own in zip(first_batch, scored, strict=True):
        mask = np.array(sample["loss_mask"])
        gap = np.array(sample["scores"][TEACHER]) - own
        followed = sample["advantage"] + ETA * gap.clip(-BOUND, BOUND)
        losses.append(-followed[mask].mean())
    first = read_lines(folder / "training_metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
