from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from async_grpo.rollout.logprob_worker import take_forward
from async_grpo.types import WeightsVersion

OLD, NEW = WeightsVersion(0, 0), WeightsVersion(0, 4)


class Wanted(NamedTuple):
    version: WeightsVersion
    temperature: float = 1.0


class Request(NamedTuple):
    number: int
    num_tokens: int
    version: WeightsVersion = OLD
    temperature: float = 1.0

    @property
    def wanted(self):
        return Wanted(self.version, self.temperature)


def drain(line):
    """The numbers of each forward."""
    batches = []
    while line:
        batches.append([request.number for request in take_forward(line, max_tokens=100)])
    return batches


def test_an_idle_model_takes_what_is_there_at_once():
    assert drain([Request(0, 1)]) == [[0]]
    assert take_forward([], max_tokens=100) == []


def test_smaller_requests_fill_the_room_that_the_first_ones_leave():
    line = [Request(number, length) for number, length in enumerate((60, 50, 40, 50))]
    assert drain(line) == [[0, 2], [1, 3]]


def test_only_requests_of_one_version_share_a_forward_and_older_weights_go_first():
    line = [Request(number, 10, version) for number, version in enumerate([NEW, OLD, NEW, OLD])]
    assert drain(line) == [[1, 3], [0, 2]]


def test_only_requests_that_want_the_same_share_a_forward():
    line = [Request(number, 10, OLD, 1.0 + number % 2) for number in range(4)]
    assert drain(line) == [[0, 2], [1, 3]]


@given(st.lists(st.tuples(st.integers(1, 100), st.sampled_from([OLD, NEW])), max_size=40))
def test_every_request_is_computed_once_within_the_budget_and_nobody_starves(requests):
    batches = drain([Request(number, *request) for number, request in enumerate(requests)])
    assert sorted(r for batch in batches for r in batch) == list(range(len(requests)))
    waiting = set(range(len(requests)))
    for batch in batches:
        assert sum(requests[r][0] for r in batch) <= 100
        assert len({requests[r][1] for r in batch}) == 1
        assert batch[0] == min(waiting, key=lambda r: (requests[r][1], r))
        waiting -= set(batch)
