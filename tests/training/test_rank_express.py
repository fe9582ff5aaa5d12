"""Trainer ranks and the teacher's workers are threads here; the logits travel over gloo."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_cluster import FakeCluster
from oracle import make_sample
from rollout.tiny_models import load_model, make_model

from async_grpo.algorithms.express import ExpressGroup, ExpressTeacher
from async_grpo.model.scorer import Scorer
from async_grpo.training.express_receiver import LOGITS, ExpressReceiver
from async_grpo.types import Minibatch, WorkerInfo
from async_grpo.util.errors import ExpressLost, WorkerError

CPU = torch.device("cpu")
TEMPERATURE = 0.7
WIDTH = 121  # of the policy's vocabulary; the teacher's is padded
INFO = WorkerInfo("t", "teacher:a", "", 1, "m", vocab_size=128, item_size=4)


class ThreadRanks:
    """`Ranks`, of which each is a thread."""

    def __init__(self, world_size):
        self.world_size, self.device = world_size, CPU
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._given, self._own = {}, threading.local()

    def __call__(self, rank):
        self._own.rank = rank
        return self

    @property
    def rank(self):
        return self._own.rank

    def gather(self, value):
        self._barrier.wait()
        self._given[self.rank] = value
        self._barrier.wait()
        return [self._given[rank] for rank in range(self.world_size)]

    def share(self, prepare):
        return self.gather(prepare() if self.rank == 0 else None)[0]

    def agree(self, urgency):
        return max(self.gather(urgency))


class Handle:
    """Of a worker whose methods run in threads; a failing one raises when it is asked to serve."""

    def __init__(self, pool, scorer, *, fails=False, num_ranks=1):
        self.num_ranks = num_ranks
        self.served = []  # tokens that each rank has read, of each round
        teachers = [ExpressTeacher(scorer, device=CPU, max_tokens=64) for _ in range(num_ranks)]

        def join(meeting, first):
            each_joins = [
                pool.submit(teacher.join, meeting, rank=first + number, timeout_s=20)
                for number, teacher in enumerate(teachers)
            ]
            for future in each_joins:
                future.result()

        def serve(*work):
            if fails:
                teachers[0].leave()
                raise WorkerError("there is no room")
            assert len(work) == num_ranks
            self.served.append([own.num_tokens for own in work])
            each_serves = [pool.submit(t.serve, own) for t, own in zip(teachers, work, strict=True)]
            for future in each_serves:
                future.result()

        self.join_express = SimpleNamespace(remote=lambda *given: pool.submit(join, *given))
        self.serve_express = SimpleNamespace(remote=lambda *given: pool.submit(serve, *given))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("teacher"), tied=True)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(12) as threads:
        yield threads


class Futures(FakeCluster):
    def wait(self, call, *, timeout_s, who):
        return call.result(timeout_s)


def minibatch(first, count):
    random = np.random.default_rng(first)
    samples = []
    for number in range(first, first + count):
        length = int(random.integers(1, 9))
        mask = random.integers(0, 3, length) > 0
        samples.append(
            make_sample(
                random.integers(3, 70, 4), random.integers(3, 70, length), mask=mask, ordinal=number
            )
        )
    return Minibatch(0, tuple(samples))


def on_each(pool, ranks, do):
    def one(rank):
        ranks(rank)
        return do(rank)

    return [f.result(60) for f in [pool.submit(one, r) for r in range(ranks.world_size)]]


def express(ranks, workers, *, teachers=(2, 1)):
    return ExpressReceiver(
        ranks,
        teachers=teachers,
        width=WIDTH,
        temperature=TEMPERATURE,
        cluster=Futures(),
        workers=lambda: [(replace(INFO, num_ranks=w.num_ranks), w) for w in workers],
    )


def check(folder, filled):
    model = load_model(folder)
    rows = iter(filled.dense[LOGITS])
    for sample in filled.samples:
        (row,) = sample.episode.rows
        ids = np.concatenate([row.prompt_token_ids, row.token_ids]).astype(np.int64)
        with torch.no_grad():
            logits = model(torch.from_numpy(ids)[None]).logits[0].numpy()
        own = logits[len(row.prompt_token_ids) - 1 : -1, :WIDTH]
        for expected in own[row.loss_mask]:  # nobody asks for masked tokens
            np.testing.assert_allclose(next(rows), expected, rtol=1e-4, atol=1e-4)
        exponents = np.exp(own / TEMPERATURE)
        chosen = exponents[np.arange(len(own)), row.token_ids] / exponents.sum(-1)
        labels = np.where(row.loss_mask, np.log(chosen), 0.0)
        np.testing.assert_allclose(sample.scores["teacher"], labels, rtol=1e-4, atol=1e-4)
    assert not list(rows)


def test_every_rank_gets_its_own_samples_logits_also_one_without_samples(folder, pool):
    scorer, ranks = Scorer(folder, device=CPU), ThreadRanks(3)
    workers = [Handle(pool, scorer) for _ in range(5)]  # one more than is needed
    ends = [express(ranks, workers, teachers=(2, 2)) for _ in range(3)]
    items = [minibatch(0, 4), Minibatch(0, ()), minibatch(10, 3)]
    for _ in range(2):  # of one group
        filled = on_each(pool, ranks, lambda rank: ends[rank].fill(items[rank]))
        assert [len(item.samples) for item in filled] == [4, 0, 3]
        for item in filled:
            check(folder, item)
    on_each(pool, ranks, lambda rank: ends[rank].close())


@pytest.mark.parametrize("mesh", [(1, 3), (3, 1)])
def test_ranks_of_a_sharded_teacher_share_the_sequences_and_none_of_its_ranks_is_left_out(
    mesh, folder, pool
):
    """Of workers with 2, 2 and 1 ranks the second one does not fit into a group of three."""
    scorer, ranks = Scorer(folder, device=CPU), ThreadRanks(2)
    workers = [Handle(pool, scorer, num_ranks=number) for number in (2, 2, 1)]
    ends = [express(ranks, workers, teachers=mesh) for _ in range(2)]
    items = [minibatch(0, 4), minibatch(10, 3)]
    for item in on_each(pool, ranks, lambda rank: ends[rank].fill(items[rank])):
        check(folder, item)
    assert [len(worker.served) for worker in workers] == [1, 0, 1]
    rows = [row for item in items for sample in item.samples for row in sample.episode.rows]
    num_tokens = sum(len(row.prompt_token_ids) + len(row.token_ids) for row in rows)
    assert sum(sum(own) for worker in workers for own in worker.served) == num_tokens
    on_each(pool, ranks, lambda rank: ends[rank].close())


def test_after_a_loss_there_is_no_group_until_the_next_step(folder, pool, caplog):
    scorer, ranks = Scorer(folder, device=CPU), ThreadRanks(2)
    workers = [Handle(pool, scorer), Handle(pool, scorer, fails=True)]
    ends = [express(ranks, workers) for _ in range(2)]
    items = [minibatch(0, 3), minibatch(10, 2)]

    def fill(rank):
        return ends[rank].fill(items[rank])

    assert on_each(pool, ranks, fill) == [None, None]
    assert "there is no room" in caplog.text
    workers[1] = Handle(pool, scorer)
    assert on_each(pool, ranks, fill) == [None, None]
    on_each(pool, ranks, lambda rank: ends[rank].step_ended())
    for item in on_each(pool, ranks, fill):
        check(folder, item)
    on_each(pool, ranks, lambda rank: ends[rank].close())


def test_a_loss_that_one_rank_alone_has_seen_is_all_ranks_loss(folder, pool, monkeypatch):
    scorer, ranks, exchange = Scorer(folder, device=CPU), ThreadRanks(2), ExpressGroup.exchange

    def lost_to_the_last(group, *args, **options):
        exchange(group, *args, **options)
        if group.rank == 3:
            raise ExpressLost("a connection was closed")

    monkeypatch.setattr(ExpressGroup, "exchange", lost_to_the_last)
    workers = [Handle(pool, scorer) for _ in range(2)]
    ends = [express(ranks, workers) for _ in range(2)]
    items = [minibatch(0, 3), minibatch(10, 2)]
    assert on_each(pool, ranks, lambda rank: ends[rank].fill(items[rank])) == [None, None]


def test_with_too_few_teachers_there_is_no_group(folder, pool, caplog):
    ranks = ThreadRanks(1)
    end = express(ranks, [Handle(pool, Scorer(folder, device=CPU))])
    assert on_each(pool, ranks, lambda _: end.fill(minibatch(0, 1))) == [None]
    assert "express needs 2 teacher ranks, 1 are here" in caplog.text
