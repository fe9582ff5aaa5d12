"""A rank's stream gives up when nothing moves, and only then."""

import itertools
import math
import threading
from threading import Event

import pytest
from fake_cluster import FakeCluster, client_of

from async_grpo.training import stream
from async_grpo.types import EndOfStep, Minibatch, PipelineStatus, Problem
from async_grpo.util.errors import ClusterError, DeadlineError, ProcessLostError, RunLost

IDLE = {name: 0 for name in ("batch", "generating", "verifying", "in_reference", "ready")} | {
    name: 0 for name in ("training", "done", "output_tokens", "reward_sum", "reward_count")
}


class Scripted(FakeCluster):
    """Gives items when `delay` waits have passed; `answers` and `tokens` grow as scripted.

    `items`: the first answer, in the place of a minibatch of its own number.
    """

    def __init__(self, *, delay=0, answers=(), tokens=(), items=None):
        super().__init__()
        self.delay, self.answers, self.hungry_at = delay, iter(answers), []
        self.tokens = itertools.chain(tokens, itertools.repeat(0))
        self.items, self.asked = items, []

    def next_items(self, run, rank, index):
        self.asked.append((rank, index))
        return self.items if self.items and index == 0 else (Minibatch(index, ()),)

    def hungry(self, run, index):
        self.hungry_at.append(index)

    def status(self, run):
        moves = {"answers": next(self.answers), "worker_tokens": next(self.tokens)}
        return PipelineStatus(**IDLE, **moves, problem=Problem("generation", "no worker is free"))

    def is_ready(self, call, *, within_s=0.0):
        if within_s and self.delay:
            self.delay -= 1
            return False
        return within_s > 0


def stream_of(scripted, **options):
    return stream.RankStream(client_of(scripted, scripted), **options)


def test_items_come_in_order_and_are_asked_for_one_ahead():
    client = Scripted()
    items = stream_of(client, rank=1, stall_timeout_s=0.001)
    assert [next(items).round_index for _ in range(3)] == [0, 1, 2]
    assert client.asked == [(1, index) for index in range(4)]


def test_an_end_that_comes_with_the_last_minibatch_follows_it_without_asking():
    end, stop, agreed = EndOfStep(0, 0, False, num_samples=1, num_tokens=1), Event(), []
    client = Scripted(items=(Minibatch(7, ()), end))
    items = stream_of(
        client, rank=1, stall_timeout_s=5, agree=lambda own: agreed.append(own) or own, stop=stop
    )
    assert next(items).round_index == 7
    stop.set()  # the ranks have the whole step: they take it before they end
    assert next(items) is end
    assert (client.asked, agreed) == ([(1, 0), (1, 1)], [stream.READY])
    assert list(items) == []


def test_a_slow_pipeline_that_moves_is_waited_for():
    client = Scripted(delay=3, answers=[1, 5, 6])
    assert next(stream_of(client, rank=0, stall_timeout_s=0.001)).round_index == 0


def test_an_output_whose_tokens_come_is_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(stream.time, "monotonic", itertools.count().__next__)
    client = Scripted(delay=200, answers=itertools.repeat(4), tokens=itertools.count())
    assert next(stream_of(client, rank=0, stall_timeout_s=5)).round_index == 0
    assert next(client.tokens) > 10


def test_a_pipeline_that_stands_still_ends_the_run_with_its_reason():
    client = Scripted(delay=10**6, answers=[4, 5, 5])
    with pytest.raises(
        DeadlineError, match=r"--stall-timeout-s 0\.001: generation: no worker is free"
    ):
        next(stream_of(client, rank=0, stall_timeout_s=0.001))


def test_a_rank_that_is_asked_to_stop_ends_the_stream_of_all():
    client = Scripted()
    agreed = iter([stream.READY, stream.STOP])
    items = stream_of(client, rank=0, stall_timeout_s=5, agree=lambda own: next(agreed))
    assert [item.round_index for item in items] == [0]
    assert items.is_stopped


def test_a_request_to_stop_ends_the_wait_for_an_item():
    client, stop = Scripted(delay=math.inf, answers=itertools.repeat(4)), Event()
    threading.Timer(0.2, stop.set).start()
    items = stream_of(client, rank=0, stall_timeout_s=20, stop=stop)
    assert list(items) == []


def test_a_run_that_one_rank_has_lost_is_lost_to_all():
    client = Scripted()
    items = stream_of(client, rank=0, stall_timeout_s=5, agree=lambda own: stream.LOST)
    with pytest.raises(RunLost):
        next(items)


@pytest.mark.parametrize("error", [ProcessLostError, RunLost, ClusterError])
def test_the_rank_that_sees_its_run_lost_says_of_what(error):
    lost = error("the controller died: the node was running low on memory")
    items = stream_of(Scripted(items=lost), rank=0, stall_timeout_s=5)
    with pytest.raises(RunLost, match="running low on memory"):
        next(items)


def test_rank_0_says_for_all_that_they_have_nothing_to_train():
    for rank in (0, 1):
        client = Scripted()
        items = stream_of(client, rank=rank, stall_timeout_s=0.001)
        next(items), next(items)
        assert client.hungry_at == ([0, 1] if rank == 0 else [])


class ScriptedExpress:
    """Fills as many minibatches as scripted; then its group is lost."""

    def __init__(self, num_filled):
        self.left, self.steps = num_filled, 0

    def fill(self, item):
        self.left -= 1
        return Minibatch(item.round_index + 100, ()) if self.left >= 0 else None

    def step_ended(self):
        self.steps += 1


def test_what_express_cannot_fill_is_fetched_by_ticket(monkeypatch):
    asked = []

    def fetch(item, client, *, rank, index, timeout_s, teachers):
        asked.append((rank, index, teachers))
        return Minibatch(item.round_index + 200, ())

    monkeypatch.setattr(stream, "fetch_payloads", fetch)
    client = Scripted()
    express = ScriptedExpress(1)
    items = stream_of(client, rank=1, stall_timeout_s=5, teachers=["teacher:a"], express=express)
    assert [next(items).round_index for _ in range(2)] == [100, 201]
    assert asked == [(1, 1, ["teacher:a"])]
    assert express.steps == 0


def test_a_rank_that_gets_no_tickets_either_loses_the_run_for_all(monkeypatch):
    def fetch(item, client, **options):
        raise ProcessLostError("the controller died")

    monkeypatch.setattr(stream, "fetch_payloads", fetch)
    client, agreed = Scripted(), []
    items = stream_of(
        client,
        rank=1,
        stall_timeout_s=5,
        agree=lambda own: agreed.append(own) or own,
        express=ScriptedExpress(0),
    )
    with pytest.raises(RunLost, match="the controller died"):
        next(items)
    assert agreed == [stream.READY, stream.LOST]


def test_express_hears_of_the_end_of_a_step():
    end = EndOfStep(0, 0, False, num_samples=1, num_tokens=1)
    client = Scripted(items=(Minibatch(7, ()), end))
    express = ScriptedExpress(1)
    items = stream_of(client, rank=1, stall_timeout_s=5, express=express)
    assert (next(items).round_index, next(items), express.steps) == (107, end, 1)
