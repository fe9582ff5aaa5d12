"""A teacher's model as a member of an express group; its ranks and a trainer's are threads here."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from members import CPU, opened
from rollout.tiny_models import load_model, make_model

from async_grpo.algorithms.express import ExpressGroup, ExpressTeacher, keep_in
from async_grpo.algorithms.express_plan import Reading, plan_round
from async_grpo.model.scorer import Scorer
from async_grpo.util.errors import ExpressLost

MAX_TOKENS = 30  # of a forward
WIDTH = 121  # of 128 columns: those that the student has too


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("teacher"), tied=request.param)


def readings(count):
    random = np.random.default_rng(count)
    return [
        Reading(
            (number, 0, 0, 0),
            random.integers(3, 70, random.integers(1, 9), dtype=np.int32),
            random.integers(3, 70, length := random.integers(1, 9), dtype=np.int32),
            np.flatnonzero(random.integers(0, 4, length)),  # some tokens are masked
        )
        for number in range(count)
    ]


def serve(teacher, meeting, rank, work):
    teacher.join(meeting, rank=rank, timeout_s=20)
    teacher.serve(work)
    teacher.serve(work)  # the group is used again and again


def receive(meeting, rank, work, *, num_rounds=2):
    group = ExpressGroup(meeting, rank=rank, device=CPU, timeout_s=20)
    (own,) = (block for block in work.needed if block.process == rank)
    cells = torch.full((len(own.rows), WIDTH), torch.nan, dtype=meeting.dtype)
    for _ in range(num_rounds):
        cells.fill_(torch.nan)
        group.exchange(work.sends(meeting.dtype.itemsize), give=None, take=keep_in(cells))
    return cells


@pytest.mark.parametrize("mesh", [(1, 1), (1, 3), (2, 2)])
def test_each_trainer_rank_gets_the_logits_of_its_trained_tokens(folder, mesh, monkeypatch):
    sequences = readings(11)
    needs = [sequences[:3], sequences[3:]]
    forwards = []
    rounds = plan_round(needs, teachers=mesh, width=WIDTH)
    meeting, _store = opened(len(rounds) + 2, torch.float32)
    scorer = Scorer(folder, device=CPU)
    pack = scorer.packed

    def counted(pairs):
        forwards.append(sum(len(prompt) + len(output) for prompt, output in pairs))
        return pack(pairs)

    monkeypatch.setattr(scorer, "packed", counted)
    with ThreadPoolExecutor(8) as pool:
        teachers = [ExpressTeacher(scorer, device=CPU, max_tokens=MAX_TOKENS) for _ in rounds]
        served = [
            pool.submit(serve, teacher, meeting, rank, work)
            for rank, (teacher, work) in enumerate(zip(teachers, rounds, strict=True))
        ]
        ranks = [pool.submit(receive, meeting, len(rounds) + r, rounds[0]) for r in range(2)]
        received = [future.result() for future in ranks]
        assert [future.result() for future in served] == [None] * len(rounds)
    assert max(forwards) <= MAX_TOKENS
    num_tokens = sum(len(reading.prompt) + len(reading.output) for reading in sequences)
    assert sum(forwards) == 2 * mesh[1] * num_tokens  # two rounds, on every tensor rank
    model = load_model(folder)
    for own, cells in zip(needs, received, strict=True):
        expected = torch.cat([logits_of(model, reading) for reading in own])
        torch.testing.assert_close(cells, expected[:, :WIDTH], rtol=1e-4, atol=1e-4)


def logits_of(model, reading):
    ids = torch.from_numpy(np.concatenate([reading.prompt, reading.output]).astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    return logits[len(reading.prompt) - 1 + reading.trained]


class Sharded(Scorer):
    is_sharded = True  # others gather from it


def test_a_rank_that_shares_a_model_does_as_many_forwards_as_the_busiest(folder):
    scorer, forwards = Sharded(folder, device=CPU), []
    pack = scorer.packed
    scorer.packed = lambda pairs: forwards.append(len(pairs)) or pack(pairs)
    [work] = plan_round([readings(1)], teachers=(1, 1), width=WIDTH)
    [busiest] = plan_round([readings(11)], teachers=(1, 1), width=WIDTH)
    most = ExpressTeacher.num_forwards(busiest, max_tokens=MAX_TOKENS)
    meeting, _store = opened(2, torch.float32)
    with ThreadPoolExecutor(2) as pool:
        received = pool.submit(receive, meeting, 1, work, num_rounds=1)
        teacher = ExpressTeacher(scorer, device=CPU, max_tokens=MAX_TOKENS)
        teacher.join(meeting, rank=0, timeout_s=20)
        teacher.serve(work, num_forwards=most)
        assert not received.result().isnan().any()
    assert len(forwards) == most > 2


def test_a_teacher_without_a_group_says_so(folder):
    teacher = ExpressTeacher(Scorer(folder, device=CPU), device=CPU, max_tokens=MAX_TOKENS)
    with pytest.raises(ExpressLost, match="in no express group"):
        teacher.serve(plan_round([[]], teachers=(1, 1), width=WIDTH)[0])
