"""What may be set while a run trains, and in which words the rest is refused."""

import pytest

from async_grpo.config.train_config import LIVE, TrainConfig, parse_settings, with_settings
from async_grpo.util.errors import ConfigError

PATHS = {"model_name_or_path": "m", "data_path": "d"}


def config(**options):
    return TrainConfig(**PATHS, **options)


def test_the_settings_of_a_run_are_its_options_but_for_what_was_set():
    changed = with_settings(config(), {"learning_rate": 5e-7, "max_staleness": 3})
    assert (changed.optimizer.learning_rate, changed.sampling.max_staleness) == (5e-7, 3)
    assert with_settings(config(), {}) == config()
    assert set(LIVE) == {"learning_rate", "max_staleness"}


@pytest.mark.parametrize(
    "texts, sentence",
    [
        (["learning_rate"], "must be NAME=VALUE, got 'learning_rate'"),
        (["learning_rate=fast"], "--learning-rate must be a number, got 'fast'"),
        (["max_staleness=1.5"], "--max-staleness must be a whole number, got '1.5'"),
        (["batch_size=8"], "--batch-size cannot be set while a run trains, got '8': learning_rate"),
        (["batch-sise=8"], "--batch-sise cannot be set"),
    ],
)
def test_what_cannot_be_read_or_set_is_refused(texts, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_settings(texts)


@pytest.mark.parametrize(
    "options, settings, sentence",
    [
        ({}, {"learning_rate": -1.0}, "--learning-rate must not be negative, got -1.0"),
        ({}, {"learning_rate": float("nan")}, "--learning-rate must not be negative, got nan"),
        ({}, {"learning_rate": 3.0}, "--learning-rate must be at most 0.01"),
        ({}, {"max_staleness": -1}, "--max-staleness must not be negative"),
        ({}, {"max_staleness": 0}, "must keep the ratio's denominator, behaviour, and would"),
        (
            {"max_staleness": 0, "deterministic": True, "ratio_mode": "decoupled"},
            {"max_staleness": 1},
            "--max-staleness must be 0 with --deterministic",
        ),
        (
            {"num_batches_per_ref_model_update": 5},
            {"max_staleness": 2},
            "must stay 1 while the reference moves",
        ),
    ],
)
def test_what_the_run_could_not_have_been_started_with_is_refused(options, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        with_settings(config(**options), settings)


def test_a_run_that_names_its_ratio_mode_may_become_strictly_on_policy():
    assert (
        with_settings(config(ratio_mode="behaviour"), {"max_staleness": 0}).sampling.max_staleness
        == 0
    )
