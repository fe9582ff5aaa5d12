"""A rank has what teachers said before it agrees to train it, or has it made again."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_cluster import FakeCluster, client_of
from hypothesis import given
from hypothesis import strategies as st
from oracle import make_sample

from async_grpo.model.collate import collate
from async_grpo.training import stream
from async_grpo.training.stream import MAX_LOSSES, fetch_payloads, with_payloads
from async_grpo.types import EndOfStep, Minibatch, Ticket
from async_grpo.util import deadlines
from async_grpo.util.errors import ProcessLostError, RunLost, WorkerError

A, B = "teacher:a", "teacher:b"
LENGTHS = (2, 3, 1)
STALL_S = 77.0


def sample(index, *, teacher=A, version=0):
    length = LENGTHS[index]
    made = make_sample([1, 2], list(range(length)))
    scores = {"teacher": np.full(length, -1.0, np.float32)}
    ticket = Ticket(((index, version),), teacher, 8 * length)
    return replace(made, index=index, scores=scores, tickets=(ticket,))


def minibatch(*teachers, version=0):
    return Minibatch(
        4, tuple(sample(i, teacher=name, version=version) for i, name in enumerate(teachers))
    )


def payload_of(index, version, width):
    value = 10 * index + version
    return {
        "hidden": np.full((LENGTHS[index], width), value, np.float32),
        "tail": np.full(LENGTHS[index], -value, np.float32),
    }


class Lossy(FakeCluster):
    """A controller and its store, in which objects are lost as often as the script says."""

    def __init__(self, *losses, items=()):
        super().__init__()
        self.items = items  # the first answer of its stream
        self.losses = list(losses)  # each time: which samples' payloads are lost
        self.asked, self.waits, self.fetches = [], [], []
        self.client = client_of(self, self)

    def fetch(self, references, *, timeout_s, owner):
        lost = self.losses.pop(0) if self.losses else ()
        if isinstance(lost, Exception):
            raise lost
        self.fetches.append((timeout_s, owner))
        return [None if i in lost else payload_of(i, version, 3) for i, version in references]

    def taught_again(self, run, rank, index, keys):
        self.asked.append((rank, index, [key[2] for key in keys]))
        return len(self.asked)

    def wait(self, version, *, timeout_s, who):
        if version is self.items:
            return version
        self.waits.append((timeout_s, who))
        lost = self.asked[-1][2]
        fresh = minibatch(*[A] * len(LENGTHS), version=version).samples
        old = minibatch(*[A] * len(LENGTHS)).samples
        return Minibatch(4, tuple(fresh[i] if i in lost else old[i] for i in range(len(LENGTHS))))

    def next_items(self, run, rank, index):
        return self.items


def fetched(lossy):
    return fetch_payloads(
        minibatch(A, A, A), lossy.client, rank=1, index=6, timeout_s=STALL_S, teachers=[A]
    )


def test_payloads_come_beside_the_scores_and_no_ticket_stays():
    client = Lossy()
    found = fetched(client)
    assert client.fetches == [(deadlines.PAYLOADS_FETCHED_S, "the controller")]
    for index, taught in enumerate(found.samples):
        assert taught.tickets == ()
        assert set(taught.scores) == {"teacher", "teacher.tail"}
        assert taught.scores["teacher.tail"].shape == (LENGTHS[index],)
    hidden = [[10.0 * index] * 3 for index, length in enumerate(LENGTHS) for _ in range(length)]
    assert found.dense["teacher.hidden"].tolist() == hidden
    assert found.round_index == 4


def test_what_is_lost_is_asked_for_again_and_nothing_else():
    client = Lossy((1,), (0, 2), ())
    found = fetched(client)
    assert client.asked == [(1, 6, [1]), (1, 6, [0, 2])]
    assert client.waits == [(STALL_S, "the controller")] * 2
    firsts = np.cumsum((0, *LENGTHS[:-1]))
    values = [int(value) for value in found.dense["teacher.hidden"][firsts, 0]]
    assert values == [2, 10, 22]  # of the answer that was asked for last


def test_a_payload_that_is_always_lost_ends_the_run_in_one_sentence():
    client = Lossy(*[(2,)] * 99)
    with pytest.raises(WorkerError, match=rf"minibatch 6 was lost {MAX_LOSSES} times: look at"):
        fetched(client)
    assert len(client.fetches) == MAX_LOSSES


BITS = st.integers(0, 2**16 - 1)


@given(st.lists(BITS, min_size=2, max_size=2))
def test_numbers_stay_in_the_type_they_came_in_to_the_bit(bits):
    array = np.array(bits, np.uint16)[:, None]
    item = Minibatch(0, (sample(0),))
    taught = with_payloads(item, [{"hidden": array}], teachers=[A])
    packed = collate(taught.samples, aggregation="sample-mean", dense=taught.dense)
    got = packed.scores["teacher.hidden"]
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.view(torch.int16), torch.from_numpy(array.view(np.int16)))


def test_several_teachers_have_one_width_and_each_token_says_whose_it_is():
    item = minibatch(B, A, B)
    found = [payload_of(i, 1, width) for i, width in enumerate((4, 2, 4))]
    minibatch_taught = with_payloads(item, found, teachers=[A, B])
    taught, hidden = minibatch_taught.samples, minibatch_taught.dense["teacher.hidden"]
    assert hidden.shape == (sum(LENGTHS), 4)
    assert hidden[2:5].tolist() == [[11.0, 11.0, 0.0, 0.0]] * LENGTHS[1]
    numbers = [each.scores["teacher.index"] for each in taught]
    assert [array.tolist() for array in numbers] == [[1, 1], [0, 0, 0], [1]]
    assert {array.dtype for array in numbers} == {np.dtype(np.int32)}


def rank_stream(lossy, *, agree=int):
    return stream.RankStream(
        lossy.client, rank=1, stall_timeout_s=STALL_S, agree=agree, teachers=[A]
    )


def test_a_rank_agrees_with_its_payloads_in_hand():
    items = (minibatch(A, A, A), EndOfStep(0, 0, False, num_samples=3, num_tokens=6))
    client, seen = Lossy((1,), (), items=items), []

    def agree(proposal):
        seen.append((proposal, len(client.fetches)))
        return proposal

    ranks = rank_stream(client, agree=agree)
    item = next(ranks)
    assert seen == [(stream.READY, 2)]
    assert len(item.dense["teacher.hidden"]) == sum(LENGTHS)
    assert next(ranks) is items[1]


def test_an_item_without_tickets_is_passed_on():
    empty = Minibatch(0, ())
    client = Lossy(items=(empty,))
    assert next(rank_stream(client)) is empty
    assert client.fetches == []


def test_payloads_that_end_with_their_owner_are_a_run_that_is_lost_to_all_ranks():
    lost, seen = ProcessLostError("the controller has ended"), []
    client = Lossy(lost, items=(minibatch(A, A, A),))
    ranks = rank_stream(client, agree=lambda own: seen.append(own) or own)
    with pytest.raises(RunLost, match="the controller has ended"):
        next(ranks)
    assert seen == [stream.LOST]
