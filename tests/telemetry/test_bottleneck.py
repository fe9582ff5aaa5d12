"""What steps take their time for is said in words, of measured shares, and does not flicker."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.config.option import flag, option_fields
from async_grpo.config.train_config import TrainConfig
from async_grpo.telemetry.bottleneck import (
    NUM_AVERAGED,
    NUM_BEFORE,
    NUM_HELD,
    WORDS,
    Bottleneck,
    StepCause,
    cause_of,
    in_words,
    shares_of,
)

# A trainer that computes all the time while 48 of the 64 samples of a step are in generation.
BUSY = {
    "seconds": 10.0,
    "seconds_waiting": 0.5,
    "seconds_publishing": 0.2,
    "seconds_checkpointing": 0.0,
    "seconds_evaluating": 0.0,
    "generator_idle_fraction": 0.05,
    "avg_generating_samples": 48.0,
    "avg_verifying_samples": 1.0,
    "avg_scoring_samples": 0.0,
    "num_samples": 64,
    "sync_batches": 1,
    "sync_seconds": 0.1,
}
STARVED = BUSY | {"seconds_waiting": 6.2}
ROWS = {
    StepCause.NONE: BUSY,
    StepCause.GENERATION: STARVED,
    StepCause.STRAGGLERS: STARVED | {"avg_generating_samples": 2.0, "avg_verifying_samples": 0.1},
    StepCause.VERIFICATION: STARVED | {"avg_verifying_samples": 60.0},
    StepCause.SCORING: STARVED | {"avg_scoring_samples": 60.0},
    StepCause.SYNC: STARVED | {"generator_idle_fraction": 0.4, "sync_seconds": 3.0},
    StepCause.WINDOW: STARVED | {"generator_idle_fraction": 0.4},
    StepCause.TRAINING: BUSY | {"generator_idle_fraction": 0.4},
    StepCause.PUBLISHING: BUSY | {"seconds_publishing": 3.0},
    StepCause.CHECKPOINTING: BUSY | {"seconds_checkpointing": 3.0},
    StepCause.EVALUATION: BUSY | {"seconds_evaluating": 3.0},
}
SENTENCES = {
    StepCause.GENERATION: "trainers waited 62% of the time for samples, 48 of which were in "
    "generation at a time: generation is the bottleneck; add generation workers, or raise "
    "--max-staleness",
    StepCause.TRAINING: "generators stood idle 40% of the time while trainers computed 93%: "
    "training is the bottleneck; add trainer ranks, or raise --max-tokens-per-gpu",
    StepCause.SYNC: "trainers waited 62% of the time for samples and generators stood idle 40%, "
    "while new weights were under way 30%: sending weights is the bottleneck; raise "
    "--max-staleness, or send less by --weight-delta",
    StepCause.NONE: "trainers waited 5% of the time for samples, generators stood idle 5%: no "
    "bottleneck: only more of both makes steps shorter",
}


def shown(rows):
    """The cause that is shown after each row."""
    bottleneck = Bottleneck()
    found = []
    for row in rows:
        bottleneck.see_row(row)
        found.append(bottleneck.cause)
    return found


@pytest.mark.parametrize("cause", StepCause)
def test_each_cause_is_told_by_what_steps_measure(cause):
    shares = shares_of([ROWS[cause]])
    assert cause_of(shares) is cause
    assert in_words(cause, shares) == SENTENCES.get(cause, in_words(cause, shares))


def test_words_name_options_that_exist():
    known = set(map(flag, option_fields(TrainConfig)))
    named = {name for words in WORDS.values() for name in re.findall(r"--[\w-]+", " ".join(words))}
    assert named <= known
    assert len(named) > 5


def test_a_cause_is_shown_once_it_has_led_for_some_steps():
    before = [None] * (NUM_BEFORE + NUM_HELD - 1)
    assert shown([STARVED] * 8) == before + [StepCause.GENERATION] * (8 - len(before))


def test_the_first_steps_wait_for_engines_and_tell_nothing():
    warming = STARVED | {"seconds": 100.0, "seconds_waiting": 95.0}
    assert set(shown([warming] * NUM_BEFORE + [BUSY] * 20)) == {None, StepCause.NONE}


def test_one_odd_step_changes_nothing():
    steady = [BUSY] * 12
    assert shown([*steady, ROWS[StepCause.CHECKPOINTING], *steady])[-13:] == [StepCause.NONE] * 13


def test_a_run_whose_bottleneck_moves_is_told_so_within_the_averaged_steps():
    found = shown([STARVED] * 20 + [ROWS[StepCause.TRAINING]] * (NUM_AVERAGED + NUM_HELD))
    assert found[19] is StepCause.GENERATION
    assert found[-1] is StepCause.TRAINING


def test_steps_that_alternate_are_one_average():
    pair = [BUSY | {"seconds_waiting": share} for share in (0.0, 8.0)]
    assert set(shown(pair * 30)[8:]) == {StepCause.GENERATION}


@given(st.lists(st.sampled_from(sorted(ROWS, key=lambda cause: cause.value)), max_size=80))
def test_what_is_shown_stays_for_as_long_as_another_must_lead(causes):
    found = [cause for cause in shown([ROWS[cause] for cause in causes]) if cause]
    changes = [i for i in range(1, len(found)) if found[i] is not found[i - 1]]
    assert all(later - earlier >= NUM_HELD for earlier, later in pairwise(changes))


def test_supervised_runs_have_no_pipeline_to_wait_for():
    row = {"seconds": 2.0, "seconds_waiting": 0.0, "generator_idle_fraction": None}
    bottleneck = Bottleneck()
    assert not any(bottleneck.see_row(row) for _ in range(20))
    assert bottleneck.sentence == ""


def test_steps_after_a_sync_are_not_told_it_again():
    several = [STARVED | {"sync_batches": n // 4, "sync_seconds": 4.0} for n in range(8)]
    assert shares_of(several).syncing == pytest.approx(2 * 4.0 / 80.0)
