import numpy as np
import pytest

from async_grpo.batching.leased_work import covers
from async_grpo.types import VersionSpan, WeightsVersion

FOUR = np.ones(4, np.bool_)


def spans(*made):
    """(batches in the weights, start, stop) of each."""
    return tuple(VersionSpan(WeightsVersion(9, b), start, stop) for b, start, stop in made)


@pytest.mark.parametrize(
    "wrong",
    [
        spans((0, 1, 4)),
        spans((0, 0, 2), (1, 3, 4)),
        spans((0, 0, 3), (1, 2, 4)),
        spans((0, 0, 3)),
        spans((0, 0, 5)),
        spans((0, 0, 4), (1, 4, 2), (1, 2, 4)),
    ],
)
def test_every_sampled_token_has_exactly_one_version(wrong):
    assert not covers(wrong, FOUR)
    assert covers(spans((0, 0, 2), (1, 2, 2), (1, 2, 4)), FOUR)


def test_what_the_model_only_read_needs_no_version():
    is_sampled = np.array([True, False, False, True])
    assert covers(spans((0, 0, 1), (1, 3, 4)), is_sampled)
    assert not covers(spans((0, 0, 1)), is_sampled)
    assert covers((), np.zeros(4, np.bool_))
