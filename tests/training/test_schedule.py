"""The learning rate over a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.config.train import TrainConfig
from async_grpo.training.schedule import learning_rate_factor, make_lr_lambda

SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")


def factors(schedule, *, warmup, steps):
    return [
        learning_rate_factor(step, schedule=schedule, num_warmup_steps=warmup, num_steps=steps)
        for step in range(steps)
    ]


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


def test_a_run_longer_than_planned_stays_at_zero():
    assert learning_rate_factor(99, schedule="linear", num_warmup_steps=1, num_steps=10) == 0.0


def test_the_run_s_length_is_its_gradient_steps():
    config = TrainConfig(
        model_name_or_path="m",
        data_path="d",
        batch_size=8,
        train_minibatch_size=4,
        num_training_batches=5,
        lr_scheduler="linear",
    )
    factor = make_lr_lambda(config)
    assert [factor(step) for step in (0, 5, 9, 10)] == pytest.approx([1.0, 0.5, 0.1, 0.0])
