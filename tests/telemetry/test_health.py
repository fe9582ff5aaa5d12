"""A run that fell apart, or learns nothing, is told of once when that begins, and seldom again."""

import pytest

from async_grpo.telemetry.health import NUM_STEPS, REPEAT_STEPS, Health

HEALTHY = {
    "num_samples": 32,
    "avg_reward": 0.4,
    "avg_max_reward_in_group": 0.7,
    "perc_with_0_advantage": 0.25,
    "perc_truncated_samples": 0.5,
    "avg_output_tokens": 40.0,
    "trained_tokens": 900,
    "mismatch_kl": 0.003,
    "learning_rate": 3e-6,
}
CUT = HEALTHY | {"perc_truncated_samples": 1.0, "avg_output_tokens": 64.0}
EVEN = HEALTHY | {
    "perc_with_0_advantage": 1.0,
    "avg_reward": 1.0,
    "avg_max_reward_in_group": 1.0,
    "trained_tokens": 0,
}
DISTILLED = HEALTHY | {"perc_with_0_advantage": 1.0}
APART = HEALTHY | {"mismatch_kl": 236.0, "learning_rate": 3.0}
ALONE = EVEN | {"num_samples": 64, "num_groups": 64}  # nobody to compare with
BOTH = ("avg_reward", "avg_max_reward_in_group")
SFT = {"loss": 0.3, "trained_tokens": 500, "mismatch_kl": None, "avg_reward": None}


def told(rows):
    """(step, sentence), steps counted from 1."""
    health = Health()
    return [(step, s) for step, row in enumerate(rows, start=1) for s in health.see_row(row)]


def test_a_healthy_run_hears_nothing():
    assert told([HEALTHY] * 300) == []
    assert told([ALONE] * 300) == []
    assert told([SFT] * 300) == []
    assert told([DISTILLED] * 300) == []  # rewards that no advantage is made of
    assert told([{}] * 300) == []  # steps without samples


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (CUT, "every output of the last 5 steps was cut at --max-generation-tokens (64)"),
        (EVEN, "in the last 5 steps all samples of a question had the same reward (mean 1)"),
    ],
)
def test_what_lasts_is_told_when_it_has_lasted_and_again_much_later(row, words):
    sentences = told([HEALTHY] * 3 + [row] * (NUM_STEPS + REPEAT_STEPS))
    assert [step for step, _ in sentences] == [3 + NUM_STEPS, 3 + NUM_STEPS + REPEAT_STEPS]
    assert words in sentences[0][1]
    assert f"last {NUM_STEPS + REPEAT_STEPS} steps" in sentences[1][1]


@pytest.mark.parametrize("row", [CUT, EVEN])
def test_what_passes_by_is_not_told(row):
    assert told(([row] * (NUM_STEPS - 1) + [HEALTHY]) * 10) == []


def test_what_begins_again_is_told_again():
    assert [step for step, _ in told(([EVEN] * 6 + [HEALTHY]) * 2)] == [5, 12]


def test_a_mismatch_that_explodes_is_told_at_once_with_the_learning_rate():
    ((step, sentence),) = told([HEALTHY, HEALTHY, APART, APART])
    assert step == 3
    assert "moved by 236 nats a token" in sentence
    assert "the learning rate was 3: lower --learning-rate" in sentence
    ((_, sentence),) = told([APART | {"mismatch_kl": None}])
    assert "more than floats hold" in sentence


def test_steps_that_train_nothing_measure_no_mismatch():
    assert told([EVEN | {"mismatch_kl": None}] * 2) == []


def test_a_collapsed_run_is_told_of_all_that_ails_it():
    collapsed = CUT | EVEN | {"perc_truncated_samples": 1.0} | dict.fromkeys(BOTH, 0.0)
    assert [step for step, _ in told([APART] + [collapsed] * 20)] == [1, 6, 6]
