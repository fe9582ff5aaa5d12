"""A teacher that dies, freezes or loses what it said in mid-run costs nothing but time.

Teacher, controller, object store and ranks are real; only the engine's tokens are drawn at random.
"""

import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import Command, trainer, wait_until
from faults.books import Work, audit
from loops import read_lines
from private_cluster import environment, is_running, sessions_of
from tiny_models import make_model

from async_grpo.util import deadlines
from benchmarks import procfs

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
NAMESPACE = ("--namespace", "teacher-faults")
READY_S = 240.0  # of commands on a busy machine, and of workers that take a dead one's place
LEASE_S = 10
BATCHES, BATCH, GROUP = 12, 4, 4
WORK = Work(batch_size=BATCH, group=GROUP, max_staleness=1)
TEACHER = ("--teacher-for", "a", "--gkd-coefficient", 0.5)
TOPK = ("--teacher-payload", "topk", "--gkd-top-k", 5)
HIDDEN = ("--teacher-payload", "hidden")
EXPRESS = ("--teacher-payload", "logits", "--express", "1x1")
SCRIPTED = environment(PYTHONPATH="tests")


class House:
    """A cluster with a scripted engine, and a teacher whose model may change."""

    def __init__(self, cluster, model, reward, questions):
        self.cluster = cluster
        self.model, self.questions = model, questions
        self.common = ("--ray-address", self.cluster.address, *NAMESPACE)
        self.engine = Command(
            *("-m", "faults.scripted_dispatcher", "--model-path", model),
            *("--reward-fns", reward, "--global-num-verifiers", 1, *self.common),
            env=SCRIPTED,
        )

    def teacher(self, folder, *options):
        return Command(
            *("worker_dispatcher.py", "--mode", "teacher", "--name", "a"),
            *("--model-path", folder, "--max-tokens-per-gpu", 512),
            *("--worker-lease-s", LEASE_S, *options, *self.common),
            env=SCRIPTED,
        )

    def teacher_pid(self):
        """Of the one that runs; None while there is none."""
        family = sessions_of({self.cluster._head.pid})
        found = [pid for pid in family if is_running(pid) and _is_teacher(pid)]
        return found[0] if found else None

    def train(self, output, *options, ranks, script="trainer_core.py"):
        return trainer(
            *(self.cluster.address, self.model, self.questions, output, *NAMESPACE, *TEACHER),
            *("--num-training-batches", BATCHES, "--max-staleness", WORK.max_staleness, *options),
            ranks=ranks,
            env=SCRIPTED,
            script=script,
        )


def _is_teacher(pid):
    try:
        return b"ray::LogprobWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of two teachers of the same shape."""
    return [
        make_model(tmp_path_factory.mktemp(f"teacher-{size}"), tied=False, hidden_size=size)
        for size in (32, 96)
    ]


@pytest.fixture(scope="module")
def house(private_cluster, tiny_model, sevens, questions):
    house = House(private_cluster, tiny_model, sevens, questions)
    try:
        house.engine.wait_for("registered", timeout_s=READY_S)
        yield house
    finally:
        house.engine.__exit__()


@pytest.fixture
def teacher(house, models):
    with house.teacher(models[0]) as command:
        command.wait_for("registered", timeout_s=READY_S)
        yield command
        command.send(signal.SIGTERM)
        command.wait(timeout_s=READY_S)


def rows_of(folder):
    return read_lines(folder / "training_metrics.jsonl")


def has_rows(folder, number):
    file = folder / "training_metrics.jsonl"
    return file.exists() and file.read_text().count("\n") >= number


def assert_whole(folder):
    """All of every step was trained, once."""
    rows = rows_of(folder)
    assert len(rows) == BATCHES
    assert all(row["trained_samples"] == row["num_samples"] == BATCH * GROUP for row in rows)
    books = audit(rows, read_lines(folder / "samples.jsonl"), work=WORK)
    assert books.are_balanced, books
    assert books.failed == 0


@contextmanager
def in_mid_run(run, folder):
    """Within, the run trains; afterwards it has come to its end."""
    with run:
        wait_until(lambda: has_rows(folder, 2) or not is_running(run.pid), timeout_s=READY_S)
        assert not has_rows(folder, BATCHES), run.err[-4000:]
        yield
        assert run.wait(timeout_s=READY_S) == 0, run.err[-4000:]


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("fault", "payload", "ranks"),
    [
        # In `make test`, one dies in test_distilled_runs.py, and other workers are started again.
        pytest.param(signal.SIGKILL, TOPK, 1, marks=slow),
        pytest.param(signal.SIGKILL, HIDDEN, 2, marks=slow),
        pytest.param(signal.SIGSTOP, TOPK, 2, marks=slow),
        pytest.param(signal.SIGSTOP, HIDDEN, 1, marks=slow),
        pytest.param(signal.SIGSTOP, EXPRESS, 2, marks=slow),
    ],
)
def test_a_run_outlives_its_teacher(fault, payload, ranks, house, teacher, tmp_path):
    run = house.train(tmp_path, *payload, ranks=ranks)
    with in_mid_run(run, tmp_path):
        victim = house.teacher_pid()
        os.kill(victim, fault)
        # A frozen one is ended by the controller, once its lease is over. Its connections close
        # with it, so that a group of express need not wait for its own deadline.
        if payload is EXPRESS:
            run.wait_for("has lost a member", timeout_s=deadlines.EXPRESS_CHUNK_S / 2)
        wait_until(lambda: house.teacher_pid() not in (victim, None), timeout_s=READY_S)
    assert_whole(tmp_path)
    assert not is_running(victim)
    assert not has_rows(tmp_path, BATCHES + 1)


@slow
def test_a_run_outlives_a_rank_of_its_teacher(house, models, tmp_path):
    with house.teacher(models[0], "--scorer-ranks", 2) as command:
        command.wait_for("registered", timeout_s=READY_S)
        with in_mid_run(house.train(tmp_path, *HIDDEN, ranks=2), tmp_path):
            worker = house.teacher_pid()
            [rank] = [pid for pid in procfs.children(worker) if _is_rank(pid)]
            os.kill(rank, signal.SIGKILL)
            wait_until(lambda: house.teacher_pid() not in (worker, None), timeout_s=READY_S)
        command.send(signal.SIGTERM)
        command.wait(timeout_s=READY_S)
        assert "a rank of this scorer has ended" in command.out + command.err
    assert_whole(tmp_path)


def _is_rank(pid):
    return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_lost_payloads_are_made_again_and_another_model_is_no_teacher_of_the_name(
    house, teacher, models, tmp_path
):
    losing = house.train(tmp_path, *HIDDEN, ranks=2, script="tests/faults/losing_trainer.py")
    stranger = house.teacher(models[1])
    with losing, stranger:
        assert losing.wait(timeout_s=READY_S) == 0, losing.err[-4000:]
        assert stranger.wait(timeout_s=READY_S) == 1, stranger.err[-4000:]
    assert_whole(tmp_path)
    # Of two ranks, every third fetch of each: a lost one is fetched again.
    lost = [row["lost_payloads"] for row in rows_of(tmp_path)]
    assert sum(lost) >= BATCHES / 2
    assert "every teacher:a worker must serve the same model" in stranger.err
    assert "start it with the same --model-path, or under another --name" in stranger.err


@slow
def test_a_run_does_not_go_on_with_a_teacher_of_another_model(house, models, tmp_path):
    options = (*TOPK, "--min-samples-per-checkpoint", 1, "--checkpoint-every-batches", 1)
    with house.teacher(models[0]) as own:
        own.wait_for("registered", timeout_s=READY_S)
        with house.train(tmp_path, *options, ranks=1) as run:
            wait_until(
                lambda: any((tmp_path / "checkpoints").glob("*[0-9]")) or not is_running(run.pid),
                timeout_s=READY_S,
            )
        own.send(signal.SIGTERM)
        own.wait(timeout_s=READY_S)
    with house.teacher(models[1]) as other:
        other.wait_for("registered", timeout_s=READY_S)
        with house.train(tmp_path, *options, ranks=1) as again:
            assert again.wait(timeout_s=READY_S) == 1
    assert "teacher a" in again.err
    assert str(models[1]) in again.err
