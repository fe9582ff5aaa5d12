"""A slice of the kill matrix in every test run; test_fault_matrix.py has the whole of it.

One run bears the faults one after the other. Generation is scripted in the slice, which spares the
start of two engines; everything else is real.
"""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from faults.experiment import books, commit, settled
from faults.live import LiveRun, Shape
from faults.plan import Fault
from faults.report import is_well, line

REPOSITORY = Path(__file__).parents[2]
SLICE = (
    Fault("verifier server", "SIGKILL", "verifying"),
    Fault("generation worker", "SIGKILL", "weight sync"),
    Fault("controller", "SIGKILL", "training"),
)

pytestmark = pytest.mark.integration


def bear(faults, run):
    """Commit them all; each must be noticed, recovered from, and have cost nothing."""
    generator = random.Random(0)
    for fault in faults:
        settled(run)
        outcome = commit(fault, run, generator=generator)
        assert is_well(outcome), line(outcome)
    assert books(run).num_batches > 0
    _, left = run.stop()
    assert left == set()
    assert books(run).are_balanced


def replayed(run):
    """What `async-grpo replay` says of the last batch of a run that has ended."""
    command = [sys.executable, "-m", "async_grpo.cli.main", "replay", str(run.output)]
    finished = subprocess.run(
        command, env=run.environment, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout.splitlines()


@pytest.mark.timeout(600)
def test_a_run_survives_a_verifier_a_worker_and_its_controller(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    with LiveRun(tmp_path, Shape(is_scripted=True, num_ranks=1)) as run:
        bear(SLICE, run)
    assert replayed(run)[-1].startswith("equal: batch")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_of_two_ranks_is_replayed_whole_over_a_kill_of_its_worker(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    with LiveRun(tmp_path, Shape(is_scripted=True, num_ranks=2)) as run:
        bear(SLICE[1:2], run)
    shutil.rmtree(run.output / "checkpoints")
    first, *_, last = replayed(run)
    assert first.endswith("on 2 ranks") and last.startswith("equal: batches 0 to ")
