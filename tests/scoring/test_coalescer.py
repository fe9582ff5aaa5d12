import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.scoring.coalescer import Coalescer
from async_grpo.types import WeightsVersion

OLD, NEW = WeightsVersion(0, 0), WeightsVersion(0, 4)


def line_of(*lengths, version=OLD, max_tokens=100):
    line = Coalescer(max_tokens)
    for request_id, num_tokens in enumerate(lengths):
        line.add(request_id, num_tokens=num_tokens, version=version)
    return line


def drain(line):
    batches = []
    while line:
        batches.append(line.next_batch(idle=True))
    return batches


def test_an_idle_model_takes_what_is_there_at_once():
    assert line_of(1).next_batch(idle=True) == [0]


def test_requests_gather_while_the_model_is_busy():
    line = line_of(30, 30)
    assert line.next_batch(idle=False) == []
    line.add(9, num_tokens=40, version=OLD)
    assert line.next_batch(idle=True) == [0, 1, 9]
    assert line.next_batch(idle=True) == []


def test_smaller_requests_fill_the_room_that_the_first_ones_leave():
    assert drain(line_of(60, 50, 40, 50)) == [[0, 2], [1, 3]]


def test_only_requests_of_one_version_share_a_forward_and_older_weights_go_first():
    line = Coalescer(100)
    for request_id, version in enumerate([NEW, OLD, NEW, OLD]):
        line.add(request_id, num_tokens=10, version=version)
    assert line.oldest_version == OLD
    assert drain(line) == [[1, 3], [0, 2]]
    assert line.oldest_version is None


def test_a_discarded_request_is_not_computed():
    line = line_of(10, 10)
    assert [line.discard(request_id) for request_id in (0, 0, 7)] == [True, False, False]
    assert drain(line) == [[1]]


@pytest.mark.parametrize("num_tokens", [0, 101])
def test_a_request_that_fits_no_forward_is_refused_with_the_sizes(num_tokens):
    with pytest.raises(ValueError, match=rf"\(100\) tokens, got {num_tokens}"):
        line_of().add(0, num_tokens=num_tokens, version=OLD)


def test_ids_must_be_unique_and_budgets_positive():
    with pytest.raises(ValueError, match="request 0 waits already"):
        line_of(5).add(0, num_tokens=5, version=OLD)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Coalescer(0)


@given(st.lists(st.tuples(st.integers(1, 100), st.sampled_from([OLD, NEW])), max_size=40))
def test_every_request_is_computed_once_within_the_budget_and_nobody_starves(requests):
    line = Coalescer(100)
    for request_id, (num_tokens, version) in enumerate(requests):
        line.add(request_id, num_tokens=num_tokens, version=version)
    batches = drain(line)
    assert sorted(r for batch in batches for r in batch) == list(range(len(requests)))
    waiting = set(range(len(requests)))
    for batch in batches:
        assert sum(requests[r][0] for r in batch) <= 100
        assert len({requests[r][1] for r in batch}) == 1
        assert batch[0] == min(waiting, key=lambda r: (requests[r][1], r))
        waiting -= set(batch)
