"""Options that cannot work are refused, and the run says which ratio it uses."""

import pytest

from async_grpo.config.train import TrainConfig
from async_grpo.errors import ConfigError


def config(**options):
    return TrainConfig(model_name_or_path="m", data_path="d", **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 0}, "--batch-size must be positive, got 0"),
        ({"temperature": 0.0}, "--temperature must be positive for training, got 0.0"),
        ({"samples_per_question": 1}, "--samples-per-question must be at least 2"),
        ({"batch_size": 6, "train_minibatch_size": 4}, r"must divide --batch-size \(6\), got 4"),
        ({"aggregation": "constant"}, "--constant-length-samples goes with"),
        ({"constant_length_samples": 9}, "--constant-length-samples goes with"),
        ({"max_tokens_per_gpu": 512}, r"must exceed --max-generation-tokens \(512\)"),
        ({"deterministic": True, "max_staleness": 1}, "--max-staleness must be 0"),
        (
            {"kl_coefficient": 0.1, "max_staleness": 1, "num_batches_per_ref_model_update": 5},
            "must not be reached within the run",
        ),
    ],
)
def test_combinations_that_cannot_work_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        config(**options)


@pytest.mark.parametrize(
    ("options", "denominator", "words"),
    [
        ({}, "on_policy", "its clip is inert"),
        ({"max_staleness": 1, "clip_high": 0.3}, "behaviour", "clipped to [0.8, 1.3]"),
        ({"batch_size": 8, "train_minibatch_size": 4}, "behaviour", "what the engine recorded"),
    ],
)
def test_the_denominator_follows_from_the_configuration(options, denominator, words):
    chosen = config(**options)
    assert chosen.denominator == denominator
    assert words in chosen.ratio_in_words
