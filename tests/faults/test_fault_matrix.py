"""Every role of a real run killed, frozen, slowed and ended; then kills at any moment.

    python -m pytest -m slow -rA tests/faults/test_fault_matrix.py
    FAULT_ROLES=controller,machine FAULT_REPEATS=5 FAULT_SEED=1 python -m pytest ... -k whole
    FAULT_MINUTES=60 FAULT_RANKS=1 python -m pytest ... -k moment
    FAULT_SCRIPTED=1 leaves engines and reference out

`python -m benchmarks.faults` writes its times to benchmarks/results, by FAULT_OUTCOMES.

One run bears one fault after the other; when it cannot go on, a fresh one takes over, so that the
table (printed, shown by -rA) has a line for each.
"""

import itertools
import os
import random
import time
from pathlib import Path

import pytest

from faults import report
from faults.experiment import books, commit, settled
from faults.live import LiveRun, Shape
from faults.plan import ROLES, matrix, random_kills

REPOSITORY = Path(__file__).parents[2]
CHOSEN = [role.strip() for role in os.environ.get("FAULT_ROLES", "").split(",") if role.strip()]
SEED = int(os.environ.get("FAULT_SEED", "0"))
SHAPE = Shape(
    num_ranks=int(os.environ.get("FAULT_RANKS", "2")),
    is_scripted=bool(os.environ.get("FAULT_SCRIPTED")),
    seed=SEED,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(0)]


def bear(faults, folder):
    """Commit them all; each must be noticed, recovered from, and have cost nothing."""
    assert set(CHOSEN) <= set(ROLES), f"FAULT_ROLES must be of {', '.join(ROLES)}"
    generator, left = random.Random(SEED), iter(faults)
    outcomes, wrong, kept = [], [], []
    for number in itertools.count():
        first = next(left, None)
        if first is None:
            break
        with LiveRun(folder / str(number), SHAPE) as run:
            for fault in itertools.chain([first], left):
                settled(run)
                outcomes.append(commit(fault, run, generator=generator))
                print(report.line(outcomes[-1]), flush=True)
                if outcomes[-1].recovered_s is None:
                    break
            _, orphans = run.stop()
            found = books(run)
            kept.append(found)
            wrong += [f"run {number}: {found}"] if not found.are_balanced else []
            wrong += [f"run {number}: {len(orphans)} processes left"] if orphans else []
    print(report.table(outcomes))
    print(report.summary(outcomes))
    wrong += [report.line(outcome) for outcome in outcomes if not report.is_well(outcome)]
    assert outcomes and not wrong, "\n".join(wrong)
    if file := os.environ.get("FAULT_OUTCOMES"):
        report.write(Path(file), outcomes, kept)


def test_a_real_run_survives_the_whole_matrix(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    bear(matrix(CHOSEN, repeats=int(os.environ.get("FAULT_REPEATS", "1")), seed=SEED), tmp_path)


def test_a_real_run_survives_kills_of_anybody_at_any_moment(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    end = time.monotonic() + 60 * float(os.environ.get("FAULT_MINUTES", "5"))
    kills = random_kills(SEED, roles=CHOSEN)
    bear(itertools.takewhile(lambda _: time.monotonic() < end, kills), tmp_path)
