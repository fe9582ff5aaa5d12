"""The learning rate over a run, on each clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.train_config import TrainConfig
from async_grpo.training.schedule import Clocks, learning_rate_after, learning_rate_factor

SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")


def factors(schedule, *, warmup, steps):
    return [
        learning_rate_factor(step, schedule=schedule, num_warmup=warmup, num_total=steps)
        for step in range(steps)
    ]


class Run:
    """The clocks of a run, and the rate of its next step."""

    def __init__(self, **options):
        self.config = TrainConfig(model_name_or_path="m", data_path="d", **options)
        self.clocks = Clocks()

    def learning_rate(self, num_samples, num_tokens=0):
        samples_per_slot = find_algorithm(self.config).samples_per_slot
        return learning_rate_after(
            self.clocks, self.config.optimizer, self.config.batching,
            num_samples=num_samples, num_tokens=num_tokens, samples_per_slot=samples_per_slot,
        )  # fmt: skip

    def stepped(self, num_samples):
        self.clocks = self.clocks.after(num_samples)


def test_schedules_by_hand():
    assert factors("constant", warmup=2, steps=4) == [1, 1, 1, 1]
    assert factors("constant_with_warmup", warmup=2, steps=4) == [0.5, 1, 1, 1]
    assert factors("cosine", warmup=0, steps=4) == pytest.approx(
        [1, 0.853553, 0.5, 0.146447], abs=1e-6
    )


@given(schedule=st.sampled_from(SCHEDULES), warmup=st.integers(0, 20), steps=st.integers(1, 50))
def test_every_real_step_learns_and_none_exceeds_the_peak(schedule, warmup, steps):
    values = factors(schedule, warmup=warmup, steps=steps)
    assert all(0 < value <= 1 for value in values)
    after = values[warmup:]
    assert after == sorted(after, reverse=True)


@given(
    schedule=st.sampled_from(SCHEDULES),
    warmup=st.integers(0, 20),
    steps=st.integers(1, 50),
    per_step=st.integers(1, 64),
)
def test_both_clocks_give_the_same_curve(schedule, warmup, steps, per_step):
    common = {
        "lr_scheduler": schedule,
        "learning_rate": 1.0,
        "allow_high_learning_rate": True,
        "num_training_batches": steps,
    }
    by_steps = Run(num_warmup_steps=warmup, **common)
    by_samples = Run(
        schedule_clock="samples",
        num_warmup_samples=warmup * per_step * 2,
        batch_size=per_step,
        samples_per_question=2,
        **common,
    )
    for _ in range(steps):
        expected = by_steps.learning_rate(2 * per_step)
        assert by_samples.learning_rate(2 * per_step) == pytest.approx(expected, rel=1e-12)
        by_steps.stepped(2 * per_step)
        by_samples.stepped(2 * per_step)
    assert by_steps.clocks == by_samples.clocks == Clocks(steps, 2 * per_step * steps)


def test_a_step_may_reach_beyond_the_warm_up():
    run = Run(
        schedule_clock="samples",
        num_warmup_samples=10,
        learning_rate=1.0,
        allow_high_learning_rate=True,
    )
    assert [run.learning_rate(count) for count in (1, 5, 10, 16)] == [0.1, 0.5, 1.0, 1.0]


def test_a_step_with_fewer_samples_moves_the_clock_of_samples_less():
    common = {
        "lr_scheduler": "linear",
        "learning_rate": 1.0,
        "allow_high_learning_rate": True,
        "num_training_batches": 4,
    }
    size = {"batch_size": 8, "samples_per_question": 2}
    run = Run(schedule_clock="samples", **common, **size)
    rates = []
    for count in (16, 8, 16, 16):
        rates.append(run.learning_rate(count))
        run.stepped(count)
    assert rates == [1.0, 1 - 16 / 64, 1 - 24 / 64, 1 - 40 / 64]


def test_the_rate_follows_the_clock():
    run = Run(num_warmup_steps=4, learning_rate=1.0, allow_high_learning_rate=True)
    for expected in (0.25, 0.5, 0.75, 1.0, 1.0):
        assert run.learning_rate(8) == expected
        run.stepped(8)


def test_a_schedule_continues_from_the_clocks_of_another():
    options = {
        "lr_scheduler": "cosine", "warmup_ratio": 0.3, "min_learning_rate_ratio": 0.1,
        "num_training_batches": 9,
    }  # fmt: skip
    first = Run(**options)
    for _ in range(4):
        first.stepped(8)
    second = Run(**options)
    second.clocks = first.clocks
    assert second.learning_rate(8) == first.learning_rate(8) != Run(**options).learning_rate(8)


def test_a_run_longer_than_planned_stays_at_zero():
    factor = learning_rate_factor(99, schedule="linear", num_warmup=1, num_total=10)
    assert factor == 0.0


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_falls_to_its_smallest_rate_and_stays_there(schedule):
    options = {"lr_scheduler": schedule, "learning_rate": 0.01, "min_learning_rate_ratio": 0.25}
    run = Run(num_training_batches=10, warmup_ratio=0.2, **options)
    rates = []
    for steps in (1, 2, 6, 10, 99):
        run.clocks = Clocks(steps=steps)
        rates.append(run.learning_rate(8))
    assert rates == pytest.approx([0.01, 0.01, 0.01 * (0.25 + 0.75 * 0.5), 0.0025, 0.0025])


@pytest.mark.parametrize(
    ("clock", "number"),
    [("steps", {"num_warmup_steps": 2}), ("samples", {"num_warmup_samples": 32})],
)
def test_a_warm_up_as_a_share_is_that_number_of_the_planned_clock(clock, number):
    size = {"batch_size": 8, "samples_per_question": 2, "num_training_batches": 10}
    common = {"schedule_clock": clock, "lr_scheduler": "cosine", **size}
    by_share = Run(warmup_ratio=0.2, **common)
    by_number = Run(**number, **common)
    for steps in range(10):
        for run in (by_share, by_number):
            run.clocks = Clocks(steps, 16 * steps)
        assert by_share.learning_rate(16) == by_number.learning_rate(16)


@pytest.mark.parametrize(
    ("share", "steps", "number"),
    [(0.07, 100, 7), (0.55, 100, 55), (0.29, 100, 29), (0.25, 10, 3), (0.001, 10, 1), (1.0, 7, 7)],
)
def test_a_share_that_is_a_whole_number_is_that_number_and_any_other_the_next(share, steps, number):
    common = {"lr_scheduler": "constant_with_warmup", "num_training_batches": steps}
    by_share, by_number = Run(warmup_ratio=share, **common), Run(num_warmup_steps=number, **common)
    for taken in range(steps):
        for run in (by_share, by_number):
            run.clocks = Clocks(steps=taken)
        assert by_share.learning_rate(16) == by_number.learning_rate(16)


TOKENS = {"schedule_clock": "tokens", "num_schedule_tokens": 4000}


@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=30),
    schedule=st.sampled_from(SCHEDULES),
    warmup=st.integers(0, 2000),
)
def test_on_the_clock_of_tokens_a_step_moves_by_those_that_it_trains(lengths, schedule, warmup):
    ends = TOKENS if schedule in ("linear", "cosine") else {"schedule_clock": "tokens"}
    warms = {"num_warmup_tokens": warmup} if schedule != "constant" else {}
    common = {"learning_rate": 1.0, "allow_high_learning_rate": True, "lr_scheduler": schedule}
    run, taken = Run(**common, **ends, **warms), 0
    for num_tokens in lengths:
        assert run.learning_rate(8, num_tokens) == learning_rate_factor(
            taken, schedule=schedule, num_warmup=warmup, num_total=4000, advance=num_tokens
        )
        run.clocks = run.clocks.after(8, num_tokens)
        taken += num_tokens


def test_a_share_of_the_clock_of_tokens_is_of_its_end():
    common = {"lr_scheduler": "cosine", **TOKENS}
    by_share, by_number = Run(warmup_ratio=0.1, **common), Run(num_warmup_tokens=400, **common)
    for tokens in (0, 100, 399, 400, 3000, 9999):
        for run in (by_share, by_number):
            run.clocks = Clocks(1, 1, tokens)
        assert by_share.learning_rate(1, 50) == by_number.learning_rate(1, 50)


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({"train_minibatch_size": 4}, Clocks(steps=10)),
        ({"schedule_clock": "samples", "samples_per_question": 3}, Clocks(samples=120)),
        ({"schedule_clock": "samples", "algorithm": "sft"}, Clocks(samples=40)),
    ],
)
def test_the_run_s_length(options, length):
    run = Run(
        batch_size=8,
        num_training_batches=5,
        lr_scheduler="linear",
        learning_rate=1.0,
        allow_high_learning_rate=True,
        **options,
    )
    for tenths in (0, 5, 9, 10):
        run.clocks = Clocks(length.steps * tenths // 10, length.samples * tenths // 10)
        assert run.learning_rate(0) == pytest.approx(1 - tenths / 10)


@pytest.mark.parametrize("clock", ["steps", "samples"])
def test_the_schedule_ends_with_the_last_pass_of_the_last_batch(clock):
    """Three batches of two steps of one question, in two passes: 12 steps of 8 samples."""
    run = Run(
        lr_scheduler="linear", schedule_clock=clock, learning_rate=1e-6, num_training_batches=3,
        batch_size=2, train_minibatch_size=1, num_passes=2,
    )  # fmt: skip
    rates = []
    for _ in range(12):
        rates.append(run.learning_rate(8))
        run.stepped(8)
    assert rates == pytest.approx([1e-6 * (1 - n / 12) for n in range(12)])
    assert run.learning_rate(8) == 0.0
