import asyncio

import numpy as np
import pytest
from scripted import make_sample
from scripted_run import make_config

from async_grpo.algorithms.base import LocalRules, ScoreNeed
from async_grpo.algorithms.find import find_algorithm
from async_grpo.algorithms.grpo import group_advantages
from async_grpo.types import Group, WeightsVersion
from async_grpo.util.errors import ConfigError

VERSION = WeightsVersion(0, 0)
K1 = {"kl_coefficient": 0.5, "kl_estimator": "k1"}


def algorithm(**options):
    return find_algorithm(make_config(max_generation_tokens=8, **options))


def finish(samples, *, attempt=0, **options):
    """The group as the controller gets it back."""
    rules = LocalRules(algorithm(**options))
    return asyncio.run(rules.finish_group(Group(0, attempt, samples)))


def group(*shapes, **changes):
    """Samples of (reward, tokens); those of 8 tokens were cut."""
    return tuple(
        make_sample(
            VERSION,
            index=index,
            reward=reward,
            num_tokens=num_tokens,
            finish_reason="length" if num_tokens == 8 else "stop",
            **changes,
        )
        for index, (reward, num_tokens) in enumerate(shapes)
    )


@pytest.mark.parametrize("method", ["grpo", "dr", "rloo"])
def test_advantages_are_of_the_shaped_rewards(method):
    options = {"advantage": method, "overlong_buffer_tokens": 4, "overlong_penalty": 1.0}
    graded = finish(group((1.0, 4), (1.0, 6), (0.0, 8)), **options).samples
    assert [sample.shaped_reward for sample in graded] == [1.0, 0.5, -1.0]
    expected = group_advantages([1.0, 0.5, -1.0], method=method)
    assert [sample.advantage for sample in graded] == expected.tolist()
    assert [sample.verdict.reward for sample in graded] == [1.0, 1.0, 0.0]


def test_what_was_cut_stays_in_the_baseline_and_is_not_trained():
    samples = group((1.0, 4), (0.0, 8))
    masked = finish(samples, advantage="dr", mask_truncated_samples=True).samples
    assert [sample.advantage for sample in masked] == [0.5, -0.5]
    assert [sample.num_trained_tokens for sample in masked] == [4, 0]
    assert [sample.contributes for sample in masked] == [True, False]
    assert samples[1].num_trained_tokens == 8
    assert masked[1].num_tokens == samples[1].num_tokens


def test_without_the_option_nothing_is_masked():
    samples = group((1.0, 4), (0.0, 8))
    assert [s.num_trained_tokens for s in finish(samples).samples] == [4, 8]


def test_a_group_is_drawn_again_only_without_any_variance_of_its_shaped_rewards():
    for shapes, expected in (
        (((1.0, 4), (1.0, 3)), True),
        (((1.0, 4), (np.nextafter(1.0, 2.0), 4)), False),
        (((1.0, 4), (1.0, 6)), False),  # the longer one was punished
        (((1.0, 6), (1.0, 6)), True),
        (((1.0, 4), (1.25, 5)), True),  # by a quarter, which evens them out
    ):
        found = finish(group(*shapes), dynamic_sampling=1, overlong_buffer_tokens=4)
        assert found.is_replaced == expected, shapes


@pytest.mark.parametrize(("bound", "expected"), [(0, [False] * 3), (2, [True, True, False])])
def test_a_slot_draws_up_to_its_bound(bound, expected):
    samples = group((1.0, 4), (1.0, 4))
    found = [finish(samples, attempt=a, dynamic_sampling=bound) for a in range(3)]
    assert [each.is_replaced for each in found] == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        (K1, False),
        ({"kl_coefficient": 0.5}, True),
        ({"entropy_coefficient": 0.1}, True),
    ],
)
def test_a_sample_without_advantage_is_sent_when_a_term_needs_it(options, expected):
    decided = algorithm(**options)
    (sample,) = group((1.0, 4), advantage=0.0)
    assert decided.contributes(sample) == expected
    (sample,) = group((1.0, 4), advantage=-1e-12)
    assert decided.contributes(sample)
    (masked,) = group((1.0, 4), num_masked=4)
    assert not decided.contributes(masked)


def test_the_reference_is_needed_for_a_penalty_alone_and_for_k1_before_advantages():
    assert algorithm().needs == ()
    assert algorithm(**K1).needs == (ScoreNeed("reference", before_advantages=True),)
    assert algorithm(kl_coefficient=0.5).needs == (ScoreNeed("reference"),)


def test_what_leaves_no_cut_output_as_it_is_masks_none():
    for policy in ("invalidate", "zero_reward"):
        with pytest.raises(ConfigError, match="--length-limit-policy truncate alone"):
            algorithm(mask_truncated_samples=True, length_limit_policy=policy)
        assert "truncated outputs" in " ".join(algorithm(length_limit_policy=policy).in_words())
