"""The books of a fault benchmark find what is lost, doubled or stale, and nothing else."""

import os
import subprocess
import sys
import time
import uuid

import pytest

from faults.books import Work, audit
from faults.members import MARK, Members
from faults.plan import ENDING, MATRIX, ROLES, Fault, matrix, random_kills
from faults.slopes import slope

WORK = Work(batch_size=2, group=3, max_staleness=1)


def make_run(num_batches=4):
    rows = [
        {
            "step": batch + 1, "iteration": batch, "fate_trained": 5, "fate_zero_contribution": 1,
            "fate_failed": 0, "fate_discarded": 0, "trained_samples": 5, "num_samples": 6,
            "total_samples_accumulated": 6 * (batch + 1), "token_fate_trained": 15,
            "token_fate_zero_contribution": 3,
        }
        for batch in range(num_batches)
    ]  # fmt: skip
    samples = [
        {
            "batch": batch, "ordinal": 2 * batch + slot, "index": index, "fate": "trained",
            "weights_versions": [[[f"0.{max(0, batch - 1)}", 0, 2], [f"0.{batch}", 2, 3]]],
            "num_output_tokens": 3,
        }
        for batch in range(num_batches)
        for slot in range(2)
        for index in range(3)
    ]  # fmt: skip
    return rows, samples


def test_the_books_of_a_faultless_run_are_balanced():
    books = audit(*make_run(), work=WORK)
    assert books.are_balanced and books.num_batches == 4
    assert (books.lost, books.doubled, books.stale, books.failed, books.problems) == (
        0,
        0,
        0,
        0,
        (),
    )


def test_batches_that_have_not_ended_owe_nothing():
    rows, samples = make_run()
    samples[-1] = dict(samples[-2])  # the last batch will be done again
    books = audit(rows[:3], samples, work=WORK)
    assert books.are_balanced and books.num_batches == 3


def test_a_lost_sample_is_not_made_up_for_by_a_doubled_one():
    rows, samples = make_run()
    samples[4] = dict(samples[3])
    books = audit(rows, samples, work=WORK)
    assert (books.lost, books.doubled) == (1, 1)


def test_dropped_and_replaced_samples_are_not_lost():
    rows, samples = make_run()
    rows[1] |= {
        "fate_failed": 3, "fate_trained": 2, "trained_samples": 2, "num_samples": 3,
        "fate_discarded": 9, "token_fate_trained": 6,
    }  # fmt: skip
    for row in rows[1:]:
        row["total_samples_accumulated"] -= 3
    kept = [sample for sample in samples if sample["ordinal"] != 3]
    kept.append(samples[0] | {"fate": "replaced"})
    books = audit(rows, kept, work=WORK)
    assert books.are_balanced
    assert (books.failed, books.discarded) == (3, 9)


@pytest.mark.parametrize(
    "change",
    [
        {"weights_versions": [[["0.1", 0, 3]]]},  # two batches old
        {"weights_versions": [[["0.4", 0, 3]]]},  # of a later batch
        {"weights_versions": [[["0.3", 0, 2]]]},  # says nothing of the last token
        {"weights_versions": [[["0.2", 0, 1], ["0.3", 2, 3]]]},  # nor of the second
        {"weights_versions": [[["0.2", 0, 2], ["1.3", 2, 3]]]},  # two incarnations
    ],
)
def test_tokens_of_wrong_or_unknown_weights_are_found(change):
    rows, samples = make_run()
    samples[-1] = samples[-1] | change
    assert audit(rows, samples, work=WORK).stale == 1


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda rows: rows.pop(1), "line 2 of the metrics is step 3"),
        (lambda rows: rows[1].update(iteration=2), "line 2 of the metrics is of batch 2"),
        (lambda rows: rows.insert(2, dict(rows[1])), "line 3 of the metrics is step 2"),
        (lambda rows: rows[2].update(trained_samples=4), "step 3: 4 trained, not as in the ledger"),
        (
            lambda rows: rows[2].update(fate_zero_contribution=2),
            "step 3: 7 samples have a final fate, not all that it has",
        ),
        (
            lambda rows: rows[2].update(token_fate_trained=14),
            "batch 2: 18 tokens, 17 in the ledger",
        ),
        (
            lambda rows: rows[2].update(total_samples_accumulated=24),
            "step 3: 24 samples, not 18",
        ),
    ],
)
def test_metrics_that_skip_repeat_or_miscount_are_found(change, finding):
    rows, samples = make_run()
    change(rows)
    assert finding in audit(rows, samples, work=WORK).problems


def test_a_sample_of_another_batch_is_found():
    rows, samples = make_run()
    samples[0] = samples[0] | {"ordinal": 2, "index": 9}
    books = audit(rows, samples, work=WORK)
    assert books.problems == ("1 samples in a batch that their ordinal does not belong to",)


def test_the_matrix_names_known_roles_and_every_one_of_them():
    assert {fault.role for fault in MATRIX} == set(ROLES)
    assert all(
        fault.ends_run == (fault.role in ENDING) for fault in MATRIX if "KILL" in fault.action
    )


def test_repeats_commit_the_same_faults_in_another_order():
    first, second = matrix(ROLES, repeats=1, seed=0), matrix(ROLES, repeats=2, seed=0)
    again = second[len(first) :]
    assert second[: len(first)] == first
    assert again != first and set(again) < set(first)
    assert {fault.action for fault in set(first) - set(again)} == {"join", "leave"}


def test_random_kills_are_the_seeds_own_and_stay_within_the_roles():
    draws = [random_kills(seed, roles=["controller", "verifier server"]) for seed in (1, 1, 2)]
    first, same, other = ([next(draw) for _ in range(20)] for draw in draws)
    assert first == same != other
    assert set(first) == {Fault("controller", "SIGKILL"), Fault("verifier server", "SIGKILL")}


@pytest.mark.integration
def test_members_are_known_by_their_mark_after_they_have_lost_their_parents():
    children = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    mark = uuid.uuid4().hex
    members, stranger = Members(mark), subprocess.Popen(sleep)
    try:
        environment = os.environ | {MARK: mark}
        subprocess.run([sys.executable, "-c", children, *sleep], env=environment, check=True)
        deadline = time.monotonic() + 30
        while not members.living() and time.monotonic() < deadline:
            time.sleep(0.05)  # between fork and exec it has no variables
        (orphan,) = members.living()
        assert orphan != stranger.pid
        assert members.end() == set()
        assert stranger.poll() is None and members.living() == set()
    finally:
        members.end()
        stranger.kill()
        stranger.wait()


def test_a_slope_tells_growth_from_noise():
    batches = list(range(0, 3000, 10))
    noise = [((37 * i) % 101) / 101 - 0.5 for i in range(300)]
    flat = slope(batches, [100 + x for x in noise])
    grows = slope(batches, [100 + 0.002 * b + x for b, x in zip(batches, noise, strict=True)])
    assert not flat.is_growth and abs(flat.per_thousand) < 0.1
    assert grows.is_growth and grows.per_thousand == pytest.approx(2.0, abs=0.1)
    assert grows.last - grows.first == pytest.approx(2.99 * grows.per_thousand, rel=1e-3)
