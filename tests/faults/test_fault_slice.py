"""A slice of the kill matrix in every test run; test_fault_matrix.py has the whole of it.

One run bears the faults one after the other. Generation is scripted in the slice, which spares the
start of two engines; everything else is real.
"""

import random
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


@pytest.mark.timeout(600)
def test_a_run_survives_a_verifier_a_worker_and_its_controller(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    with LiveRun(tmp_path, Shape(is_scripted=True, num_ranks=1)) as run:
        bear(SLICE, run)
