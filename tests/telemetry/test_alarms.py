"""A run that fell apart, or learns nothing, raises an alarm once; it is cleared when it is over."""

import json
import logging
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.config.option import flag, option_fields
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.telemetry.alarm_conditions import CONDITIONS, NUM_COMPARED, NUM_NOW, NUM_STEPS
from async_grpo.telemetry.alarms import (
    ALARMS_FILE,
    GROUPS_FAIL,
    NUM_CLEAN,
    SETTLED_S,
    SHRUNK_S,
    AlarmLog,
    Alarms,
)

HEALTHY = {
    "step": 7,
    "num_samples": 32,
    "avg_reward": 0.4,
    "avg_max_reward_in_group": 0.7,
    "merge_loss": 0.01,
    "perc_with_0_advantage": 0.25,
    "perc_truncated_samples": 0.5,
    "avg_output_tokens": 40.0,
    "trained_tokens": 900,
    "mismatch_kl": 0.003,
    "learning_rate": 3e-6,
    "grad_norm": 0.5,
    "skipped_steps_non_finite": 0,
    "entropy": 0.4,
    "kl": 0.1,
}
CUT = HEALTHY | {"perc_truncated_samples": 1.0, "avg_output_tokens": 64.0}
EVEN = HEALTHY | {
    "perc_with_0_advantage": 1.0,
    "avg_reward": 1.0,
    "avg_max_reward_in_group": 1.0,
    "trained_tokens": 0,
    "mismatch_kl": None,
}
DISTILLED = HEALTHY | {"perc_with_0_advantage": 1.0}
APART = HEALTHY | {"mismatch_kl": 236.0, "learning_rate": 3.0}
ALONE = EVEN | {"num_samples": 64, "num_groups": 64}  # nobody to compare with
BOTH = ("avg_reward", "avg_max_reward_in_group")
SFT = {"loss": 0.3, "trained_tokens": 500, "mismatch_kl": None, "avg_reward": None}
SPIKE = HEALTHY | {"grad_norm": 12.0}
RISEN = HEALTHY | {"mismatch_kl": 0.06}
LONG = HEALTHY | {"avg_output_tokens": 70.0}
NUM_MOVED = NUM_NOW // 2 + NUM_STEPS  # steps until a median has moved for as many
FAILURES = {  # what makes of a healthy row one of a run that failed
    "reward_fell": lambda row: {"avg_reward": 0.06 * row["avg_reward"]},
    "entropy_fell": lambda row: {"entropy": 0.003 * row["entropy"]},
    "entropy_rose": lambda _: {"entropy": 5.0},
    "kl_rose": lambda _: {"kl": 50.0},
    "all_truncated": lambda _: {"perc_truncated_samples": 0.97},
    "no_signal": lambda _: {"perc_with_0_advantage": 0.97},
}
RUNS = sorted(Path(__file__).with_name("healthy").glob("*.jsonl"))
# What provokes each alarm after healthy steps, and how many of it raise it.
PROVOKED = {
    "collapsed": ([APART], 1),
    "not_finite": ([HEALTHY | {"skipped_steps_non_finite": 1, "grad_norm": None}], 1),
    "gradient_spike": ([SPIKE], 1),
    "lost_in_merging": ([HEALTHY | {"merge_loss": 0.2}], 1),
    "mismatch_rising": ([RISEN] * 30, NUM_COMPARED // 2 - 1 + NUM_STEPS),
    "all_truncated": ([CUT] * NUM_STEPS, NUM_STEPS),
    "no_signal": ([EVEN] * NUM_STEPS, NUM_STEPS),
    "length_bias": ([LONG] * 30, 14 + NUM_STEPS - 1),
    "reward_fell": ([HEALTHY | {"avg_reward": 0.1}] * 30, NUM_MOVED),
    "entropy_fell": ([HEALTHY | {"entropy": 0.05}] * 30, NUM_MOVED),
    "entropy_rose": ([HEALTHY | {"entropy": 2.5}] * 30, NUM_MOVED),
    "kl_rose": ([HEALTHY | {"kl": 2.0}] * 30, NUM_MOVED),
    "types_fail": ([HEALTHY | {"perc_failed_samples/maths": 1.0}] * 2, 2),
}


def changes(rows):
    """(step, alarm, whether it is raised), steps counted from 1."""
    alarms = Alarms()
    return [
        (step, change.alarm, change.is_raised)
        for step, row in enumerate(rows, start=1)
        for change in alarms.see_row(row)
    ]


def sentences(rows):
    alarms = Alarms()
    return [change.sentence for row in rows for change in alarms.see_row(row)]


def noisy(generator):
    """A healthy step of a run whose numbers scatter."""
    return HEALTHY | {
        "avg_reward": generator.gauss(0.4, 0.05),
        "avg_output_tokens": generator.gauss(40.0, 4.0),
        "mismatch_kl": 0.01 * generator.lognormvariate(0.0, 0.4),
        "grad_norm": 0.5 * generator.lognormvariate(0.0, 0.5),
        "entropy": 0.4 * generator.lognormvariate(0.0, 0.3),
        "kl": 0.1 * generator.lognormvariate(0.0, 0.5),
    }


def rows_of(run):
    return [json.loads(line) for line in run.read_text().splitlines()]


def test_every_alarm_is_provoked_here():
    assert PROVOKED.keys() == CONDITIONS.keys()


@pytest.mark.parametrize("alarm", PROVOKED)
def test_each_alarm_is_raised_once_and_cleared_when_it_is_over(alarm):
    wrong, num_steps = PROVOKED[alarm]
    before = [HEALTHY] * 50
    skipped = wrong[-1]["skipped_steps_non_finite"]
    after = [HEALTHY | {"skipped_steps_non_finite": skipped}] * 250
    (raised, cleared) = changes(before + wrong + after)
    assert raised == (len(before) + num_steps, alarm, True)
    assert cleared[1:] == (alarm, False)
    assert cleared[0] >= len(before) + len(wrong) + NUM_CLEAN - 1


@pytest.mark.parametrize("row", [HEALTHY, ALONE, SFT, DISTILLED, {}])
def test_a_healthy_run_raises_none(row):
    """DISTILLED: rewards that no advantage is made of; {}: steps without samples."""
    assert changes([row] * 300) == []


def test_there_are_four_runs_that_learnt():
    assert len(RUNS) == 4
    for run in RUNS:
        rewards = [row["avg_reward"] for row in rows_of(run)]
        assert len(rewards) >= 80 and sum(rewards[-10:]) > 1.5 * sum(rewards[:10])


@pytest.mark.parametrize("run", RUNS, ids=[run.stem for run in RUNS])
def test_a_run_that_learnt_raised_none(run):
    assert changes(rows_of(run)) == []


@pytest.mark.parametrize("run", RUNS, ids=[run.stem for run in RUNS])
@pytest.mark.parametrize("alarm", FAILURES)
@pytest.mark.parametrize("gradually", [1, 20], ids=["at once", "over 20 steps"])
def test_a_run_that_learnt_and_then_fails_says_so_and_says_it_until_the_end(alarm, run, gradually):
    rows = rows_of(run)
    if rows[-1]["kl"] is None:
        rows = [row | {"kl": 0.1} for row in rows]
    healthy, after = rows[-1], []
    for step in range(60):
        share = min(1.0, (step + 1) / gradually)
        failed = FAILURES[alarm](healthy)
        moved = {name: healthy[name] + share * (failed[name] - healthy[name]) for name in failed}
        after.append(healthy | moved)
    raised = [step for step, name, is_raised in changes(rows + after) if name == alarm]
    assert len(raised) == 1
    assert len(rows) < raised[0] <= len(rows) + gradually + NUM_MOVED


def test_a_run_that_fails_early_says_so_by_its_twentieth_step():
    before, failed = [HEALTHY] * 10, HEALTHY | {"avg_reward": 0.02, "kl": 9.0}
    told = {alarm: step for step, alarm, _ in changes([*before, *[failed] * 10])}
    assert told == {"reward_fell": 19, "kl_rose": 19}


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_rewards_of_any_scale_are_held_against_their_own_past(scale):
    generator = random.Random(0)
    before = [generator.gauss(3.0, 0.5) * scale for _ in range(60)]
    rewards = [*before, *(generator.gauss(0.2, 0.5) * scale for _ in range(10))]
    found = changes([HEALTHY | {"avg_reward": each} for each in rewards])
    assert [alarm for _, alarm, _ in found] == ["reward_fell"]
    noise = [generator.gauss(0.0, 1.0) * scale for _ in range(300)]
    assert changes([HEALTHY | {"avg_reward": each} for each in noise]) == []


def test_entropy_that_falls_while_rewards_rise_is_a_task_that_is_being_learnt():
    rows = [
        HEALTHY | {"avg_reward": 0.3 + 0.6 * step / 80, "entropy": 0.4 * 0.95**step}
        for step in range(80)
    ]
    assert changes(rows) == []
    flat = [row | {"avg_reward": 0.3} for row in rows]
    assert [alarm for _, alarm, _ in changes(flat)] == ["entropy_fell"]


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_scatters_raises_none(seed):
    generator = random.Random(seed)
    assert changes([noisy(generator) for _ in range(500)]) == []


def test_outputs_that_grow_with_rewards_are_what_training_is_for():
    growing = [
        HEALTHY | {"avg_output_tokens": 40.0 + step, "avg_reward": 0.4 + step / 1000}
        for step in range(300)
    ]
    assert changes(growing) == []


def test_a_mismatch_that_rises_to_what_is_usual_is_none_of_it():
    assert (
        changes([HEALTHY | {"mismatch_kl": 1e-5}] * 50 + [HEALTHY | {"mismatch_kl": 0.01}] * 100)
        == []
    )


@pytest.mark.parametrize("row", [CUT, EVEN])
def test_what_passes_by_raises_none(row):
    assert changes(([row] * (NUM_STEPS - 1) + [HEALTHY]) * 10) == []


def test_what_begins_again_is_raised_again():
    found = changes(([EVEN] * 6 + [HEALTHY] * NUM_CLEAN) * 2)
    assert found == [
        (5, "no_signal", True), (11, "no_signal", False),
        (16, "no_signal", True), (22, "no_signal", False),
    ]  # fmt: skip


def test_a_mismatch_that_explodes_is_told_at_once_with_the_learning_rate():
    (sentence,) = sentences([HEALTHY, HEALTHY, APART, APART])
    assert "moved by 236 nats a token" in sentence
    assert "the learning rate was 3: lower --learning-rate" in sentence
    (sentence,) = sentences([APART | {"mismatch_kl": None}])
    assert "more than floats hold" in sentence


def test_steps_that_train_nothing_neither_raise_nor_clear_a_mismatch():
    assert changes([EVEN] * 2) == []
    assert changes([APART] + [EVEN] * 20) == [(1, "collapsed", True), (6, "no_signal", True)]


def test_a_collapsed_run_is_told_of_all_that_ails_it():
    collapsed = CUT | EVEN | {"perc_truncated_samples": 1.0} | dict.fromkeys(BOTH, 0.0)
    told = [(step, alarm) for step, alarm, _ in changes([APART] + [collapsed] * 20)]
    assert told == [(1, "collapsed"), (6, "all_truncated"), (6, "no_signal")]


def test_a_run_that_goes_on_is_not_told_of_steps_skipped_before():
    earlier = HEALTHY | {"step": 40, "skipped_steps_non_finite": 3}
    assert changes([earlier] * 10) == []
    first = HEALTHY | {"step": 1, "skipped_steps_non_finite": 1}
    assert changes([first])[0][1] == "not_finite"


def test_a_type_that_fails_whole_is_named_and_one_that_fails_now_and_then_is_not():
    shares = [(0.5, 1.0), (1.0, None), (0.0, 1.0), (1.0, None), (0.5, None)]
    rows = [
        HEALTHY | {"perc_failed_samples/odd": odd, "perc_failed_samples/rare": rare}
        for odd, rare in shares
    ]
    (sentence,) = sentences(rows)
    assert sentence.startswith("all groups of the types rare failed in their last 2 steps")


def test_each_kind_of_failure_is_raised_once_and_over_when_no_group_fails():
    alarms, why = Alarms(), {"a": "KeyError at mine.py:3", "b": "no server"}
    failing, whole = HEALTHY | {"perc_failed_samples": 0.1}, HEALTHY | {"perc_failed_samples": 0.0}
    raised = [*alarms.see_failures(why), *alarms.see_failures(why)]
    assert [(change.alarm, change.sentence) for change in raised] == [
        (GROUPS_FAIL, "KeyError at mine.py:3"), (GROUPS_FAIL, "no server"),
    ]  # fmt: skip
    rows = [whole] * (NUM_CLEAN - 1) + [failing] + [whole] * (NUM_CLEAN - 1)
    assert [change for row in rows for change in alarms.see_row(row)] == []
    cleared = alarms.see_row(whole)
    assert {change.sentence for change in cleared if not change.is_raised} == {*why.values()}
    assert alarms.see_failures(why) == [] and not alarms.active


def test_words_name_options_that_exist():
    known = {flag(n) for each in (TrainConfig, WorkerConfig) for n in option_fields(each)}
    for wrong, _ in PROVOKED.values():
        (sentence,) = sentences([HEALTHY] * 50 + wrong)
        assert set(re.findall(r"--[\w-]+", sentence)) <= known


@given(st.lists(st.sampled_from([HEALTHY, CUT, EVEN, APART, SPIKE, RISEN, SFT, {}]), max_size=120))
def test_an_alarm_is_raised_and_cleared_in_turn_whatever_comes(rows):
    found = changes(rows)
    for alarm in CONDITIONS:
        raised = [is_raised for _, name, is_raised in found if name == alarm]
        assert raised == [number % 2 == 0 for number in range(len(raised))]


def fleet(*seen):
    """Changes as (time, alarm, whether it is raised) of (time, workers)."""
    alarms = Alarms()
    return [
        (at_s, change.alarm, change.is_raised)
        for at_s, workers in seen
        for change in alarms.see_workers(workers, now_s=at_s)
    ]


def test_a_fleet_that_shrinks_raises_an_alarm_until_it_is_whole():
    four, two = {"generation": 4, "reference": 1}, {"generation": 2, "reference": 1}
    seen = [(0, two), (1, four), (100, two), (159, two), (160, two), (200, two), (300, four)]
    assert fleet(*seen) == [
        (160, "fleet_shrank_generation", True),
        (300, "fleet_shrank_generation", False),
    ]


def test_a_worker_that_is_soon_made_anew_raises_none():
    one, two = {"generation": 1}, {"generation": 2}
    assert fleet(*[(at, one if at % 60 < 50 and at > 10 else two) for at in range(300)]) == []


def test_a_fleet_that_stays_smaller_is_taken_for_its_size():
    seen = [(0, {"generation": 3}), (5, {}), (5 + SHRUNK_S, {}), (5 + SETTLED_S, {}), (9999, {})]
    assert fleet(*seen) == [
        (5 + SHRUNK_S, "fleet_shrank_generation", True),
        (5 + SETTLED_S, "fleet_shrank_generation", False),
    ]


def test_alarms_are_logged_once_counted_and_kept_in_a_file(tmp_path, caplog):
    log = AlarmLog(tmp_path, num_raised=3)
    with caplog.at_level(logging.INFO):
        counted = [log.see_row(row) for row in [EVEN] * 9 + [HEALTHY] * 9]
        log.see_workers({"generation": 2}, now_s=0.0)
        log.see_workers({"generation": 1}, now_s=1.0)
        log.see_workers({"generation": 1}, now_s=70.0)
    assert [row["alarms"] for row in counted] == [0] * 4 + [1] * 9 + [0] * 5
    assert [row["alarms_raised"] for row in counted] == [3] * 4 + [4] * 14
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert log.active == (
        "of 2 generation workers 1 is left since 60 s: the log of their dispatcher says why; a run "
        "goes on with fewer, more slowly",
    )
    lines = [json.loads(line) for line in (tmp_path / ALARMS_FILE).read_text().splitlines()]
    assert [(line["alarm"], line["event"], line["step"]) for line in lines] == [
        ("no_signal", "raised", 7), ("no_signal", "cleared", 7),
        ("fleet_shrank_generation", "raised", 7),
    ]  # fmt: skip
    assert lines[0]["sentence"] == lines[1]["sentence"] == caplog.messages[0]
