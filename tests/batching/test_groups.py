import numpy as np
import pytest
from scripted import make_sample
from scripted_run import make_config

from async_grpo.batching.advantage import group_advantages
from async_grpo.batching.groups import GroupRules, with_scores
from async_grpo.types import WeightsVersion

VERSION = WeightsVersion(0, 0)
K1 = {"kl_coefficient": 0.5, "kl_estimator": "k1"}


def rules(**options):
    return GroupRules(make_config(max_generation_tokens=8, **options))


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
    decided = rules(advantage=method, overlong_buffer_tokens=4, overlong_penalty=1.0)
    graded = decided.graded(group((1.0, 4), (1.0, 6), (0.0, 8)))
    assert [sample.shaped_reward for sample in graded] == [1.0, 0.5, -1.0]
    expected = group_advantages([1.0, 0.5, -1.0], method=method)
    assert [sample.advantage for sample in graded] == expected.tolist()
    assert [sample.verdict.reward for sample in graded] == [1.0, 1.0, 0.0]


def test_what_was_cut_stays_in_the_baseline_and_is_not_trained():
    decided = rules(advantage="dr", mask_truncated_samples=True)
    graded = decided.graded(group((1.0, 4), (0.0, 8)))
    masked = decided.masked(graded)
    assert [sample.advantage for sample in masked] == [0.5, -0.5]
    assert [sample.num_trained_tokens for sample in masked] == [4, 0]
    assert [decided.contributes(sample) for sample in masked] == [True, False]
    assert graded[1].episode.rows[0].loss_mask.all()
    assert len(masked[1].episode.rows[0].token_ids) == 8


def test_without_the_option_nothing_is_masked():
    graded = group((1.0, 4), (0.0, 8))
    assert rules().masked(graded) is graded


def test_a_group_is_drawn_again_only_without_any_variance_of_its_shaped_rewards():
    decided = rules(dynamic_sampling=1, overlong_buffer_tokens=4)
    for shapes, expected in (
        (((1.0, 4), (1.0, 3)), True),
        (((1.0, 4), (np.nextafter(1.0, 2.0), 4)), False),
        (((1.0, 4), (1.0, 6)), False),  # the longer one was punished
        (((1.0, 6), (1.0, 6)), True),
        (((1.0, 4), (1.25, 5)), True),  # by a quarter, which evens them out
    ):
        graded = decided.graded(group(*shapes))
        assert decided.is_drawn_again(graded, attempt=0) == expected, shapes


@pytest.mark.parametrize(("bound", "expected"), [(0, [False] * 3), (2, [True, True, False])])
def test_a_slot_draws_up_to_its_bound(bound, expected):
    graded = rules().graded(group((1.0, 4), (1.0, 4)))
    decided = rules(dynamic_sampling=bound)
    assert [decided.is_drawn_again(graded, attempt=a) for a in range(3)] == expected


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
    (sample,) = group((1.0, 4), advantage=0.0)
    assert rules(**options).contributes(sample) == expected
    (sample,) = group((1.0, 4), advantage=-1e-12)
    assert rules(**options).contributes(sample)
    (masked,) = group((1.0, 4), num_masked=4)
    assert not rules(**options).contributes(masked)


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [({}, [], []), (K1, [0, 2], []), ({"kl_coefficient": 0.5}, [], [0, 2])],
)
def test_the_reference_sees_what_needs_it_and_when(options, before, after):
    samples = group((1.0, 4), (0.0, 5), (0.5, 3))
    samples = (samples[0], *group((0.0, 0), (0.0, 5), num_masked=5)[1:], samples[2])
    decided = rules(**options)
    assert [s.index for s in decided.to_score_before_advantages(samples)] == before
    assert [s.index for s in decided.to_score_for_loss(samples)] == after


def test_scores_go_to_the_samples_they_were_asked_for():
    samples = group((1.0, 4), (0.0, 5), (0.5, 3))
    scored = group((1.0, 4), (0.0, 5), reference_logprobs=np.zeros(5, np.float32))[1:]
    merged = with_scores(samples, scored)
    assert [s.reference_logprobs is not None for s in merged] == [False, True, False]
    assert [s.index for s in merged] == [0, 1, 2]
