"""A real run, with vLLM, whose trainer is killed while its workers live; the same command again.

The model has a head of its own: test_loop.py has one that is tied.
"""

import contextlib
import json
import os
import signal

import pytest
from commands import wait_until
from loops import READY_S, Setup, num_registered, wait_until_registered
from tiny_models import make_model

from async_grpo.data.stream import QuestionStream

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

NUM_BATCHES, BATCH, GROUP = 7, 4, 4
OPTIONS = {
    "num_training_batches": NUM_BATCHES,
    "checkpoint_every_batches": 2,
    "max_staleness": 1,
    "learning_rate": 1e-3,
}
TOLERANCE = 5e-6  # nats, float32


def test_a_killed_trainer_goes_on_with_workers_that_never_stopped(ray_cluster, questions, tmp_path):
    """The same questions in their order, clocks and ledger go on, no evaluation is repeated."""
    model = make_model(tmp_path / "model", tied=False)
    setup = Setup(
        tmp_path, ray_cluster, model, questions,
        namespace="real-resume", reward="share_of_digits",
    )  # fmt: skip
    options = OPTIONS | {"eval_data_path": questions}
    checkpoints = tmp_path / "run" / "checkpoints"
    with setup.workers("generation", num_workers=1) as workers:
        wait_until_registered(workers, 1)
        with setup.train("run", **options) as first:
            wait_until(
                lambda: len(setup.rows("run")) >= 3 and last_committed(checkpoints),
                timeout_s=READY_S * 2,
            )
            kill(first)
        assert len(setup.rows("run")) < NUM_BATCHES
        saved = last_committed(checkpoints)
        with setup.train("run", **options) as second:
            assert second.wait(timeout_s=READY_S * 2) == 0, second.out + second.err
            assert f"the run goes on after batch {saved}" in second.out
        assert num_registered(workers) == 1
    check_rows(setup.rows("run"))
    check_samples(setup.samples("run"), questions)
    evaluations = (tmp_path / "run" / "evaluation_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in evaluations] == [0, NUM_BATCHES]
    check_ledger(tmp_path / "run" / "checkpoints" / f"batch_{NUM_BATCHES}")


def last_committed(checkpoints):
    """The number of batches it holds; 0 when there is none."""
    marks = checkpoints.glob("*/COMMITTED")
    return max((int(mark.parent.name.removeprefix("batch_")) for mark in marks), default=0)


def kill(command):
    for pid in command.family():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def check_rows(rows):
    assert [row["step"] for row in rows] == list(range(1, NUM_BATCHES + 1))
    assert [row["iteration"] for row in rows] == list(range(NUM_BATCHES))
    assert [row["optimizer_steps"] for row in rows] == list(range(1, NUM_BATCHES + 1))
    assert [row["total_samples_accumulated"] for row in rows] == [
        BATCH * GROUP * step for step in range(1, NUM_BATCHES + 1)
    ]
    assert max(row["canary_max"] for row in rows) <= TOLERANCE  # engine against trainer
    assert len({row["sync_batches"] for row in rows}) > 1


def check_samples(samples, questions):
    """Each slot has one group that counts, of the question that its ordinal stands for."""
    with open(questions) as file:
        inputs = [json.loads(line)["input"] for line in file]
    order = QuestionStream(len(inputs), seed=37)
    by_ordinal = {}
    for sample in samples:
        by_ordinal.setdefault(sample["ordinal"], []).append(sample)
    assert sorted(by_ordinal) == list(range(NUM_BATCHES * BATCH))
    for ordinal, group in by_ordinal.items():
        assert sorted(sample["index"] for sample in group) == list(range(GROUP))
        assert {sample["input"] for sample in group} == {inputs[order.index(ordinal)]}
        assert {sample["fate"] for sample in group} <= {"trained", "zero_contribution"}


def check_ledger(checkpoint):
    ledger = json.loads((checkpoint / "manifest.json").read_text())["state"]["resume"]["ledger"]
    assert ledger["open"] == []
    assert ledger["admitted_samples"] == sum(ledger["samples"].values())
    assert ledger["admitted_slots"] == sum(ledger["slots"].values()) == NUM_BATCHES * BATCH
